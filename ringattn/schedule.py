"""Which shards meet at which step of a ring, and which hops nobody needs.

Block j is the keys of ring rank j; at distance d, rank r meets block r - d. Three routes lead there:

    relay    blocks move to higher ranks from one to the next. A distance at which no rank sees anything is left out,
             and the hop across it is longer; a block that nobody further along will see is not sent on (`steps`)
    direct   every block goes from its owner to each rank that sees it, and gradients straight back: no hop waits for
             another, and several blocks may be brought for one step (`visits`)
    levels   for ranks on several hosts: each block goes from host to host once, to the rank of the same place, and from
             there direct to the others of the host (`rounds`)

Plain numpy: print it, test it, no device needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringattn.layout import Shard


@dataclass(frozen=True)
class Hop:
    """One rotation, as one rank takes part in it."""

    shift: int
    send: bool
    recv: bool


@dataclass(frozen=True)
class Step:
    """What one rank does at one distance, then how blocks and their gradients move on."""

    source: int  # whose keys are here
    here: bool  # whether they are: a block stops travelling when nobody further along sees it
    work: bool  # whether this rank's queries see any of them
    hop: Hop | None  # the keys' hop to the next step, which starts before this step's work
    home: Hop | None  # finished (dk, dv) going home after this step; None when nobody's do


@dataclass(frozen=True)
class Visit:
    """What one rank does at one step of the direct route. Gradients take the same ways back after it."""

    sources: tuple[int, ...]  # whose keys are here: those that its queries see any of
    readers: tuple[int, ...]  # who else has this rank's keys at the same step


@dataclass(frozen=True)
class Round:
    """What one rank does while the blocks of one host are on its host: it holds one of them, and visits the others."""

    held: int  # the block that this rank holds, and so gives to the others of its host
    visits: tuple[Visit, ...]
    hop: Hop | None  # the held block's hop to the next host, which starts before the visits


@dataclass(frozen=True, eq=False)
class Schedule:
    """`needed[i, j]`: the queries of ring rank i see keys of rank j. Everything else follows from it."""

    needed: np.ndarray

    @property
    def ring(self) -> int:
        return len(self.needed)

    @cached_property
    def by_distance(self) -> np.ndarray:
        """[distance, block]: whether the rank at that distance from the block's home sees it."""
        d, j = np.mgrid[: self.ring, : self.ring]
        return self.needed[(j + d) % self.ring, j]

    @cached_property
    def distances(self) -> list[int]:
        """The steps: distance 0, and every distance at which somebody sees something."""
        return [0, *(d for d in range(1, self.ring) if self.by_distance[d].any())]

    @cached_property
    def last(self) -> np.ndarray:
        """The distance at which each block is seen for the last time."""
        return np.array([max([0, *np.flatnonzero(seen)]) for seen in self.by_distance.T])

    def steps(self, rank: int) -> list[Step]:
        """The whole run of one ring rank."""
        steps = []
        for d, following in zip(self.distances, [*self.distances[1:], None], strict=True):
            source = (rank - d) % self.ring
            hop = None
            if following is not None:
                sends, receives = self.last[source] >= following, self.last[(rank - following) % self.ring] >= following
                hop = Hop(following - d, bool(sends), bool(receives))
            home = None
            if d and (self.last == d).any():
                home = Hop(-d, bool(self.last[source] == d), bool(self.last[rank] == d))
            here = bool(self.last[source] >= d)
            steps.append(Step(source, here, bool(self.needed[rank, source]), hop, home))
        return steps

    def visits(self, rank: int, together: int = 1) -> list[Visit]:
        """The whole run of one ring rank on the direct route, up to `together` blocks at a step.

        The first step needs what is at home.
        """
        visits = [Visit((rank,) if self.needed[rank, rank] else (), ())]
        for now in growing(self.distances[1:], together):
            sources, readers = [(rank - d) % self.ring for d in now], [(rank + d) % self.ring for d in now]
            visits.append(Visit(
                tuple(s for s in sources if self.needed[rank, s]), tuple(r for r in readers if self.needed[r, rank])
            ))  # fmt: skip
        return visits

    def rounds(self, rank: int, hosts: int, together: int = 1) -> list[Round]:
        """The whole run of one ring rank whose ring lies on so many hosts, one after the other."""
        size = self.ring // hosts
        host, place = divmod(rank, size)
        found = []
        for o in range(hosts):
            first = (host - o) % hosts * size  # the first of the blocks that are on this host now
            held = first + place
            visits = [Visit((held,) if self.needed[rank, held] else (), ())]
            for now in growing(range(1, size), together):
                sources = (first + (place - d) % size for d in now)
                readers = (host * size + (place + d) % size for d in now)
                visits.append(Visit(
                    tuple(s for s in sources if self.needed[rank, s]), tuple(r for r in readers if self.needed[r, held])
                ))  # fmt: skip
            hop = None
            if o + 1 < hosts:
                hop = Hop(size, self.wanted(held, o + 1, hosts), self.wanted((held - size) % self.ring, o + 1, hosts))
            found.append(Round(held, tuple(visits), hop))
        return found

    def wanted(self, block: int, start: int, hosts: int) -> bool:
        """Whether a rank of a host that is at least `start` hops away from a block's home sees the block."""
        size = self.ring // hosts
        away = [(block // size + o) % hosts * size for o in range(start, hosts)]
        return bool(any(self.needed[first : first + size, block].any() for first in away))

    def blocks_sent(self, rank: int, route: str = "relay") -> tuple[int, int]:
        """How many blocks a rank sends: of keys and values (forward, and again in backward), and of gradients."""
        if route == "direct":
            others = np.arange(self.ring) != rank
            return int(self.needed[others, rank].sum()), int(self.needed[rank, others].sum())
        steps = self.steps(rank)
        return sum(step.hop.send for step in steps if step.hop), sum(step.here for step in steps[1:])


def growing(distances: Sequence[int], together: int) -> Iterator[Sequence[int]]:
    """What each step brings: at most three times what has been worked on before, so that it can hide behind that."""
    done = 0
    while done < len(distances):
        now = distances[done : done + min(together, 3 * (done + 1))]
        done += len(now)
        yield now


def needed(begin: np.ndarray, end: np.ndarray, queries: Sequence[Shard], keys: Sequence[Shard]) -> np.ndarray:
    """[i, j]: whether some query of shard i sees a key of shard j; `begin`, `end` are [rows, T] for all positions.

    All shards are of one layout each.
    """
    blocks = [block for shard in keys for block in shard]
    found = [
        [sees(b[at], e[at], blocks) for b, e in zip(begin, end, strict=True) for at in slices(shard)]
        for shard in queries
    ]
    return np.any(found, axis=1).reshape(len(queries), len(keys), -1).any(axis=2)


def sees(begin: np.ndarray, end: np.ndarray, blocks: Sequence[range]) -> np.ndarray:
    """[block]: whether one of these rows, whose ends never decrease, sees one of its keys."""
    starts, step = np.array([block.start for block in blocks]), blocks[0].step
    if step == 1:
        first = np.searchsorted(end, starts, "right")
        last = np.searchsorted(begin, [block.stop for block in blocks], "left")
        some = np.cumsum(np.append(0, begin < end))
        return some[last] > some[first]
    at = begin % step  # stripes: each interval, or the first `step` of its keys, marks two laps of all stripes
    marks = np.bincount(at, minlength=2 * step + 1)
    marks -= np.bincount(at + np.minimum(end - begin, step), minlength=2 * step + 1)
    covered = marks.cumsum()
    return covered[starts] + covered[starts + step] > 0


def slices(shard: Shard) -> list[slice]:
    return [slice(r.start, r.stop, r.step) for r in shard]
