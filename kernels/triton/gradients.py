"""Gradients in one pass: added up as they come home, and in the form that a vendor's backward takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton.blocks import launch
from ringattn.kernels.triton.launch import cdiv, power_of_2


@triton.jit
def add_kernel(own_ptr, more_ptr, out_ptr, size, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(own_ptr + at, mask=inside, other=0.0)
    for i in range(N):
        x += tl.load(more_ptr + tl.cast(i, tl.int64) * size + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def add_up(own: Tensor, more: Tensor, dtype: torch.dtype) -> Tensor:
    """own + more[0] + more[1] + ..., in that order, in `dtype`; all contiguous, in float32."""
    out = own if dtype == own.dtype else torch.empty(own.shape, dtype=dtype, device=own.device)
    size = own.numel()
    launch(add_kernel, (cdiv(size, 2048),), (own, more, out), (size, more.shape[0]), BLOCK=2048)
    return out


@triton.jit
def stand_in_kernel(
    dout_ptr, delta_ptr, new_ptr, out_ptr, dout_st, delta_st, new_st, T, H, tiny,
    V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows as (direction, length): lengths may be so small that their squares vanish in float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, h = row // H, row % H
    live = row < tl.cast(T, tl.int64) * H
    columns = tl.arange(0, WIDTH)
    inside = live[:, None] & (columns < V)[None, :]
    at = b * dout_st[0] + (t * dout_st[1] + h * dout_st[2])[:, None] + columns[None, :] * dout_st[3]
    x = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + b * delta_st[0] + t * delta_st[1] + h * delta_st[2], mask=live, other=0.0)
    longest = tl.max(tl.abs(x), 1)
    safe = tl.where(longest > 0, longest, 1.0)
    unit = x / safe[:, None]
    squares = tl.sum(unit * unit, 1)
    least = (tl.abs(delta) * tiny).to(dout_ptr.dtype.element_ty).to(tl.float32)
    small = longest * tl.sqrt(squares) < least
    unit = tl.where(small[:, None], (columns == 0)[None, :].to(tl.float32), unit)
    safe = tl.where(small, least, safe)
    squares = tl.where(small, 1.0, squares)
    factor = tl.where((squares > 0) & live, delta / safe / tl.where(squares > 0, squares, 1.0), 0.0)
    at = b * new_st[0] + (t * new_st[1] + h * new_st[2])[:, None] + columns[None, :]
    x = tl.where(small[:, None], unit * safe[:, None], x)
    tl.store(new_ptr + at, x.to(new_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + at, (unit * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def stand_in(dout_BTHV: Tensor, delta_BTH: Tensor, tiny: float) -> tuple[Tensor, Tensor]:
    """`ringattn.kernels.vendor.tiles.stand_in` in one pass."""
    B, T, H, V = dout_BTHV.shape
    new, out = (torch.empty(B, T, H, V, dtype=dout_BTHV.dtype, device=dout_BTHV.device) for _ in range(2))
    tensors = (dout_BTHV, delta_BTH, new, out)
    strides = [x.stride() for x in tensors[:3]]
    launch(
        stand_in_kernel, (cdiv(T * H, 32), B), tensors, (*strides, T, H, tiny),
        V=V, WIDTH=power_of_2(V), ROWS=32,
    )  # fmt: skip
    return new, out
