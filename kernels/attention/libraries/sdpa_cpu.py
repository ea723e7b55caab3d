"""torch's own flash attention for CPUs, by rectangles, in every float dtype.

16-bit inputs are computed in float32, which costs little here, since the kernel would round weights to 16 bits. `tiled`
takes over where this kernel is wrong. It takes NaN for an empty row, and multiplies values that a query does not see by
0. And it rounds the lse to float32, which is too coarse for merges and gradients of large scores.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.arrays import fine
from ringattn.kernels.attention import tiled
from ringattn.kernels.attention.libraries import equal_dims
from ringattn.kernels.attention.libraries.rectangles import is_one, over_rectangles
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import EVERY, NO_SUMS, Rows, row_delta

WIDE = torch.float32, torch.float64
LARGE = 64.0  # from this score on float32 rounds an lse, and the weights of a merge, by more than 2e-6


def refuses(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"sdpa_cpu runs on the CPU, not on {problem.device}"
    if not problem.rectangles:
        return "it serves only full or causal rectangles, so no windows or documents"
    return "sdpa_cpu does not support softcap" if problem.softcap else equal_dims(problem, "sdpa_cpu")


def forward(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, *, scale: float, softcap: None = None
) -> tuple[Tensor, Tensor]:
    assert softcap is None  # which `refuses` refuses
    q, k, v = [x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGV)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    dout_BTHV: Tensor, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, out_BTHV: Tensor, lse_BTH: Tensor, causal: bool,
    *, scale: float, softcap: None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = [x.transpose(1, 2) for x in (dout_BTHV, q_BTHD, k_BSGD, v_BSGV, out_BTHV, lse_BTH)]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    dq, dk, dv = [x.transpose(1, 2) for x in grads]
    return dq, dk, dv


BY_RECTANGLES = over_rectangles("sdpa_cpu", forward, backward, refuses)


def attend(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, *, carry: Partial | None = None,
    out_dtype: torch.dtype | None = None, **score: Any,
) -> Partial:  # fmt: skip
    low = q_BTHD.dtype not in WIDE
    q, k, v = widened(q_BTHD, k_BSGD, v_BSGV)
    rounded = low and is_one(where.rectangles or (), q) and carry is None and out_dtype is not None
    right = q.dtype == torch.float64 or rounded or largest_score(q, k, score["scale"]) < LARGE
    run = BY_RECTANGLES.attend if where.rectangles is None or (right and finite(q, k, v)) else tiled.attend
    part = run(q, k, v, where, carry=carry, out_dtype=out_dtype, **score)
    return Partial(part.out, part.lse.to(fine(q_BTHD))) if low else part


def gradients(
    tensors: tuple[Tensor, Tensor, Tensor], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
    into: tuple[Any, Any, Any] = NO_SUMS, **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    q, k, v, dout = widened(*tensors, rows.dout)
    delta, out = rows.delta, None if rows.out is None else widened(rows.out)[0]
    if out is not None and not finite(q, k, v, dout):
        delta, out = row_delta(out, dout), None
    return BY_RECTANGLES.backward((q, k, v), where, Rows(dout, rows.lse, delta, out), want, into, **options)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float32, or in float64."""
    return tuple([x if x.dtype in WIDE else x.float() for x in tensors])


def finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, by the sum of each tensor; also False if a sum overflows."""
    return all([bool(x.sum().isfinite()) for x in tensors])


def largest_score(q_BTHD: Tensor, k_BSGD: Tensor, scale: float) -> float:
    """An upper bound of all scores: the norm of the longest query times that of the longest key."""
    if not q_BTHD.numel() or not k_BSGD.numel():
        return 0.0
    longest = [float(torch.linalg.vector_norm(x, dim=-1).max()) for x in (q_BTHD, k_BSGD)]
    return abs(scale) * longest[0] * longest[1]


KERNEL = replace(BY_RECTANGLES, attend=attend, backward=gradients)
