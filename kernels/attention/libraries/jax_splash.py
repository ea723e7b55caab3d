"""JAX's stock splash attention for TPUs, for masks that are known before tracing: a check of our own kernel.

It takes any fixed mask, so a step is one rectangle of all queries and keys, whose mask is its intervals. The public
function uses its own lse in the backward pass, which is wrong for a ring. So the private backward kernels are called,
which take any lse and delta; a test compares every gradient.

It does not support `check_vma`, it divides by zero for a row without keys, and it needs q multiplied by the scale,
which rounds q once more unless the scale is a power of two.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringattn.kernels import Problem
from ringattn.kernels.attention.libraries.jax_rectangles import over_rectangles
from ringattn.kernels.attention.pallas.blocks import by_heads, divided, padded
from ringattn.kernels.intervals import Rectangle
from ringattn.kernels.partial import NEVER
from ringattn.kernels.protocol import JaxKernel
from ringattn.kernels.varying import axes_of

BLOCK = 512  # queries and keys of a block, at most


def refuses(problem: Problem) -> str | None:
    if problem.device not in ("tpu", "cpu"):
        return f"is a TPU kernel (interpreted on CPUs), and the device is {problem.device}"
    if problem.dtype not in (("bfloat16",) if problem.device == "tpu" else ("bfloat16", "float32")):
        return f"takes bfloat16 (and float32 on CPUs; a TPU would round it), not {problem.dtype}"
    return None if problem.static else "needs a mask known before the program runs, and these documents are traced"


def options(problem: Problem) -> dict[str, Any]:
    """The kernel's own keyword arguments for this problem."""
    return {"interpret": problem.device != "tpu"}


@dataclass(frozen=True)
class Fixed:
    """Intervals [rows, T] as a hashable value."""

    begin: bytes
    end: bytes
    rows: int

    @property
    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        begin, end = (np.frombuffer(x, np.int32).reshape(self.rows, -1) for x in (self.begin, self.end))
        return begin, end


def rectangles(begin: np.ndarray, end: np.ndarray, keys: int) -> tuple[Rectangle, ...]:
    """The whole step as one rectangle, with its intervals as the mask; no rectangle if no query sees a key."""
    if (begin >= end).all():
        return ()
    first, last = (np.ascontiguousarray(x, np.int32).tobytes() for x in (begin, end))
    return (Rectangle(slice(0, begin.shape[1]), slice(0, keys), Fixed(first, last, len(begin))),)


def forward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, seen: Fixed, scale: float, softcap: float | None, interpret: bool
) -> tuple[Array, Array]:
    """One rectangle: out in the dtype of q, and the float32 lse [B, T, H]; a row without keys is 0, and -inf."""
    q, k, v = operands(q_BTHD, k_BSGD, v_BSGV, scale)

    def run(i: int, q: Array, k: Array, v: Array) -> Any:
        return kernel_of(seen, i, q.shape, k.shape[1], softcap, interpret)(q, k, v)

    out, (lse,) = by_rows(run, seen.rows, q, k, v)
    some = nonempty(seen)
    out, lse = (jnp.einsum("bht...->bth...", x)[:, : q_BTHD.shape[1]] for x in (out, lse))
    return jnp.where(some[..., None], out, 0), jnp.where(some, lse, NEVER)


