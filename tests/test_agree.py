"""Where words between ranks are dear (NCCL), calls are compared when they are new, and an error is never waited for."""

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import LocalAxis, run
from ringattn.launch.processes import run as run_processes
from ringattn.plans.machine import load


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


@pytest.mark.parametrize("call", ["unshard", "roll"])
def test_tokens_that_only_one_rank_differentiates_are_not_joined(call):
    def one_rank(mesh):
        plan, x = ra.plan(mesh, seq_len=8), torch.ones(1, 4, 2, requires_grad=mesh.rank == 0)
        with pytest.raises(ValueError, match="gradients: ring rank 0 has True, ring rank 1 has False"):
            getattr(plan, call)(x)

    run(one_rank, ring=2, timeout=20)


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


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([{"transport": ra.Transport("levels", hosts)} for hosts in (2, 4)],
         r"route: ring rank 0 has levels 2 .*, .*3 has levels 4"),
        ([{"machine": "cpu"}, {"machine": load("cpu").replace(room=1e6)}],
         r"machine: ring rank 0 has CPU .* #\w+, .*3 has CPU .* #\w+"),
    ],
)  # fmt: skip
def test_ranks_that_decide_by_other_hosts_or_another_machine_are_named(choices, words):
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=32, **choices[mesh.rank // 2])
        with pytest.raises(ValueError, match=words):
            ra.attention(*qkv(), plan)

    run(one_rank, ring=4, timeout=20)


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
