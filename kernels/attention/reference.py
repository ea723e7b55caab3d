"""Attention over intervals, dense and simple: every other kernel must give the same results.

    B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim

Query t of a batch row sees the keys [begin[t], end[t]) and no others. Written once for torch and
jax.numpy, in any dtype: products and sums are taken in float32 (float64 for float64 inputs).
"""

from typing import Any

from ringattn.kernels.arrays import Array, accumulator, arange, astype, fine, is_torch, namespace
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial, merge
from ringattn.kernels.protocol import JaxKernel, TorchKernel, at_once
from ringattn.kernels.rows import rounded


def attend(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, out_dtype: Any = None,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, merged into `carry`; `out` has `out_dtype` if given."""
    xp = namespace(q_BTHD)
    if not is_torch(q_BTHD):
        from ringattn.kernels.attention import jax_finite

        k_BSGD, _, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
    s = visible_scores(q_BTHD, k_BSGD, where, scale, softcap)
    top = xp.amax(s, axis=-1, keepdims=True) if s.shape[-1] else xp.sum(s, axis=-1, keepdims=True) + NEVER
    top = xp.where(top == NEVER, xp.zeros_like(top), top)
    p = xp.exp(s - top)
    total = xp.sum(p, axis=-1, keepdims=True)
    seen = total != 0  # also where total is NaN
    p = p / xp.where(seen, total, xp.ones_like(total))
    lse = astype(top, fine(q_BTHD)) + xp.log(xp.where(seen, total, xp.ones_like(total)))
    lse = xp.where(seen, lse, xp.full_like(lse, NEVER))
    out = product(p, by_head(v_BSGV, p.dtype), s == NEVER)
    B, T, H = q_BTHD.shape[:3]
    part = Partial(
        xp.einsum("bgrtv->btgrv", out).reshape(B, T, H, v_BSGV.shape[-1]),
        xp.einsum("bgrt->btgr", lse[..., 0]).reshape(B, T, H),
    )
    return finish(part, carry, out_dtype)


def attend_backward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array,
    *, scale: float, softcap: float | None = None, dq: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(dq, dk, dv) of these keys, given the lse over *all* keys and delta = rowsum(dout * out) - dlse.

    With the lse over all keys, p = exp(s - lse) is exact for any block of keys, so the gradients of blocks add up: dq
    is added to the one of other blocks, if that is given.
    """
    xp, scored = namespace(q_BTHD), k_BSGD
    if not is_torch(q_BTHD):
        from ringattn.kernels.attention import jax_finite

        scored, k_BSGD, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
        q_BTHD, dout_BTHV, lse_BTH, delta_BTH = jax_finite.of_rows(q_BTHD, dout_BTHV, lse_BTH, delta_BTH)
    s = visible_scores(q_BTHD, scored, where, scale, softcap)
    dout_BTHV, lse_BTH, delta_BTH = rounded(dout_BTHV, lse_BTH, delta_BTH)
    q, dout = split_heads(q_BTHD, k_BSGD), split_heads(dout_BTHV, k_BSGD)
    lse, delta = (xp.einsum("btgr->bgrt", split_heads(x, k_BSGD))[..., None] for x in (lse_BTH, delta_BTH))
    hidden, zero = s == NEVER, xp.zeros_like(s)
    p = xp.where(hidden, zero, xp.exp(s - lse))
    dp = xp.einsum("btgrv,bsgv->bgrts", dout, astype(v_BSGV, s.dtype))
    ds = xp.where(hidden, zero, p * (dp - delta))
    if softcap is not None:
        ds = ds * (1 - (xp.where(hidden, zero, s) / softcap) ** 2)
    new_dq = xp.einsum("bgrtd->btgrd", product(ds, by_head(k_BSGD, s.dtype), hidden)).reshape(q_BTHD.shape) * scale
    turned = (xp.einsum("bgrts->bgrst", x) for x in (ds, p))
    rows, unseen = (xp.einsum("btgrd->bgrtd", x) for x in (q, dout)), xp.einsum("bgrts->bgrst", hidden)
    grads = (product(x, y, unseen).sum(2) for x, y in zip(turned, rows, strict=True))
    dk, dv = (xp.einsum("bgsd->bsgd", x) for x in grads)
    return new_dq if dq is None else dq + new_dq, dk * scale, dv


def product(weights: Array, x: Array, hidden: Array | None) -> Array:
    """weights @ x without the rows of x that are hidden: their weight is 0, but 0 * NaN would be NaN.

    In JAX, which cannot look at numbers, x is already finite (ringattn.kernels.attention.jax_finite).
    """
    if hidden is None or not is_torch(x) or bool(x.isfinite().all()):
        return weights @ x
    bad = ~x.isfinite().all(-1)
    bad = bad.reshape(-1, bad.shape[-1]).any(0)
    out = weights @ x.masked_fill(bad[:, None], 0.0)
    for i in bad.nonzero().flatten().tolist():
        if not bool(hidden[..., i].all()):
            out += (weights[..., i, None] * x[..., i, None, :]).masked_fill(hidden[..., i, None], 0.0)
    return out


def by_head(x_BSGD: Array, dtype: Any) -> Array:
    """[B, S, G, D] as [B, G, 1, S, D]."""
    return namespace(x_BSGD).einsum("bsgd->bgsd", astype(x_BSGD, dtype))[:, :, None]


def finish(part: Partial, carry: Partial | None, out_dtype: Any) -> Partial:
    """`part` merged into `carry` if there is one, with its out in `out_dtype` if that is given."""
    part = part if carry is None else merge(carry, part)
    return part if out_dtype is None else Partial(astype(part.out, out_dtype), part.lse)


def visible_scores(q_BTHD: Array, k_BSGD: Array, where: Intervals, scale: float, softcap: float | None) -> Array:
    """scale * q k^T with the softcap applied, and -inf outside each query's interval: [B, G, R, T, S]."""
    xp = namespace(q_BTHD)
    s = xp.einsum("btgrd,bsgd->bgrts", split_heads(q_BTHD, k_BSGD), astype(k_BSGD, accumulator(q_BTHD))) * scale
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    index = arange(k_BSGD.shape[1], like=q_BTHD)[None, None]
    visible = (where.begin[..., None] <= index) & (index < where.end[..., None])  # [B or 1, T, S]
    return xp.where(visible[:, None, None], s, xp.full_like(s, NEVER))


def split_heads(x_BTH_: Array, k_BSGD: Array) -> Array:
    """[B, T, H, ...] as [B, T, G, R, ...]: the R query heads that share each key head, in the accumulator's dtype."""
    B, T, H, *rest = x_BTH_.shape
    G = k_BSGD.shape[2]
    return astype(x_BTH_, accumulator(x_BTH_)).reshape(B, T, G, H // G, *rest)


KERNEL = TorchKernel(attend, at_once(attend_backward))
JAX = JaxKernel(attend, attend_backward, plain=True)
