"""Bands, the runs of queries of which every mask is made, and what two of them have in common.

Plain numpy: print it, test it, no device needed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.numeric import Row

KINDS = "full", "causal", "inverse", "both"  # of slices


class Bands(NamedTuple):
    """Query p of [start, stop) sees the keys [begin + lean * (p - start), end + rise * (p - start)), at least one.

    lean and rise are 0 or 1. All are arrays [n], by start in a family of one row.
    """

    start: Row
    stop: Row
    begin: Row
    end: Row
    lean: Row
    rise: Row

    @property
    def last_begin(self) -> Row:
        return self.begin + self.lean * (self.stop - 1 - self.start)

    @property
    def last_end(self) -> Row:
        return self.end + self.rise * (self.stop - 1 - self.start)

    def some(self, which: Any) -> "Bands":
        return Bands(*(x[which] for x in self))


def joined(many: Sequence[Bands]) -> Bands:
    """All of these bands, one after the other."""
    return Bands(*(np.concatenate(columns) for columns in zip(*many, strict=True))) if many else EMPTY


EMPTY = Bands(*[np.zeros(0, np.int64)] * 6)


def within(counts: Row) -> Row:
    """0, 1, ... counts[i] - 1 for each i, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def between(start: Row, stop: Row, first: tuple[Row, Row], last: tuple[Row, Row]) -> Bands:
    """The bands from the intervals of their first and last queries; only those that see something."""
    lean, rise = ((b > a).astype(np.int64) for a, b in zip(first, last, strict=True))
    return Bands(start, stop, *first, lean, rise).some(first[0] < first[1])


def continued(bands: Bands) -> Bands:
    """The same bands, of which those that continue each other are one."""
    base = bands.begin - bands.lean * bands.start, bands.end - bands.rise * bands.start
    order = np.lexsort((bands.start, *base, bands.lean, bands.rise))
    bands, base = bands.some(order), (base[0][order], base[1][order])
    same = [x[1:] == x[:-1] for x in (*base, bands.lean, bands.rise)]
    goes_on = np.logical_and.reduce(same) & (bands.start[1:] == bands.stop[:-1])
    ends = np.append(~goes_on, True)[: len(bands.start)]
    return bands.some(np.append(True, ~goes_on)[: len(bands.start)])._replace(stop=bands.stop[ends])


def of_slices(slices: np.ndarray) -> Bands:
    """Slices [n, 5] as bands: one each, without queries that see nothing."""
    start, stop, begin, end, kind = slices.T
    rise, lean = ((kind == 1) | (kind == 3)).astype(np.int64), (kind >= 2).astype(np.int64)
    size, late = end - begin, stop - start - (end - begin)  # how many more queries than keys
    width = np.where(rise > 0, size - (stop - start) + 1, size)  # keys of the first query
    first = np.where((rise > 0) & (lean == 0), np.maximum(start + late, start), start)
    last = np.where((lean > 0) & (rise == 0), np.minimum(stop, start + size), stop)
    width = width + rise * (first - start)
    bands = Bands(first, last, begin, begin + width, lean, rise)
    return bands.some((first < last) & (width > 0))


def common(a: Bands, b: Bands) -> Bands:
    """What both bands of each pair see, as bands: cut where another side is the nearer one, or the last key leaves."""
    first, stop = np.maximum(a.start, b.start), np.minimum(a.stop, b.stop)
    begins, ends = ([(x[i] - x[i + 2] * x.start, x[i + 2]) for x in (a, b)] for i in (2, 3))

    def after(x: Any, y: Any) -> Row:
        """The first query at which it changes whether line x is beyond line y."""
        gap, slope = x[0] - y[0], x[1] - y[1]
        return np.where(slope > 0, 1 - gap, np.where(slope < 0, gap, first))

    pairs = (begins, ends, (ends[0], begins[1]), (ends[1], begins[0]))
    cuts = np.stack([first, *(after(*lines) for lines in pairs), stop]).clip(first, np.maximum(first, stop))
    cuts.sort(0)
    start = cuts[:-1]
    begin, last_begin = (base + slope * start for base, slope in begins)
    end, last_end = (base + slope * start for base, slope in ends)
    lean, rise = np.where(begin > last_begin, a.lean, b.lean), np.where(end > last_end, b.rise, a.rise)
    pieces = Bands(start, cuts[1:], np.maximum(begin, last_begin), np.minimum(end, last_end), lean, rise)
    return Bands(*(x[(start < cuts[1:]) & (pieces.begin < pieces.end)] for x in pieces))


def overlap(a: Bands, b: Bands) -> np.ndarray:
    """Whether two bands have a pair in common: some query's later begin is before its earlier end.

    That gap is the least of four lines along the queries, so it is concave: an end of the queries, or a crossing.
    """
    first, last = np.maximum(a.start, b.start), np.minimum(a.stop, b.stop) - 1
    low, high = first, last
    for x in (a, b):
        for y in (a, b):
            # end of x at p: x.end + rise * (p - x.start) must be more than the begin of y at p
            gap = (x.end - x.rise * x.start) - (y.begin - y.lean * y.start)
            slope = x.rise - y.lean
            low = np.where(slope > 0, np.maximum(low, 1 - gap), low)
            high = np.where(slope < 0, np.minimum(high, gap - 1), high)
            high = np.where((slope == 0) & (gap <= 0), low - 1, high)
    return np.asarray(low <= high)
