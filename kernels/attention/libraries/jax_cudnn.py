"""cuDNN's fused attention on JAX arrays: a step is cut into rectangles whose mask cuDNN has, with one call for each.

Its masks are full, causal, a window, and packed documents (on Hopper and later). A rectangle has one of these, or a
causal one with its tokens in reverse order.

jax.nn.dot_product_attention rounds the lse to the dtype of the keys, which is too coarse for a ring. The private
function below it keeps cuDNN's float32 lse, and its backward accepts any lse. cuDNN computes delta = rowsum(dout * out)
itself, so with the lse and the out over all keys each rectangle's gradients are exact.

If the lse has a gradient too, delta = rowsum(dout * out) - dlse. No `out` gives that delta in every range of numbers.
So dlse takes a second call with values of 0, where ds = p * (0 - delta), and delta = -dlse is exact.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from ringattn.kernels import Problem
from ringattn.kernels.attention.libraries import cudnn_refusal, equal_dims
from ringattn.kernels.attention.libraries.jax_rectangles import over_rectangles
from ringattn.kernels.intervals import FLIPPED, Rectangle, rectangles_of
from ringattn.kernels.protocol import JaxKernel
from ringattn.kernels.sequences import sequences_of


def refuses(problem: Problem) -> str | None:
    return cudnn_refusal(problem) or equal_dims(problem, "cuDNN")


Delta = tuple[Array, Array | None]  # what cuDNN needs in its place: the out over all keys; the lse's gradient, if any


def prepare(
    q: Array, dout: Array, lse: Array, delta: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array, Delta]:
    """Replaces delta by out, since cuDNN computes delta itself."""
    return q, dout.astype(q.dtype), lse, (out.astype(q.dtype), dlse)


SINGLE_CALLS = 4  # so many packed documents are calls of their own
DOCUMENTS_A_CALL = 32  # and so many are one call: its lse takes memory for all of its tokens in each document


class CudnnMask(NamedTuple):
    """What cuDNN calls the mask of a rectangle."""

    kind: str  # of cudnn.MaskType
    window: int | None = None  # a query sees so many keys, itself among them
    starts: tuple[int, ...] | None = None  # of packed documents, and the end of the last

    @classmethod
    def of(cls, mask: Any) -> "CudnnMask":
        return mask if isinstance(mask, cls) else cls("CAUSAL" if mask else "NO_MASK")


def rectangles(begin: np.ndarray, end: np.ndarray, keys: int) -> tuple[Rectangle, ...] | None:
    """Host intervals [rows, T] as few rectangles of cuDNN's masks, or None."""
    alike = (begin == begin[:1]).all() and (end == end[:1]).all()
    groups = sequences_of(begin[0], end[0]) if alike else None
    if groups and len(groups) == 1:
        cells, causal, window = groups[0]
        squares = (cells[:, 1] - cells[:, 0] == cells[:, 3] - cells[:, 2]).all()
        joined = (cells[1:, ::2] == cells[:-1, 1::2]).all()
        if window is not None and squares and len(cells) == 1:  # it has no packed documents with windows
            return (packed(cells, CudnnMask("CAUSAL", window + 1)),)
        if window is None and squares and joined and len(cells) > SINGLE_CALLS and packs():
            some = [cells[i : i + DOCUMENTS_A_CALL] for i in range(0, len(cells), DOCUMENTS_A_CALL)]
            kind = CudnnMask("PADDING_CAUSAL" if causal else "PADDING")
            starts = [tuple((np.append(x[:, 0], x[-1, 1]) - x[0, 0]).tolist()) for x in some]
            return tuple(packed(x, kind._replace(starts=at)) for x, at in zip(some, starts, strict=True))
    return rectangles_of(begin, end, flips=True)


def packed(cells: np.ndarray, mask: CudnnMask) -> Rectangle:
    """Sequences that follow one another as one rectangle."""
    (first, _, start, _), (_, last, _, stop) = cells[0].tolist(), cells[-1].tolist()
    return Rectangle(slice(first, last), slice(start, stop), mask)


def packs() -> bool:
    """Whether the GPUs here have packed documents."""
    return bool(cudnn.check_compute_capability("9.0"))


def forward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, mask: Any, scale: float, softcap: float | None = None
) -> tuple[Array, Array]:
    """One rectangle: out in the dtype of q, and the float32 lse [B, T, H]."""
    assert softcap is None  # which `refuses` refuses
    q, k, v = reverse(mask, q_BTHD, k_BSGD, v_BSGV)
    out, lse = reverse(mask, *fused_forward(q, k, v, CudnnMask.of(mask), scale))
    return out, lse


