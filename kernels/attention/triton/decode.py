"""Decode: few queries, many keys. One kernel splits the keys over the whole GPU, and a second one merges the partials.

    B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim

The T * R rows that share a key head lie in one tile, so every key is loaded once, whatever the number of query heads.
The kernel itself finds the range of keys of a batch row, from its first `begin` to its last `end`, and cuts it into
even splits. So rows of different lengths stay balanced, and the host never waits for the device.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import Problem
from ringattn.kernels.arrays import fine
from ringattn.kernels.attention.triton import KERNEL as FLASH
from ringattn.kernels.attention.triton import refuses as triton_refuses
from ringattn.kernels.attention.triton.blocks import logits, tanh
from ringattn.kernels.attention.triton.merge import merge_stack
from ringattn.kernels.attention.triton.table import Tile
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial
from ringattn.kernels.triton import LN2, Launch, kind_of, power_of_2

MAX_TILE_ROWS = 64  # the T * R rows of a key head that one tile can hold; with more rows use the kernel in forward.py
PROGRAMS = 3  # that share a multiprocessor


@triton.jit(do_not_specialize=["B", "T", "S", "G", "R"])
def decode_kernel(
    q, k, v, begin, end,  # [B, T, H, D], [B, S, G, D], [B, S, G, V], [B or 1, T] twice
    out, lse,  # [splits, B, T, H, V], [splits, B, T, H]
    q_st, k_st, v_st, where_st,
    scale, cap,  # s = scale * q k^T in base 2; with SOFTCAP s = cap * tanh(scale * q k^T)
    B, T, S, G, R, D, V,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    WHOLE_D: tl.constexpr, WHOLE_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M rows (t, h) of one key head, over one split of the keys. Statistics inside are in base 2.

    Programs: (key heads x blocks of rows, splits, batch rows). A program finds the keys [low, high) that its rows see,
    from the intervals themselves, and takes the part of them that is its split. An empty split gives (0, -inf).

    Loop: over the keys of the split, BLOCK_N at a time: an online softmax with the running maximum m, sum z and
    accumulator o, as in the forward kernel. Every tile is masked, since a split may end inside a tile, and rows may
    have different intervals.

    Why at the odd places: the offset of a tile takes 64 bits, once a tile, and the offsets inside it take 32. Where D
    or V is a power of two (WHOLE_D, WHOLE_V) the loads need no mask along it. `safe`, as `zero` in the forward kernel,
    avoids -inf - -inf for a row that has seen no key yet; `z != 0` also holds for NaN.
    """
    g, block = tl.program_id(0) % G, tl.program_id(0) // G
    split, splits = tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    t, h = row // R, g * R + row % R
    live = row < T * R
    first = tl.load(begin + b * where_st[0] + t * where_st[1], mask=live, other=0)
    last = tl.load(end + b * where_st[0] + t * where_st[1], mask=live, other=0)
    real = first < last
    low = tl.maximum(tl.min(tl.where(real, first, S)), 0)
    high = tl.minimum(tl.max(tl.where(real, last, 0)), S)
    share = tl.cdiv(tl.maximum(high - low, 0), splits)
    low += split * share
    high = tl.minimum(low + share, high)

    d, w, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)
    q_at = b * q_st[0] + t.to(tl.int64)[:, None] * q_st[1] + h[:, None] * q_st[2] + d[None, :] * q_st[3]
    queries = tl.load(q + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    k_at, v_at = n[:, None] * k_st[1] + d[None, :] * k_st[3], n[:, None] * v_st[1] + w[None, :] * v_st[3]
    k += b * k_st[0] + g.to(tl.int64) * k_st[2]
    v += b * v_st[0] + g.to(tl.int64) * v_st[2]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    z = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + n
        inside = key < high
        k_mask = inside[:, None] if WHOLE_D else inside[:, None] & (d < D)[None, :]
        v_mask = inside[:, None] if WHOLE_V else inside[:, None] & (w < V)[None, :]
        keys = tl.load(k + tl.cast(start, tl.int64) * k_st[1] + k_at, mask=k_mask, other=0.0)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            s = cap * tanh(s)
        seen = (first[:, None] <= key[None, :]) & (key[None, :] < tl.minimum(last, high)[:, None])
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        values = tl.load(v + tl.cast(start, tl.int64) * v_st[1] + v_at, mask=v_mask, other=0.0)
        o = tl.dot(p.to(values.dtype), values, o * shrink[:, None], input_precision="ieee")
        z = z * shrink + tl.sum(p, 1)
        m = new

    some = z != 0
    at = ((split * B + b) * T + t) * (G * R) + h
    o = o / tl.where(some, z, 1.0)[:, None]
    m = m.to(lse.dtype.element_ty) * LN2
    m = tl.where(some, m + tl.log(tl.where(some, z, 1.0)), float("-inf"))
    tl.store(lse + at, m, mask=live)
    tl.store(out + at[:, None] * V + w[None, :], o, mask=live[:, None] & (w < V)[None, :])


@lru_cache(maxsize=256)
def config(rows: int, head_dim: int, value_dim: int, itemsize: int) -> Tile:
    """Tiles of 16 KiB of keys or values, two in flight for each program: the fastest on an H200; `queries` are rows."""
    queries = 16 if itemsize == 4 else min(MAX_TILE_ROWS, max(16, power_of_2(rows)))  # float32 has no tensor cores here
    key_bytes = power_of_2(2 * max(head_dim, value_dim)) * itemsize
    keys, wide = min(128, max(16, 16384 // key_bytes)), key_bytes > 1024
    return Tile(queries, keys, warps=8 if queries > 16 else 4, stages=2 if wide else 3)


@lru_cache(maxsize=1024)
def choose_splits(rows: int, keys: int, slots: int) -> int:
    """The number of splits of `keys` keys with the least predicted time, for `rows` programs a split.

    `slots` programs run at the same time. Times are in keys: each wave of programs takes the keys of a split and 128
    more to start, and the merge takes 8 for each program.
    """

    def time(splits: int) -> float:
        return ceil(rows * splits / slots) * (keys / splits + 128) + 8 * rows * splits / slots

    return min(range(1, max(1, min(128, keys // 128)) + 1), key=time)


def refuses(problem: Problem) -> str | None:
    """Why this kernel cannot serve the problem, or None when it can."""
    if (reason := triton_refuses(problem)) is not None:
        return reason
    if problem.queries is None:
        return "is for few queries, and the number of queries is not known"
    rows = problem.queries * problem.heads // problem.kv_heads
    if rows > MAX_TILE_ROWS:
        return f"is for few queries: {problem.queries} make {rows} rows a key head, more than {MAX_TILE_ROWS}"
    return None


def attend(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, out_dtype: torch.dtype | None = None,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, in two launches: splits of the keys, then their merge.

    A carry is one more partial in the merge; it is not overwritten.
    """
    parts = decode_splits(q_BTHD, k_BSGD, v_BSGV, where, scale, softcap)
    single = carry is None and parts.out.shape[0] == 1
    part = Partial(parts.out[0], parts.lse[0]) if single else merge_stack(parts, carry)
    return part if out_dtype is None else Partial(part.out.to(out_dtype), part.lse)


def decode_splits(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, scale: float, softcap: float | None,
    splits: int | None = None,
) -> Partial:  # fmt: skip
    """The partial of each split of the keys, stacked along a first dim of `splits`, which is chosen if not given."""
    B, T, H, D = q_BTHD.shape
    _, S, G, V = v_BSGV.shape
    tile, blocks = blocks_of(q_BTHD, v_BSGV)
    splits = splits or splits_for(q_BTHD, v_BSGV, S)
    out = torch.empty(splits, B, T, H, V, dtype=torch.float32, device=q_BTHD.device)
    lse = torch.empty(splits, B, T, H, dtype=fine(q_BTHD), device=q_BTHD.device)
    block_d, block_v = power_of_2(max(16, D)), power_of_2(max(16, V))
    if out.numel():
        rows_st = where.begin.stride(0) if where.begin.shape[0] > 1 else 0
        strides = q_BTHD.stride(), k_BSGD.stride(), v_BSGV.stride(), (rows_st, where.begin.stride(1))
        constants = (
            softcap is not None, tile.queries, tile.keys, block_d, block_v, block_d == D, block_v == V, tile.stages,
        )  # fmt: skip
        tensors = q_BTHD, k_BSGD, v_BSGV, where.begin, where.end, out, lse
        Launch(
            decode_kernel, (G * blocks, splits, B), q_BTHD.device,
            (*strides, *logits(scale, softcap), B, T, S, G, H // G, D, V, *constants),
            (q_BTHD.dtype, kind_of((*strides, D, V)), constants), num_warps=tile.warps,
        )(*tensors)  # fmt: skip
    return Partial(out, lse)


def blocks_of(q_BTHD: Tensor, v_BSGV: Tensor) -> tuple[Tile, int]:
    """The tile sizes, and how many tiles the rows of a key head fill."""
    _, T, H, D = q_BTHD.shape
    rows = T * (H // v_BSGV.shape[2])
    tile = config(rows, D, v_BSGV.shape[3], q_BTHD.element_size())
    return tile, -(-rows // tile.queries)


def splits_for(q_BTHD: Tensor, v_BSGV: Tensor, keys: int) -> int:
    """The best number of splits if at most the first `keys` keys are seen."""
    _, blocks = blocks_of(q_BTHD, v_BSGV)
    programs = q_BTHD.shape[0] * v_BSGV.shape[2] * blocks
    return choose_splits(programs, keys, multiprocessors(q_BTHD.device) * PROGRAMS)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors; 1 for the interpreter, which runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# the backward pass of few queries runs the general kernels
KERNEL = replace(FLASH, attend=attend, refuses=refuses)
