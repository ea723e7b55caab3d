"""Lists of the tiles that intervals touch, for kernels that visit tiles one by one (FlashAttention-4).

A tile is full if every query in it sees every key in it: no mask is needed there. All other tiles that hold a visible
pair are masked. A forward pass needs the tiles of each block of queries, a backward pass those of each block of keys.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention.triton.backward import count_below
from ringattn.kernels.attention.triton.blocks import rows_of
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.triton import cdiv, launch, power_of_2


class Lists(NamedTuple):
    """Counts [rows, 1, blocks] and the indices of the tiles, [rows, 1, blocks, most]."""

    masked_count: Tensor
    masked: Tensor
    full_count: Tensor
    full: Tensor


@triton.jit
def put_range(ptr, start, stop, CHUNK: tl.constexpr):
    """Write start, start + 1, ..., stop - 1."""
    for i in tl.range(0, stop - start, CHUNK):
        at = i + tl.arange(0, CHUNK)
        tl.store(ptr + at, start + at, mask=at < stop - start)


@triton.jit
def put_touched(
    begin_ptr, end_ptr, ptr, count, start, stop, fixed, T, S,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Append to `ptr`, after `count` entries, the tiles of [start, stop) with a visible pair; returns their number.

    BY_KEYS: the tiles are blocks of queries, and `fixed` is the block of keys; else the other way round.
    """
    i = tl.arange(0, WIDE)
    for n in tl.range(start, stop):
        block = n if BY_KEYS else fixed
        first = (fixed if BY_KEYS else n) * KEYS
        t = block * QUERIES + i
        inside = (i < QUERIES) & (t < T)
        begin = tl.load(begin_ptr + t, mask=inside, other=0)
        end = tl.load(end_ptr + t, mask=inside, other=0)
        hit = (tl.maximum(begin, first) < tl.minimum(end, tl.minimum(first + KEYS, S))).to(tl.int32)
        touched = tl.max(hit, 0)
        tl.store(ptr + count, n, mask=touched > 0)
        count += touched
    return count


@triton.jit(do_not_specialize=["T", "S", "blocks", "most_masked", "most_full", "steps"])
def lists_kernel(
    begin_ptr, end_ptr, masked_count, masked, full_count, full,
    rows_st, T, S, blocks, most_masked, most_full, steps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """The lists of one block of queries, or with BY_KEYS of one block of keys, of one row of intervals.

    The tiles [low, high) contain all visible pairs, and those of [head, tail) are full. No loop but over these tiles:
    first the full ones are written, then each of the others if it has a visible pair.
    """
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin_ptr += row * rows_st
    end_ptr += row * rows_st
    if BY_KEYS:
        first = block * KEYS
        low = count_below(end_ptr, first + 1, T, steps)
        high = tl.maximum(low, count_below(begin_ptr, tl.minimum(first + KEYS, S), T, steps))
        clear_low = count_below(end_ptr, first + KEYS, T, steps)
        clear_high = count_below(begin_ptr, first + 1, T, steps)
    else:
        i = tl.arange(0, WIDE)
        t = block * QUERIES + i
        begin = tl.load(begin_ptr + t, mask=(i < QUERIES) & (t < T), other=0)
        end = tl.load(end_ptr + t, mask=(i < QUERIES) & (t < T), other=0)
        real = begin < end
        high = tl.max(tl.where(real, end, 0), 0)
        low = tl.minimum(tl.min(tl.where(real, begin, 2147483647), 0), high)
        clear_low = tl.max(begin, 0)
        clear_high = tl.min(tl.where(real, end, tl.where(i < QUERIES, 0, 2147483647)), 0)
    SIZE: tl.constexpr = QUERIES if BY_KEYS else KEYS
    low = low // SIZE
    high = (high + SIZE - 1) // SIZE
    head = tl.minimum(tl.maximum((clear_low + SIZE - 1) // SIZE, low), high)
    tail = tl.minimum(tl.maximum(clear_high // SIZE, head), high)
    at = row * blocks + block
    put_range(full + at * most_full, head, tail, 128)
    tl.store(full_count + at, tail - head)
    masked += at * most_masked
    count = put_touched(begin_ptr, end_ptr, masked, head * 0, low, head, block, T, S, QUERIES, KEYS, WIDE, BY_KEYS)
    count = put_touched(begin_ptr, end_ptr, masked, count, tail, high, block, T, S, QUERIES, KEYS, WIDE, BY_KEYS)
    tl.store(masked_count + at, count)


def block_lists(where: Intervals, length: int, queries: int, keys: int, by_keys: bool) -> Lists:
    """The lists for tiles of `queries` x `keys`, of each block of queries, or with `by_keys` of each block of keys.

    `length` is the number of keys. The lists are as long as the longest one, if the intervals are known on the host.
    Otherwise each has room for every tile: 4 MB at 131072 queries and keys.
    """
    begin, end, rows_st = rows_of(where)
    (rows, T), steps = begin.shape, begin.shape[1].bit_length()
    others, blocks = cdiv(length, keys), cdiv(T, queries)
    if by_keys:
        others, blocks = blocks, others
    sizes = queries, keys, by_keys
    most = (others, others) if where.host is None else most_tiles(where.host[0], where.host[1], length, *sizes)
    counts = torch.empty(2, rows, 1, blocks, dtype=torch.int32, device=begin.device)
    room = [(rows, 1, blocks, max(1, each)) for each in most]
    lists = [torch.zeros(shape, dtype=torch.int32, device=begin.device) for shape in room]
    launch(
        lists_kernel, (blocks, rows), (begin, end, counts[0], lists[0], counts[1], lists[1]),
        (rows_st, T, length, blocks, lists[0].shape[-1], lists[1].shape[-1], steps),
        QUERIES=queries, KEYS=keys, WIDE=power_of_2(queries), BY_KEYS=by_keys,
    )  # fmt: skip
    return Lists(counts[0], lists[0], counts[1], lists[1])


def most_tiles(
    begin: np.ndarray, end: np.ndarray, length: int, queries: int, keys: int, by_keys: bool
) -> tuple[int, int]:
    """The length of the longest list of masked tiles, at most, and of the longest list of full tiles."""
    most_masked = most_full = 0
    for b, e in zip(begin.astype(np.int64), end.astype(np.int64), strict=True):
        if by_keys:
            first = np.arange(0, length, keys)
            low, high = np.searchsorted(e, first, "right"), np.searchsorted(b, np.minimum(first + keys, length))
            clear_low, clear_high = np.searchsorted(e, first + keys), np.searchsorted(b, first, "right")
        else:
            starts, real = np.arange(0, len(b), queries), b < e
            low = np.minimum.reduceat(np.where(real, b, 2**40), starts)
            high = np.maximum.reduceat(np.where(real, e, 0), starts)
            clear_low = np.maximum.reduceat(b, starts)
            clear_high = np.minimum.reduceat(np.where(real, e, 0), starts)
            clear_high[-1] *= len(b) % queries == 0  # a block past the last query has no full tiles
        size = queries if by_keys else keys
        low, high = np.minimum(low, high) // size, -(-high // size)
        head = np.clip(-(-clear_low // size), low, np.maximum(low, high))
        tail = np.clip(clear_high // size, head, np.maximum(head, high))
        most_full = max(most_full, int((tail - head).max(initial=0)))
        most_masked = max(most_masked, int((high - low - (tail - head)).max(initial=0)))
    return most_masked, most_full
