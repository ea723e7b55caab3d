"""A mask as bands: runs of queries whose intervals of keys begin and end at a constant key, or rise with the query.

Whatever a mask is made from (a spec and documents, a tree, slices), it becomes bands, none of which overlap, in a few
families. In a family every query is in one band at most, and neither side of its interval decreases along the
sequence: kernels take families one after the other. Schedules, costs and layouts count on bands alone.

    causal           1 band            # . . .        window of 2      2 bands          # . . .
                                       # # . .                                          # # . .
                                       # # # .                                          . # # .
                                       # # # #                                          . . # #

Plain numpy: print it, test it, no device needed.
"""

from bisect import bisect, bisect_left, insort
from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.crossing import EMPTY, Row, between, common, continued, of_slices, within
from ringattn.masks.crossing import Bands as Bands
from ringattn.masks.crossing import joined as joined
from ringattn.masks.numeric import LONGEST
from ringattn.masks.packing import depths
from ringattn.masks.spec import AttentionSpec, Docs

Families = tuple[tuple[Bands, ...], ...]  # [family][row]


@lru_cache(maxsize=64)
def families(
    spec: AttentionSpec, seq_len: int, key_len: int | None = None, docs: Docs | None = None,
    key_docs: Docs | None = None, offset: int = 0,
) -> Families:  # fmt: skip
    """The families of a mask, for one row, or for every row of a batch.

    With `docs`, a query of document i sees document i of `key_docs` (the same documents unless the keys are another
    sequence), and the last query of a document is at the position of its last key. `offset` is the key position of
    query 0.
    """
    rows = every_row(spec, seq_len, key_len, docs, key_docs, offset)
    if docs is not None and (docs.parents is not None or docs.slices is not None):
        rows = [stacked(chained(bands)) for (bands,) in rows]
    most = max(map(len, rows))
    return tuple(zip(*(row + [EMPTY] * (most - len(row)) for row in rows), strict=True))


@lru_cache(maxsize=64)
def all_bands(spec: AttentionSpec, seq_len: int, *more: Any, **given: Any) -> Bands:
    """All bands of all families and rows, for the arguments of `families`, which this need not make."""
    return joined([bands for row in every_row(spec, seq_len, *more, **given) for bands in row])


def every_row(
    spec: AttentionSpec, seq_len: int, key_len: int | None = None, docs: Docs | None = None,
    key_docs: Docs | None = None, offset: int = 0,
) -> list[list[Bands]]:  # fmt: skip
    """[row][family] of documents; of trees and slices [row][0]: all bands, which are not families yet."""
    key_len = seq_len if key_len is None else key_len
    if docs is None:
        edges = np.array([0, seq_len])
        return [documents(spec, edges, np.array([0]), np.array([key_len]), np.array([offset]))]
    if docs.slices is not None:
        return [[continued(under(spec, of_slices(docs.slices[0]), seq_len))]]
    rows = []
    for i, starts in enumerate(docs.starts):
        if docs.parents is not None:
            rows.append([tree(spec, starts, docs.parents[i])])
            continue
        limits = starts if key_docs is None else key_docs.starts[i]
        shift = limits[1:] - starts[1:]
        spans = None if docs.spans is None else docs.spans[i]
        rows.append(documents(spec, starts, limits[:-1], limits[1:], shift, spans))
    return rows


def under(spec: AttentionSpec, bands: Bands, seq_len: int) -> Bands:
    """What bands of a mask see in the window and the chunks of a spec, or of its first keys, counted along the row.

    Whether a query sees keys after it is for the mask to say: a window that counts back takes away the keys before it.
    """
    left, right = spec.reach[0], None if spec.causal else spec.reach[1]
    if left is None and right is None and spec.chunk is None:
        return bands
    reach = tuple(LONGEST if n is None else n for n in (left, right))
    edges, begin, end = np.array([0, seq_len]), np.array([0]), np.array([seq_len])
    parts = []
    for near in documents(spec.replace(causal=False, window=reach), edges, begin, end, begin):
        low = np.searchsorted(near.stop, bands.start, "right")
        counts = np.maximum(np.searchsorted(near.start, bands.stop, "left") - low, 0)
        parts.append(
            common(
                bands.some(np.repeat(np.arange(len(low)), counts)), near.some(np.repeat(low, counts) + within(counts))
            )
        )
    return joined(parts)


