"""What the flash kernels share: loading a tile, the keys a block of queries sees, and the soft cap."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.triton.table import Table, Tiles, entry
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.triton import LOG2E, architecture, cells, power_of_2


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2|x|); near 0, where that cancels, the series."""
    a = tl.abs(x)
    e = tl.exp2(a * (-2 * LOG2E))
    y = x * x
    series = a * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    t = tl.where(a < 0.25, series, (1 - e) / (1 + e))
    return tl.where(x < 0, -t, t)


@triton.jit
def matrix(ptr, stop, stride, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """The source for `tile`: with TMA a tensor descriptor that ends at row `stop`, else the pointer."""
    if TMA:
        return tl.make_tensor_descriptor(ptr, [stop, COLS], [stride, 1], [ROWS, WIDTH])
    else:
        return ptr


@triton.jit
def tile(
    source, first, stop, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + ROWS) of a matrix as [ROWS, WIDTH]; zero from row `stop` and from column COLS on."""
    if TMA:
        return source.load([first, 0])
    else:
        at, inside = cells(source, first, stop, 0, stride_row, stride_col, ROWS, COLS, WIDTH)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def add_rows(
    ptr, x, first, stop, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Write x to rows [first, stop) of a matrix; with ADD add it to them."""
    at, inside = cells(ptr, first, stop, 0, stride_row, stride_col, ROWS, COLS, WIDTH)
    if ADD:
        x += tl.load(at, mask=inside, other=0.0)
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def seen(begin_ptr, end_ptr, first, T, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The intervals of a block of queries, and the keys [lo, hi) that at least one of them sees, as tiles from `lo` on.

    Every query sees all keys of the tiles [head, tail); tiles [0, head) and [tail, count) need a mask. Rows past T
    repeat the last row. If a row is empty, head = tail: all tiles need a mask.
    """
    rows = tl.minimum(first + tl.arange(0, ROWS), T - 1)
    begin = tl.load(begin_ptr + rows)
    end = tl.load(end_ptr + rows)
    real = begin < end
    hi = tl.max(tl.where(real, end, 0), 0)
    lo = tl.minimum(tl.min(tl.where(real, begin, 2147483647), 0), hi)
    clear_lo = tl.max(begin, 0)
    clear_hi = tl.min(tl.where(real, end, 0), 0)
    head, tail, count = phases(lo, hi, clear_lo, clear_hi, KEYS)
    return begin, end, lo, hi, head, tail, count


@triton.jit
def phases(lo, hi, clear_lo, clear_hi, SIZE: tl.constexpr):
    """[lo, hi) in `count` tiles; those of [head, tail) lie within [clear_lo, clear_hi) and need no mask."""
    count = (hi - lo + SIZE - 1) // SIZE
    head = tl.minimum((tl.maximum(clear_lo - lo, 0) + SIZE - 1) // SIZE, count)
    tail = tl.minimum(tl.maximum((clear_hi - lo) // SIZE, head), count)
    return head, tail, count


@triton.jit
def span(PHASE: tl.constexpr, block, head, tail, count):
    """The tiles [start, stop) of a phase: 0 the masked head, 1 and 2 the middle, 3 the masked tail.

    Blocks that run at the same time would otherwise load the same tile at the same time, which is slower. So each block
    starts its middle one tile after the block before it (phase 1), and ends it with the tiles it skipped (phase 2).
    """
    turn = head + block % tl.maximum(tail - head, 1)
    if PHASE == 0:
        return head * 0, head
    elif PHASE == 1:
        return turn, tail
    elif PHASE == 2:
        return head, turn
    else:
        return tail, count


@triton.jit
def head_of(heads, blocks, LAST_FIRST: tl.constexpr):
    """(block, batch row, head) of this program.

    All blocks of a head come before those of the next one, so that heads of one group find its keys in the cache. Under
    a causal mask the last queries and the first keys have the most work, so those blocks come first.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, (pid // blocks // heads).to(tl.int64), (pid // blocks % heads).to(tl.int64)


def rows_of(where: Intervals) -> tuple[Tensor, Tensor, int]:
    """(begin, end, stride between batch rows); the stride is 0 if all batch rows share one row of intervals."""
    begin, end = whole_int32(where.begin), whole_int32(where.end)
    return begin, end, begin.stride(0) if begin.shape[0] > 1 else 0


def whole_int32(x: Tensor) -> Tensor:
    """`x` as a contiguous int32 tensor; asking first costs the host less than converting."""
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def logits(scale: float, softcap: float | None) -> tuple[float, float]:
    """(unit, cap): a score in base 2 is unit * q k, or cap * tanh(unit * q k)."""
    return (scale * LOG2E.value, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E.value)


class Shape(NamedTuple):
    """B batch rows, T queries, S keys, H query heads, G key heads, head dim D, value dim V."""

    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    V: int

    @classmethod
    def of(cls, q_BTHD: Tensor, v_BSGV: Tensor) -> "Shape":
        B, T, H, D = q_BTHD.shape
        return cls(B, T, v_BSGV.shape[1], H, v_BSGV.shape[2], D, v_BSGV.shape[3])

    @property
    def widths(self) -> tuple[int, int]:
        """The powers of two that hold D and V; a product of tiles needs at least 16."""
        return max(16, power_of_2(self.D)), max(16, power_of_2(self.V))

    def tiles(
        self, device: torch.device, itemsize: int, strides: tuple[Any, ...], aligned: bool, table: Table | None
    ) -> Tiles:
        """The entry of the table for inputs with these strides, or one without TMA if one cannot have a descriptor."""
        # a descriptor is of contiguous rows that start at multiples of 16 bytes
        described = aligned and all(x[-1] == 1 and all(s * itemsize % 16 == 0 for s in x[:-1]) for x in strides)
        return entry(architecture(device), itemsize * 8, max(32, *self.widths), described, table)

    def constants(self, softcap: float | None, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The compile-time arguments that every kernel of this problem takes."""
        wide_d, wide_v = self.widths
        precise = "tf32x3" if dtype == torch.float32 and device.type == "cuda" and not torch.version.hip else "ieee"
        sizes = {"R": self.H // self.G, "D": self.D, "V": self.V, "WIDTH_D": wide_d, "WIDTH_V": wide_v}
        return {**sizes, "SOFTCAP": softcap is not None, "PRECISION": precise}


def are_aligned(*tensors: Tensor) -> bool:
    return not any([x.data_ptr() % 16 for x in tensors])
