"""FlashAttention-4, if it is installed (`pip install flash-attn-4`)."""

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.partial import NEVER
from ringattn.kernels.vendor import equal_dims, gpu_refusal
from ringattn.kernels.vendor.tiles import heads_first, over_tiles


def refuses(problem: Problem) -> str | None:
    name = "FlashAttention-4"
    return gpu_refusal(problem, name, (9, 0), 128) or equal_dims(problem, name)


def forward(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _flash_attn_fwd(q_BTHD, k_BSGD, v_BSGV, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out, heads_first(lse.masked_fill(lse == NEVER, torch.nan))  # it writes -inf for NaN; no row is empty


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


KERNEL = over_tiles("FlashAttention-4", forward, backward, refuses)
