"""What packed documents may have besides their starts: spans that see themselves whole, and parents, as arrays."""

from itertools import pairwise
from typing import Any

import numpy as np

from ringattn.masks.numeric import Row, are_counts, rows_of, untraced


def spans_in(starts: Row, counts: list[int], prefix: Any, spans: Any) -> Row | None:
    """The spans of each row, [rows, m, 2] in order; a prefix is one at the start of its document.

    `counts` is how many documents were given for each row. Rows with fewer spans end in empty ones.
    """
    by_row: list[list[tuple[int, int]]] = [[] for _ in starts]
    if prefix is not None:
        given = of_each_row("prefix", rows_of("prefix", prefix), len(starts))
        for row, *of_row in zip(by_row, given, starts, counts, strict=True):
            row += prefixes(*of_row)
    if spans is not None:
        for row, pairs, edges in zip(by_row, of_each_row("spans", pairs_of(spans), len(starts)), starts, strict=True):
            for start, stop in pairs:
                at = int(np.searchsorted(edges, start, "right"))
                if not 0 <= start < stop or at >= len(edges) or stop > edges[at]:
                    raise ValueError(
                        f"spans: ({start}, {stop}) is no range of tokens within one document; documents start at "
                        f"{edges[:-1].tolist()} and end at {int(edges[-1])}"
                    )
                row.append((start, stop))
    for row in by_row:
        row.sort()
        if wrong := [pair for pair in pairwise(row) if pair[1][0] < pair[0][1]]:
            raise ValueError(f"spans overlap: {wrong[0][0]} and {wrong[0][1]}; join them, or make them shorter")
    most = max(map(len, by_row))
    if most == 0:
        return None
    empty = [(int(edges[-1]), int(edges[-1])) for edges in starts]
    return np.array([row + [end] * (most - len(row)) for row, end in zip(by_row, empty, strict=True)], np.int64)


def prefixes(lengths: list[Any], edges: Row, count: int) -> list[tuple[int, int]]:
    """The prefixes of the documents of a row, as spans."""
    if not are_counts(lengths) or len(lengths) != count:
        raise ValueError(f"prefix: expected a whole number for each of {count} documents, got {lengths}")
    pairs = []
    for n, start, stop in zip(map(int, lengths), edges.tolist(), edges[1:].tolist(), strict=False):
        if n > stop - start:
            raise ValueError(f"prefix: {n} tokens of a document of {stop - start}; at most its length")
        if n:
            pairs.append((start, start + n))
    return pairs


def pairs_of(spans: Any) -> list[list[tuple[int, int]]]:
    """Pairs of whole numbers for each row, from those of one row or of all."""
    given = untraced(spans).tolist() if hasattr(spans, "tolist") else list(spans)
    rows = [given] if not given or is_pair(given[0]) else [list(row) for row in given]
    for row in rows:
        if not all(is_pair(pair) and are_counts(list(pair)) for pair in row):
            raise ValueError(f"spans: expected pairs (start, stop) of whole numbers, got {row}")
    return [[(int(start), int(stop)) for start, stop in row] for row in rows]


def is_pair(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == 2 and not any(isinstance(n, (list, tuple)) for n in x)


def of_each_row(name: str, given: list[Any], rows: int) -> list[Any]:
    if len(given) == rows:
        return given
    if len(given) == 1:
        return given * rows
    raise ValueError(f"{name} has {len(given)} rows, the documents have {rows}; give as many, or one for all")


def parents_in(starts: Row, rows: list[list[Any]]) -> Row:
    """The parents of the segments of each row, [rows, n]; rows with fewer segments end in empty ones without."""
    padded, count = [], starts.shape[1] - 1
    for row in of_each_row("parents", rows, len(starts)):
        if len(row) > count or (len(rows) == 1 and len(row) != count):
            raise ValueError(f"parents: {len(row)} numbers for {count} segments; give one for each")
        for i, parent in enumerate(row):
            if not are_counts([parent]) and parent != -1:
                raise ValueError(f"parents: {parent!r} of segment {i} is no number of a segment, nor -1 for none")
            if parent >= i:
                raise ValueError(
                    f"parents are not a tree: segment {i} has parent {int(parent)}, which does not come before it; "
                    "order segments so that each follows its parent"
                )
        padded.append([int(parent) for parent in row] + [-1] * (count - len(row)))
    return np.array(padded, np.int64)


def depths(starts: Row, parents: Row) -> Row:
    """How many tokens of ancestors come before each segment of one row."""
    before = np.zeros(len(parents), np.int64)
    lengths = np.diff(starts)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            before[i] = before[parent] + lengths[parent]
    return before


def branch_positions(starts: Row, parents: Row, length: int) -> Row:
    """The depth of each token of one row along its branch; padding repeats its own place."""
    at = np.arange(length)
    i = np.minimum(np.searchsorted(starts, at, "right") - 1, len(parents) - 1)
    return np.where(at < starts[-1], at - starts[i] + depths(starts, parents)[i], at)
