"""FlashAttention-4 (`pip install flash-attn-4`), where it is installed."""

from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from ringattn.kernels.partial import NEVER
from ringattn.kernels.vendor.tiles import equal_dims, gpu_refusal, heads_first, over_tiles, prepare, rounds, row_delta


def refuses(problem: Any) -> str | None:
    if problem.arch is not None and problem.arch < (9, 0):
        return f"FlashAttention-4 needs compute capability 9.0, this is {problem.arch[0]}.{problem.arch[1]}"
    return equal_dims(problem, "FlashAttention-4") or gpu_refusal(problem, "FlashAttention-4", 128)


def forward(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _flash_attn_fwd(q_BTHD, k_BSGD, v_BSGV, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out, heads_first(lse.masked_fill(lse == NEVER, torch.nan))  # it writes -inf for NaN; no row here is empty


def backward(
    dout_BTHV: Tensor,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    out_BTHV: Tensor,
    lse_BTH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = heads_first(lse_BTH).contiguous()
    tensors = (q_BTHD, k_BSGD, v_BSGV, out_BTHV, dout_BTHV)
    dq, dk, dv = _flash_attn_bwd(*tensors, lse, softmax_scale=scale, causal=causal)[:3]
    return dq, dk, dv


__all__ = ["attend", "attend_backward", "prepare", "refuses", "rounds", "row_delta"]
attend, attend_backward = over_tiles("FlashAttention-4", forward, backward)
