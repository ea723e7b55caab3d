"""Flash attention backward over intervals, from the lse over all keys: no atomics, the same bits every run.

With p = 2^(score - lse), scores and lse in base 2:

    dv = p^T dout      ds = p * (dout v^T - delta)      dq = scale * ds k      dk = scale * ds^T q

Two kernels recompute the scores. `dq_kernel` owns a block of queries and loops over the keys they see, as the forward
does. `dkdv_kernel` owns a block of keys and loops over the queries that see them. Both ends of the intervals never
decrease, so those queries are an interval too, which `spans_kernel` finds by binary search.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.triton.blocks import (
    Shape,
    add_rows,
    are_aligned,
    head_of,
    logits,
    matrix,
    phases,
    rows_of,
    seen,
    span,
    tanh,
    tile,
)
from ringattn.kernels.attention.triton.stats import stats_of
from ringattn.kernels.attention.triton.table import Table, Tile
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.rows import EVERY, NO_SUMS, Rows
from ringattn.kernels.triton import Kept, Launch, cdiv, launch, ready


@triton.jit
def count_below(ptr, x, T, steps):
    """How many of the sorted ptr[0:T] are below each x, by binary search in `steps` steps."""
    lo = x * 0
    hi = lo + T
    for _ in range(steps):
        mid = (lo + hi) // 2
        below = tl.load(ptr + mid, mask=lo < hi, other=0) < x
        lo, hi = tl.where((lo < hi) & below, mid + 1, lo), tl.where(below, hi, mid)
    return lo


@triton.jit
def spans_kernel(
    begin_ptr, end_ptr, spans_ptr, rows_st, T, S, blocks, steps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows of `spans` for LANES blocks of KEYS keys, one block a lane; no loop besides the binary searches.

    [lo, hi) are the queries that see any key of the block: their end lies past its first key, and their begin before
    its stop. [full, part) are those that see all of it: their end is not before its stop, and their begin not past its
    first key. No query sees a key from `last` on: those that begin there are padding, and do not count for hi. lo is
    rounded down to a multiple of 4, since TMA reads the float32 stats from multiples of 16 bytes. The queries
    below the true lo see none of the keys; they are in a masked tile.
    """
    block = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row = tl.program_id(1).to(tl.int64)
    begin_ptr += row * rows_st
    end_ptr += row * rows_st
    first = block * KEYS
    stop = tl.minimum(first + KEYS, S)
    last = tl.load(end_ptr + T - 1, mask=T > 0, other=0)
    lo = count_below(end_ptr, first + 1, T, steps) // 4 * 4
    hi = tl.maximum(lo, count_below(begin_ptr, tl.minimum(stop, last), T, steps))
    full = count_below(end_ptr, stop, T, steps)
    partly = count_below(begin_ptr, first + 1, T, steps)
    head, tail, count = phases(lo, hi, full, partly, QUERIES)
    middle = tl.maximum(tail - head, 1)
    apart = (first - lo) // QUERIES % middle
    turn = tl.minimum(head + tl.where(apart < 0, apart + middle, apart), tail)
    at = spans_ptr + (row * blocks + block) * WIDTH
    tl.store(at, lo, mask=block < blocks)
    tl.store(at + 1, hi, mask=block < blocks)
    tl.store(at + 2, head * 0, mask=block < blocks)
    tl.store(at + 3, head, mask=block < blocks)
    tl.store(at + 4, turn, mask=block < blocks)
    tl.store(at + 5, tail, mask=block < blocks)
    tl.store(at + 6, count, mask=block < blocks)


SPAN = 8  # numbers of a block, one of them unused


def spans(where: Intervals, length: int, config: Tile) -> Tensor:
    """For each block of keys: lo, hi, 0, head, turn, tail, count; the queries [lo, hi) see it, and are `count` tiles.

    Tiles [0, head) and [tail, count) are masked. The middle starts at `turn`, and ends with the tiles before `turn`, as
    in `blocks.span`, without which it takes a tenth longer. Under a causal mask turn is head: blocks begin one tile
    apart anyway.
    """
    cache, sizes = where.made, (length, config.queries, config.keys)
    if cache is not None and sizes in cache:
        return cache[sizes]
    begin, end, rows_st = rows_of(where)
    (rows, T), blocks = begin.shape, cdiv(length, config.keys)
    table = torch.empty(rows, blocks, SPAN, dtype=torch.int32, device=begin.device)
    numbers = (rows_st, T, length, blocks, T.bit_length())
    constants = {"QUERIES": config.queries, "KEYS": config.keys, "LANES": 32, "WIDTH": SPAN}
    launch(spans_kernel, (cdiv(blocks, 32), rows), (begin, end, table), numbers, **constants)
    if cache is not None and not (table.is_cuda and torch.cuda.is_current_stream_capturing()):
        cache[sizes] = table  # not during a capture: the memory of a table made there belongs to the graph
    return table


