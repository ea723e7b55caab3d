"""What the ranks of a ring do, step by step, for predictions: columns of its table in the order of steps, and folds.

Rings of more ranks than `EXACT` have no table. There blocks travel whole, and all hosts and phases have equal steps.
Predictions take some readers of such a ring; the simulator takes all of them, step by step.

Plain numpy.
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


class Cells(NamedTuple):
    """Where readers meet blocks: in which step, and how many pairs of a query and a key they then see."""

    reader: Row  # the place among the readers
    block: Row
    step: Row
    pairs: Row

    def some(self, rows: Row) -> "Cells":
        return Cells(*(x[rows] for x in self))


class Steps:
    """The steps of some ranks, the readers, and what follows from them as [reader, step]."""

    ring: Ring
    readers: Row
    first: Row  # [phase]: its first step
    count: int
    taken: Row  # [reader, step]: not the empty steps of its host
    # functions of begin and end: what is computed at these steps, and its reads; blocks that come from other hosts for
    # them; sums of gradients that go home as they begin
    met: Callable[[int, int], tuple[Cells, Transfers]]
    hops: Callable[[int, int], Transfers]
    homes: Callable[[int, int], Transfers]

    def summed(self, reader: Row, step: Row, amounts: Row) -> Row:
        cells = np.bincount(reader * self.count + step, amounts, len(self.readers) * self.count)
        return cells.reshape(-1, self.count)

    def place(self, rows: Transfers) -> Row:
        """The place of each destination among the readers."""
        return np.searchsorted(self.readers, rows.destination)

    @cached_property
    def pairs(self) -> Row:
        reader, _, step, pairs = self.met(0, self.count)[0]
        return self.summed(reader, step, pairs)

    @cached_property
    def kinds(self) -> tuple[Transfers, Transfers]:
        """The keys that are sent within hosts, and between hosts."""
        keys = joined(self.met(0, self.count)[1], self.hops(0, self.count))
        remote = self.ring.host(keys.source) != self.ring.host(keys.destination)
        return keys.some(~remote), keys.some(remote)

    @cached_property
    def tokens(self) -> tuple[Row, Row]:
        """The same as tokens that are received."""
        near, far = (self.summed(self.place(x), x.needed_at, x.tokens) for x in self.kinds)
        return near, far

    @cached_property
    def received(self) -> Row:
        return self.tokens[0] + self.tokens[1]

    @cached_property
    def moves_on(self) -> Row:
        """[step]: whether a phase begins, with blocks that others held before."""
        return np.isin(np.arange(self.count), self.first[1:])

    @cached_property
    def queries(self) -> Row:
        """Queries from the first to the last that sees some keys."""
        low, high = queries_seeing(*self.ring[:4], self.readers)
        reader, block, step, _ = self.met(0, self.count)[0]
        begin, end = np.full(self.pairs.shape, self.ring.queries.shard_len), np.zeros(self.pairs.shape, int)
        np.minimum.at(begin, (reader, step), low[reader, block])
        np.maximum.at(end, (reader, step), high[reader, block])
        return np.maximum(end - begin, 0)

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
        return self.summed(self.place(homes), homes.send_at - 1, homes.tokens)

    def sending(self, rows: Transfers) -> Row:
        """How many GPUs of a host send any of these for a step: of the hosts from which a reader receives, the most."""
        host = self.ring.host(rows.source)
        source, step = np.unique(np.array([rows.source, rows.needed_at]), axis=1)
        cells = self.ring.host(source) * self.count + step
        number = np.bincount(cells, minlength=1)[host * self.count + rows.needed_at] * self.ring.queries.ulysses
        most = np.ones(self.pairs.shape)
        np.maximum.at(most, (self.place(rows), rows.needed_at), number)
        return most


class OfTable(Steps):
    """Those of all ranks."""

    def __init__(self, ring: Ring, table: Table, pairs: Row):
        self.ring, self.readers, self.first, self.count = ring, np.arange(table.ring), table.first, table.count
        phase = table.phase(np.arange(table.count))
        self.taken = (np.arange(table.count) - table.first[phase] < table.busy[:, phase]).repeat(table.size, 0)
        reader, block = np.nonzero(table.when >= 0)
        cells = Cells(reader, block, table.when[reader, block], pairs[reader, block])
        reads, hops, homes = table.reads, table.hops, table.homes

        def within(steps: Row, begin: int, end: int) -> Row:
            return (begin <= steps) & (steps < end)

        self.met = lambda *span: (cells.some(within(cells.step, *span)), reads.some(within(reads.needed_at, *span)))
        self.hops = lambda *span: hops.some(within(hops.needed_at, *span))
        self.homes = lambda *span: homes.some(within(homes.send_at, *span))


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

    def met(self, begin: int, end: int) -> tuple[Cells, Transfers]:
        some = slice(*np.searchsorted(self.step, (begin, end)))
        away, before = (x[some] for x in self.columns)
        pairs = self.pairs_at[away * self.size + before]
        column, reader = np.nonzero(pairs)
        rank, before, step = self.readers[reader], before[column], self.step[some][column]
        source = rank // self.size * self.size + (rank - before) % self.size
        block = (source - away[column] * self.size) % self.ring.size
        reads = self.whole(*(x[before > 0] for x in (step - 1, step, source, rank, block)))
        return Cells(reader, block, step, pairs[column, reader].astype(float)), reads

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
