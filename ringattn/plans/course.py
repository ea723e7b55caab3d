"""What the ranks of a ring do, step by step, for predictions: columns of its table in the order of steps, and folds.

Rings of more ranks than `EXACT` have no table. There blocks travel whole, and all hosts and phases have equal steps.
Predictions take some readers of such a ring; the simulator takes all of them, step by step.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ringattn.layouts.layout import Layout
from ringattn.masks.bands import all_bands
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import queries_seeing, seen_pairs, shards
from ringattn.steps.reads import Reads, seen
from ringattn.steps.table import Row, Table, Transfers, build, grouped, joined

EXACT, READERS = 64, 12  # rings of more than EXACT ranks are predicted from so many readers
COUNTED_AT_ONCE = 64  # readers whose pairs are counted together


class Ring(NamedTuple):
    """What the steps of a ring follow from: where queries and keys are, how they meet, and on how many hosts.

    `hosts` are those of the route, and `gpus` how many ranks a host really has.
    """

    queries: Layout
    keys: Layout
    spec: AttentionSpec
    docs: Docs | None
    hosts: int
    gpus: int

    @property
    def size(self) -> int:
        return self.queries.ring

    def host(self, rank: Row) -> Row:
        return rank * self.queries.ulysses // self.gpus


Cells = tuple[Row, Row, Row]  # readers, by their place among them, steps, and the pairs of query and key seen in these


class Steps:
    ring: Ring  # of whose ranks some, the readers, have these steps
    readers: Row
    first: Row  # [phase]: its first step
    count: int
    taken: Row  # [reader, step]: not the empty steps of its host
    # of steps [begin, end): what is computed, and its reads; blocks from other hosts for them; sums that then go home
    cells: Callable[[int, int], tuple[Cells, Row]]  # with the blocks that are met
    met: Callable[[int, int], tuple[Cells, Transfers]]
    hops: Callable[[int, int], Transfers]
    homes: Callable[[int, int], Transfers]

    def summed(self, reader: Row, step: Row, amounts: Row) -> Row:
        cells = np.bincount(reader * self.count + step, amounts, len(self.readers) * self.count)
        return cells.reshape(-1, self.count)

    @cached_property
    def pairs(self) -> Row:
        return self.summed(*self.met(0, self.count)[0])

    @cached_property
    def tokens(self) -> tuple[Row, Row]:
        """The keys that are received within hosts, and from other hosts."""
        keys = joined(self.met(0, self.count)[1], self.hops(0, self.count))
        remote = self.ring.host(keys.source) != self.ring.host(keys.destination)
        at = np.searchsorted(self.readers, keys.destination), keys.needed_at
        return self.summed(*at, keys.tokens * ~remote), self.summed(*at, keys.tokens * remote)

    @cached_property
    def received(self) -> Row:
        return self.tokens[0] + self.tokens[1]

    @cached_property
    def moves_on(self) -> Row:
        """[step]: whether a phase begins, with blocks that others held before."""
        return np.isin(np.arange(self.count), self.first[1:])

    @cached_property
    def sent(self) -> Row:
        """Tokens of the block that it holds which others of its host read; in large rings all alike."""
        if len(self.readers) < self.ring.size:
            return np.where(self.moves_on, 0, self.received)
        _, reads = self.met(0, self.count)
        return self.summed(reads.source, reads.needed_at, reads.tokens)

    @cached_property
    def returned(self) -> Row:
        """Tokens of its own block whose sums are sent home from those that held them last, after each step."""
        homes = self.homes(0, self.count + 1)
        return self.summed(np.searchsorted(self.readers, homes.destination), homes.send_at - 1, homes.tokens)

    @cached_property
    def queries(self) -> Row:
        """Queries from the first to the last that sees some keys."""
        low, high = queries_seeing(*self.ring[:4], self.readers)
        (reader, step, _), block = self.cells(0, self.count)
        begin, end = np.full(self.pairs.shape, self.ring.queries.shard_len), np.zeros(self.pairs.shape, int)
        np.minimum.at(begin, (reader, step), low[reader, block])
        np.maximum.at(end, (reader, step), high[reader, block])
        return np.maximum(end - begin, 0)


class OfTable(Steps):
    """Those of all ranks."""

    def __init__(self, ring: Ring, table: Table, pairs: Row):
        self.ring, self.readers, self.first, self.count = ring, np.arange(table.ring), table.first, table.count
        self.table, self.pairs_of, step = table, pairs, np.arange(table.count)
        phase = np.searchsorted(table.first, step, "right") - 1
        self.taken = (step - table.first[phase] < table.busy[:, phase]).repeat(table.size, 0)

    def cells(self, begin: int, end: int) -> tuple[Cells, Row]:
        when = self.table.when
        reader, block = np.nonzero((begin <= when) & (when < end))
        return (reader, when[reader, block], self.pairs_of[reader, block]), block

    def met(self, begin: int, end: int) -> tuple[Cells, Transfers]:
        reads = self.table.reads
        return self.cells(begin, end)[0], reads.some((begin <= reads.needed_at) & (reads.needed_at < end))

    def hops(self, begin: int, end: int) -> Transfers:
        at = self.table.hops.needed_at
        return self.table.hops.some((begin <= at) & (at < end))

    def homes(self, begin: int, end: int) -> Transfers:
        at = self.table.homes.send_at
        return self.table.homes.some((begin <= at) & (at < end))


class OfWholeBlocks(Steps):
    """Those of some readers of a large ring, whose blocks travel whole; rows are made when they are asked for.

    `pairs` [distance, reader] are those of the block that comes from so many hosts and ranks of a host before: the
    distance is hosts * ranks of a host + ranks.
    """

    def __init__(self, ring: Ring, readers: Row, pairs: Row, together: int):
        self.ring, self.readers, self.pairs_at, self.length = ring, readers, pairs, ring.keys.shard_len
        self.size = size = ring.size // ring.hosts
        met: Row = np.logical_or.reduce(pairs.reshape(ring.hosts, size, -1), axis=0)  # [ranks before, reader]
        self.distances = np.append(0, np.flatnonzero(pairs[size:].any(1).reshape(-1, size).any(1)) + 1)
        ranks = np.append(0, np.flatnonzero(met[1:].any(1)) + 1)
        within = grouped(lambda d: met[None, None, d] * self.length, size, self.length, together)[0, 0, ranks]
        busy, phases = int(within[-1]) + 1, len(self.distances)
        self.first, self.count = np.arange(phases) * busy, phases * busy
        self.columns = np.repeat(self.distances, len(ranks)), np.tile(ranks, phases)  # how many hosts and ranks before
        self.step = np.repeat(self.first, len(ranks)) + np.tile(within, phases)
        self.taken = np.broadcast_to(True, (len(readers), self.count))

    def cells(self, begin: int, end: int) -> tuple[Cells, Row]:
        some = slice(*np.searchsorted(self.step, (begin, end)))
        away, before = (x[some] for x in self.columns)
        pairs = self.pairs_at[away * self.size + before]
        column, reader = np.nonzero(pairs)
        rank = self.readers[reader]
        source = rank // self.size * self.size + (rank - before[column]) % self.size
        block = (source - away[column] * self.size) % self.ring.size
        return (reader, self.step[some][column], pairs[column, reader].astype(float)), block

    def met(self, begin: int, end: int) -> tuple[Cells, Transfers]:
        (reader, step, pairs), block = self.cells(begin, end)
        rank = self.readers[reader]
        source = rank // self.size * self.size + block % self.size
        reads = self.whole(*(x[source != rank] for x in (step - 1, step, source, rank, block)))
        return (reader, step, pairs), reads

    def hops(self, begin: int, end: int) -> Transfers:
        phases = np.arange(1, len(self.first))[slice(*np.searchsorted(self.first[1:], (begin, end)))]
        phase, rank = (x.ravel() for x in np.meshgrid(phases, self.readers, indexing="ij"))
        gaps = np.diff(self.distances, prepend=0)
        source, block = ((rank - hosts[phase] * self.size) % self.ring.size for hosts in (gaps, self.distances))
        return self.whole(self.first[phase - 1], self.first[phase], source, rank, block)

    def homes(self, begin: int, end: int) -> Transfers:
        rank = self.readers[: len(self.readers) * (begin <= self.count < end and len(self.first) > 1)]
        ends = 0 * rank + self.count
        return self.whole(ends, ends, (rank + self.distances[-1] * self.size) % self.ring.size, rank, rank)

    def whole(self, send_at: Row, needed_at: Row, source: Row, destination: Row, block: Row) -> Transfers:
        return Transfers(send_at, needed_at, source, destination, block, 0 * block, 0 * block + self.length)


@lru_cache(maxsize=64)
def met(queries: Layout, keys: Layout, spec: AttentionSpec, docs: Docs | None) -> tuple[Row, Row, Reads | None]:
    """The readers; [reader, block]: the pairs that they see; and what they read of blocks, if they are all ranks."""
    if (ring := queries.ring) > EXACT:
        readers = np.unique(np.linspace(0, ring - 1, READERS).astype(int))
        return readers, seen_pairs(queries, keys, spec, docs, readers), None
    reads = seen(all_bands(spec, queries.length, keys.length, docs), shards(queries), shards(keys))
    return np.arange(ring), seen_pairs(queries, keys, spec, docs), reads


@lru_cache(maxsize=1)  # of a ring of 16,384 ranks a gigabyte
def all_pairs(ring: Ring) -> Row:
    """[distance, rank]: the pairs of every rank with the block at each distance."""
    pairs = np.empty((ring.size, ring.size), np.min_scalar_type(ring.queries.shard_len * ring.keys.shard_len))
    for some in np.array_split(np.arange(ring.size), -(-ring.size // COUNTED_AT_ONCE)):
        pairs[:, some] = at_distances(seen_pairs(*ring[:4], some), some, ring)
    return pairs


def at_distances(pairs: Row, readers: Row, ring: Ring) -> Row:
    """[distance, reader] of pairs [reader, block]."""
    size = ring.size // ring.hosts
    away, before = (x.ravel() for x in np.mgrid[: ring.hosts, :size])
    host, place = np.divmod(readers[:, None], size)
    host, place = host - away, place - before
    block = (host + ring.hosts * (host < 0)) * size + place + size * (place < 0)  # % is slower
    return np.take_along_axis(pairs, block, 1).T


def steps_of(ring: Ring, together: int, everyone: bool = False) -> Steps:
    """The steps of all ranks, or of some readers of a large ring; `everyone`: of all of its ranks."""
    readers, pairs, reads = met(*ring[:4])
    if reads is not None:
        return OfTable(ring, build(reads, ring.hosts, together), pairs)
    if everyone:
        return OfWholeBlocks(ring, np.arange(ring.size), all_pairs(ring), together)
    return OfWholeBlocks(ring, readers, at_distances(pairs, readers, ring), together)


course = lru_cache(maxsize=64)(steps_of)
