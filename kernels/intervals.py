"""Which keys each query sees: the form in which kernels get a mask."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringattn.kernels.arrays import Array

FLIPPED = "flipped"


class Rectangle(NamedTuple):
    """A rectangle of queries and keys that a vendor kernel can run: all pairs, or the causal half of a square.

    `mask` says whether it is causal, and is FLIPPED for the half in which query t sees the keys from t on: the causal
    half of the square with both queries and keys in reverse order. Kernels that take more masks make it an object of
    their own.
    """

    queries: slice
    keys: slice
    mask: Any


class Sets(tuple):  # of tuples of rectangles
    """Compared and hashed by identity: constants of a program need a hash, and slices have none."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Choice(NamedTuple):
    """The rectangles of one program for all devices and steps: `sets[which]`, where `which` is traced."""

    sets: Sets
    which: Any


class Intervals(NamedTuple):
    """Query t of row b sees the keys [begin[b, t], end[b, t]): int32, [B or 1, T], both never decreasing along t.

    A row with begin >= end is empty.
    """

    begin: Array
    end: Array
    rectangles: tuple[Rectangle, ...] | None = None  # the same mask as a few rectangles, if possible
    host: Any = None  # (begin, end) as numpy arrays, if the host made them: planning must not read the device
    choice: Choice | None = None  # instead of `rectangles`, if one program serves all devices
    made: dict[Any, Any] | None = None  # a kernel's cache, for intervals that several calls share
    also: tuple["Intervals", ...] = ()  # further keys that the queries see, none of them twice: other families

    @property
    def families(self) -> "tuple[Intervals, ...]":
        """Each family alone: kernels take one."""
        return (self._replace(also=()), *self.also) if self.also else (self,)

    @property
    def are_rectangles(self) -> bool:
        return self.rectangles is not None and all(family.rectangles is not None for family in self.also)


def some(families: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Those (begin, end) that see something, at least one; ends on a device are not looked at."""
    seeing = [family for family in families if not isinstance(family[0], np.ndarray) or (family[0] < family[1]).any()]
    return seeing or list(families[:1])


def stack(families: Sequence[Intervals]) -> Intervals:
    first, *others = families
    return first._replace(also=tuple(others)) if others else first


def extent(where: Intervals) -> tuple[slice, slice]:
    """The queries and keys between the first and the last that see, or are seen, in any row; the host must know it."""
    begin, end = where.host
    real = begin < end
    live = np.flatnonzero(real.any(0))
    if not len(live):
        return slice(0, 0), slice(0, 0)
    return slice(int(live[0]), int(live[-1]) + 1), slice(int(begin[real].min()), int(end[real].max()))


def within(where: Intervals, queries: slice, first: int) -> Intervals:
    """The intervals of these queries, which see no key before `first`, counted from there."""
    if queries == slice(0, where.begin.shape[1]) and first == 0:
        return where
    begin, end, *host = ((x[:, queries] - first).clip(0) for x in (where.begin, where.end, *where.host))
    return Intervals(begin, end, host=tuple(host))


def rectangles_of(
    begin: np.ndarray, end: np.ndarray, most: int = 64, flips: bool = False
) -> tuple[Rectangle, ...] | None:
    """Host intervals [rows, T] as at most `most` rectangles that together cover exactly the same pairs, or None.

    A run of queries with equal begin and end is a full rectangle. A run whose end grows by one with each query is the
    causal half of a square, next to a full rectangle of the keys that all of them see. With `flips`, in the same way, a
    run whose begin grows ends in a flipped half, and a window, where both grow, is cut into runs with both halves. All
    batch rows must be equal.
    """
    if (begin != begin[:1]).any() or (end != end[:1]).any():
        return None
    first, last = begin[0].astype(np.int64), end[0].astype(np.int64)
    empty = first >= last
    first, last = np.where(empty, -1, first), np.where(empty, -1, last)
    low, high = np.diff(first), np.diff(last)
    even = ((high == 0) | (high == 1)) & ((low == 0) | ((low == 1) & flips))
    steps = np.append(np.where(even, high + 2 * low, -1), -1)  # 1: one more key at the end; 2: one less at the start
    turns = np.flatnonzero(np.diff(steps)) + 1
    if np.count_nonzero(~empty[turns]) > 2 * most + 1:
        return None
    rectangles: list[Rectangle] = []
    edges = turns.tolist()
    t, T = 0, len(first)
    while t < T:
        step = steps[t]
        stop = t + 1 if step < 0 else edges[bisect_right(edges, t)] + 1
        if step == 3:  # a window: as many queries as leave both halves room beside each other
            stop = min(stop, t + max(1, int(last[t] - first[t]) - 1))
        if not empty[t]:
            queries, n = slice(t, stop), stop - t
            grows, shrinks = n > 1 and step in (1, 3), n > 1 and step in (2, 3)
            start, square = int(first[t]), int(last[t]) - grows
            if shrinks:
                rectangles.append(Rectangle(queries, slice(start, start + n), FLIPPED))
            if start + n * shrinks < square:
                rectangles.append(Rectangle(queries, slice(start + n * shrinks, square), False))
            if grows:
                rectangles.append(Rectangle(queries, slice(square, square + n), True))
        if len(rectangles) > most:
            return None
        t = stop
    return tuple(rectangles)
