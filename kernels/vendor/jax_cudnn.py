"""cuDNN's fused attention on JAX arrays: a step is cut into full and causal tiles, with one call for each.

jax.nn.dot_product_attention rounds the lse to the dtype of the keys, which is too coarse for a ring. The private
function below it keeps cuDNN's float32 lse, and its backward accepts any lse. cuDNN computes delta = rowsum(dout * out)
itself, so with the lse and the out over all keys each tile's gradients are exact.

If the lse has a gradient too, delta = rowsum(dout * out) - dlse. No `out` gives that delta in every range of numbers.
So dlse takes a second call with values of 0, where ds = p * (0 - delta), and delta = -dlse is exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringattn.kernels import Problem
from ringattn.kernels.protocol import JaxKernel
from ringattn.kernels.vendor import cudnn_refusal, equal_dims
from ringattn.kernels.vendor.jax_tiles import over_tiles


def refuses(problem: Problem) -> str | None:
    return cudnn_refusal(problem) or equal_dims(problem, "cuDNN")


class Delta(NamedTuple):
    """What cuDNN needs in place of delta: the out over all keys, and the lse's gradient if there is one."""

    out: Array
    dlse: Array | None


def prepare(
    q: Array, dout: Array, lse: Array, delta: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, Array, Delta]:
    """Replaces delta by out, since cuDNN computes delta itself."""
    return dout.astype(q.dtype), lse, Delta(out.astype(q.dtype), dlse)


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
    rows: tuple[Array, Array, Delta],
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """One tile: (dq, dk, dv), in the dtypes of q, k, v or in float32."""
    without_softcap(softcap)
    dout_BTHV, lse_BTH, (out_BTHV, dlse_BTH) = rows
    dq, dk, dv = fused_backward(q_BTHD, k_BSGD, v_BSGV, dout_BTHV, lse_BTH, out_BTHV, causal, scale)
    if dlse_BTH is None:
        return dq, dk, dv
    ones, parts = rows_with_delta(-dlse_BTH, dout_BTHV)
    more_q, more_k, _ = fused_backward(q_BTHD, k_BSGD, jnp.zeros_like(v_BSGV), ones, lse_BTH, parts, causal, scale)
    exact = lse_BTH.dtype
    return dq.astype(exact) + more_q.astype(exact), dk.astype(exact) + more_k.astype(exact), dv


PARTS = 3  # three bfloat16 numbers, of 8 bits each, are as exact as one float32 number


def rows_with_delta(delta: Array, like: Array) -> tuple[Array, Array]:
    """(dout, out) in the dtype and shape of `like`, with rowsum(dout * out) = delta: ones, and delta in parts."""
    parts = []
    for _ in range(PARTS):
        parts.append(delta.astype(like.dtype))
        delta = delta - parts[-1].astype(delta.dtype)
    rest = [(0, 0)] * (like.ndim - 1) + [(0, like.shape[-1] - PARTS)]
    found = jnp.pad(jnp.stack(parts, -1), rest)
    return jnp.ones_like(found), found


def fused_backward(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, out: Array, causal: bool, scale: float
) -> tuple[Array, Array, Array]:
    """cuDNN's backward for one tile."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = jnp.zeros(0, q.dtype)  # bias, lengths, offsets and pages
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *[unused] * 7, lse.swapaxes(1, 2), out, dout,
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None,
    )  # fmt: skip
    return dq, dk, dv


def without_softcap(softcap: float | None) -> None:
    if softcap is not None:
        raise NotImplementedError(f"cuDNN does not support softcap={softcap}; use kernel='reference'")


attend, attend_backward = over_tiles("cuDNN", forward, backward)
KERNEL = JaxKernel(attend, attend_backward, refuses, prepare=prepare, parted=False)  # one call computes dq, dk and dv
