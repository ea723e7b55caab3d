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

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.crossing import EMPTY, Bands, between, common, continued, cut, joined, paired, runs
from ringattn.masks.numeric import MAX_SIZE, Row
from ringattn.masks.packing import depths
from ringattn.masks.slices import of_slices
from ringattn.masks.spec import AttentionSpec, Docs

Families = tuple[tuple[Bands, ...], ...]  # [family][row]


@lru_cache(maxsize=64)
def families(spec: AttentionSpec, seq_len: int, *more: Any, **given: Any) -> Families:
    """The families of a mask, for one row, or for every row of a batch; the arguments are those of `every_row`."""
    rows = every_row(True, spec, seq_len, *more, **given)
    most = max(map(len, rows))
    return tuple(zip(*(row + [EMPTY] * (most - len(row)) for row in rows), strict=True))


@lru_cache(maxsize=64)
def all_bands(spec: AttentionSpec, seq_len: int, *more: Any, **given: Any) -> Bands:
    """All bands of all families and rows, for the arguments of `every_row`."""
    return joined([bands for row in every_row(False, spec, seq_len, *more, **given) for bands in row])


def every_row(
    sort: bool, spec: AttentionSpec, seq_len: int, key_len: int | None = None, docs: Docs | None = None,
    key_docs: Docs | None = None, offset: int = 0,
) -> list[list[Bands]]:  # fmt: skip
    """[row][family].

    With `docs`, a query of document i sees document i of `key_docs` (the same documents unless the keys are another
    sequence), and the last query of a document is at the position of its last key. `offset` is the key position of
    query 0. Unless `sort`, the bands of trees and slices are not families yet.
    """
    if docs is None:
        begin, end = np.array([0]), np.array([seq_len if key_len is None else key_len])
        return [documents(spec, np.array([0, seq_len]), begin, end, np.array([offset]))]
    if docs.slices is not None or docs.parents is not None:
        if docs.parents is None:
            masks = [under(spec, of_slices(docs.slices[0]), seq_len)]
        else:
            masks = [tree(spec, *row) for row in zip(docs.starts, docs.parents, strict=True)]
        return [stacked(merged(continued(bands))) if sort else [continued(bands)] for bands in masks]
    rows = []
    for i, starts in enumerate(docs.starts):
        limits = starts if key_docs is None else key_docs.starts[i]
        spans = None if docs.spans is None else docs.spans[i]
        rows.append(documents(spec, starts, limits[:-1], limits[1:], limits[1:] - starts[1:], spans))
    return rows


def under(spec: AttentionSpec, bands: Bands, seq_len: int) -> Bands:
    """What bands of a mask see in the window and the chunks of a spec, or of its first keys, counted along the row.

    Whether a query sees keys after it is for the mask to say: a window that counts back takes away the keys before it.
    """
    left, right = spec.reach[0], None if spec.causal else spec.reach[1]
    reach = MAX_SIZE if left is None else left, MAX_SIZE if right is None else right
    begin, end = np.array([0]), np.array([seq_len])
    parts = []
    for near in documents(spec.replace(causal=False, window=reach), np.array([0, seq_len]), begin, end, begin):
        low = np.searchsorted(near.stop, bands.start, "right")
        which, other = paired(low, np.maximum(np.searchsorted(near.start, bands.stop, "left") - low, 0))
        parts.append(common(bands.some(which), near.some(other)))
    return joined(parts)