def backward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, rows: tuple[Array, Array, Delta], mask: Any, scale: float,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One rectangle: (dq, dk, dv), in the dtypes of q, k, v or in float32."""
    assert softcap is None
    dout, lse, (out, dlse) = rows
    q, k, v, dout, lse, out, dlse = reverse(mask, q_BTHD, k_BSGD, v_BSGV, dout, lse, out, dlse)
    named = CudnnMask.of(mask)
    dq, dk, dv = fused_backward(q, k, v, dout, lse, out, named, scale)
    if dlse is not None:
        ones, parts = rows_with_delta(-dlse, dout)
        more_q, more_k, _ = fused_backward(q, k, jnp.zeros_like(v), ones, lse, parts, named, scale)
        dq, dk = (a.astype(lse.dtype) + b.astype(lse.dtype) for a, b in ((dq, more_q), (dk, more_k)))
    dq, dk, dv = reverse(mask, dq, dk, dv)
    return dq, dk, dv


def reverse(mask: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays with their tokens in reverse order, if the rectangle is flipped."""
    return tuple(x if x is None else x[:, ::-1] for x in arrays) if mask is FLIPPED else arrays


PARTS = 3  # three bfloat16 numbers, of 8 bits each, are as exact as one float32 number


def rows_with_delta(delta: Array, like: Array) -> tuple[Array, Array]:
    """(dout, out) in the dtype and shape of `like`, with rowsum(dout * out) = delta: ones, and delta in parts."""
    parts = []
    for _ in range(PARTS):
        parts.append(delta.astype(like.dtype))
        delta = delta - parts[-1].astype(delta.dtype)
    rest = [(0, 0)] * (like.ndim - 1) + [(0, like.shape[-1] - PARTS)]
    per_document = jnp.pad(jnp.stack(parts, -1), rest)
    return jnp.ones_like(per_document), per_document


def fused_forward(q: Array, k: Array, v: Array, mask: CudnnMask, scale: float) -> tuple[Array, Array]:
    """cuDNN's forward for one rectangle."""
    lengths, offsets = documents(mask, q)
    out, lse = cudnn.dot_product_attention(
        q, k, v, scale=scale, mask_type=cudnn.MaskType[mask.kind], qkv_layout="BTNH", return_residual=True,
        sliding_window_length=mask.window, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
    )  # fmt: skip
    return out, lse.swapaxes(1, 2) if mask.starts is None else unpadded(lse, mask.starts, q.shape[0])


def fused_backward(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, out: Array, mask: CudnnMask, scale: float
) -> tuple[Array, Array, Array]:
    """cuDNN's backward for one rectangle."""
    unused = jnp.zeros(0, q.dtype)  # bias and pages, and without documents their lengths and offsets
    lengths, offsets = (unused if x is None else x for x in documents(mask, q))
    lse = lse.swapaxes(1, 2) if mask.starts is None else padded(lse, mask.starts)
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, unused, lengths, lengths, offsets, offsets, unused, unused, lse, out, dout,
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=cudnn.MaskType[mask.kind], layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=mask.window,
    )  # fmt: skip
    return dq, dk, dv


def documents(mask: CudnnMask, q: Array) -> tuple[Array | None, Array | None]:
    """The lengths [B, documents] and the offsets [B, documents + 1] of packed documents."""
    if mask.starts is None:
        return None, None
    starts = np.array(mask.starts, np.int32)
    rows = [np.broadcast_to(x, (q.shape[0], len(x))) for x in (np.diff(starts), np.append(starts[:-1], -1))]
    return jnp.asarray(rows[0], jnp.int32), jnp.asarray(rows[1], jnp.int32)


def places(starts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Each token's document, and its place in it."""
    lengths = np.diff(starts)
    own = np.repeat(np.arange(len(lengths)), lengths)
    return own, np.arange(starts[-1]) - np.asarray(starts)[own]


def unpadded(lse: Array, starts: tuple[int, ...], batch: int) -> Array:
    """[B, T, H] of the lse as cuDNN has it with packed documents, [B * documents, H, T]."""
    own, at = places(starts)
    return lse.reshape(batch, -1, *lse.shape[1:])[:, own, :, at].swapaxes(0, 1)


def padded(lse: Array, starts: tuple[int, ...]) -> Array:
    """The inverse of `unpadded`."""
    (B, T, H), (own, at) = lse.shape, places(starts)
    by_document = jnp.zeros((B, len(starts) - 1, H, T), lse.dtype).at[:, own, :, at].set(lse.swapaxes(0, 1))
    return by_document.reshape(-1, H, T)


attend, attend_backward = over_rectangles("cuDNN", forward, backward)
KERNEL = JaxKernel(attend, attend_backward, refuses, prepare=prepare, cut=rectangles)  # a call computes dq, dk and dv
