"""Attention over intervals, dense and obvious: the truth that every other kernel must equal.

    B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim

Query t of a batch row sees the keys [begin[t], end[t]) and no others. Written once for torch and
jax.numpy, in any dtype: products and sums are taken in float32 (float64 for float64 inputs).
"""

from typing import Any

from ringattn.kernels.arrays import Array, accumulator, arange, astype, namespace
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial, merge


def attend(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGV: Array,
    where: Intervals,
    *,
    scale: float,
    softcap: float | None = None,
    carry: Partial | None = None,
    out_dtype: Any = None,
) -> Partial:
    """softmax(scale * q k^T) v over each query's interval, merged into `carry`; `out` in `out_dtype` if it is given."""
    xp = namespace(q_BTHD)
    s = visible_scores(q_BTHD, k_BSGD, where, scale, softcap)
    top = xp.amax(s, axis=-1, keepdims=True) if s.shape[-1] else xp.sum(s, axis=-1, keepdims=True) + NEVER
    top = xp.where(top == NEVER, xp.zeros_like(top), top)
    p = xp.exp(s - top)
    total = xp.sum(p, axis=-1, keepdims=True)
    seen = total != 0  # so is NaN
    p = p / xp.where(seen, total, xp.ones_like(total))
    lse = xp.where(seen, top + xp.log(xp.where(seen, total, xp.ones_like(total))), xp.full_like(total, NEVER))
    out = xp.einsum("bgrts,bsgv->btgrv", p, astype(v_BSGV, p.dtype))
    B, T, H = q_BTHD.shape[:3]
    part = Partial(out.reshape(B, T, H, v_BSGV.shape[-1]), xp.einsum("bgrt->btgr", lse[..., 0]).reshape(B, T, H))
    return finish(part, carry, out_dtype)


def attend_backward(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGV: Array,
    where: Intervals,
    dout_BTHV: Array,
    lse_BTH: Array,
    delta_BTH: Array,
    *,
    scale: float,
    softcap: float | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of these keys, given the lse over *all* keys and delta = rowsum(dout * out) - dlse.

    With the global lse, p = exp(s - lse) is exact for any block of keys, so nothing is merged: gradients add up, here
    to the dq, dk, dv that were given (whose memory a kernel may reuse).
    """
    xp = namespace(q_BTHD)
    s = visible_scores(q_BTHD, k_BSGD, where, scale, softcap)
    q, dout = split_heads(q_BTHD, k_BSGD), split_heads(dout_BTHV, k_BSGD)
    lse, delta = (xp.einsum("btgr->bgrt", split_heads(x, k_BSGD))[..., None] for x in (lse_BTH, delta_BTH))
    p = xp.where(s == NEVER, xp.zeros_like(s), xp.exp(s - lse))
    dp = xp.einsum("btgrv,bsgv->bgrts", dout, astype(v_BSGV, s.dtype))
    ds = p * (dp - delta)
    if softcap is not None:
        ds = ds * (1 - (xp.where(s == NEVER, xp.zeros_like(s), s) / softcap) ** 2)
    new_dq = xp.einsum("bgrts,bsgd->btgrd", ds, astype(k_BSGD, s.dtype)).reshape(q_BTHD.shape) * scale
    new_dk = xp.einsum("bgrts,btgrd->bsgd", ds, q) * scale
    new_dv = xp.einsum("bgrts,btgrv->bsgv", p, dout)
    return plus(dq, new_dq), plus(dk, new_dk), plus(dv, new_dv)


def finish(part: Partial, carry: Partial | None, out_dtype: Any) -> Partial:
    """`part` merged into what was carried, its out in the dtype that was asked for."""
    part = part if carry is None else merge(carry, part)
    return part if out_dtype is None else Partial(astype(part.out, out_dtype), part.lse)


def plus(total: Array | None, part: Array) -> Array:
    return part if total is None else total + part


def row_delta(out_BTHV: Array, dout_BTHV: Array, dlse_BTH: Array | None = None) -> Array:
    """rowsum(dout * out) - dlse: all that the backward pass needs to know of out and of the lse's gradient."""
    xp, dtype = namespace(out_BTHV), accumulator(out_BTHV)
    delta = xp.sum(astype(dout_BTHV, dtype) * astype(out_BTHV, dtype), axis=-1)
    return delta if dlse_BTH is None else delta - dlse_BTH


def visible_scores(q_BTHD: Array, k_BSGD: Array, where: Intervals, scale: float, softcap: float | None) -> Array:
    """scale * q k^T, softly capped, with -inf outside each query's interval: [B, G, R, T, S]."""
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