@triton.jit
def span_of(spans_ptr, at, PHASE: tl.constexpr):
    """The tiles of a phase: 0 the masked head, 1 the middle from `turn` on, 2 the middle before it, 3 the masked tail.

    They are loaded phase by phase, because registers are what limits the kernel.
    """
    if PHASE == 1:
        at += 2
    elif PHASE == 2:
        at += 1
    else:
        at += PHASE
    return tl.load(spans_ptr + at), tl.load(spans_ptr + at + 1)


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, end_ptr, dout_ptr, stats_ptr, spans_ptr, dk_ptr, dv_ptr,
    q_st, k_st, v_st, rows_st, dout_st, spans_st, dk_st, dv_st, T, S, G, blocks, room, scale, unit, cap,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, ADD_DK: tl.constexpr, ADD_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of KEYS keys of one key head, summed over the queries that see it and the R query heads.

    Programs: one for each block of keys of each key head. k and v stay in registers or shared memory; dk and dv are
    accumulated in float32 and stored once, or added to what is there with ADD_DK and ADD_DV.

    Loop: over the queries [lo, hi) that see the block, QUERIES at a time, in the four phases of `span_of`; phases 0 and
    3 are masked. Within a tile of queries the R heads that share the keys follow each other (i // R is the tile, i % R
    the head): all of them have the same intervals, and adding them up here needs no atomics.

    Why at the odd places:
    - Scores are transposed, [keys, queries], so that p and ds are the left operands of the products for dv and dk and
      can stay in registers.
    - The queries of an empty row have an lse of +inf in `stats`, and so have loads past hi: their p is 0. A descriptor
      reads 0 past hi instead, but 0 for q and dout too; nothing is added then.
    - Keys from `last` on are seen by no query. They are read as 0, since padding may hold NaN, and 0 * NaN is NaN.
    - Intervals, dout and delta are loaded only where they are needed, because registers limit the kernel. For the same
      reason a head's offset takes 64 bits only if FAR says that 32 may overflow.
    """
    block, b, g = head_of(G, blocks, False)
    first = block * KEYS
    keys = first + tl.arange(0, KEYS)
    begin_ptr += b * rows_st
    end_ptr += b * rows_st
    at = tl.cast(b * spans_st, tl.int32) + block * 8
    lo = tl.load(spans_ptr + at)
    hi = tl.load(spans_ptr + at + 1)
    if ADD_DK and ADD_DV:  # noqa: SIM102
        if lo >= hi:
            return
    last = tl.minimum(tl.load(end_ptr + T - 1, mask=T > 0, other=0), S)
    k = tile(k_ptr + b * k_st[0] + g * k_st[2], first, last, k_st[1], k_st[3], KEYS, D, WIDTH_D, False)
    v = tile(v_ptr + b * v_st[0] + g * v_st[2], first, last, v_st[1], v_st[3], KEYS, V, WIDTH_V, False)

    q_src = q_ptr + b * q_st[0] + g * R * q_st[2]
    dout_src = dout_ptr + b * dout_st[0] + g * R * dout_st[2]
    stats = stats_ptr + (b * G + g) * R * 2 * room
    if TMA:
        q_src = tl.make_tensor_descriptor(q_src, [hi, R, D], [q_st[1], q_st[2], 1], [QUERIES, 1, WIDTH_D])
        dout_src = tl.make_tensor_descriptor(dout_src, [hi, R, V], [dout_st[1], dout_st[2], 1], [QUERIES, 1, WIDTH_V])
        stats = tl.make_tensor_descriptor(stats, [2 * R, hi], [room, 1], [1, QUERIES])
    dk = tl.zeros([KEYS, WIDTH_D], tl.float32)
    dv = tl.zeros([KEYS, WIDTH_V], tl.float32)
    for PHASE in tl.static_range(4):
        start, stop = span_of(spans_ptr, at + 2, PHASE)
        for i in tl.range(start * R, stop * R):
            t = lo + i // R * QUERIES
            r = i % R
            if TMA:
                q = q_src.load([t, r, 0]).reshape(QUERIES, WIDTH_D)
                lse = stats.load([2 * r, t]).reshape(QUERIES)
            else:
                apart = tl.cast(r, tl.int64) if FAR else r
                q = tile(q_src + apart * q_st[2], t, hi, q_st[1], q_st[3], QUERIES, D, WIDTH_D, False)
                rows = t + tl.arange(0, QUERIES)
                lse = tl.load(stats + 2 * r * room + rows, mask=rows < hi, other=float("inf"))
            s = tl.dot(k, q.T, input_precision=PRECISION) * unit
            if SOFTCAP:
                bend = tanh(s)
                s = bend * cap
            p = tl.exp2(s - lse[None, :])
            if PHASE % 3 == 0:
                here = tl.minimum(t + tl.arange(0, QUERIES), T - 1)
                begin = tl.load(begin_ptr + here)
                end = tl.load(end_ptr + here)
                p = tl.where((begin[None, :] <= keys[:, None]) & (keys[:, None] < end[None, :]), p, 0.0)
            if TMA:
                dout = dout_src.load([t, r, 0]).reshape(QUERIES, WIDTH_V)
            else:
                dout = tile(dout_src + apart * dout_st[2], t, hi, dout_st[1], dout_st[3], QUERIES, V, WIDTH_V, False)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            if TMA:
                delta = stats.load([2 * r + 1, t]).reshape(QUERIES)
            else:
                delta = tl.load(stats + (2 * r + 1) * room + rows, mask=rows < hi, other=0.0)
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds = ds * (1 - bend * bend)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    dk_ptr += b * dk_st[0] + g * dk_st[2]
    dv_ptr += b * dv_st[0] + g * dv_st[2]
    add_rows(dk_ptr, dk * scale, first, S, dk_st[1], dk_st[3], KEYS, D, WIDTH_D, ADD_DK)
    add_rows(dv_ptr, dv, first, S, dv_st[1], dv_st[3], KEYS, V, WIDTH_V, ADD_DV)


@triton.jit(do_not_specialize=["blocks"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, end_ptr, dout_ptr, stats_ptr, dq_ptr,
    q_st, k_st, v_st, rows_st, dout_st, dq_st, T, H, blocks, room, scale, unit, cap,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq of a block of QUERIES queries of one head, summed over the keys they see; added to what is there with ADD.

    Programs and loop are those of `forward_kernel`: one program for each block of queries of each head, and the keys
    [lo, hi) in four phases, of which 0 and 3 are masked. No running maximum is needed, because the lse is final, so
    tiles are independent of each other. A row that sees no key, and a row past T, has an lse of +inf: its p is 0.
    """
    block, b, h = head_of(H, blocks, True)
    first = block * QUERIES
    rows = first + tl.arange(0, QUERIES)
    begin, end, lo, hi, head, tail, count = seen(
        begin_ptr + b * rows_st, end_ptr + b * rows_st, first, T, QUERIES, KEYS
    )
    if ADD:  # noqa: SIM102
        if lo >= hi:
            return
    q = tile(q_ptr + b * q_st[0] + h * q_st[2], first, T, q_st[1], q_st[3], QUERIES, D, WIDTH_D, False)
    dout = dout_ptr + b * dout_st[0] + h * dout_st[2]
    dout = tile(dout, first, T, dout_st[1], dout_st[3], QUERIES, V, WIDTH_V, False)
    stats = stats_ptr + (b * H + h) * 2 * room + rows
    lse = tl.load(stats, mask=rows < T, other=float("inf"))
    delta = tl.load(stats + room, mask=rows < T, other=0.0)

    k_src = matrix(k_ptr + b * k_st[0] + h // R * k_st[2], hi, k_st[1], KEYS, D, WIDTH_D, TMA)
    v_src = matrix(v_ptr + b * v_st[0] + h // R * v_st[2], hi, v_st[1], KEYS, V, WIDTH_V, TMA)
    dq = tl.zeros([QUERIES, WIDTH_D], tl.float32)
    for PHASE in tl.static_range(4):
        start, stop = span(PHASE, block, head, tail, count)
        for i in tl.range(start, stop):
            n = lo + i * KEYS
            k = tile(k_src, n, hi, k_st[1], k_st[3], KEYS, D, WIDTH_D, TMA)
            v = tile(v_src, n, hi, v_st[1], v_st[3], KEYS, V, WIDTH_V, TMA)
            s = tl.dot(q, k.T, input_precision=PRECISION) * unit
            if SOFTCAP:
                bend = tanh(s)
                s = bend * cap
            p = tl.exp2(s - lse[:, None])
            if PHASE % 3 == 0:
                keys = n + tl.arange(0, KEYS)
                p = tl.where((begin[:, None] <= keys[None, :]) & (keys[None, :] < end[:, None]), p, 0.0)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds = ds * (1 - bend * bend)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    dq = tl.where((begin < end)[:, None], dq * scale, 0.0)  # padding may hold NaN, and then its dq is NaN
    dq_ptr += b * dq_st[0] + h * dq_st[2]
    add_rows(dq_ptr, dq, first, T, dq_st[1], dq_st[3], QUERIES, D, WIDTH_D, ADD)


def flash_backward(
    tensors: tuple[Tensor, Tensor, Tensor], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
    into: tuple[Any, Any, Any] = NO_SUMS, *, scale: float, softcap: float | None = None, final: bool = False,
    table: Table | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients that are wanted, in float32 or, `final`, in the inputs' dtypes; those of k and v come together."""
    q, k, v = tensors
    begin, end, rows_st = rows_of(where)
    inputs = (q, k, v, begin, end, rows.dout)
    stats: Tensor = stats_of(rows) if rows.made is None else rows.made
    rows.made = stats
    key = (
        q.shape, v.shape, q.device, q.dtype, k.dtype, v.dtype, rows.dout.dtype,
        q.stride(), k.stride(), v.stride(), rows.dout.stride(), rows_st, are_aligned(q, k, v, rows.dout),
        scale, softcap, final, *[None if x is None else (x.dtype, x.stride()) for x in into],
    )  # fmt: skip
    dq, dk, dv = [
        None if i not in want
        else torch.empty_like(x, dtype=x.dtype if final else torch.float32, memory_format=torch.contiguous_format)
        if into[i] is None else into[i]
        for i, x in enumerate(tensors)
    ]  # fmt: skip
    launches = LAUNCHES.get(key) if table is None else None
    if launches is None:
        launches = launches_of(inputs, rows_st, scale, softcap, final, into, table)
        if table is None:
            LAUNCHES.keep(key, launches)
    if dk is not None and dv is not None:
        launches.dkdv(*inputs, stats, spans(where, k.shape[1], launches.config), dk, dv)
    if dq is not None:
        launches.dq(*inputs, stats, dq)
    return dq, dk, dv


class Launches(NamedTuple):
    """The kernels of a backward pass, and what `dkdv` is cut into."""

    dkdv: Launch
    dq: Launch
    config: Tile


LAUNCHES = Kept()  # of `flash_backward`, by all that they depend on but addresses


def launches_of(
    inputs: tuple[Tensor, ...], rows_st: int, scale: float, softcap: float | None, final: bool,
    into: tuple[Any, Any, Any], table: Table | None,
) -> Launches:  # fmt: skip
    """The launches of `flash_backward` for q, k, v, begin, end and dout of these shapes, dtypes and strides."""
    q, k, v, _, _, dout = inputs
    shape, device, dtypes = Shape.of(q, v), q.device, tuple([*[x.dtype for x in inputs], torch.float32])
    described = [x.stride() for x in (q, k, v, dout)]
    tiles = shape.tiles(device, q.itemsize, tuple(described), are_aligned(q, k, v, dout), table)
    strides, constants = (*described[:3], rows_st, described[3]), shape.constants(softcap, q.dtype, device)
    B, T, H, _ = dout.shape
    numbers = cdiv(T, 4) * 4, scale, *logits(scale, softcap)
    adds = [x is not None for x in into]
    dq, dk, dv = [
        torch.empty_like(x, dtype=x.dtype if final else torch.float32, device="meta",
                         memory_format=torch.contiguous_format) if y is None else y
        for x, y in zip((q, k, v), into, strict=True)
    ]  # fmt: skip
    blocks = cdiv(shape.S, tiles.dkdv.keys)
    spans_st = blocks * SPAN if rows_st else 0
    dkdv = ready(
        dkdv_kernel, (blocks * B * shape.G,), device, (*dtypes, torch.int32, dk.dtype, dv.dtype),
        (*strides, spans_st, dk.stride(), dv.stride(), T, shape.S, shape.G, blocks, *numbers), tiles.dkdv,
        **constants, QUERIES=tiles.dkdv.queries, KEYS=tiles.dkdv.keys, TMA=tiles.dkdv.tma,
        ADD_DK=adds[1], ADD_DV=adds[2], FAR=(H // shape.G - 1) * max(q.stride(2), dout.stride(2)) >= 2**31,
    )  # fmt: skip
    blocks = cdiv(T, tiles.dq.queries)
    of_dq = ready(
        dq_kernel, (blocks * B * H,), device, (*dtypes, dq.dtype), (*strides, dq.stride(), T, H, blocks, *numbers),
        tiles.dq, **constants, QUERIES=tiles.dq.queries, KEYS=tiles.dq.keys, ADD=adds[0], TMA=tiles.dq.tma,
    )  # fmt: skip
    return Launches(dkdv, of_dq, tiles.dkdv)
