"""The two readable kernels: the dense one equals autograd in float64, and the tiled one equals it for any tiling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels.attention import reference, tiled
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import empty, merge


def problem(T=13, S=17, H=4, G=2, D=8, V=6, B=2, seed=0, dtype=torch.float64):
    """Random tensors and random monotone intervals, empty and one-key rows among them."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, h, d, generator=g, dtype=dtype) for n, h, d in ((T, H, D), (S, G, D), (S, G, V)))
    begin = torch.randint(0, S, (B, T), generator=g).sort(-1)[0].int()
    end = torch.maximum(begin, torch.randint(0, S + 1, (B, T), generator=g).sort(-1)[0].int())
    return q, k, v, Intervals(begin, end)


def by_autograd(q, k, v, where, softcap=None):
    """The definition, differentiated by autograd."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    s = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(repeat, 2)) * 0.3
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    j = torch.arange(k.shape[1])
    mask = ((where.begin[..., None] <= j) & (j < where.end[..., None]))[:, None]
    some = mask.any(-1, keepdim=True)
    p = torch.where(some, torch.softmax(torch.where(some, s.masked_fill(~mask, -np.inf), 0.0), -1), 0.0)
    out = torch.einsum("bhts,bshv->bthv", p, v.repeat_interleave(repeat, 2))
    lse = torch.where(some[..., 0], s.masked_fill(~mask, -np.inf).logsumexp(-1), -np.inf).transpose(1, 2)
    return out, lse, (q, k, v)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("module", [reference, tiled], ids=lambda m: m.__name__.split(".")[-1])
def test_forward_and_backward_are_the_definition(module, softcap):
    q, k, v, where = problem()
    out, lse, leaves = by_autograd(q, k, v, where, softcap)
    part = module.attend(q, k, v, where, scale=0.3, softcap=softcap)
    torch.testing.assert_close(part.out, out)
    torch.testing.assert_close(part.lse, lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    finite = torch.isfinite(lse)
    expected = torch.autograd.grad((out * dout).sum() + (torch.where(finite, lse, 0.0) * dlse).sum(), leaves)
    delta = (dout * part.out).sum(-1) - dlse * finite
    results = module.attend_backward(q, k, v, where, dout, part.lse, delta, scale=0.3, softcap=softcap)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_any_tiling_gives_the_dense_answer(block_q, block_k, seed):
    q, k, v, where = problem(seed=seed)
    a = reference.attend(q, k, v, where, scale=0.3)
    b = tiled.attend(q, k, v, where, scale=0.3, block_q=block_q, block_k=block_k)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    rows = (torch.randn_like(a.out), a.lse, torch.randn_like(a.lse))
    for x, y in zip(
        reference.attend_backward(q, k, v, where, *rows, scale=0.3),
        tiled.attend_backward(q, k, v, where, *rows, scale=0.3, block_q=block_q, block_k=block_k),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("module", [reference, tiled])
def test_blocks_accumulate_into_what_is_carried(module):
    q, k, v, where = problem()
    whole = module.attend(q, k, v, where, scale=0.3)
    carry = None
    for keys in (slice(0, 5), slice(5, 17)):
        part = Intervals(*((x - keys.start).clamp(0, keys.stop - keys.start) for x in where[:2]))
        carry = module.attend(q, k[:, keys], v[:, keys], part, scale=0.3, carry=carry)
    torch.testing.assert_close(carry, whole)
    assert module.attend(q, k, v, where, scale=0.3, out_dtype=torch.float32).out.dtype == torch.float32
    rows = (torch.randn_like(whole.out), whole.lse, torch.randn_like(whole.lse))
    if module is reference:
        dq, *keys = reference.attend_backward(q, k, v, where, *rows, scale=0.3)
        more, *again = reference.attend_backward(q, k, v, where, *rows, scale=0.3, dq=dq.clone())
        torch.testing.assert_close([more, *again], [2 * dq, *keys])


@pytest.mark.parametrize("module", [reference, tiled])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_accumulate_in_float32(module, dtype):
    q, k, v, where = problem(dtype=torch.float32)
    low = [x.to(dtype) for x in (q, k, v)]
    a = module.attend(*low, where, scale=0.3)
    b = module.attend(*(x.double() for x in low), where, scale=0.3)
    assert a.out.dtype == a.lse.dtype == torch.float32
    torch.testing.assert_close(a.out.double(), b.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_is_the_same_in_jax(softcap):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    q, k, v, where = problem(dtype=torch.float32)
    part = reference.attend(q, k, v, where, scale=0.3, softcap=softcap)
    rows = (torch.randn_like(part.out), part.lse, torch.randn_like(part.lse))
    grads = reference.attend_backward(q, k, v, where, *rows, scale=0.3, softcap=softcap)

    def j(x):
        return jnp.asarray(x.numpy())

    at = Intervals(j(where.begin), j(where.end))
    got = jax.jit(lambda *a: reference.attend(*a, scale=0.3, softcap=softcap))(j(q), j(k), j(v), at)
    np.testing.assert_allclose(got.out, part.out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, part.lse, rtol=2e-5, atol=2e-6)
    back = reference.attend_backward(j(q), j(k), j(v), at, *map(j, rows), scale=0.3, softcap=softcap)
    for x, y in zip(back, grads, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_blocks_that_nobody_sees_are_never_touched():
    q, k, v, where = problem(T=8, S=64)
    where = Intervals(torch.full((2, 8), 20, dtype=torch.int32), torch.full((2, 8), 30, dtype=torch.int32))
    k[:, :16], v[:, :16], k[:, 32:], v[:, 32:] = (torch.nan,) * 4
    assert tiled.attend(q, k, v, where, scale=0.3, block_k=8).out.isfinite().all()


def test_no_keys_at_all():
    q, k, v, _ = problem(S=1)
    where = Intervals(*(torch.zeros(2, 13, dtype=torch.int32) for _ in range(2)))
    for module in (reference, tiled):
        part = module.attend(q, k[:, :0], v[:, :0], where, scale=0.3)
        assert part.out.eq(0).all() and part.lse.eq(-np.inf).all()


def check_bad_rows(part, nothing):
    out, lse = (np.asarray(x) for x in part)
    assert np.isnan(out[~nothing]).all() and not np.isfinite(lse[~nothing]).any()
    assert (out[nothing] == 0).all() and (lse[nothing] == -np.inf).all()


@pytest.mark.parametrize("size", [np.nan, 1e30])
@pytest.mark.parametrize("module", [reference, tiled])
def test_nan_and_overflowing_scores_are_not_empty_rows(module, size):
    q, k, v, where = problem(dtype=torch.float32)
    carry = module.attend(q, k, v, where, scale=0.3)
    q, k, nothing = q.abs() * size, k.abs() * size, (where.begin == where.end).numpy()
    for before in (None, carry):
        part = module.attend(q, k, v, where, scale=0.3, carry=before)
        check_bad_rows(part, nothing)
    dq = module.attend_backward(q, k, v, where, part.out, part.lse, part.lse, scale=0.3)[0]
    assert dq[torch.from_numpy(~nothing)].isnan().all()


@pytest.mark.parametrize("size", [np.nan, 1e30])
def test_nan_and_overflowing_scores_are_not_empty_rows_in_jax(size):
    jnp = pytest.importorskip("jax").numpy
    q, k, v, where = problem(dtype=torch.float32)
    q, k, v, *at = (jnp.asarray(x.numpy()) for x in (q.abs() * size, k.abs() * size, v, *where[:2]))
    part = reference.attend(q, k, v, Intervals(*at), scale=0.3)
    for result in (part, merge(part, empty(q, v.shape[-1]))):
        check_bad_rows(result, np.asarray(at[0] == at[1]))
