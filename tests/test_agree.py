"""Where words between ranks are dear (NCCL), calls are compared when they are new, and an error is never waited for.

Ranks of one plan that were handed other sequences are found; those that were not go on.
"""

import threading

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import LocalAxis, run
from ringattn.launch.processes import run as run_processes
from ringattn.torch.agree import MAX_CHECKSUMS, checksum


@pytest.fixture
def exchanged(monkeypatch) -> list[object]:
    """What ranks say to each other, which they are made to find dear."""
    results: list[object] = []
    exchange = LocalAxis.exchange_words

    def noted(axis, words):
        results.append(words)
        return exchange(axis, words)

    monkeypatch.setattr(LocalAxis, "cheap_words", False)
    monkeypatch.setattr(LocalAxis, "exchange_words", noted)
    return results


def qkv(tokens: int = 8, batch: int = 1) -> list[torch.Tensor]:
    return [torch.ones(batch, tokens, 2, 8) for _ in range(3)]


def lengths(step: int) -> ra.Docs:
    return ra.Docs.from_lengths([step + 1, 15 - step])


@pytest.mark.parametrize("function", [ra.attention, ra.linear_attention])
def test_new_documents_are_no_new_kind_of_call(function, exchanged):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=16)
        for step in range(15):
            function(*qkv(), plan=plan, docs=lengths(step))
        assert len(plan.agreed) == 1

    run(one_rank, ring=2)
    assert len(exchanged) == 2  # each rank once


def backward_twice_on_one_rank(function: str) -> str:
    plan = ra.plan(ra.init_mesh(ring=2, device_type="cpu"), seq_len=64)
    call = getattr(ra, function)
    loss = call(*(x.requires_grad_() for x in qkv(32)), plan=plan).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError) as caught:
        loss.backward() if plan.ring_axis.rank == 0 else call(*(x.requires_grad_() for x in qkv(32)), plan=plan)
    return str(caught.value)


@pytest.mark.parametrize("function", ["attention", "linear_attention"])
def test_a_rank_that_runs_backward_again_is_named_on_all(function):
    """Over gloo, which would end the other rank's process."""
    for text in run_processes(backward_twice_on_one_rank, 2, function):
        assert f"call: ring rank 0 has backward of {function}, ring rank 1 has {function}" in text


def test_a_rank_whose_later_call_is_wrong_raises_at_once(exchanged):
    """The others, which made this call before, do not stop to hear of it."""

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=16)
        ra.attention(*qkv(), plan)
        if mesh.rank:
            with pytest.raises(ValueError, match="q has 9 tokens, a rank of this plan holds 8"):
                ra.attention(*qkv(9), plan)
            with pytest.raises(ValueError, match="docs is of type list"):
                ra.attention(*qkv(), plan, docs=[8, 8])
        ra.attention(*qkv(), plan)

    run(one_rank, ring=2, timeout=20)
    assert len(exchanged) == 2


def test_a_problem_is_raised_where_no_other_rank_listens(monkeypatch):
    def lost(axis, words):
        raise ConnectionError("a rank is lost")

    monkeypatch.setattr(LocalAxis, "exchange_words", lost)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=16)
        with pytest.raises(ValueError, match="q has 9 tokens") as error:
            ra.attention(*qkv(9), plan)
        assert str(error.value.__cause__) == "a rank is lost"
        with pytest.raises(ConnectionError, match="a rank is lost"):
            ra.attention(*qkv(), plan)

    run(one_rank, ring=2)


T = 13


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(seed))


def step(plan: ra.Plan, whole: torch.Tensor, compare: bool = True) -> torch.Tensor:
    return ra.token_mean(plan.shard(whole, compare=compare).float(), plan)


@pytest.fixture(params=[True, False], ids=["words", "gathered"])
def transport(request, monkeypatch):
    """Words that are compared in each call, and those that are as dear as over NCCL."""
    monkeypatch.setattr(LocalAxis, "cheap_words", request.param)


def other_tokens(plan: ra.Plan, mesh) -> None:
    wrong_from = 2 if LocalAxis.cheap_words else 0  # else only the first step is compared
    for i in range(wrong_from):
        step(plan, tokens(i))
    step(plan, tokens(wrong_from + 100 * (mesh.coordinates["ring"] == 1)))


def other_documents(plan: ra.Plan, mesh) -> None:
    n = 5 + mesh.coordinates["ring"]
    step(plan.replace(layout="balanced").for_docs(ra.Docs.from_lengths([n, T - n])), tokens(0))


def attention_to_other_tokens(plan: ra.Plan, mesh) -> None:
    x = plan.shard(tokens(mesh.coordinates["ring"])).float()[..., None, None].expand(-1, -1, 2, 4)
    ra.attention(x, x, x, plan)


@pytest.mark.parametrize("call", [other_tokens, other_documents, attention_to_other_tokens])
def test_other_sequences_on_a_rank_are_named_on_all_at_once(call, transport):
    says = "different sequences.* of ring rank 1.*num_replicas=DATA_RANKS, rank=DATA_RANK"

    def one_rank(mesh):
        with pytest.raises(ValueError, match=says):
            call(ra.plan(mesh, seq_len=T), mesh)

    run(one_rank, ring=2, ulysses=2, timeout=20)


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
