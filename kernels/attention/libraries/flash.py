"""FlashAttention-2, which is built into torch."""

import torch
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.attention.libraries import equal_dims, gpu_refusal
from ringattn.kernels.attention.libraries.rectangles import heads_first, over_rectangles


def refuses(problem: Problem) -> str | None:
    name = "FlashAttention-2"
    return gpu_refusal(problem, name, (8, 0), 256) or equal_dims(problem, name)


def forward(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    lengths = (None, None, q_BTHD.shape[1], k_BSGD.shape[1])
    out, lse = torch.ops.aten._flash_attention_forward(
        q_BTHD, k_BSGD, v_BSGV, *lengths, 0.0, causal, False, scale=scale
    )[:2]
    return out, heads_first(lse)


def backward(
    dout_BTHV: Tensor, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, out_BTHV: Tensor, lse_BTH: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lengths = (None, None, q_BTHD.shape[1], k_BSGD.shape[1])
    seed = torch.zeros(2, dtype=torch.uint64, device=q_BTHD.device)  # of dropout, unused
    lse = heads_first(lse_BTH).contiguous()
    return torch.ops.aten._flash_attention_backward(
        dout_BTHV, q_BTHD, k_BSGD, v_BSGV, out_BTHV, lse, *lengths, 0.0, causal, seed, seed, scale=scale
    )


KERNEL = over_rectangles("FlashAttention-2", forward, backward, refuses)
