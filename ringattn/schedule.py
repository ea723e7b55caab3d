"""Which shards meet at which step of a ring, and which hops nobody needs.

Block j (the keys of ring rank j) starts at home and moves to higher ranks. At the step of distance d, rank r holds
block r - d. A distance at which no rank sees anything is left out, and the hop across it is longer; a block that
nobody further along will see is not sent on. Plain numpy: print it, test it, no device needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringattn.layout import Shard, count_below, to_local


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

    def blocks_sent(self, rank: int) -> tuple[int, int]:
        """How many blocks a rank sends: of keys and values (forward, and again in backward), and of gradients."""
        steps = self.steps(rank)
        return sum(step.hop.send for step in steps if step.hop), sum(step.here for step in steps[1:])


def needed(begin: np.ndarray, end: np.ndarray, queries: Sequence[Shard], keys: Sequence[Shard]) -> np.ndarray:
    """[i, j]: whether some query of shard i sees a key of shard j; `begin`, `end` are [rows, T] for all positions."""
    return np.array([[shard_sees(begin, end, shard, block) for block in keys] for shard in queries])


def shard_sees(begin: np.ndarray, end: np.ndarray, queries: Shard, keys: Shard) -> bool:
    return any(
        sees(b[at], e[at], block) for b, e in zip(begin, end, strict=True) for at in slices(queries) for block in keys
    )


def sees(begin: np.ndarray, end: np.ndarray, keys: range) -> bool:
    """Whether one of these rows, whose ends never decrease, sees one of the keys: two binary searches."""
    first, last = np.searchsorted(end, keys.start, "right"), np.searchsorted(begin, keys.stop, "left")
    b, e = begin[first:last], end[first:last]
    if keys.step == 1:
        return bool((b < e).any())
    wide = e - b >= keys.step  # such an interval holds one of every `step` positions
    return bool(wide.any() or (count_below((keys,), e) > count_below((keys,), b)).any())


def slices(shard: Shard) -> list[slice]:
    return [slice(r.start, r.stop, r.step) for r in shard]


def work(begin: np.ndarray, end: np.ndarray, queries: Shard, keys: Shard) -> int:
    """The number of (query, key) pairs of two shards that are seen: the work of their step."""
    local = (to_local(keys, begin[:, at], end[:, at]) for at in slices(queries))
    return sum(int(np.maximum(high - low, 0).sum()) for low, high in local)
