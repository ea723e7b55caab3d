"""What a backward pass needs of each row: delta = rowsum(dout * out) - dlse, and beside it the lse in base 2."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.triton.blocks import tile
from ringattn.kernels.rows import Rows, rounded
from ringattn.kernels.triton import LOG2E, cdiv, launch, power_of_2


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


@triton.jit
def stats_kernel(
    lse_ptr, delta_ptr, out_ptr, dout_ptr, stats_ptr, lse_st, delta_st, out_st, dout_st, T, H, room,
    V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BY_OUT: tl.constexpr,
):  # fmt: skip
    """(log2(e) * lse, delta) next to each other; (+inf, 0) for a row that sees no key, so that its weights are 0.

    With BY_OUT delta = rowsum(dout * out), else it is given.
    """
    first = tl.program_id(0) * ROWS
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    lse = tl.load(lse_ptr + b * lse_st[0] + rows * lse_st[1] + h * lse_st[2], mask=rows < T, other=0.0)
    if BY_OUT:
        out = tile(out_ptr + b * out_st[0] + h * out_st[2], first, T, out_st[1], out_st[3], ROWS, V, WIDTH, False)
        dout_ptr += b * dout_st[0] + h * dout_st[2]
        dout = tile(dout_ptr, first, T, dout_st[1], dout_st[3], ROWS, V, WIDTH, False)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    else:
        delta = tl.load(delta_ptr + b * delta_st[0] + rows * delta_st[1] + h * delta_st[2], mask=rows < T, other=0.0)
    saw = lse > float("-inf")
    at = stats_ptr + (b * H + h) * 2 * room + rows
    tl.store(at, tl.where(saw, lse * LOG2E, float("inf")), mask=rows < T)
    tl.store(at + room, tl.where(saw, delta, 0.0), mask=rows < T)


def prepare(dout: Tensor, lse: Tensor, delta: Tensor | None, out: Tensor | None) -> Rows:
    """The rows of a backward pass, with delta, or with the out from which `stats_of` computes it.

    `stats_kernel` also converts the lse to base 2, which rounds it once more.
    """
    rows = rounded(dout, lse, delta, lambda lse: (lse * LOG2E.value).double() / LOG2E.value)
    return Rows(*rows, out if delta is None else None)


def stats_of(rows: Rows) -> Tensor:
    """The rows' lse and delta as the kernels take them."""
    B, T, H, V = rows.dout.shape
    values: Any = rows.out if rows.delta is None else rows.delta
    room = cdiv(T, 4) * 4  # rows of a multiple of 16 bytes, which descriptors require
    stats = torch.empty(B, H, 2, room, dtype=torch.float32, device=rows.dout.device)
    tensors, lines = (rows.lse, values, values, rows.dout, stats), 32 if rows.delta is None else 256
    launch(
        stats_kernel, (cdiv(T, lines), H, B), tensors, (*[x.stride() for x in tensors[:4]], T, H, room),
        V=V, WIDTH=power_of_2(V), ROWS=lines, BY_OUT=rows.delta is None,
    )  # fmt: skip
    return stats
