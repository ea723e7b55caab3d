"""What each rank of a ring reads of each block, counted from bands and ranges alone.

Block b holds the tokens of ring rank b. What is read of it are ranges of its local indices, one row each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ringattn.layouts.layout import Shard
from ringattn.masks.bands import Bands
from ringattn.masks.crossing import paired, runs

GRAINS = 64  # of a block: ranges that are read begin and end at multiples of a grain, so they are few and round


@dataclass(frozen=True, eq=False)
class Reads:
    """Each reader sees some of [begin, end) of a block: rows in the order of reader, block and begin.

    A row's tokens include all that the reader sees there, and up to a grain more at each end.
    """

    ring: int
    length: int  # tokens of a block
    reader: np.ndarray
    block: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    shards: Sequence[Shard] = ()  # the positions of every block

    @cached_property
    def tokens(self) -> np.ndarray:
        """[reader, block]: how many tokens each rank reads of each block."""
        cell, ring = self.reader * self.ring + self.block, self.ring
        return np.bincount(cell, self.end - self.begin, ring**2).astype(np.int64).reshape(ring, ring)


class AllRanges(NamedTuple):
    """The ranges of all shards in the order of their first tokens, and where each begins in its shard."""

    starts: np.ndarray
    stops: np.ndarray
    steps: np.ndarray
    owners: np.ndarray
    offsets: np.ndarray


def all_ranges(shards: Sequence[Shard]) -> AllRanges:
    counts = [*map(len, shards)]
    bounds = np.array([(r.start, r.stop, r.step) for shard in shards for r in shard])
    lengths = np.array([len(r) for shard in shards for r in shard])
    before, first = np.cumsum(lengths) - lengths, np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(shards)), counts)
    table = (*bounds.T, owners, before - before[first[owners]])
    order = np.lexsort(bounds.T[1::-1])
    return AllRanges(*(x[order] for x in table))


Seen = tuple[np.ndarray, np.ndarray, np.ndarray]  # who sees, and the tokens [begin, end) that it sees


def seen(bands: Bands, queries: Sequence[Shard], keys: Sequence[Shard]) -> Reads:
    """What is read where keys travel to the queries that see them.

    What is read of a block is cut where ranges of its shard end: other blocks may lie between them.
    """
    blocks, length, ring = all_ranges(keys), sum(map(len, keys[0])), len(keys)
    reader, begin, end = keys_seen(bands, all_ranges(queries))
    if blocks.steps[0] > 1:  # stripes: those that are seen at all are seen nearly whole
        some = np.zeros((ring, ring), bool)
        np.logical_or.at(some, reader, (np.arange(ring) - begin[:, None]) % ring < (end - begin)[:, None])
        reader, block = np.nonzero(some)
        return Reads(ring, length, reader, block, 0 * block, 0 * block + length, keys)
    reader, begin, end = union(reader, begin, end)
    at, which, begin, last = overlaps(blocks, begin, end)
    low, first = blocks.offsets[which], blocks.starts[which]
    cell, high, shift = reader[at] * ring + blocks.owners[which], low + blocks.stops[which] - first, low - first
    cell, begin, end = grained(length, cell, begin + shift, last + 1 + shift, low, high)
    return Reads(ring, length, *np.divmod(cell, ring), begin, end, keys)


def grained(length: int, cell: np.ndarray, begin: np.ndarray, end: np.ndarray, low: Any, high: Any) -> Seen:
    """Ranges of cells within [low, high), extended to multiples of a grain, and joined where they then touch."""
    grain = max(1, length // GRAINS)
    grain -= grain % 128 if grain > 128 else 0
    order = np.argsort(cell, kind="stable")
    begin, end = np.maximum(begin // grain * grain, low), np.minimum(-(-end // grain) * grain, high)
    cell, begin, end, low = (x[order] for x in (cell, begin, end, low))
    touch = (cell[1:] == cell[:-1]) & (low[1:] == low[:-1]) & (begin[1:] <= end[:-1])
    first, last = runs(touch, len(cell))
    return cell[first], begin[first], end[last]


def keys_seen(bands: Bands, queries: AllRanges) -> Seen:
    """The keys that runs of queries of one rank see together: each band's queries in each range that it overlaps.

    The queries of a stripe are apart, and their intervals need not touch. One query then stands for all: if both sides
    rise or none does, all of them reach the same stripes; else the one that sees the most keys reaches all of them.
    """
    at, which, first, last = overlaps(queries, bands.start, bands.stop)
    band = bands.some(at)
    if queries.steps[0] > 1:
        first = last = np.where(band.rise > band.lean, last, first)
    begin, end = band.begin + band.lean * (first - band.start), band.end + band.rise * (last - band.start)
    return queries.owners[which], begin, end


def overlaps(table: AllRanges, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, ...]:
    """Each of some intervals in every range that it overlaps: (interval, range, its first token there, its last)."""
    low, high = np.searchsorted(table.stops, start, "right"), np.searchsorted(table.starts, stop, "left")
    at, which = paired(low, np.where(start < stop, high - low, 0))
    step, begun = table.steps[0], table.starts[which]  # all ranges have the same step
    first, last = np.maximum(start[at], begun), np.minimum(stop[at], table.stops[which]) - 1
    if step > 1:
        first += (begun - first) % step
        last -= (last - begun) % step
    some = first <= last
    return at[some], which[some], first[some], last[some]


def union(reader: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Seen:
    """The same tokens in intervals that neither overlap nor touch, sorted by reader."""
    if not len(reader):
        return reader, begin, end
    apart = int(end.max()) + 2
    begin, end = begin + reader * apart, end + reader * apart
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first, last = runs(begin[1:] <= reach[:-1], len(begin))
    reader = begin[first] // apart
    return reader, begin[first] - reader * apart, reach[last] - reader * apart
