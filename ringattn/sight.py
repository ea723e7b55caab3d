"""Which keys the queries of one ring rank see, and which of these queries see keys of other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ringattn.kernels.intervals import Intervals, rectangles_of, some, stack
from ringattn.layout import Shard, to_local
from ringattn.mask import Mask

Sides = tuple[Any, Any]  # the keys [begin, end) that each query sees, [rows, queries], of one family


@dataclass(frozen=True, eq=False)
class Some:
    """Some of a rank's queries."""

    which: np.ndarray  # whether a query is one of them

    def of(self, seen: Sequence[Sides]) -> list[Sides]:
        """The intervals of these queries; all others are empty, at the end of the last one before them."""
        reach = [np.maximum.accumulate(np.where(self.which, end, 0), -1) for _, end in seen]
        return [
            (np.where(self.which, begin, at), np.where(self.which, end, at))
            for (begin, end), at in zip(seen, reach, strict=True)
        ]


class Split(NamedTuple):
    """A rank's queries in two sets."""

    near: Some  # those that see no keys of other ranks
    far: Some
    own: tuple[range, ...]  # this rank's keys that the second set sees, as local indices, each within one range
    pairs: tuple[int, int]  # of both sets, with this rank's keys


class Sight:
    """The keys that the queries of one ring rank see, on the host."""

    def __init__(self, mask: Mask, rank: int):
        self.mask, self.rank = mask, rank
        self.made: dict[tuple[Shard, Some | None], Any] = {}
        self.halves: dict[tuple[Shard, Shard], Split | None] = {}

    def at(self, keys: Shard, queries: Some | None = None) -> Any:
        """The intervals of these queries, by default of all, among these keys, made once; None if they see none."""
        if (keys, queries) not in self.made:
            self.made[keys, queries] = self.among(keys, self.seen if queries is None else queries.of(self.seen))
        return self.made[keys, queries]

    def split(self, own: Shard, others: Shard) -> Split | None:
        """The queries by whether they see some of the other keys; None if they cannot be told apart."""
        if (own, others) not in self.halves:
            self.halves[own, others] = split(self.seen, own, others)
        return self.halves[own, others]

    @cached_property
    def seen(self) -> Any:
        """Of each family, the keys [begin, end) that each query sees."""
        return self.mask.bounds(self.mask.plan.tokens.shard(self.rank))

    def among(self, keys: Shard, seen: Sequence[Sides]) -> Any:
        made = []
        for sides in some([to_local(keys, *sides) for sides in seen]):
            begin, end = (side.astype(np.int32) for side in sides)
            made.append(Intervals(begin, end, rectangles_of(begin, end) if len(begin) == 1 else None, (begin, end)))
        return stack(made)


def split(seen: Sequence[Sides], own: Shard, others: Shard) -> Split | None:
    """See `Sight.split`. The host must know the intervals, and in both sets they must rise, as kernels need them."""
    if not all(isinstance(begin, np.ndarray) for begin, _ in seen):
        return None
    here, there = ([to_local(keys, *sides) for sides in seen] for keys in (own, others))
    far = np.any([(begin < end).any(0) for begin, end in there], 0)
    sets = Some(~far), Some(far)
    if any((np.diff(begin) < 0).any() for one in sets for begin, _ in one.of(seen)):
        return None
    begin, end = (np.concatenate([sides[i][:, far].ravel() for sides in here]) for i in (0, 1))
    pairs = sum(np.maximum(end - begin, 0).sum(0) for begin, end in here)
    return Split(*sets, covered(begin, end, own), (int(pairs[~far].sum()), int(pairs[far].sum())))


def covered(begin: np.ndarray, end: np.ndarray, shard: Shard) -> tuple[range, ...]:
    """The local indices in any of these intervals, as ranges, none of which goes on into another range of the shard."""
    stops = list(accumulate(map(len, shard)))
    some = begin < end
    counts = [np.bincount(side[some], minlength=stops[-1] + 1) for side in (begin, end)]
    inside = np.cumsum(counts[0] - counts[1])[:-1] > 0
    edges = np.unique(np.concatenate([[0], np.flatnonzero(np.diff(inside)) + 1, stops])).tolist()
    return tuple(range(a, b) for a, b in pairwise(edges) if inside[a])
