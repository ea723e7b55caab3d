"""Which rank sees which block at which step of a ring, and the transfers that this needs.

Block j holds the tokens of ring rank j. The ring lies on one or more hosts, with consecutive ranks and equally many on
each, and a rank's run has two loops:

    round    the block that a rank holds moves to the rank with the same place on another host. At distance o every
             rank holds a block whose home is o hosts back. A distance at which no rank sees anything is skipped by a
             longer hop; the tokens of a block that no later host sees stop travelling
    step     within a round the ranks of one host read the blocks that they hold from each other, several small ones
             per step. No transfer waits for another

On one host there is one round, and every block comes directly from its owner. With one rank per host there is one step
per round, and blocks are relayed from rank to rank. In backward, a block's holder sums its gradients; those of each
token move on with it, and go home from its last holder.

What ranks of one host read of a block is the ranges that they see, and only gradients of these return. What moves to
another host serves all ranks there and on the hosts behind it.

Plain numpy: print it, test it, no device needed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringattn.layout import Shard, count_below

Ranges = tuple[range, ...]  # of a block's local indices


@dataclass(frozen=True)
class Hop:
    """One rank's part in a rotation: which places among the tokens that it holds it sends, and where to others come."""

    shift: int
    out: Ranges
    into: Ranges

    @property
    def send(self) -> bool:
        return bool(self.out)

    @property
    def recv(self) -> bool:
        return bool(self.into)


class Places(NamedTuple):
    """Where the ranges of a block that are read lie among all keys of a step."""

    at: Ranges
    after: tuple[int, ...]  # how many tokens of other ranks the block's holder shows to others before these


class Only(NamedTuple):
    """Some queries of a rank: those that `see` any of these keys, or those that see none."""

    keys: Shard
    see: bool


class Sight(Protocol):
    """The keys that one ring rank's queries see."""

    def at(self, keys: Shard, only: Only | None = None) -> Any:
        """The intervals of these queries, by default all, among these keys; None if they see none."""


@dataclass(frozen=True, eq=False)
class Step:
    """One kernel call of a rank, and what travels for it. Gradients take the way of the blocks in reverse."""

    schedule: "Schedule" = field(repr=False)
    rank: int
    neighbours: int  # how many ranks its host has
    held: int  # the block of which this rank holds the ranges `kept` meanwhile
    kept: Ranges
    sources: tuple[int, ...]  # the blocks that are here: those that it sees a part of
    readers: tuple[int, ...] = ()  # the ranks that read, at the same step, the block that this rank holds
    company: tuple[tuple[int, ...], ...] = ()  # of each block that comes, all its readers, in the order of its holder
    heads: tuple[slice, slice] | None = None  # the query and the key heads that are computed; None: all
    only: Only | None = None  # the queries that are computed, if all of their keys are in this step; None: all queries
    own: Ranges = ()  # what lies among the keys that come of this rank's own block
    sight: Sight | None = field(default=None, repr=False)

    @cached_property
    def read(self) -> list[tuple[Shard, int]]:
        """The positions of each range of keys that is here, sorted, and of which block it is.

        What comes beside other blocks is cut where the ranges of its block end, so that parts never interleave.
        """
        positions, ranges = self.schedule.positions, self.schedule.ranges
        if not self.company:
            return [(positions(block, self.kept), block) for block in self.sources]
        pairs = [(s, r) for s in self.sources for r in ranges(self.rank, s)] + [(self.held, r) for r in self.own]
        read = [(positions(s, (r,)), s) for s, r in pairs]
        return sorted(read, key=lambda pair: pair[0][0].start)

    @cached_property
    def keys(self) -> Shard:
        """The positions of the keys that are here, which increase; those of stripes interleave."""
        keys = tuple(r for positions, _ in self.read for r in positions)
        assert all(a.stop <= b.start or a.step > 1 for a, b in pairwise(keys)), f"keys out of order: {self}"
        return keys

    @cached_property
    def length(self) -> int:
        return sum(map(len, self.keys))

    @cached_property
    def by_block(self) -> dict[int, Ranges]:
        """Where what is here of each block lies among the keys that are here."""
        at: dict[int, Ranges] = {}
        for (_, block), where in zip(self.read, places([positions for positions, _ in self.read]), strict=True):
            at[block] = (*at.get(block, ()), where)
        return at

    @cached_property
    def brought(self) -> dict[int, Places]:
        """By rank: where what this one reads of its block lies among the keys that are here."""
        by_reader, size = {}, self.neighbours
        for block, readers in zip(self.sources, self.company, strict=False):  # the held block has no company
            by_reader[self.rank // size * size + block % size] = Places(
                self.by_block.get(block, ()), self.schedule.before(self.rank, block, readers)
            )
        return by_reader

    @cached_property
    def shown(self) -> dict[int, Ranges]:
        """What other ranks read, at the same step, of the tokens that this rank holds."""
        return {reader: within(self.kept, self.schedule.ranges(reader, self.held)) for reader in self.readers}

    @cached_property
    def where(self) -> Any:
        """The queries' intervals among the keys that are here; None if they see none."""
        return self.sight.at(self.keys, self.only) if self.sight and self.sources else None


