"""Which rank sees which block at which step of a ring, and the transfers that this needs.

Block j holds the tokens of ring rank j. The ring lies on one or more hosts, with consecutive ranks and equally many on
each, and a rank's run has two loops:

    round    the block that a rank holds moves to the rank with the same place on another host. At distance o every
             rank holds a block whose home is o hosts back. A distance at which no rank sees anything is skipped by a
             longer hop; a block that no later host sees stops travelling
    visit    within a round the ranks of one host read the blocks that they hold from each other, several small ones
             per visit. No transfer waits for another

On one host there is one round, and every block comes directly from its owner. With one rank per host there is one visit
per round, and blocks are relayed from rank to rank. In backward, a block's holder sums its gradients; they move on with
the block, and go home from its last holder.

Plain numpy: print it, test it, no device needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ringattn.layout import Shard, laps
from ringattn.spec import AttentionSpec, interval


@dataclass(frozen=True)
class Hop:
    """One rank's part in a rotation."""

    shift: int
    send: bool
    recv: bool


@dataclass(frozen=True)
class Visit:
    """The blocks that one rank works on at one step. Gradients take the way of the blocks in reverse."""

    sources: tuple[int, ...]  # the blocks that are here: those that it sees a part of
    readers: tuple[int, ...]  # the ranks that read, at the same step, the block that this rank holds


@dataclass(frozen=True)
class Round:
    """The steps of one rank while it holds one block."""

    held: int  # the block
    here: bool  # whether it is here: a block stops travelling when no later host sees it
    visits: tuple[Visit, ...]  # the first one is of the held block
    hop: Hop | None  # of the held block to its next holder, which starts before the visits
    home: Hop | None  # of finished gradients to their owners after the visits; None if none is finished


@dataclass(frozen=True, eq=False)
class Schedule:
    """`needed[i, j]`: ring rank i sees some of block j. Everything else follows from it."""

    needed: np.ndarray

    @property
    def ring(self) -> int:
        return len(self.needed)

    @property
    def turned(self) -> "Schedule":
        """The schedule in which queries travel and keys stay."""
        return Schedule(self.needed.T)

    @cached_property
    def distances(self) -> list[int]:
        """0, and every distance d at which some rank sees the block of the rank d before it."""
        return met(by_distance(self.needed, self.ring))

    def rounds(self, rank: int, hosts: int = 1, together: int = 1) -> list[Round]:
        """All rounds of one ring rank; a visit brings up to `together` blocks."""
        size = self.ring // hosts
        host, place = divmod(rank, size)
        distances, last = crossings(self, hosts)

        def held_at(o: int) -> int:
            return (host - o) % hosts * size + place

        found = []
        for o, following in zip(distances, [*distances[1:], None], strict=True):
            held, hop, home = held_at(o), None, None
            if following is not None:
                hop = Hop((following - o) * size, bool(last[held] >= following),
                          bool(last[held_at(following)] >= following))  # fmt: skip
            if o and (last == o).any():
                home = Hop(-o * size, bool(last[held] == o), bool(last[rank] == o))
            visits = self.visits(rank, (host - o) % hosts * size, size, together)
            found.append(Round(held, bool(last[held] >= o), visits, hop, home))
        return found

    def visits(self, rank: int, first: int, size: int, together: int) -> tuple[Visit, ...]:
        """The steps of one rank while the blocks [first, first + size) are on its host, the held block's step first.

        A distance within the host at which none of its ranks sees anything is skipped.
        """
        host, place = rank // size * size, rank % size
        here = self.needed[host : host + size, first : first + size]
        visits = [Visit((first + place,) if here[place, place] else (), ())]
        for now in growing(near(self, host, first, size), together):
            sources, readers = [(place - d) % size for d in now], [(place + d) % size for d in now]
            visits.append(Visit(
                tuple(first + s for s in sources if here[place, s]), tuple(host + r for r in readers if here[r, place])
            ))  # fmt: skip
        return tuple(visits)

    def blocks_sent(self, rank: int, hosts: int = 1) -> tuple[int, int]:
        """How many blocks a rank sends: of keys and values (forward, and again in backward), and of gradients."""
        rounds = self.rounds(rank, hosts)
        onward = sum(one.hop.send for one in rounds if one.hop)
        read = sum(len(visit.readers) for one in rounds for visit in one.visits)
        brought = sum(len(visit.sources) for one in rounds for visit in one.visits[1:])
        return onward + read, brought + sum(one.here for one in rounds[1:])


@lru_cache(maxsize=16)
def crossings(schedule: Schedule, hosts: int) -> tuple[list[int], np.ndarray]:
    """The distances between hosts at which something is seen, and for each block the last one."""
    seen = by_distance(schedule.needed.reshape(hosts, -1, schedule.ring).max(1), hosts)
    last = np.array([max(np.flatnonzero(column).tolist(), default=0) for column in seen.T])
    return met(seen), last


