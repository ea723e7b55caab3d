"""torch's own flash attention for CPUs: the tiles of a step on the machine that has no GPU, in every float dtype."""

import torch
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.vendor import equal_dims
from ringattn.kernels.vendor.tiles import heads_first, over_tiles, prepare, row_delta


def refuses(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"sdpa_cpu runs on the CPU, not on {problem.device}"
    if not problem.tiles:
        return "these intervals are not known to be a few full or causal rectangles"
    return "sdpa_cpu has no softcap" if problem.softcap else equal_dims(problem, "sdpa_cpu")


def forward(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = map(heads_first, (q_BTHD, k_BSGD, v_BSGV))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return heads_first(out), heads_first(lse)


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
    tensors = map(heads_first, (dout_BTHV, q_BTHD, k_BSGD, v_BSGV, out_BTHV, lse_BTH))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    dq, dk, dv = map(heads_first, grads)
    return dq, dk, dv


__all__ = ["attend", "attend_backward", "prepare", "refuses", "row_delta", "totals"]
attend, attend_backward, totals = over_tiles("sdpa_cpu", forward, backward)
