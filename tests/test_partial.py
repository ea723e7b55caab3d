"""Partials merge: associative, commutative, `empty` is neutral; an empty side makes no NaN, and none disappears."""

import itertools

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.kernels.partial import (
    NEVER,
    Partial,
    add_sinks,
    empty,
    merge,
    merge_stack,
    normalise_empty,
    packed,
    sink_gradient,
    unpacked,
)

INF, NAN = float("inf"), float("nan")


def attention_over(keys: slice, seed: int = 0, size: float = 1.0) -> Partial:
    """Dense float64 attention of 5 queries over a slice of 12 keys."""
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(1, 5, 2, 12, generator=g, dtype=torch.float64)[..., keys] * size
    v = torch.randn(12, 3, generator=g, dtype=torch.float64)[keys]
    if not s.shape[-1]:
        return empty(torch.zeros(1, 5, 2, 3, dtype=torch.float64), 3)
    return Partial(torch.softmax(s, -1) @ v, torch.logsumexp(s, -1))


def close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [1.0, 10.0, 50.0, 500.0])
@pytest.mark.parametrize("at", [0, 1, 5, 12])
def test_merging_two_blocks_is_attention_over_both(at, size):
    a, b = attention_over(slice(0, at), size=size), attention_over(slice(at, 12), size=size)
    whole = attention_over(slice(0, 12), size=size)
    close(merge(a, b), whole)
    close(merge(b, a), whole)


def test_merging_is_associative():
    a, b, c = (attention_over(slice(i, i + 4)) for i in (0, 4, 8))
    close(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_the_sign_the_weight_of_a_grows_with_its_own_lse():
    a = Partial(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 2.0))
    b = Partial(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), 1.0))
    assert merge(a, b).out.item() == pytest.approx(np.exp(2) / (np.exp(2) + np.exp(1)))


@pytest.mark.parametrize("size", [1.0, 10.0, 50.0, 500.0])
def test_partials_of_float32_lose_nothing_where_they_travel_and_merge_in_any_order(size):
    """To 1e-6 of dense float64, relative and by norm: the lse travels as two numbers."""
    g = torch.Generator().manual_seed(1)
    s, v = (torch.empty(shape).uniform_(-size, size, generator=g) for shape in ((9, 60), (60, 24)))
    parts = [empty(torch.zeros(1, 9, 1, 24), 24)]  # a rank with nothing cached
    for keys in torch.arange(60).split(16):
        lse = s[:, keys].double().logsumexp(1)
        out = (s[:, keys] - lse[:, None]).exp().float() @ v[keys]
        parts.append(Partial(out[None, :, None], lse[None, :, None]))
    expected = torch.softmax(s.double(), 1) @ v.double()
    for order in itertools.permutations(parts):
        stack = unpacked(torch.stack([packed(part) for part in order]), 24)
        result = merge_stack(stack)
        assert off(result.out[0, :, 0], expected) <= 1e-6
        assert off(result.lse[0, :, 0], torch.logsumexp(s.double(), 1)) <= 1e-12


def off(result, expected):
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_an_lse_of_minus_infinity_is_an_empty_side(garbage):
    a = attention_over(slice(0, 12))
    nothing = Partial(torch.full_like(a.out, garbage), torch.full_like(a.lse, NEVER))
    close(merge(a, nothing), a)
    close(merge(nothing, a), a)
    both = merge(nothing, nothing)
    assert both.out.eq(0).all() and both.lse.eq(NEVER).all()
    close(normalise_empty(nothing), both)


@pytest.mark.parametrize("lse", [NAN, INF])
def test_a_side_that_is_nan_is_not_empty(lse):
    """A library may write lse = +inf beside an out of NaN."""
    a = attention_over(slice(0, 12))
    bad = Partial(a.out * NAN, torch.full_like(a.lse, lse))
    for other in (a, bad, empty(a.out, 3)):
        for pair in ((bad, other), (other, bad)):
            merged = merge(*pair)
            assert merged.out.isnan().all() and not merged.lse.isfinite().any()


@pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])
def test_a_key_of_nan_reaches_every_query_that_sees_it_on_a_ring_as_on_one_device(kernel):
    q, k, v = torch.randn(3, 1, 64, 2, 8).unbind()
    k[:, 3] = NAN

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64, kernel=kernel)
        return plan.unshard(ra.attention(plan.shard(q), plan.shard(k), plan.shard(v), plan))

    for out in (ra.attention(q, k, v), *run(one_rank, ring=4)):
        assert out[:, :3].isfinite().all() and out[:, 3:].isnan().all()


GAPS = [(0.0, 100.0), (0.0, -100.0), (0.0, 1000.0), (0.0, -1000.0), (0.0, NEVER), (NEVER, 0.0), (NEVER, NEVER)]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("lse_a", "lse_b"), GAPS)
def test_merging_lets_through_finite_gradients_whatever_lies_between_two_sides(lse_a, lse_b, framework):
    """Of sum(3 out + lse): the side that counts has all of it, the other has none."""
    out_a, out_b = np.float32([[[[1.0, 2.0]]]]), np.float32([[[[5.0, 7.0]]]])
    given = out_a, np.float32([[[lse_a]]]), out_b, np.float32([[[lse_b]]])
    if framework == "torch":
        leaves = [torch.tensor(x, requires_grad=True) for x in given]
        result = merge(Partial(*leaves[:2]), Partial(*leaves[2:]))
        grads = torch.autograd.grad(3 * result.out.sum() + result.lse.sum(), leaves)
    else:
        jax = pytest.importorskip("jax")

        def loss(oa, la, ob, lb):
            merged = merge(Partial(oa, la), Partial(ob, lb))
            return 3 * merged.out.sum() + merged.lse.sum()

        grads = jax.grad(loss, (0, 1, 2, 3))(*map(jax.numpy.asarray, given))
    a, b = float(lse_a > lse_b), float(lse_b > lse_a)
    for grad, expected in zip(grads, (3 * a, a, 3 * b, b), strict=True):
        np.testing.assert_allclose(np.asarray(grad), np.full(grad.shape, expected), atol=1e-30)


def test_sinks_are_one_more_key_with_a_value_of_zero():
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64)
    a = attention_over(slice(0, 12))
    got = add_sinks(a, sinks)
    torch.testing.assert_close(got.lse, torch.logaddexp(a.lse, sinks.expand_as(a.lse)))
    torch.testing.assert_close(got.out, a.out * torch.exp(a.lse - got.lse)[..., None])
    close(add_sinks(a, sinks + NEVER), a)
    assert add_sinks(a, sinks * NAN).out.isnan().all()


@pytest.mark.parametrize("framework", ["torch", "jax.numpy"])
def test_a_sink_that_nobody_sees_and_padding_have_no_gradient(framework):
    xp = pytest.importorskip(framework)
    sinks, lse = np.float32([-INF, 0.5]), np.float32([[[-INF, 0.5], [2.0, 1.5], [-INF, -INF]]])
    result = sink_gradient(*(xp.asarray(x) for x in (sinks, lse, np.full_like(lse, 3.0))))
    np.testing.assert_allclose(np.asarray(result), [0.0, -3 - 3 * np.exp(-1)], rtol=1e-6)