@lru_cache(maxsize=256)
def near(schedule: Schedule, host: int, first: int, size: int) -> list[int]:
    """The distances at which a rank of the host that begins at rank `host` sees one of the blocks from `first` on."""
    return met(by_distance(schedule.needed[host : host + size, first : first + size], size))[1:]


def by_distance(needed: np.ndarray, size: int) -> np.ndarray:
    """[distance, block]: whether the host (or rank), one of `size`, at this distance from a block's home sees it."""
    d, j = np.mgrid[:size, : needed.shape[1]]
    return needed[(j // (needed.shape[1] // size) + d) % size, j]


def met(seen: np.ndarray) -> list[int]:
    """Distance 0, and every distance at which something is seen."""
    return [0, *(d for d in range(1, len(seen)) if seen[d].any())]


def growing(distances: Sequence[int], together: int) -> Iterator[Sequence[int]]:
    """The distances of each step: at most three times as many as before it, so that compute can hide the transfer."""
    done = 0
    while done < len(distances):
        now = distances[done : done + min(together, 3 * (done + 1))]
        done += len(now)
        yield now


def needed(spec: AttentionSpec, pieces: np.ndarray, queries: Sequence[Shard], keys: Sequence[Shard]) -> np.ndarray:
    """[i, j]: whether some query of shard i sees a key of shard j.

    Each of the n `pieces` [4, n] is a document: queries [start, stop) and keys [start, stop), aligned at their ends. It
    is cut into runs of queries of one shard that together see one range of keys, to avoid work per token.
    """
    start, stop, begin, end = pieces
    shift = end - stop  # from a query's position to the same position among the keys
    if spec.causal:
        start = np.maximum(start, begin - shift)  # earlier ones see nothing
    owner, at, first, last = runs_of(queries, start, stop, spec.window)
    begin, end, shift = begin[at], end[at], shift[at]
    begin, end = interval(spec, first + shift, begin, end)[0], interval(spec, last + shift, begin, end)[1]
    some = begin < end
    return marked(owner[some], begin[some], end[some], keys)


def runs_of(shards: Sequence[Shard], start: np.ndarray, stop: np.ndarray, window: int | None) -> tuple[np.ndarray, ...]:
    """Each piece as one run in every range that it overlaps: (owner, piece, the run's first query, its last query).

    Windows that are shorter than the step of a range do not overlap: then its run is two, of one query each. The first
    query's window may begin before the document; all others' windows reach the same stripes as the second's.
    """
    ranges = sorted((r.start, r.stop, r.step, owner) for owner, shard in enumerate(shards) for r in shard)
    starts, stops, steps, owners = np.array(ranges).T
    low, high = np.searchsorted(stops, start, "right"), np.searchsorted(starts, stop, "left")
    counts = np.where(start < stop, high - low, 0)
    at = np.repeat(np.arange(len(start)), counts)
    which = np.arange(len(at)) - (np.cumsum(counts) - counts - low)[at]
    step, begun = steps[which], starts[which]
    first = np.maximum(start[at], begun)
    first += (begun - first) % step
    last = np.minimum(stop[at], stops[which]) - 1
    last -= (last - begun) % step
    owner = owners[which]
    if window is not None and window < steps[0]:
        owner, at, first, last = (np.concatenate([x, y]) for x, y in zip(
            (owner, at, first, np.minimum(first, last)), (owner, at, first + step, np.minimum(first + step, last)),
            strict=True,
        ))  # fmt: skip
    some = first <= last
    return owner[some], at[some], first[some], last[some]


def marked(owner: np.ndarray, begin: np.ndarray, end: np.ndarray, keys: Sequence[Shard]) -> np.ndarray:
    """[i, j]: whether one of the ranges [begin, end) of owner i has a key of shard j."""
    ring, (lap, starts, owners) = len(keys), laps(keys)
    blocks = len(owners)
    begin, last = begin % lap, begin % lap + np.minimum(end - begin, lap) - 1  # within two laps
    low, high = (x // lap * blocks + np.searchsorted(starts, x % lap, "right") - 1 for x in (begin, last))
    width = 2 * blocks + 1
    marks = np.bincount(owner * width + low, minlength=ring * width)
    marks -= np.bincount(owner * width + high + 1, minlength=ring * width)
    seen = np.any(marks.reshape(ring, width).cumsum(1)[:, :-1].reshape(ring, 2, blocks), axis=1)
    found = np.zeros((ring, ring), bool)
    by, block = np.nonzero(seen)
    found[by, owners[block]] = True
    return found
