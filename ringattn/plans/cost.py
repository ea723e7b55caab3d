"""What a plan computes and moves: pairs, bytes, groups of heads. Plain Python and numpy; predict.py has the times."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ringattn.layouts.layout import Layout, Shard
from ringattn.masks.bands import all_bands
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.steps.reads import AllRanges, all_ranges, overlaps


@dataclass(frozen=True)
class Shape:
    """One attention call, whole sequence and all heads."""

    seq_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int = 2
    batch: int = 1

    @property
    def flops_a_pair(self) -> int:
        """Multiply-adds of one (query, key) pair over all heads: the two products of the forward pass."""
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim)

    def bytes_of(self, tokens: int, heads: int) -> int:
        """Of the keys and values of so many heads; as much as of queries and their results."""
        return self.batch * tokens * heads * (self.head_dim + self.value_dim) * self.itemsize


def seen_pairs(
    layout: Layout, key_layout: Layout, spec: AttentionSpec, docs: Docs | None = None, ranks: np.ndarray | None = None
) -> np.ndarray:  # fmt: skip
    """[rank, block]: how many (query, key) pairs of two ring shards are seen; by default of all ranks.

    Counted by the runs of a rank's queries that are in one band: each side of their intervals is constant, or rises by
    the step of a shard. Of all sides, the keys of a block below them are summed, with their signs.
    """
    queries = ranges(layout) if ranks is None else all_ranges([shards(layout)[rank] for rank in ranks])
    rows, ring = layout.ring if ranks is None else len(ranks), key_layout.ring
    bands = all_bands(spec, layout.length, key_layout.length, docs)
    at, which, start, last = overlaps(queries, bands.start, bands.stop)
    run, apart, row = bands.some(at), start - bands.start[at], np.tile(queries.owners[which], 2)
    count = np.tile((last - start) // queries.steps[0] + 1, 2)
    first = np.concatenate([run.end + run.rise * apart, run.begin + run.lean * apart])
    sign, rise = np.repeat([1, -1], len(at)), np.concatenate([run.rise, run.lean]) > 0
    table = ranges(key_layout)
    table = table._replace(stops=np.append(table.stops[:-1], table.stops[-1] + 1))  # the position after all keys too
    every: Any = 0
    lengths: Any = table.stops - table.starts
    later = count * (count - 1) // 2
    if (step := table.steps[0]) > 1:  # of stripes, a piece is the next token of a shard in each lap of all shards
        whole, of_shard = np.divmod(first, step)
        every = np.bincount(row, sign * (count * whole + rise * later), rows)[:, None]
        number, keys, lengths = sign * count, 0 * count, 1
    else:
        at, of_shard, low, high = overlaps(table, first, first + np.where(rise, count, 1))
        n, times, row = high - low + 1, (sign * np.where(rise, 1, count))[at], row[at]
        number, keys = times * n, times * (n * (low - table.starts[of_shard]) + n * (n - 1) // 2)
    within = np.bincount(row * len(table.starts) + of_shard, number, rows * len(table.starts)).reshape(rows, -1)
    below = lengths * (within.sum(1, keepdims=True) - within.cumsum(1))  # whole pieces
    order, number = np.argsort(table.owners, kind="stable"), np.bincount(table.owners)
    whole = np.add.reduceat(below.take(order, 1), np.cumsum(number) - number, axis=1)
    cut_short = np.bincount(row * ring + table.owners[of_shard], keys, rows * ring).reshape(rows, ring)
    return every + whole + cut_short


def queries_seeing(
    layout: Layout, key_layout: Layout, spec: AttentionSpec, docs: Docs | None, ranks: np.ndarray
) -> np.ndarray:  # fmt: skip
    """[first or stop, rank, block]: between which of its queries some of a ranks's see some of a block."""
    table = all_ranges([shards(layout)[rank] for rank in ranks])
    blocks, length, ring = ranges(key_layout), layout.shard_len, key_layout.ring
    between = np.array([np.full((len(ranks), ring), length), np.zeros((len(ranks), ring), int)])
    bands = all_bands(spec, layout.length, key_layout.length, docs)
    at, which, first, last = overlaps(table, bands.start, bands.stop)
    band, far = bands.some(at), first - bands.start[at]
    begin, end = band.begin + band.lean * far, band.end + band.rise * far  # of the run's first query
    run, block_range, *_ = overlaps(blocks, begin, end + band.rise * (last - first))
    low = np.where(band.rise[run] > 0, np.maximum(blocks.starts[block_range] - end[run] + 1, 0), 0)
    high = np.where(band.lean[run] > 0, blocks.stops[block_range] - begin[run] - 1, length * ring)
    step, run_first = table.steps[0], (table.offsets - table.starts)[which]
    if step > 1:  # of stripes all are between the first and the last
        run_first, first, last, low, high = 0 * first, 0 * first, 0 * last + length - 1, 0 * low, 0 * high + length
    cell = table.owners[which][run], blocks.owners[block_range]
    np.minimum.at(between[0], cell, (run_first + first)[run] + low)
    np.maximum.at(between[1], cell, run_first[run] + np.minimum(last[run], first[run] + high) + 1)
    return between


@lru_cache(maxsize=64)
def shards(layout: Layout) -> list[Shard]:
    return [layout.shard(rank) for rank in range(layout.ring)]


@lru_cache(maxsize=64)
def ranges(layout: Layout) -> AllRanges:
    return all_ranges(shards(layout))


def replicas(kv_heads: int, ulysses: int) -> int:
    """How often each key head is repeated so that the Ulysses size divides them."""
    return ulysses // math.gcd(kv_heads, ulysses)


def kv_heads_of_a_rank(kv_heads: int, ulysses: int) -> int:
    return kv_heads * replicas(kv_heads, ulysses) // ulysses


def may_group(groups: int, heads: int, kv_heads: int, ring: int) -> bool:
    """Whether a rank's heads can be cut into so many groups, each with as many key heads of its own.

    Groups of queries share a rank's only key head, which travels once, with the first; but not round a ring.
    """
    return kv_heads % groups == 0 or (kv_heads == ring == 1 and heads % groups == 0)


def heads_of_group(heads: int, kv_heads: int, ulysses: int, groups: int) -> tuple[int, int]:
    """The query and the key heads of one group on one rank."""
    return heads // ulysses // groups, max(1, kv_heads_of_a_rank(kv_heads, ulysses) // groups)


def of_heads(shape: Shape, ulysses: int, local: tuple[int, int]) -> tuple[int, int]:
    """The bytes of a rank's queries with their results, and of its keys and values, whose heads Ulysses exchanges.

    `local` is how many tokens of the queries and of the keys a rank holds. Key heads are repeated so that they divide.
    """
    keys = shape.kv_heads * replicas(shape.kv_heads, ulysses)
    return shape.bytes_of(local[0], shape.heads), shape.bytes_of(local[1], keys)
