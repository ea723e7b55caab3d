"""Bands, the runs of queries of which every mask is made, and what two of them have in common.

Plain numpy: print it, test it, no device needed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.numeric import Row


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

    @property
    def sides(self) -> tuple[tuple[Row, Row], tuple[Row, Row]]:
        """Both sides of the intervals as lines: (base, slope) where query p is at base + slope * p."""
        return (self.begin - self.lean * self.start, self.lean), (self.end - self.rise * self.start, self.rise)

    def some(self, which: Any) -> "Bands":
        return Bands(*(x[which] for x in self))


def joined(many: Sequence[Bands]) -> Bands:
    """All of these bands, one after the other."""
    return Bands(*(np.concatenate(columns) for columns in zip(*many, strict=True))) if many else EMPTY


EMPTY = Bands(*[np.zeros(0, np.int64)] * 6)


def paired(first: Any, counts: Row) -> tuple[Row, Row]:
    """The pairs of each i with first[i], first[i] + 1, ..., counts[i] of them."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (first - np.cumsum(counts) + counts)[which]


def cut(start: Row, stop: Row, places: Sequence[Row]) -> tuple[Row, Row, Row]:
    """Each of the ranges [start, stop) cut at its places: the starts and stops of the pieces, and of which range."""
    edges = np.stack([start, *places, stop]).clip(start, np.maximum(start, stop))
    edges.sort(0)
    which, i = np.nonzero((edges[:-1] < edges[1:]).T)
    return edges[i, which], edges[i + 1, which], which


def between(start: Row, stop: Row, first: tuple[Row, Row], last: tuple[Row, Row]) -> Bands:
    """The bands from the intervals of their first and last queries; only those that see something."""
    lean, rise = ((b > a).astype(np.int64) for a, b in zip(first, last, strict=True))
    return Bands(start, stop, *first, lean, rise).some(first[0] < first[1])


def continued(bands: Bands) -> Bands:
    """The same bands, of which those that continue each other are one."""
    (begin, _), (end, _) = bands.sides
    order = np.lexsort((bands.start, begin, end, bands.lean, bands.rise))
    bands, *lines = bands.some(order), begin[order], end[order]
    same = [x[1:] == x[:-1] for x in (*lines, bands.lean, bands.rise)]
    goes_on = np.logical_and.reduce(same) & (bands.start[1:] == bands.stop[:-1])
    first, last = runs(goes_on, len(order))
    return bands.some(first)._replace(stop=bands.stop[last])


def runs(goes_on: np.ndarray, size: int) -> tuple[Row, Row]:
    """The first and the last of each run, where goes_on[i] says that i + 1 is in the run of i."""
    return np.flatnonzero(np.append(True, ~goes_on)[:size]), np.flatnonzero(np.append(~goes_on, True)[:size])


def common(a: Bands, b: Bands) -> Bands:
    """What both bands of each pair see, as bands: cut where another side is the nearer one, or the last key leaves."""
    start, stop = np.maximum(a.start, b.start), np.minimum(a.stop, b.stop)
    begins, ends = zip(a.sides, b.sides, strict=True)

    def meeting(x: Any, y: Any, late: Any) -> Row:
        """The query at which the lines x and y meet, or `late` queries after it."""
        slope = x[1] - y[1]
        return np.where(slope == 0, start, (y[0] - x[0]) * slope + late)

    # where an end meets a begin, the last query that sees a key is before it if the begin rises, the first one behind
    places = [meeting(*begins, 0), meeting(*ends, 1), *(meeting(ends[i], begins[1 - i], ends[i][1]) for i in (0, 1))]
    start, stop, which = cut(start, stop, places)

    def seen(p: Row) -> tuple[Row, Row]:
        begin, end = ([base[which] + slope[which] * p for base, slope in side] for side in (begins, ends))
        return np.maximum(*begin), np.minimum(*end)

    return between(start, stop, seen(start), seen(stop - 1))