@dataclass(frozen=True, eq=False)
class Round:
    """The steps of one rank while it holds one block."""

    held: int  # the block
    kept: Ranges  # what is here of it: tokens stop travelling when no later host sees them
    steps: tuple[Step, ...]  # the first one is of the held block, but in backward perhaps the last, or both by halves
    hop: Hop | None  # of what goes on to the next holder, which starts before the steps
    home: Hop | None  # of finished gradients to their owners after the steps; the latter's places are in whole blocks


class Parts(NamedTuple):
    """What is seen of blocks, as ranges [begin, end) of their local indices, by cell: reader * ring + block."""

    cell: np.ndarray  # never decreasing
    begin: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class Schedule:
    """`needed[i, j]`: ring rank i sees some of block j, namely the `parts`, by default all of it."""

    needed: np.ndarray
    length: int = 1  # tokens of a block
    parts: Parts | None = None
    shards: Sequence[Shard] = ()  # the positions of every block
    asked: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # ranges that were asked for

    @property
    def ring(self) -> int:
        return len(self.needed)

    def ranges(self, reader: int, block: int) -> Ranges:
        """What a rank reads of a block: all that it sees, and up to a grain more at each end."""
        if self.parts is None:
            return (range(self.length),)
        if (reader, block) not in self.asked:
            at = reader * self.ring + block
            low, high = np.searchsorted(self.parts.cell, (at, at + 1))
            ends = zip(self.parts.begin[low:high].tolist(), self.parts.end[low:high].tolist(), strict=True)
            self.asked[reader, block] = tuple(range(a, b) for a, b in ends)
        return self.asked[reader, block]

    def positions(self, block: int, ranges: Ranges) -> Shard:
        """The positions of these ranges of a block."""
        shard = self.shards[block]
        if ranges == (range(self.length),):
            return shard
        if ("ends", block) not in self.asked:
            self.asked["ends", block] = [*accumulate(map(len, shard))]
        ends, positions = self.asked["ends", block], []
        for r in ranges:
            for i in range(bisect_right(ends, r.start), bisect_left(ends, r.stop) + 1):
                before = ends[i] - len(shard[i])
                positions.append(shard[i][max(0, r.start - before) : r.stop - before])
        return tuple(positions)

    def lasting(self, hosts: int, block: int) -> tuple[list[int], np.ndarray]:
        """Edges in a block, and the distance of the last host that sees the tokens between two of them."""
        if ("last", hosts, block) not in self.asked:
            some = self.parts or Parts(np.flatnonzero(self.needed), np.array([0]), np.array([self.length]))
            of = some.cell % self.ring == block
            begin, end = (np.broadcast_to(x, of.shape)[of] for x in some[1:])
            size = self.ring // hosts
            distance = (some.cell[of] // self.ring // size - block // size) % hosts
            edges = np.unique(np.concatenate([begin, end]))
            first, stop = np.searchsorted(edges, begin).tolist(), np.searchsorted(edges, end).tolist()
            last = np.zeros(max(0, len(edges) - 1), int)
            for i in np.argsort(distance, kind="stable").tolist():
                last[first[i] : stop[i]] = distance[i]
            self.asked["last", hosts, block] = edges.tolist(), last
        return self.asked["last", hosts, block]

    def kept(self, hosts: int, block: int, low: int, high: int | None = None) -> Ranges:
        """The tokens of a block whose last reader is on a host at distance `low` or more, and below `high`."""
        edges, last = self.lasting(hosts, block)
        some = (last >= low) if high is None else (last >= low) & (last < high)
        return joined([range(edges[i], edges[i + 1]) for i in np.flatnonzero(some).tolist()])

    def travelling(self, hosts: int) -> np.ndarray:
        """[distance, block]: how many tokens hosts at this distance or later ones see."""
        if hosts == 1:
            return np.zeros((1, self.ring), int)
        if ("travelling", hosts) not in self.asked:  # as `lasting`, of all blocks at once: in a row, with gaps between
            parts = self.parts or Parts(np.flatnonzero(self.needed), np.array([0]), np.array([self.length]))
            reader, block = np.divmod(parts.cell, self.ring)
            size, wide = self.ring // hosts, self.length + 1
            begin, end = block * wide + parts.begin, block * wide + parts.end
            edges = np.unique(np.concatenate([begin, end]))
            first, stop = np.searchsorted(edges, begin), np.searchsorted(edges, end)
            count = stop - first
            covered = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
            last = np.zeros(max(0, len(edges) - 1), int)
            np.maximum.at(last, covered, np.repeat((reader // size - block // size) % hosts, count))
            of = edges[:-1] // wide
            tokens = np.diff(edges) * (of == edges[1:] // wide)
            counts = np.bincount(last * self.ring + of, tokens, hosts * self.ring).reshape(hosts, self.ring)
            self.asked["travelling", hosts] = counts[::-1].cumsum(0)[::-1].astype(int)
        return self.asked["travelling", hosts]

    def tokens(self, reader: int, block: int) -> int:
        return int(self.read[reader, block])

    @cached_property
    def read(self) -> np.ndarray:
        """[reader, block]: how many tokens each rank reads of each block."""
        if self.parts is None:
            return self.needed * self.length
        cell, begin, end = self.parts
        return np.bincount(cell, end - begin, self.ring**2).astype(np.int64).reshape(self.ring, self.ring)

    @cached_property
    def arriving(self) -> int:
        """The most tokens that a rank reads of other ranks' blocks."""
        return int((self.read.sum(1) - self.read.diagonal()).max())

    def before(self, reader: int, block: int, company: Sequence[int]) -> tuple[int, ...]:
        """How many tokens each set of ranges has that the block's holder shows before the one of this reader."""
        sets = dict.fromkeys(self.ranges(r, block) for r in company)
        mine = self.ranges(reader, block)
        return tuple(sum(map(len, each)) for each in takewhile(lambda each: each != mine, sets))

    @cached_property
    def distances(self) -> list[int]:
        """0, and every distance d at which some rank sees the block of the rank d before it."""
        return met(by_distance(self.needed, self.ring))

    def brought(self, host: int, first: int, size: int) -> np.ndarray:
        """[distance, rank]: what the ranks of a host read of the blocks from `first` on, at each distance there."""
        here, place = self.read[host : host + size, first : first + size], np.arange(size)
        return here[place, (place - place[:, None]) % size]

    def rounds(self, rank: int, hosts: int = 1, together: int = 1, sight: Sight | None = None) -> tuple[Round, ...]:
        """All rounds of one ring rank; what a step brings has at most as many tokens as `together` blocks."""
        size = self.ring // hosts
        host, place = divmod(rank, size)
        distances, last = crossings(self, hosts)

        def held_at(o: int) -> int:
            return (host - o) % hosts * size + place

        rounds = []
        for o, following in zip(distances, [*distances[1:], None], strict=True):
            held, hop, home = held_at(o), None, None
            kept = self.kept(hosts, held, o) if o else (range(self.length),)
            if following is not None:
                come = sum(map(len, self.kept(hosts, held_at(following), following)))
                out = within(kept, self.kept(hosts, held, following))
                hop = Hop((following - o) * size, out, (range(come),) if come else ())
            if o and (last >= o).any():
                ended = [self.kept(hosts, block, o, following) for block in (held, rank)]
                home = Hop(-o * size, within(kept, ended[0]), ended[1])
            steps = self.steps(rank, (host - o) % hosts * size, size, kept, together, sight)
            rounds.append(Round(held, kept, steps, hop, home))
        return tuple(rounds)

    def steps(
        self, rank: int, first: int, size: int, kept: Ranges, together: int, sight: Sight | None
    ) -> tuple[Step, ...]:
        """The steps of one rank while the blocks [first, first + size) are on its host, the held block's step first.

        A distance within the host at which none of its ranks sees anything is skipped.
        """
        host, place = rank // size * size, rank % size
        here = self.needed[host : host + size, first : first + size]
        step = partial(Step, self, rank, size, first + place, kept, sight=sight)
        mine = [step((first + place,) if here[place, place] else ())]
        for now in steps(self, together, host, first, size):
            apart = np.array(now)

            def readers(block: int, apart: np.ndarray = apart) -> tuple[int, ...]:
                r = (block + apart) % size
                return tuple((host + r[here[r, block]]).tolist())

            sources = [s for d in now if here[place, s := (place - d) % size]]
            mine.append(step(tuple(first + s for s in sources), readers(place), tuple(map(readers, sources))))
        return tuple(mine)

    def tokens_sent(self, rank: int, hosts: int = 1) -> tuple[int, int]:
        """How many tokens a rank sends: of keys and values (forward, and again in backward), and of gradients."""
        rounds = self.rounds(rank, hosts)
        onward = sum(len(r) for round_ in rounds if round_.hop for r in round_.hop.out)
        read = sum(self.tokens(r, round_.held) for round_ in rounds for step in round_.steps for r in step.readers)
        brought = sum(self.tokens(rank, s) for round_ in rounds for step in round_.steps[1:] for s in step.sources)
        return onward + read, brought + sum(len(r) for round_ in rounds[1:] for r in round_.kept)


@lru_cache(maxsize=16)
def crossings(schedule: Schedule, hosts: int) -> tuple[list[int], np.ndarray]:
    """The distances between hosts at which something is seen, and for each block the last one."""
    seen = by_distance(schedule.needed.reshape(hosts, -1, schedule.ring).max(1), hosts)
    last = np.array([max(np.flatnonzero(column).tolist(), default=0) for column in seen.T])
    return met(seen), last


@lru_cache(maxsize=256)
def steps(schedule: Schedule, together: int, host: int, first: int, size: int) -> list[list[int]]:
    """The distances of the blocks that each step brings to the ranks of a host, after that of the held block."""
    needed = schedule.needed[host : host + size, first : first + size]
    read = schedule.brought(host, first, size)
    return list(growing(met(by_distance(needed, size))[1:], read, schedule.length, together))


def by_distance(needed: np.ndarray, size: int) -> np.ndarray:
    """[distance, block]: whether the host (or rank), one of `size`, at this distance from a block's home sees it."""
    d, j = np.mgrid[:size, : needed.shape[1]]
    return needed[(j // (needed.shape[1] // size) + d) % size, j]


def met(seen: np.ndarray) -> list[int]:
    """Distance 0, and every distance at which something is seen."""
    return [0, *(d for d in range(1, len(seen)) if seen[d].any())]


def growing(distances: Sequence[int], read: np.ndarray, block: int, together: int) -> Iterator[list[int]]:
    """The distances of each step, that of own blocks of `block` tokens left out; `read` [distance, rank] tokens come.

    To no rank more tokens come in a step than `together` blocks have, and more than three times as many as were there
    before it, so that compute can hide the transfer; of one distance all come.
    """
    now: list[int] = []
    coming = 0 * read[0]
    done = coming + block
    for d in distances:
        if now and (coming + read[d] > np.minimum(together * block, 3 * done)).any():
            yield now
            now, done, coming = [], done + coming, 0 * coming
        now.append(d)
        coming = coming + read[d]
    if now:
        yield now


def places(parts: Sequence[Shard]) -> Ranges:
    """Where the tokens of each part lie among all of them: one after the other, or stripes dealt out in turn."""
    if parts and parts[0][0].step > 1:
        shard = tuple(r for ranges in parts for r in ranges)
        first, second = (count_below(shard, np.array([r.start + i * r.step for r in shard])).tolist() for i in (0, 1))
        return tuple(range(a, a + len(r) * (b - a), b - a) for a, b, r in zip(first, second, shard, strict=True))
    ends = [0, *accumulate(sum(map(len, ranges)) for ranges in parts)]
    return tuple(map(range, ends, ends[1:]))


def within(kept: Ranges, ranges: Ranges) -> Ranges:
    """Where these ranges, each of which is in one of `kept`, lie among all tokens of `kept`."""
    among, before, i = [], 0, 0
    for r in ranges:
        while kept[i].stop < r.stop:
            before, i = before + len(kept[i]), i + 1
        at = before + r.start - kept[i].start
        among.append(range(at, at + len(r)))
    return tuple(among)


def joined(ranges: Sequence[range]) -> Ranges:
    """Ranges, of which those that touch are one."""
    joined: list[range] = []
    for r in ranges:
        joined.append(range(joined.pop().start, r.stop) if joined and joined[-1].stop == r.start and r.step == 1 else r)
    return tuple(joined)
