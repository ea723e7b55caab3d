"""Gradients in one pass: added up as they come home, and in the form that a vendor's backward takes."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.total import MOST, Part
from ringattn.kernels.triton.blocks import launch
from ringattn.kernels.triton.launch import cdiv, power_of_2


@triton.jit
def add_kernel(
    out_ptr, x0, x1, x2, x3, x4, x5, places, T, H,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each row (t, h) of out is the sum of the N parts that have it, which lie row after row as out does."""
    parts = (x0, x1, x2, x3, x4, x5)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, h, live = row // H, row % H, row < T * H
    column = tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(N):
        first, end, top, bottom = places[4 * i], places[4 * i + 1], places[4 * i + 2], places[4 * i + 3]
        here = live & (t >= first) & (t < end) & (h >= top) & (h < bottom)
        at = ((b * (end - first) + t - first) * (bottom - top) + h - top) * D
        inside = here[:, None] & (column < D)[None, :]
        total += tl.load(parts[i] + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (b * T * H + row) * D
    inside = live[:, None] & (column < D)[None, :]
    tl.store(out_ptr + at[:, None] + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(out: Tensor, parts: Sequence[Part]) -> Tensor:
    """The sum of up to six parts, added in float32 in their order, into `out`, which may be the first of them."""
    B, T, H, D = out.shape
    found = [x.contiguous() for x, _, _ in parts]
    places = tuple([n for _, rows, heads in parts for n in (*rows, *heads)])
    width = power_of_2(D)
    rows = max(1, 4096 // width)
    tensors = (out, *found, *[out] * (MOST - len(found)))
    launch(
        add_kernel, (cdiv(T * H, rows), B), tensors, (places, T, H), N=len(found), D=D, WIDTH=width, ROWS=rows
    )  # fmt: skip
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