def backward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, rows: tuple[Array, Array, Array], seen: Fixed, scale: float,
    softcap: float | None, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One rectangle: (dq, dk, dv) in the dtypes of q, k, v; rows are dout, the global lse and delta."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as stock

    q, k, v = operands(q_BTHD, k_BSGD, v_BSGV, scale)
    some, bq = nonempty(seen), divided(q_BTHD.shape[1], BLOCK)
    dout, lse, delta = rows
    dout = by_heads(jnp.where(some[..., None], dout, 0), bq)
    lse, delta = jnp.where(some, lse, jnp.inf), jnp.where(some, delta, 0)  # exp(score - inf) = 0
    lse, delta = (padded(jnp.einsum("bth->bht", x), 2, bq) for x in (lse, delta))

    def run(i: int, q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array) -> Any:
        kernel = kernel_of(seen, i, q.shape, k.shape[1], softcap, interpret)
        given: Any = {
            "is_mqa": False, "mask_value": stock.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": softcap,
            "mask_function": None, "interpret": interpret,
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), stock.QKVLayout.HEAD_DIM_MINOR),
        }  # fmt: skip
        arrays, sizes = (q, k, v, None, None, lse, dout, delta), kernel.kwargs["block_sizes"]
        dq = stock._splash_attention_bwd_dq(
            *arrays, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info, **given
        )
        _, dk, dv = stock._splash_attention_bwd_dkv(
            *arrays, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv, bkv_compute=sizes.block_kv_dkv_compute,
            mask_info=kernel.dkv_mask_info, use_fused_bwd_kernel=False, **given,
        )  # fmt: skip
        return dq, dk, dv

    grads = by_rows(run, seen.rows, q, k, v, dout, lse, delta)
    dq, dk, dv = (
        jnp.einsum("bhtd->bthd", g)[:, : x.shape[1]] for g, x in zip(grads, (q_BTHD, k_BSGD, v_BSGV), strict=True)
    )
    return (dq * scale).astype(q_BTHD.dtype), dk, dv


def operands(q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, scale: float) -> tuple[Array, Array, Array]:
    """The operands by heads, padded to whole blocks, with q multiplied by the scale."""
    if axes_of(q_BTHD, k_BSGD, v_BSGV):
        raise NotImplementedError(
            "kernel='stock_splash' does not support values that vary along mesh axes; use shard_map(check_vma=False), "
            "or kernel='splash'"
        )
    bq, bk = divided(q_BTHD.shape[1], BLOCK), divided(k_BSGD.shape[1], BLOCK)
    return by_heads(q_BTHD * jnp.asarray(scale, q_BTHD.dtype), bq), by_heads(k_BSGD, bk), by_heads(v_BSGV, bk)


def by_rows(run: Any, rows: int, *arrays: Array) -> Any:
    """run(i, ...) for each batch row, where i is its row of the intervals."""
    if rows == 1:
        return jax.vmap(lambda *x: run(0, *x))(*arrays)
    return jax.tree.map(lambda *x: jnp.stack(x), *(run(i, *(x[i] for x in arrays)) for i in range(rows)))


def nonempty(seen: Fixed) -> Array:
    """Which queries see at least one key, [rows, T, 1]."""
    begin, end = seen.intervals
    return jnp.asarray(begin < end)[..., None]


def kernel_of(
    seen: Fixed, row: int, queries: tuple[int, ...], keys: int, softcap: float | None, interpret: bool
) -> Any:
    """The stock kernel for one row of the intervals, its heads and tokens [H, T, D] padded to whole blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as stock
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    begin, end = (np.pad(x[row], (0, queries[1] - x.shape[1]))[:, None] for x in seen.intervals)
    if (begin >= end).all():  # the kernel needs some work; rows without keys are cleared afterwards
        begin, end = np.zeros_like(begin), np.ones_like(end)

    class Mask(masks.Mask):
        """Intervals as a stock mask, of which blocks are computed on demand."""

        shape = (queries[1], keys)

        def __getitem__(self, at: tuple[slice, slice]) -> np.ndarray:
            index = np.arange(keys)[at[1]]
            return (begin[at[0]] <= index) & (index < end[at[0]])

    bq, bk = divided(queries[1], BLOCK), divided(keys, BLOCK)
    sizes = stock.BlockSizes(block_q=bq, block_kv=bk, block_q_dkv=bq, block_kv_dkv=bk, block_q_dq=bq, block_kv_dq=bk)
    return stock.make_splash_mha(
        masks.MultiHeadMask([Mask()] * queries[0]), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        save_residuals=True, attn_logits_soft_cap=softcap, interpret=interpret,
    )  # fmt: skip


attend, attend_backward = over_rectangles("the stock splash kernel", forward, backward)
KERNEL = JaxKernel(attend, attend_backward, refuses, options, halves=attend_backward)