def documents(
    spec: AttentionSpec, starts: Row, begin: Row, end: Row, shift: Row, spans: Row | None = None
) -> list[Bands]:  # fmt: skip
    """The families of a row of documents: document i has the queries [starts[i], starts[i + 1]), which are at the
    positions p + shift[i] among its keys [begin[i], end[i]).

    Queries are cut where a document, a chunk or a span begins, and where a side of the intervals begins or ends to rise
    with the query, or to be empty.
    """
    left, right, chunk, first = [None if n is None else min(n, MAX_SIZE) for n in (*spec.reach, spec.chunk, spec.first)]
    edges = [starts] if spans is None else [starts, spans.ravel()]
    if chunk is not None:
        i, number = paired(0, -(-(end - begin) // chunk))
        at = begin[i] + number * chunk - shift[i]
        edges.append(at[(starts[i] < at) & (at < starts[i + 1])])
    at = np.unique(np.concatenate(edges))
    start, stop = at[:-1], at[1:]
    i = np.searchsorted(starts, start, "right") - 1
    begin, end, shift = begin[i], end[i], shift[i]
    low, high = begin, end  # of each chunk
    if chunk is not None:
        ((low, high),) = intervals(AttentionSpec(causal=False, chunk=chunk), start + shift, begin, end)
    top = [] if not first else [np.minimum(begin + first, end)]
    span: list[Row] = []
    if spans is not None and len(spans):
        j = np.searchsorted(spans[:, 0], start, "right") - 1
        inside = (j >= 0) & (start < spans[j, 1])
        span = [np.where(inside, spans[j, 0], MAX_SIZE), np.where(inside, spans[j, 1], 0)]
    places = [] if left is None else [key + left - shift for key in (low + 1, high, *top, *span[:1])]
    places += [] if right is None else [key - right - shift for key in (low, high, *(x - 1 for x in top), *span[1:])]
    start, stop, i = cut(start, stop, places)
    beside = tuple(x[i] for x in span) or None
    sides = [intervals(spec, p + shift[i], begin[i], end[i], beside) for p in (start, stop - 1)]
    return [between(start, stop, *ends) for ends in zip(*sides, strict=True)]


def intervals(spec: AttentionSpec, at: Any, begin: Any, end: Any, span: Any = None) -> list[tuple[Any, Any]]:
    """The keys [begin, end) that a query sees, in any array library: the families of them, none of which overlap.

    `at` is the query's position among the keys, and its document has the keys [begin, end). `span`, (start, stop), is
    seen by the queries in it; the start lies behind, and the stop before, all queries that are in none. The queries of
    a document of the keys 2 to 7, causal with a window of 3; in chunks of 4; and of 2 beside the first key:

        keys    0 1 2 3 4 5 6 7 8     0 1 2 3 4 5 6 7 8     0 1 2 3 4 5 6 7 8
        at  2   . . # . . . . . .     . . # . . . . . .     . . # . . . . . .
        at  3   . . # # . . . . .     . . # # . . . . .     . . # # . . . . .
        at  4   . . # # # . . . .     . . # # # . . . .     . . + # # . . . .
        at  5   . . . # # # . . .     . . # # # # . . .     . . + . # # . . .
        at  6   . . . . # # # . .     . . . . . . # . .     . . + . . # # . .
        at  7   . . . . . # # # .     . . . . . . # # .     . . + . . . # # .

    In a family neither side decreases from a query to the next one. Where a query sees nothing, begin >= end.
    """
    most = 2 ** (8 * at.dtype.itemsize - 1) - 1  # of their integers; what is added to a position is cut to fit first
    first, last, (left, right) = begin, end, spec.reach
    if spec.chunk is not None:
        chunk = min(spec.chunk, most)
        begin = (first + (at.clip(first, None) - first) // chunk * chunk).clip(None, last)
        end = begin + (last - begin).clip(None, chunk)
    low, high, size = begin, end, end - begin
    if left is not None:
        low = begin + ((at - begin).clip(min(left, most), None) - min(left, most)).clip(None, size)
    if right is not None:
        high = end - ((end - 1 - at).clip(min(right, most), None) - min(right, most)).clip(None, size)
    if span is not None:
        low, high = low.clip(None, span[0]), high.clip(span[1], None)
    sides = [(low, high)]
    if spec.first:
        top = first + (last - first).clip(None, min(spec.first, most))
        sides.append((first, low.clip(None, top)))
        if not spec.causal:
            sides.append((high.clip(None, top), top))
    return sides


def tree(spec: AttentionSpec, starts: Row, parents: Row) -> Bands:
    """The bands of a row of segments: each is a document whose keys are all tokens of its branch."""
    depth, branches = depths(starts, parents), branches_of(starts, parents)
    counts = np.array([len(branch) for branch in branches])
    pieces = np.array(list(chain.from_iterable(branches)), np.int64).reshape(-1, 3)  # of all branches
    bands = joined(documents(spec, starts, 0 * depth, depth + np.diff(starts), depth - starts[:-1]))
    i = np.searchsorted(starts, bands.start, "right") - 1
    which, piece = paired((np.cumsum(counts) - counts)[i], counts[i])
    bands, (low, at, size) = bands.some(which), pieces[piece].T
    seen = bands._replace(begin=bands.begin - low + at, end=bands.end - low + at)
    return common(seen, Bands(seen.start, seen.stop, at, at + size, 0 * at, 0 * at))


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


def merged(bands: Bands) -> Bands:
    """The same keys, of which those that follow one another for a query are one band."""
    edges = np.unique(bands[:2])
    low = np.searchsorted(edges, bands.start)
    which, at = paired(low, np.searchsorted(edges, bands.stop) - low)
    (begin, lean), (end, rise) = ((base[which] + slope[which] * edges[at], slope[which]) for base, slope in bands.sides)
    order = np.lexsort((begin, at))
    at, begin, end, lean, rise = (x[order] for x in (at, begin, end, lean, rise))
    first, last = runs((at[1:] == at[:-1]) & (begin[1:] == end[:-1]) & (lean[1:] == rise[:-1]), len(at))
    return continued(Bands(edges[at[first]], edges[at[first] + 1], begin[first], end[last], lean[first], rise[last]))


def stacked(bands: Bands) -> list[Bands]:
    """Bands that do not overlap, as few families: each continues the one that reaches farthest of those that it may.

    Where a family stops and a band starts at the same query, no side may decrease. If there are queries between them,
    which see nothing, the band must begin behind all keys of the family.
    """
    bands = bands.some(np.lexsort((bands.begin, bands.start)))
    reached: list[tuple[int, int, int]] = []  # by each family: the query where it stops, the keys of its last one
    which = []
    columns = (bands.start, bands.stop, bands.begin, bands.end, bands.last_begin, bands.last_end)
    for start, stop, begin, end, last_begin, last_end in zip(*(x.tolist() for x in columns), strict=True):
        best, number = -1, len(reached)
        for i, (until, low, high) in enumerate(reached):
            joins = until == start and low <= begin and high <= end
            if high > best and (joins or (until <= start and high <= begin)):
                best, number = high, i
        reached[number : number + 1] = [(stop, last_begin, last_end)]
        which.append(number)
    at = np.array(which, np.int64)
    return [bands.some(at == number) for number in range(len(reached))] or [EMPTY]


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
    start, begin, end, lean, rise = np.zeros((5, 2 * len(top) + 1), np.int64)
    start[1::2], start[2::2] = bands.start, bands.stop
    begin[1::2], begin[2::2], end[1::2], end[2::2] = bands.begin, top, bands.end, top
    lean[1::2], rise[1::2] = bands.lean, bands.rise
    return Bands(start, start, begin, end, lean, rise)


def repeated(values: Row, counts: Row) -> Row:
    """[rows, runs] -> [rows, T]: each value repeated `counts` times; the counts of all rows have the same sum."""
    return np.repeat(values.ravel(), counts.ravel()).reshape(len(values), -1)


def bounds_at(family: Sequence[Bands], positions: Any, xp: Any = np) -> tuple[Any, Any]:
    """The keys [begin, end) that queries at these positions see, in any order, [rows, T]; xp is numpy or jax.numpy."""
    rows = []
    for bands in map(covered, family):
        start, begin, end, lean, rise = [xp.asarray(x, positions.dtype) for x in (bands.start, *bands[2:])]
        i = xp.searchsorted(start, positions, side="right") - 1
        late = positions - start[i]
        rows.append((begin[i] + lean[i] * late, end[i] + rise[i] * late))
    begins, ends = zip(*rows, strict=True)
    return xp.stack(begins), xp.stack(ends)


class Work(NamedTuple):
    """How many pairs of a query and a key there are, by query: from each edge on, one more or less a query."""

    edges: Row
    before: Row  # pairs of all queries before the edge
    width: Row  # keys that the query at the edge sees
    slope: Row

    @classmethod
    def of(cls, bands: Bands) -> "Work":
        grow = bands.rise - bands.lean
        keys = bands.end - bands.begin
        at = np.concatenate([[0], bands.start, bands.stop])
        edges, which = np.unique(at, return_inverse=True)
        edges = edges.astype(float) if edges[-1] >= 2**31 else edges  # whose products would not fit in 64 bits
        past = -keys - grow * (bands.stop - bands.start)
        jump, bend = (
            np.bincount(which.ravel(), np.concatenate([[0], *x]), len(edges)).astype(np.int64)
            for x in ((keys, past), (grow, -grow))
        )
        slope, length = np.cumsum(bend), np.diff(edges, append=edges[-1:])
        width = np.cumsum(jump + np.append(0, (slope * length)[:-1]))
        pairs = width * length + slope * (length * (length - 1) // 2)
        return cls(edges, np.cumsum(pairs) - pairs, width, slope)

    def below(self, position: Any) -> Any:
        """The pairs of all queries before these."""
        i = np.searchsorted(self.edges, position, "right") - 1
        n = position - self.edges[i]
        return self.before[i] + self.width[i] * n + self.slope[i] * (n * (n - 1) // 2)


@lru_cache(maxsize=64)
def work_of(spec: AttentionSpec, seq_len: int, *more: Any, **given: Any) -> Work:
    """The work of all rows together, for the arguments of `every_row`."""
    return Work.of(all_bands(spec, seq_len, *more, **given))
