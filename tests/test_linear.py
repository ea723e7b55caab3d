"""Gated linear attention on one device: the chunkwise form equals the recurrence."""

import pytest
import torch
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.kernels.linear import chunkwise
from ringattn.kernels.linear.maps import Inputs, Map
from ringattn.kernels.linear.recurrent import recurrent
from tests.cases import LEAVES, K, begins, inputs, relative_error, truth

T = 153  # two whole chunks and a part
PACKED = ((30, 20, 100, 3), (64, 64, 25))  # borders inside chunks and at their edges
GATES = ("channel", "head", None)
RULES = ({}, {"beta": True, "key_heads": 1})


def results(given, begin, start=True, passes=chunkwise, keep=False):
    """out, end and every gradient by the functions of a kernel; `keep`: the states before all chunks."""
    x = Inputs(*(given[n] for n in LEAVES), begin, K**-0.5)
    state, dout, dend = given["state"] if start else None, given["dout"], given["dend"]
    own = passes.scan_states(x)
    sizes, dtype = passes.states_shape(x.k, x.v)
    kept = torch.full(sizes, torch.nan, dtype=dtype) if keep else None
    out, end = passes.read_out(x, own, state, kept)
    back = passes.scan_gradients(x, dout)
    *grads, dstate = passes.gradients(x, kept if keep else own, state, back, dout, dend)
    mapped = own.map.after(torch.zeros_like(given["state"]) if state is None else state)
    torch.testing.assert_close(mapped, end, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(back.map.after(dend), dstate, rtol=1e-4, atol=1e-5)
    result = {"out": out, "end": end, "dstate": dstate, **{f"d{n}": t for n, t in zip(LEAVES, grads, strict=True)}}
    return {n: t for n, t in result.items() if t is not None}


def check(result, expected, limit):
    for name, x in result.items():
        value = relative_error(x, expected[name])
        assert value <= limit, f"{name} is off by {value:.2e} (limit {limit:.0e})"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("lengths", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("memory", ["much", "little"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_chunkwise_form_equals_the_recurrence(gate, lengths, dtype, limit, memory, rule, monkeypatch):
    """States that are kept for backward and states walked again give the same bits."""
    if memory == "little":  # one chunk at a time, and states computed again in every pass
        monkeypatch.setattr(chunkwise, "AT_ONCE", 1)
        monkeypatch.setattr(chunkwise, "MAX_KEPT", 0)
    given, begin = inputs(T, gate, dtype, **rule), begins(lengths, T)
    again, kept = (results(given, None if begin is None else begin.int(), keep=keep) for keep in (False, True))
    check(again, truth(T, gate, lengths, dtype, **rule), limit)
    for name in again:
        assert torch.equal(again[name], kept[name]), name


@pytest.mark.parametrize("deep", [1e-6, 30.0, 3000.0])
@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gates_near_one_and_near_zero_lose_no_precision(gate, deep, rule):
    """Also where both meet: a gate of exp(-3000) must not take the bits of the sums beside it along."""
    given = inputs(T, gate, torch.float32, deep, **rule)
    exact = dict(truth(T, gate, None, torch.float32, deep, **rule))
    result = results(given, None)
    assert result["dstate"].norm() <= 1.001 * exact["dstate"].norm()
    if deep > 1000:
        exact.pop("dstate"), result.pop("dstate")  # below the smallest float32
    check(result, exact, 2e-6)


@pytest.mark.slow
def test_twenty_thousand_steps():
    """Gates near 0 and near 1, and strong ones among weak ones: float32 against float64, forward and backward."""
    steps, kinds = 20_000, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, steps, kinds, 2, generator=generator, dtype=torch.float64) for _ in range(4))
    noise = torch.rand(1, steps, kinds, generator=generator, dtype=torch.float64)
    g = -noise * torch.tensor([1e-7, 1e-3, 1.0, 1e3])
    g[:, ::997, 1] = -1e4
    q, k, v, dout, g = (x.float() for x in (q, k, v, dout, g))

    def both(dtype):
        x, do = Inputs(*(t.to(dtype) for t in (q, k, v, g)), None, None, 1.0), dout.to(dtype)
        own, back = chunkwise.scan_states(x), chunkwise.scan_gradients(x, do)
        return *chunkwise.read_out(x, own, None), *chunkwise.gradients(x, own, None, back, do, None)[:4]

    exact = both(torch.float64)
    out, end = recurrent(Inputs(q.double(), k.double(), v.double(), g.double(), None, None, 1.0), None)
    torch.testing.assert_close(exact[0], out, rtol=1e-10, atol=1e-9)  # of sums over all tokens, rounded in other orders
    torch.testing.assert_close(exact[1], end, rtol=1e-10, atol=1e-9)
    for name, x, expected in zip(("out", "end", "dq", "dk", "dv", "dg"), both(torch.float32), exact, strict=True):
        for kind in range(kinds):
            pick = (slice(None), slice(None), kind) if name != "end" else (slice(None), kind)
            value = relative_error(x[pick], expected[pick])
            assert value <= 2e-6, f"{name} of kind {kind} is off by {value:.1e}"


@settings(max_examples=25)
@forall(st.data())
def test_any_lengths_and_borders(data):
    length = data.draw(st.integers(1, 140))
    borders = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {0})
    begin = torch.tensor([max(b for b in borders if b <= t) for t in range(length)])
    begin = torch.where(begin == 0, data.draw(st.sampled_from([0, -1, -100])), begin)[None]
    given = inputs(length, data.draw(st.sampled_from(GATES)), **data.draw(st.sampled_from(RULES)))
    result = results(given, begin.int())
    out, end = recurrent(Inputs(*(given[n] for n in LEAVES), begin, K**-0.5), given["state"])
    check({"out": result["out"], "end": result["end"]}, {"out": out, "end": end}, 1e-10)


def test_maps_compose_in_order_and_in_any_grouping():
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 3):  # a decay of each row, and a matrix
        a, b, c = (Map(*(torch.randn(1, 2, 3, n, generator=generator) for n in (columns, 4))) for _ in "abc")
        torch.testing.assert_close(a.then(b).then(c), a.then(b.then(c)))
        assert not torch.allclose(a.then(b).kv, b.then(a).kv)
        state = torch.randn(1, 2, 3, 4, generator=generator)
        torch.testing.assert_close(a.then(b).after(state), b.after(a.after(state)))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_a_gate_of_minus_infinity_forgets_all(gate, rule):
    """As a document that begins there; finite gates as strong do the same."""
    given = inputs(T, gate, torch.float32, **rule)
    docs = ra.Docs.from_lengths([70, T - 70])
    at = (slice(None), slice(70, 71))
    results = []
    for gate_there, packed in ((-torch.inf, None), (-1e4, None), (-1e30, None), (0.0, docs)):
        leaves = {n: given[n].clone() for n in LEAVES if given[n] is not None}
        leaves["g"][at] = gate_there
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        how = {"beta": leaves.get("beta"), "return_state": True, "docs": packed}
        out, end = ra.linear_attention(*(leaves[n] for n in "qkvg"), **how)
        grads = torch.autograd.grad((out * given["dout"]).sum() + (end * given["dend"]).sum(), list(leaves.values()))
        results.append([out, end, *grads])
    for result in results[:3]:
        for x, expected in zip(result, results[3], strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


def test_segments_with_their_states_equal_the_whole_and_the_invariant_holds():
    """rowsum(S * dS) at any border = sum over all tokens behind it of q dq - k dk: nothing of the gate is lost."""
    given = inputs(T, "channel")
    leaves = [given[n].requires_grad_() for n in "qkvg"]
    state, states, outs = given["state"], [], []
    for part in (slice(0, 40), slice(40, 104), slice(104, T)):
        out, state = ra.linear_attention(*(x[:, part] for x in leaves), initial_state=state, return_state=True)
        state.retain_grad()
        outs.append(out)
        states.append((part.stop, state))
    whole = ra.linear_attention(*leaves, initial_state=given["state"])
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-12, atol=1e-12)
    (torch.cat(outs, 1) * given["dout"]).sum().backward()
    q, k = leaves[:2]
    pairs = (q * q.grad - k * k.grad).detach()
    for stop, s in states[:-1]:
        torch.testing.assert_close((s * s.grad).sum(-1).detach(), pairs[:, stop:].sum(1), rtol=1e-10, atol=1e-10)


def test_low_precision_inputs_have_float32_states():
    given = inputs(T, "channel", torch.bfloat16)
    q, k, v, g = (given[n].requires_grad_() for n in "qkvg")
    out, end = ra.linear_attention(q, k, v, g, return_state=True)
    assert out.dtype == torch.bfloat16 and end.dtype == torch.float32
    out.float().sum().backward()
    assert [x.grad.dtype for x in (q, k, v, g)] == [torch.bfloat16] * 3 + [torch.float32]


def test_gates_are_looked_at_where_it_costs_nothing_and_where_it_is_asked_for():
    given = inputs(9, "channel", torch.float32)
    q, k, v, g = (given[n] for n in "qkvg")
    assert ra.linear_attention(q, k, v, -g, check=False).isfinite().all()  # growth over nine tokens
    with pytest.raises(ValueError):
        ra.linear_attention(q, k, v, -g, check=True)
