"""What the ranks of a ring do, step by step, for predictions: columns of its table in the order of steps, and folds.

Rings of more ranks than `EXACT` have no table. There blocks travel whole, and all hosts and phases have equal steps.
Predictions take some readers of such a ring; the simulator takes all of them, step by step.

Plain numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

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
    """What the steps of a ring follow from: where queries and keys are, how they meet, and on how many hosts."""

    queries: Layout
    keys: Layout
    spec: AttentionSpec
    docs: Docs | None
    hosts: int

    @property
    def size(self) -> int:
        return self.queries.ring


class Cells(NamedTuple):
    """Where readers meet blocks: in which step, and how many pairs of a query and a key they then see."""

    reader: Row  # the place among the readers
    block: Row
    step: Row
    pairs: Row


Rows = TypeVar("Rows", Cells, Transfers)


class OfTable:
    """The steps of all ranks. Each column is a function of the steps [begin, end) that are asked for."""

    def __init__(self, table: Table, pairs: Row):
        self.readers, self.first, self.count = np.arange(table.ring), table.first, table.count
        phase = table.phase(np.arange(table.count))
        taken = np.arange(table.count) - table.first[phase] < table.busy[:, phase]
        self.taken = taken.repeat(table.size, 0)  # [reader, step]: not the empty steps of its host
        reader, block = np.nonzero(table.when >= 0)
        self.cells = in_order(Cells(reader, block, table.when[reader, block], pairs[reader, block]), "step")
        self.reads, self.hops = (in_order(rows, "needed_at") for rows in (table.reads, table.hops))
        self.homes = in_order(table.homes, "send_at")

    def met(self, begin: int, end: int) -> tuple[Cells, Transfers]:
        """What is computed at these steps, and the reads that it needs."""
        return self.cells(begin, end), self.reads(begin, end)


def in_order(rows: Rows, name: str) -> Callable[[int, int], Rows]:
    """A function of begin and end: those rows whose column of this name has numbers in [begin, end)."""
    order, kind = np.argsort(getattr(rows, name), kind="stable"), type(rows)
    rows = kind(*(x[order] for x in rows))
    column = getattr(rows, name)

    def some(begin: int, end: int) -> Rows:
        at = slice(*np.searchsorted(column, (begin, end)))
        return kind(*(x[at] for x in rows))

    return some


class OfWholeBlocks:
    """The same of some readers of a large ring, whose blocks travel whole; rows are made when they are asked for.

    `pairs` [distance, reader] are those of the block that comes from so many hosts and ranks of a host before: the
    distance is hosts * ranks of a host + ranks.
    """

    def __init__(self, ring: int, hosts: int, length: int, readers: Row, pairs: Row, together: int):
        self.ring, self.length, self.readers, self.pairs = ring, length, readers, pairs
        self.size = size = ring // hosts
        met: Row = np.logical_or.reduce(pairs.reshape(hosts, size, -1), axis=0)  # [ranks before, reader]: in any phase
        self.distances = np.append(0, np.flatnonzero(pairs[size:].any(1).reshape(-1, size).any(1)) + 1)
        ranks = np.append(0, np.flatnonzero(met[1:].any(1)) + 1)
        within = grouped(lambda d: met[None, None, d] * length, size, length, together)[0, 0, ranks]
        busy, phases = int(within[-1]) + 1, len(self.distances)
        self.first, self.count = np.arange(phases) * busy, phases * busy
        self.columns = np.repeat(self.distances, len(ranks)), np.tile(ranks, phases)  # how many hosts and ranks before
        self.step = np.repeat(self.first, len(ranks)) + np.tile(within, phases)
        self.taken = np.broadcast_to(True, (len(readers), self.count))

    def met(self, begin: int, end: int) -> tuple[Cells, Transfers]:
        some = slice(*np.searchsorted(self.step, (begin, end)))
        away, before = (x[some] for x in self.columns)
        pairs = self.pairs[away * self.size + before]
        column, reader = np.nonzero(pairs)
        rank, before, step = self.readers[reader], before[column], self.step[some][column]
        source = rank // self.size * self.size + (rank - before) % self.size
        block = (source - away[column] * self.size) % self.ring
        reads = self.whole(*(x[before > 0] for x in (step - 1, step, source, rank, block)))
        return Cells(reader, block, step, pairs[column, reader].astype(float)), reads

    def hops(self, begin: int, end: int) -> Transfers:
        phases = np.arange(1, len(self.first))[slice(*np.searchsorted(self.first[1:], (begin, end)))]
        phase, rank = (x.ravel() for x in np.meshgrid(phases, self.readers, indexing="ij"))
        gaps = np.diff(self.distances, prepend=0)
        source, block = ((rank - hosts[phase] * self.size) % self.ring for hosts in (gaps, self.distances))
        return self.whole(self.first[phase - 1], self.first[phase], source, rank, block)

    def homes(self, begin: int, end: int) -> Transfers:
        rank = self.readers[: len(self.readers) * (begin <= self.count < end and len(self.first) > 1)]
        ends = 0 * rank + self.count
        return self.whole(ends, ends, (rank + self.distances[-1] * self.size) % self.ring, rank, rank)

    def whole(self, send_at: Row, needed_at: Row, source: Row, destination: Row, block: Row) -> Transfers:
        return Transfers(send_at, needed_at, source, destination, block, 0 * block, 0 * block + self.length)


Steps = OfTable | OfWholeBlocks


@lru_cache(maxsize=64)
def met(queries: Layout, keys: Layout, spec: AttentionSpec, docs: Docs | None) -> tuple[Row, Row, Reads | None]:
    """The readers; [reader, block]: the pairs that they see; and what they read of blocks, if they are all ranks."""
    if (ring := queries.ring) > EXACT:
        readers = np.unique(np.linspace(0, ring - 1, READERS).astype(int))
        return readers, seen_pairs(queries, keys, spec, docs, readers), None
    reads = seen(all_bands(spec, queries.length, keys.length, docs), shards(queries), shards(keys))
    return np.arange(ring), seen_pairs(queries, keys, spec, docs), reads


@lru_cache(maxsize=1)  # of a ring of 16,384 ranks a gigabyte
def pairs_at(ring: Ring) -> Row:
    """[distance, rank]: the pairs of every rank with the block at each distance."""
    pairs = np.empty((ring.size, ring.size), np.min_scalar_type(ring.queries.shard_len * ring.keys.shard_len))
    for some in np.array_split(np.arange(ring.size), -(-ring.size // COUNTED_AT_ONCE)):
        counts = seen_pairs(*ring[:4], some)
        pairs[:, some] = np.take_along_axis(counts, sources(some, ring.size, ring.hosts), 1).T
    return pairs


def steps_of(ring: Ring, together: int, everyone: bool = False) -> Steps:
    """The steps of all ranks, or of some readers of a large ring; `everyone`: of all of its ranks."""
    hosts = ring.hosts
    readers, pairs, reads = met(*ring[:4])
    if reads is not None:
        return OfTable(build(reads, hosts, together), pairs)
    if everyone:
        readers, pairs = np.arange(ring.size), pairs_at(ring)
    else:
        pairs = np.take_along_axis(pairs, sources(readers, ring.size, hosts), 1).T
    return OfWholeBlocks(ring.size, hosts, ring.keys.shard_len, readers, pairs, together)


def sources(readers: Row, ring: int, hosts: int) -> Row:
    """[reader, distance]: the blocks at every distance between hosts, and on a host."""
    size = ring // hosts
    away, before = (x.ravel() for x in np.mgrid[:hosts, :size])
    host, place = np.divmod(readers[:, None], size)
    host, place = host - away, place - before
    return (host + hosts * (host < 0)) * size + place + size * (place < 0)  # % is slower


@dataclass(frozen=True, eq=False)
class Course:
    """[reader, step]: the work of some ranks, and the tokens that must be there before it, on hosts of so many GPUs."""

    ring: Ring
    gpus: int
    steps: Steps

    @property
    def readers(self) -> Row:
        return self.steps.readers

    @property
    def first(self) -> Row:
        """[phase]: its first step."""
        return self.steps.first

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.readers), self.steps.count

    @cached_property
    def pairs(self) -> Row:
        reader, _, step, pairs = self.steps.met(0, self.steps.count)[0]
        return summed(reader, step, pairs, self.shape)

    @cached_property
    def kinds(self) -> tuple[Transfers, Transfers]:
        """The keys that are sent within hosts, and between hosts."""
        keys = joined(self.steps.met(0, self.steps.count)[1], self.steps.hops(0, self.steps.count))
        remote = self.host(keys.source) != self.host(keys.destination)
        return keys.some(~remote), keys.some(remote)

    def host(self, rank: Row) -> Row:
        return rank * self.ring.queries.ulysses // self.gpus

    @cached_property
    def tokens(self) -> tuple[Row, Row]:
        """The same as tokens [reader, step] that are received."""
        near, far = (summed(self.place(x), x.needed_at, x.tokens, self.shape) for x in self.kinds)
        return near, far

    def place(self, rows: Transfers) -> Row:
        """The place of each destination among the readers."""
        return np.searchsorted(self.readers, rows.destination)

    @cached_property
    def received(self) -> Row:
        return self.tokens[0] + self.tokens[1]

    @cached_property
    def hops(self) -> Row:
        """[step]: whether a phase begins, with blocks that others held before."""
        return np.isin(np.arange(self.steps.count), self.first[1:])

    @cached_property
    def queries(self) -> Row:
        """[reader, step]: queries from the first to the last that sees some keys."""
        low, high = queries_seeing(*self.ring[:4], self.readers)
        reader, block, step, _ = self.steps.met(0, self.steps.count)[0]
        begin, end = np.full(self.shape, self.ring.queries.shard_len), np.zeros(self.shape, int)
        np.minimum.at(begin, (reader, step), low[reader, block])
        np.maximum.at(end, (reader, step), high[reader, block])
        return np.maximum(end - begin, 0)

    @cached_property
    def sent(self) -> Row:
        """[reader, step]: tokens of the block that it holds which others of its host read; in large rings all alike."""
        if len(self.readers) < self.ring.size:
            return np.where(self.hops, 0, self.received)
        _, reads = self.steps.met(0, self.steps.count)
        return summed(reads.source, reads.needed_at, reads.tokens, self.shape)

    @cached_property
    def returned(self) -> Row:
        """[reader, phase]: tokens of its own block whose sums come home from those that held them last."""
        homes = self.steps.homes(0, self.steps.count + 1)
        phase = np.searchsorted(self.first, homes.send_at) - 1
        return summed(self.place(homes), phase, homes.tokens, (len(self.readers), len(self.first)))

    def sending(self, rows: Transfers) -> Row:
        """[row]: how many GPUs of its source's host send any of these for the same step."""
        host, ulysses = self.host(rows.source), self.ring.queries.ulysses
        source, step = np.unique(np.array([rows.source, rows.needed_at]), axis=1)
        shape = int(host.max(initial=0)) + 1, self.steps.count + 1
        return summed(self.host(source), step, 0 * step + ulysses, shape)[host, rows.needed_at]


def summed(row: Row, column: Row, amounts: Row, shape: tuple[Any, ...]) -> Row:
    """[row, column]: the sums of amounts."""
    return np.bincount(row * shape[1] + column, amounts, shape[0] * shape[1]).reshape(shape)


@lru_cache(maxsize=64)
def course(ring: Ring, gpus: int, together: int) -> Course:
    """What ranks do, on hosts of so many GPUs, if a step brings up to so many blocks."""
    return Course(ring, gpus, steps_of(ring, together))
