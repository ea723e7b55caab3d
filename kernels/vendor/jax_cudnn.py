"""cuDNN's fused attention on JAX arrays: a step cut into full and causal tiles, one call a tile.

jax.nn.dot_product_attention rounds the log-sum-exp to the dtype of the keys, which a ring cannot use. The call beneath
it leaves cuDNN's own float32 statistics as they are, and its backward takes whichever statistics it is given: with the
lse over all keys, and an `out` whose rowsum with dout is the delta that we want, each tile's gradients are exact.

Where nobody gets the lse, the call's own `out` is that one, and none is made up.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringattn.kernels import Problem
from ringattn.kernels.vendor import cudnn_refusal, equal_dims
from ringattn.kernels.vendor.jax_tiles import over_tiles

parted = False  # one call makes dq, dk and dv


def refuses(problem: Problem) -> str | None:
    return cudnn_refusal(problem) or equal_dims(problem, "cuDNN")


class StandIn(NamedTuple):
    """What a backward takes for delta once it is made: an `out` whose rowsum with dout is delta."""

    out: Array


def prepare(
    q: Array, dout: Array, lse: Array, delta: Array | StandIn, out: Array | None = None
) -> tuple[Array, Array, StandIn]:
    """`jax_tiles.as_they_are`, with an `out` in delta's place."""
    if isinstance(delta, StandIn):
        return dout, lse, delta
    if out is not None:
        return dout, lse, StandIn(out)
    dout, made = stand_in(dout.astype(q.dtype), delta)
    return dout, lse, StandIn(made)


def forward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, causal: bool, scale: float, softcap: float | None = None
) -> tuple[Array, Array]:
    """One tile: out in the dtype of q, and the float32 lse [B, T, H]."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    without_softcap(softcap)
    kind = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    out, lse = cudnn.dot_product_attention(
        q_BTHD, k_BSGD, v_BSGV, scale=scale, mask_type=kind, qkv_layout="BTNH", return_residual=True
    )
    return out, lse.swapaxes(1, 2)


def backward(
    q_BTHD: Array,
    k_BSGD: Array,
    v_BSGV: Array,
    rows: tuple[Array, Array, StandIn],
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """One tile: (dq, dk, dv) in the dtypes of q, k, v."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    without_softcap(softcap)
    dout_BTHV, lse_BTH, (out_BTHV,) = rows
    unused = jnp.zeros(0, q_BTHD.dtype)  # the bias, lengths, offsets and pages that this call does without
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q_BTHD, k_BSGD, v_BSGV, *[unused] * 7, lse_BTH.swapaxes(1, 2), out_BTHV, dout_BTHV,
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None,
    )  # fmt: skip
    return dq, dk, dv


def without_softcap(softcap: float | None) -> None:
    if softcap is not None:
        raise NotImplementedError(f"cuDNN has no softcap (got {softcap}); the reference has")


def stand_in(dout: Array, delta: Array) -> tuple[Array, Array]:
    """(dout, out) with rowsum(dout * out) = delta: out = dout * delta / |dout|^2, the shortest such row.

    A row whose dout vanishes although its delta does not (only the lse was differentiated) gets another dout, too
    small to matter beside delta: 2^-30 of it (2^-14 in float16, whose exponents end there).
    """
    tiny = 2.0**-14 if dout.dtype == jnp.float16 else 2.0**-30
    top = jnp.abs(dout).max(-1).astype(jnp.float32)  # squares of small gradients leave float32
    unit = dout.astype(jnp.float32) / jnp.where(top > 0, top, 1.0)[..., None]
    square = (unit * unit).sum(-1)
    least = (jnp.abs(delta) * tiny).astype(dout.dtype).astype(jnp.float32)
    small = top * jnp.sqrt(square) < least
    first = jnp.arange(dout.shape[-1]) == 0
    dout = jnp.where(small[..., None], jnp.where(first, least[..., None], 0.0).astype(dout.dtype), dout)
    unit = jnp.where(small[..., None], first.astype(jnp.float32), unit)
    top, square = jnp.where(small, least, top), jnp.where(small, 1.0, square)
    factor = jnp.where(top > 0, delta / jnp.where(top > 0, top * square, 1.0), 0.0)
    return dout, (unit * factor[..., None]).astype(dout.dtype)


attend, attend_backward = over_tiles("cuDNN", forward, backward, prepare)
