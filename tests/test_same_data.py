"""Ranks of one plan that were handed other sequences are found; those that were not go on."""

import threading

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import LocalAxis, run
from ringattn.torch.agree import MAX_CHECKSUMS, checksum

T = 13


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(seed))


def step(plan: ra.Plan, whole: torch.Tensor, compare: bool = True) -> torch.Tensor:
    return ra.token_mean(plan.shard(whole, compare=compare).float(), plan)


@pytest.fixture(params=[True, False], ids=["words", "gathered"])
def transport(request, monkeypatch):
    """Words that are compared in each call, and those that are as dear as over NCCL."""
    monkeypatch.setattr(LocalAxis, "cheap_words", request.param)


def test_other_sequences_on_a_rank_are_named_on_all_at_once(transport):
    wrong_from = 2 if LocalAxis.cheap_words else 0  # else only the first step is compared

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T)
        for i in range(wrong_from):
            step(plan, tokens(i))
        with pytest.raises(ValueError, match=r"ring rank 1.*num_replicas=DATA_RANKS, rank=DATA_RANK"):
            step(plan, tokens(wrong_from + 100 * (mesh.coordinates["ring"] == 1)))

    run(one_rank, ring=2, ulysses=2, timeout=20)


def test_documents_that_are_dealt_out_otherwise_on_a_rank_are_named_on_all(transport):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T, layout="balanced")
        with pytest.raises(ValueError, match="the documents that the plan lays out, of ring rank 1 are not those"):
            step(plan.for_docs(ra.Docs.from_lengths([5 + mesh.rank, T - 5 - mesh.rank])), tokens(0))

    run(one_rank, ring=2, timeout=20)


def test_attention_finds_other_sequences_before_any_loss(transport):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T)
        x = plan.shard(tokens(mesh.rank)).float()[..., None, None].expand(-1, -1, 2, 4)
        with pytest.raises(ValueError, match="different sequences"):
            ra.attention(x, x, x, plan)

    run(one_rank, ring=2, timeout=20)


def test_what_is_no_other_sequence_goes_on(transport):
    """Cut on one rank alone, by a thread that loads ahead, on purpose, or a number that is a float."""

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T)
        for i in range(6):
            if mesh.rank == 0:
                plan.shard(tokens(7))
            if i == 1:
                ahead = threading.Thread(target=plan.shard, args=(tokens(mesh.rank),))
                ahead.start()
                ahead.join()
            step(plan, tokens(mesh.rank), compare=False)
            step(plan, torch.rand(1, T))
            if mesh.rank == 1:
                for _ in range(2 * MAX_CHECKSUMS):
                    plan.shard(tokens(i))
            step(plan, tokens(i))

    run(one_rank, ring=2, timeout=20)


def test_a_checksum_depends_on_numbers_and_positions():
    x = torch.randint(0, 9, (2, 50))
    assert checksum(x) == checksum(x.int())
    others = x.flip(1), x.roll(1, 1), x + 1, x[:, :-1], torch.cat([x, x.new_zeros(2, 1)], 1)
    assert len({int(checksum(y)) for y in (x, *others)}) == 6