def documents(
    spec: AttentionSpec, starts: Row, begin: Row, end: Row, shift: Row, spans: Row | None = None,
    marks: tuple[Row, Row] | None = None,
) -> list[Bands]:  # fmt: skip
    """The families of a row of documents: document i has the queries [starts[i], starts[i + 1]), which are at the
    positions p + shift[i] among its keys [begin[i], end[i]).

    At `marks` (documents, keys) bands are cut where a side of theirs passes the key.
    """
    edges = bends(spec, starts, begin, end, shift, spans, marks)
    first, last = edges[:-1], edges[1:] - 1
    i = np.searchsorted(starts, first, "right") - 1
    span = None
    if spans is not None and len(spans):
        j = np.searchsorted(spans[:, 0], first, "right") - 1
        inside = (j >= 0) & (first < spans[j, 1])
        span = np.where(inside, spans[j, 0], LONGEST), np.where(inside, spans[j, 1], 0)
    sides = [intervals(spec, p + shift[i], begin[i], end[i], span) for p in (first, last)]
    return [between(first, last + 1, *ends) for ends in zip(*sides, strict=True)]


def intervals(spec: AttentionSpec, own: Any, begin: Any, end: Any, span: Any = None) -> list[tuple[Any, Any]]:
    """The keys [begin, end) that a query sees, in any array library: the families of them, none of which overlap.

    `own` is the query's position among the keys, and its document has the keys [begin, end). `span`, (start, stop), is
    seen by the queries in it; the start lies behind, and the stop before, all queries that are in none. The queries of
    a document of the keys 2 to 7, causal with a window of 3; in chunks of 4; and of 2 beside the first key:

        keys    0 1 2 3 4 5 6 7 8     0 1 2 3 4 5 6 7 8     0 1 2 3 4 5 6 7 8
        own 2   . . # . . . . . .     . . # . . . . . .     . . # . . . . . .
        own 3   . . # # . . . . .     . . # # . . . . .     . . # # . . . . .
        own 4   . . # # # . . . .     . . # # # . . . .     . . + # # . . . .
        own 5   . . . # # # . . .     . . # # # # . . .     . . + . # # . . .
        own 6   . . . . # # # . .     . . . . . . # . .     . . + . . # # . .
        own 7   . . . . . # # # .     . . . . . . # # .     . . + . . . # # .

    In a family neither side decreases from a query to the next one. Where a query sees nothing, begin >= end.
    """
    most = 2 ** (8 * own.dtype.itemsize - 1) - 1  # of their integers; what is added to a position is cut to fit first
    first, last, (left, right) = begin, end, spec.reach
    if spec.chunk is not None:
        chunk = min(spec.chunk, most)
        begin = (first + (own.clip(first, None) - first) // chunk * chunk).clip(None, last)
        end = begin + (last - begin).clip(None, chunk)
    low, high, size = begin, end, end - begin
    if left is not None:
        low = begin + ((own - begin).clip(min(left, most), None) - min(left, most)).clip(None, size)
    if right is not None:
        high = end - ((end - 1 - own).clip(min(right, most), None) - min(right, most)).clip(None, size)
    if span is not None:
        low, high = low.clip(None, span[0]), high.clip(span[1], None)
    sides = [(low, high)]
    if spec.first:
        top = first + (last - first).clip(None, min(spec.first, most))
        sides.append((first, low.clip(None, top)))
        if not spec.causal:
            sides.append((high.clip(None, top), top))
    return sides


def bends(
    spec: AttentionSpec, starts: Row, begin: Row, end: Row, shift: Row, spans: Row | None, marks: Any
) -> Row:  # fmt: skip
    """The queries from which on some side of the intervals is constant, or rises, increasing; first 0, then the end."""
    left, right, chunk, many = (None if n is None else min(n, LONGEST) for n in (*spec.reach, spec.chunk, spec.first))
    cuts, low, high, i = [starts], starts[:-1], starts[1:], np.arange(len(begin))
    keys, stops = begin, end
    if chunk is not None:
        counts = np.maximum(-(-(end - begin) // chunk), 1)
        i = np.repeat(i, counts)
        keys = begin[i] + within(counts) * chunk
        stops = np.minimum(keys + chunk, end[i])
        low, high = np.maximum(low[i], keys - shift[i]), np.minimum(high[i], stops - shift[i])
        cuts.append(low)

    def pass_keys(lefts: list[Row], rights: list[Row], low: Row, high: Row, shift: Any) -> None:
        """Where the begin of an interval passes one of the first keys, or its end one of the others."""
        passing = [] if left is None else [keys + left - shift for keys in lefts]
        passing += [] if right is None else [keys - right - shift for keys in rights]
        cuts.extend(where[(low < where) & (where < high)] for where in passing)

    pass_keys([keys + 1], [keys, stops], low, high, shift[i])
    if many:
        top = np.minimum(begin + many, end)
        pass_keys([top], [top - 1], starts[:-1], starts[1:], shift)
    if marks is not None:
        at, key = marks
        pass_keys([key, key + 1], [key, key - 1], starts[at], starts[at + 1], shift[at])
    if spans is not None:
        cuts += list(spans.T)
        pass_keys([spans[:, 0]], [spans[:, 1]], spans[:, 0], spans[:, 1], 0)
    return np.unique(np.concatenate(cuts))


def tree(spec: AttentionSpec, starts: Row, parents: Row) -> Bands:
    """The bands of a row of segments: each is a document whose keys are all tokens of its branch."""
    depth, branches = depths(starts, parents), branches_of(starts, parents)
    counts = np.array([len(branch) for branch in branches])
    rows = np.array(list(chain.from_iterable(branches)), np.int64).reshape(-1, 3)  # of all branches
    marks = np.repeat(np.arange(len(branches)), counts), rows[:, 0]
    of_each = documents(spec, starts, 0 * depth, depth + np.diff(starts), depth - starts[:-1], None, marks)
    many = []
    for bands in of_each:
        i = np.searchsorted(starts, bands.start, "right") - 1
        first = bands.some(np.repeat(np.arange(len(i)), counts[i]))
        low, at, size = rows[within(counts[i]) + np.repeat((np.cumsum(counts) - counts)[i], counts[i])].T
        sides = (first.begin, first.end, first.last_begin, first.last_end)
        begin, end, last_begin, last_end = (x.clip(low, low + size) - low + at for x in sides)
        many.append(between(first.start, first.stop, (begin, end), (last_begin, last_end)))
    return continued(joined(many))


def branches_of(starts: Row, parents: Row) -> list[tuple[tuple[int, int, int], ...]]:
    """The tokens of each segment's branch, as pieces that follow one another: (depth, first token, tokens)."""
    branches: list[tuple[tuple[int, int, int], ...]] = []
    for parent, start, stop in zip(parents.tolist(), starts.tolist(), starts[1:].tolist(), strict=False):
        branch = branches[parent] if parent >= 0 else ()
        at, begin, size = branch[-1] if branch else (0, start, 0)
        if begin + size == start:
            branches.append((*branch[:-1], (at, begin, size + stop - start)))
        else:
            branches.append((*branch, (at + size, start, stop - start)))
    return branches


def chained(bands: Bands) -> Bands:
    """The same keys in bands of chains: a band's next begins where its keys end, and starts and stops no earlier.

    Those of a chain that a query sees are one interval of it, neither side of which decreases.
    """
    size = len(bands.start)
    lines = [2 * (side - slope * bands.start) + slope for side, slope in zip(bands[2:4], bands[4:], strict=True)]
    (begins, ends), queries = np.unique(lines, return_inverse=True)[1].reshape(2, size), np.unique(bands[:2])
    low, high = (np.searchsorted(queries, x) for x in bands[:2])
    order = np.lexsort((low, begins))
    keys = (begins * len(queries) + low)[order]
    following = np.append(order, 0)[np.searchsorted(keys, ends * len(queries) + low)]
    goes_on = (
        (begins[following] == ends) & (low <= low[following]) & (low[following] < high) & (high <= high[following])
    )
    if not goes_on.any():
        return bands
    which, heads = np.where(goes_on, following, -1).tolist(), np.ones(size, bool)
    heads[following[goes_on]] = False
    line, chain_of = [], []
    for number, at in enumerate(np.flatnonzero(heads).tolist()):
        while at >= 0:
            line.append(at)
            chain_of.append(number)
            at = which[at]
    own = np.array(chain_of) * len(queries)
    starts, stops = (own + x[line] for x in (low, high))
    edges = np.unique([starts, stops])
    first, last = np.searchsorted(stops, edges, "right"), np.searchsorted(starts, edges, "right") - 1
    some = np.flatnonzero(first <= last)
    start, stop = queries[edges[some] % len(queries)], queries[edges[some + 1] % len(queries)]
    a, b = (bands.some(np.array(line)[x[some]]) for x in (first, last))
    begin, end = a.begin + a.lean * (start - a.start), b.end + b.rise * (start - b.start)
    return continued(Bands(start, stop, begin, end, a.lean, b.rise))


def stacked(bands: Bands) -> list[Bands]:
    """Bands that do not overlap, as few families: each continues the one that reaches farthest of those that it may.

    Where a family stops and a band starts at the same query, no side may decrease. If there are queries between them,
    which see nothing, the band must begin behind all keys of the family. The keys of bands that stop at one query are
    apart, so their order is the same by begin and by end.
    """
    bands = bands.some(np.lexsort((bands.begin, bands.start)))
    busy: list[tuple[int, int]] = []  # a heap: where families stop
    free: list[tuple[int, int]] = []  # the last keys of those that have stopped, in order
    near: dict[int, list[tuple[int, int, int]]] = {}  # the last intervals of those that stop at a query, in order
    ends: list[tuple[int, int]] = []  # of each family
    which = []
    columns = (bands.start, bands.stop, bands.begin, bands.end, bands.last_begin, bands.last_end)
    for start, stop, begin, end, last_begin, last_end in zip(*(x.tolist() for x in columns), strict=True):
        while busy and busy[0][0] <= start:
            _, number = heappop(busy)
            insort(free, (ends[number][1], number))
        here = near.get(start, [])
        i = min(bisect(here, begin, key=itemgetter(0)), bisect(here, end, key=itemgetter(1))) - 1
        j = bisect(free, (begin, len(ends))) - 1
        if i >= 0 and (j < 0 or here[i][1] >= free[j][0]):
            *_, number = here.pop(i)
            del free[bisect_left(free, (ends[number][1], number))]
        elif j >= 0:
            _, number = free.pop(j)
        else:
            number = len(ends)
            ends.append((0, 0))
        ends[number] = last_begin, last_end
        heappush(busy, (stop, number))
        insort(near.setdefault(stop, []), (last_begin, last_end, number))
        which.append(number)
    at = np.array(which, np.int64)
    return [bands.some(at == number) for number in range(len(ends))] or [EMPTY]


class Runs(NamedTuple):
    """Queries at increasing positions, cut into runs: few numbers, from which the intervals of a family are made.

    Run i of a row has counts[i] queries; a query p of it sees the keys [begin + lean * p, end + rise * p).
    """

    positions: Row  # [T]
    counts: Row  # [rows, runs], like the following
    begin: Row
    end: Row
    lean: Row
    rise: Row

    @classmethod
    def of(cls, family: Sequence[Bands], positions: Row, below: Callable[[Row], Row]) -> "Runs":
        """The runs of queries at increasing positions, of which below(x) lie below x."""
        rows = [covered(row) for row in family]
        most = max(len(row.start) for row in rows)
        start, begin, end, lean, rise = (
            np.stack([np.pad(x, (0, most - len(x)), "edge") if len(x) < most else x for x in column])
            for column in zip(*((r.start, r.begin, r.end, r.lean, r.rise) for r in rows), strict=True)
        )
        counts = np.diff(below(start), append=len(positions))
        return cls(positions, counts, begin - lean * start, end - rise * start, lean, rise)

    def bounds(self) -> tuple[Row, Row]:
        """The keys [begin, end) that every query sees, [rows, T]."""
        sides = []
        for base, slope in ((self.begin, self.lean), (self.end, self.rise)):
            side = repeated(base, self.counts)
            sides.append(side + repeated(slope, self.counts) * self.positions if slope.any() else side)
        return sides[0], sides[1]


def covered(bands: Bands) -> Bands:
    """The bands of a family and row, and empty runs around them: each query from 0 on is in one, up to its next."""
    top = np.maximum.accumulate(bands.last_end) if len(bands.start) else bands.end
    zero = np.zeros(2 * len(top) + 1, np.int64)
    start, begin, end, lean, rise = (zero.copy() for _ in range(5))
    start[1::2], start[2::2] = bands.start, bands.stop
    begin[1::2], begin[2::2], end[1::2], end[2::2] = bands.begin, top, bands.end, top
    lean[1::2], rise[1::2] = bands.lean, bands.rise
    return Bands(start, start, begin, end, lean, rise)


def repeated(values: Row, counts: Row) -> Row:
    """[rows, runs] -> [rows, T]: each value repeated `counts` times; the counts of all rows have the same sum."""
    return np.repeat(values.ravel(), counts.ravel()).reshape(len(values), -1)


def bounds_at(family: Sequence[Bands], positions: Row) -> tuple[Row, Row]:
    """The keys [begin, end) that queries at these positions see, in any order, [rows, T]."""
    begins, ends = [], []
    for bands in map(covered, family):
        i = np.searchsorted(bands.start, positions, "right") - 1
        apart = positions - bands.start[i]
        begins.append(bands.begin[i] + bands.lean[i] * apart)
        ends.append(bands.end[i] + bands.rise[i] * apart)
    return np.stack(begins), np.stack(ends)


def bounds(
    spec: AttentionSpec, positions: Row, seq_len: int, key_len: int | None = None, docs: Docs | None = None,
    key_docs: Docs | None = None, offset: int = 0,
) -> tuple[Row, Row]:  # fmt: skip
    """The keys [begin, end) that queries at these positions see, as [1, T] or [rows, T] arrays, by a mask of one
    family. Positions from `seq_len` on are padding: they see nothing. Other arguments are as of `families`.
    """
    (family,) = families(spec, seq_len, key_len, docs, key_docs, offset)
    return bounds_at(family, np.asarray(positions, np.int64))


class Work(NamedTuple):
    """How many pairs of a query and a key there are, by query: from each edge on, one more or less a query."""

    edges: Row
    before: Row  # pairs of all queries before the edge
    here: Row  # keys that the query at the edge sees
    slope: Row

    @classmethod
    def of(cls, bands: Bands) -> "Work":
        grow = bands.rise - bands.lean
        width = bands.end - bands.begin
        at = np.concatenate([[0], bands.start, bands.stop])
        edges, which = np.unique(at, return_inverse=True)
        past = -width - grow * (bands.stop - bands.start)
        jump, bend = (
            np.bincount(which.ravel(), np.concatenate([[0], *x]), len(edges)).astype(np.int64)
            for x in ((width, past), (grow, -grow))
        )
        slope, length = np.cumsum(bend), np.diff(edges, append=edges[-1:])
        here = np.cumsum(jump + np.append(0, (slope * length)[:-1]))
        pairs = here * length + slope * (length * (length - 1) // 2)
        return cls(edges, np.cumsum(pairs) - pairs, here, slope)

    def below(self, position: Any) -> Any:
        """The pairs of all queries before these."""
        i = np.searchsorted(self.edges, position, "right") - 1
        n = position - self.edges[i]
        return self.before[i] + self.here[i] * n + self.slope[i] * (n * (n - 1) // 2)


@lru_cache(maxsize=64)
def work_of(spec: AttentionSpec, seq_len: int, *more: Any, **given: Any) -> Work:
    """The work of all rows together, for the arguments of `families`."""
    return Work.of(all_bands(spec, seq_len, *more, **given))
