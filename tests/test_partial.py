"""Partials merge: associative, commutative, `empty` is neutral, and no infinity becomes a NaN."""

import numpy as np
import pytest
import torch

from ringattn.kernels.partial import (
    NEVER,
    Partial,
    add_sinks,
    empty,
    from_streams,
    merge,
    merge_streams,
    normalise_empty,
    to_streams,
)

INF = float("inf")


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
@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_merging_two_blocks_is_attention_over_both(cut, size):
    a, b = attention_over(slice(0, cut), size=size), attention_over(slice(cut, 12), size=size)
    whole = attention_over(slice(0, 12), size=size)
    close(merge(a, b), whole)
    close(merge(b, a), whole)
    close(from_streams(merge_streams(to_streams(a), to_streams(b))), whole)


def test_merging_is_associative():
    a, b, c = (attention_over(slice(i, i + 4)) for i in (0, 4, 8))
    close(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_the_sign_the_weight_of_a_grows_with_its_own_lse():
    a = Partial(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 2.0))
    b = Partial(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), 1.0))
    assert merge(a, b).out.item() == pytest.approx(np.exp(2) / (np.exp(2) + np.exp(1)))


@pytest.mark.parametrize("missing", [NEVER, INF])
@pytest.mark.parametrize("garbage", [0.0, float("nan"), INF])
def test_an_infinite_lse_of_either_sign_is_an_empty_side(missing, garbage):
    a = attention_over(slice(0, 12))
    nothing = Partial(torch.full_like(a.out, garbage), torch.full_like(a.lse, missing))
    close(merge(a, nothing), a)
    close(merge(nothing, a), a)
    both = merge(nothing, nothing)
    assert both.out.eq(0).all() and both.lse.eq(NEVER).all()
    close(normalise_empty(nothing), both)


def test_streams_keep_empty_rows_empty():
    none = empty(torch.zeros(1, 5, 2, 3), 3)
    assert from_streams(to_streams(none)).lse.eq(NEVER).all()
    again = from_streams(merge_streams(to_streams(none), to_streams(none)))
    assert again.lse.eq(NEVER).all() and again.out.eq(0).all()


def test_sinks_are_one_more_key_with_a_value_of_zero():
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64)
    a = attention_over(slice(0, 12))
    got = add_sinks(a, sinks)
    torch.testing.assert_close(got.lse, torch.logaddexp(a.lse, sinks.expand_as(a.lse)))
    torch.testing.assert_close(got.out, a.out * torch.exp(a.lse - got.lse)[..., None])


def test_the_same_words_work_on_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    a, b = attention_over(slice(0, 5)), attention_over(slice(5, 12))
    expected = merge(a, b)
    got = merge(*(Partial(*(jnp.asarray(x.float().numpy()) for x in p)) for p in (a, b)))
    np.testing.assert_allclose(got.out, expected.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.lse, expected.lse, rtol=1e-5)
