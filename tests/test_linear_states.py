"""One state a document: packed documents begin with their own states, and return what is behind each, over ranks."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import ringattn as ra
from ringattn.comms.local import run
from ringattn.plans.segments import WAYS
from ringattn.torch.linear.documents import TOKENS_PER_LEVEL, row_length
from tests.cases import LEAVES, B, docs_of, inputs, linear, on_threads, states_of
from tests.cases import check as check_found

T = 61  # a prime: no number of ranks divides it
LONG = 557  # fragments of several chunks, which are cut into several rows
PACKED = ((20, 0, 11, 30), (1, 2, 50))  # the second row counts an empty document at its end, and padding
LENGTHS = {
    "packed": PACKED,
    "one_row_for_all": ((20, 35),),
    "first_empty": ((0, 33, 20), (0, 61)),
    "nearly_all_padding": ((3, 0), (0, 2)),
}
CHUNKS = ((150, 0, 250, 157), (64, 457, 3))
BESIDE_SHORT = ((LONG,), (40,) * 13)  # short rows: ranks hold several of a document that only passes
PLACES = [(1, 1, "contiguous"), (3, 1, "contiguous"), (4, 1, "zigzag"), (1, 4, "contiguous"), (2, 3, "zigzag")]
PLACES += [(8, 1, "zigzag"), (2, 2, "zigzag")]
BALANCED = [(4, 1, "balanced"), (3, 2, "balanced")]
RULES = ({}, {"beta": True, "key_heads": 1})


def check(place, gate, lengths, T=T, dtype=torch.float64, limit=1e-10, scan="auto", kernel="auto", **rule):
    rule = {"states": states_of(lengths)} | rule
    case, given, exact, _ = linear(place, gate, lengths, T, dtype, scan, **rule)
    check_found(on_threads(case, given, exact, kernel=kernel), exact, limit, f"{case} {rule}")


@pytest.mark.parametrize("place", [*PLACES, *BALANCED], ids=str)
@pytest.mark.parametrize("lengths", list(LENGTHS.values()), ids=list(LENGTHS))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_document_goes_on_from_its_own_state(place, lengths, rule):
    check(place, "channel", lengths, **rule)
    check(place, None if rule else "head", lengths, dtype=torch.float32, limit=2e-6, **rule)


@pytest.mark.parametrize(
    ("place", "scan"), [*product([*PLACES[:3], PLACES[-1]], WAYS), *product(BALANCED, ["auto"])], ids=str
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_long_documents_are_cut_and_joined(place, scan, rule):
    check(place, "head", CHUNKS, LONG, torch.float32, 2e-6, scan, **rule)
    check(place, "channel", BESIDE_SHORT, LONG, scan=scan, deep=0.02, **rule)  # what passes a rank is still there


@pytest.mark.parametrize("lengths", [[16] * 8, [16, 48, 16, 16, 32], [128]], ids=["short", "long", "one"])
def test_a_state_travels_only_where_a_document_goes_on_on_another_rank(lengths):
    docs, ends = ra.Docs.from_lengths(lengths), np.cumsum(lengths)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=128, layout="balanced", docs=docs)
        q, k, v, g = (torch.randn(1, plan.local_len, 2, n).requires_grad_() for n in (4, 4, 8, 4))
        ra.linear_attention(q, k, v, -g.exp(), plan, docs=docs).sum().backward()
        return plan.ring_axis.sent, [(r.start, r.stop) for r in plan.tokens.shard(plan.ring_axis.rank)]

    (sent, held), size = zip(*run(one_rank, ring=4), strict=True), 2 * 4 * (8 + 1) * 4  # a map of two heads in float32
    expected = [0] * 4
    for r, s in ((r, s) for r in range(4) for s in range(4) if r != s):
        for start, stop in held[r]:
            met = [(e - n, e) for e, n in zip(ends, lengths, strict=True) if e - n < stop and start < e]
            later = any(a < x < b and x >= stop for a, b in met for x, _ in held[s])  # goes on there
            earlier = any(a < y < b and y <= start for a, b in met for _, y in held[s])  # gradients go back there
            expected[r] += size * (later + earlier)
    assert list(sent) == expected and any(sent) == (lengths != [16] * 8)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_packed_rollouts_go_on_where_they_stopped(rule):
    """Two calls, packed differently, are each document as a whole, gradients included."""
    lengths, first = (70, 9, 40), (31, 9, 17)
    given = inputs(sum(lengths), "head", **rule)
    leaves = {n: given[n][:1].clone().requires_grad_() for n in LEAVES if given[n] is not None}

    def chunk(tokens: Tensor, lengths: list[int], state: Tensor | None) -> Any:
        x = {n: t[:, tokens] for n, t in leaves.items()}
        docs, how = ra.Docs.from_lengths(lengths), {"return_state": "documents", "initial_state": state}
        return ra.linear_attention(x["q"], x["k"], x["v"], x["g"], beta=x.get("beta"), docs=docs, **how)

    document = torch.repeat_interleave(torch.tensor(lengths))
    at = torch.arange(len(document)) - torch.tensor([0, 70, 79])[document]
    early = at < torch.tensor(first)[document]
    outs, state = torch.zeros(1, sum(lengths), 2, given["v"].shape[-1], dtype=torch.float64), None
    for tokens in (early, ~early):
        out, state = chunk(tokens, [int((tokens & (document == d)).sum()) for d in range(3)], state)
        outs = outs.index_copy(1, tokens.nonzero()[:, 0], out)
    whole, ends = chunk(document >= 0, list(lengths), None)
    torch.testing.assert_close(outs, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, ends, rtol=1e-12, atol=1e-12)
    weights = torch.randn(ends.shape, dtype=torch.float64)
    results, expected = (
        torch.autograd.grad((o * given["dout"][:1]).sum() + (s * weights).sum(), list(leaves.values()))
        for o, s in ((outs, state), (whole, ends))
    )
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("place", PLACES[:4], ids=str)
def test_from_a_state_a_row_the_documents_states_may_be_asked_for(place):
    """It belongs to the first document, even an empty one, which keeps it; the others begin with zero."""
    lengths, (ring, ulysses, layout) = ((0, 33, 20), (7, 0, 54)), place
    given = inputs(T, "channel", states=B, beta=True)
    each = torch.zeros(6, *given["state"].shape[1:], dtype=torch.float64)
    each[0], each[3] = given["state"]
    dend = torch.randn(each.shape, dtype=torch.float64)

    def one_rank(mesh, state, plan=None):
        plan = ra.plan(mesh, seq_len=T, layout=layout)
        leaves = [plan.shard(given[n]).requires_grad_() for n in LEAVES]
        state = None if state is None else state.clone().requires_grad_()
        how = {"docs": docs_of(lengths, T), "initial_state": state, "return_state": "documents"}
        out, end = ra.linear_attention(*leaves[:4], plan, beta=leaves[4], **how)
        loss = (out * plan.shard(given["dout"])).sum() + (end * dend / (ring * ulysses)).sum()
        grads = torch.autograd.grad(loss, leaves if state is None else [*leaves, state])
        return [out.detach(), end.detach(), *grads]

    for state, same in ((given["state"], each), (None, torch.zeros_like(each))):
        ours, others = (run(lambda mesh, s=s: one_rank(mesh, s), ring=ring, ulysses=ulysses) for s in (state, same))
        for a, b in zip(ours, others, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a[:7], b[:7], strict=True))
        if state is not None:
            total = sum(b[7] for b in others)
            torch.testing.assert_close(sum(a[7] for a in ours), torch.stack([total[0], total[3]]))


def test_the_state_behind_an_empty_document_is_that_before_it():
    given, lengths = inputs(T, "channel", states=8), PACKED
    state = given["state"].requires_grad_()
    x = [given[n] for n in "qkvg"]
    _, end = ra.linear_attention(*x, docs=docs_of(lengths, T), initial_state=state, return_state=True)
    assert torch.equal(end[[1, 7]], state[[1, 7]])
    (grad,) = torch.autograd.grad(end, state, given["dend"])
    assert torch.equal(grad[[1, 7]], given["dend"][[1, 7]])


@pytest.mark.parametrize("how", [{"return_state": True}, {"return_state": "documents", "docs": docs_of(PACKED, T)}])
def test_a_loss_of_one_ranks_states_alone(how):
    """A rank whose loss takes neither outputs nor states has its part in everybody's gradients."""
    given = inputs(T, "channel")
    whole = given["k"].clone().requires_grad_()
    _, end = ra.linear_attention(given["q"], whole, given["v"], given["g"], **how)
    end.square().sum().backward()

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=T)
        q, k, v, g = (plan.shard(given[n]).requires_grad_() for n in "qkvg")
        out, end = ra.linear_attention(q, k, v, g, plan, **how)
        (end.square().sum() if mesh.rank == 1 else out.sum() * 0).backward()
        return plan.unshard(k.grad)

    for grad in run(one_rank, ring=3):
        torch.testing.assert_close(grad, whole.grad, rtol=1e-12, atol=1e-12)


@settings(max_examples=200, deadline=None)
@forall(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.sampled_from([0, TOKENS_PER_LEVEL]))
def test_rows_hold_at_most_twice_the_tokens_and_two_chunks_a_document(tokens, level):
    x = np.array(tokens)
    length = row_length(x, level)
    assert sum(-(-x // length)) * length <= 2 * x.sum() + 128 * len(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "gate", "lengths", "rule"),
    [
        ((2, 1, "zigzag"), "channel", PACKED, {"states": B}),
        ((1, 1, "auto"), "head", ((9, 0, 31),), {}),
        *(((1, 1, "auto"), "head", ((70, 9, 12),), rule) for rule in RULES),  # of several rows: by maps
    ],
    ids=str,
)
def test_the_gpu_kernels_serve_ranks_and_documents_with_states(place, gate, lengths, rule):
    """In the interpreter where there is no GPU: they get rows without documents that have states."""
    pytest.importorskip("triton")
    check(place, gate, lengths, sum(lengths[0]), torch.float32, 2e-6, kernel="triton", **rule)
