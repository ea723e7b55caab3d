"""delta = rowsum(dout * out) - dlse in one pass: all that a backward pass needs of out and of the lse's gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.triton.blocks import tile
from ringattn.kernels.triton import cdiv, launch, power_of_2


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, out_st, dout_st, dlse_st, delta_st, T,
    V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse, for ROWS queries of one head."""
    first = tl.program_id(0) * ROWS
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    out = tile(out_ptr + b * out_st[0] + h * out_st[2], first, T, out_st[1], out_st[3], ROWS, V, WIDTH, False)
    dout = tile(dout_ptr + b * dout_st[0] + h * dout_st[2], first, T, dout_st[1], dout_st[3], ROWS, V, WIDTH, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + b * dlse_st[0] + rows * dlse_st[1] + h * dlse_st[2], mask=rows < T, other=0.0)
    tl.store(delta_ptr + b * delta_st[0] + rows * delta_st[1] + h * delta_st[2], delta, mask=rows < T)


def row_delta(out_BTHV: Tensor, dout_BTHV: Tensor, dlse_BTH: Tensor | None = None) -> Tensor:
    """delta = rowsum(dout * out) - dlse, float32 [B, T, H]: all that the backward needs to know of the output."""
    B, T, H, V = out_BTHV.shape
    delta = torch.empty(B, H, T, dtype=torch.float32, device=out_BTHV.device).transpose(1, 2)
    tensors = (out_BTHV, dout_BTHV, delta if dlse_BTH is None else dlse_BTH, delta)
    launch(
        delta_kernel, (cdiv(T, 32), H, B), tensors, (*[x.stride() for x in tensors], T),
        V=V, WIDTH=power_of_2(V), ROWS=32, HAS_DLSE=dlse_BTH is not None,
    )  # fmt: skip
    return delta
