"""What packed documents may have besides their starts: spans that see themselves whole, and parents, as arrays."""

from itertools import pairwise
from typing import Any

import numpy as np

from ringattn.masks.numeric import Row, plain, rows_of


def spans_in(starts: Row, counts: list[int], prefix: Any, spans: Any) -> Row | None:
    """The spans of each row, [rows, m, 2] in order; a prefix is one at the start of its document.

    `counts` is how many documents were given for each row. Rows with fewer spans end in empty ones.
    """
    by_row: list[list[list[int]]] = [[] for _ in starts]
    if prefix is not None:
        given = of_each_row("prefix", rows_of("prefix", prefix), len(starts))
        for row, lengths, edges, count in zip(by_row, given, starts.tolist(), counts, strict=True):
            if len(lengths) != count or (np.array(lengths) > np.diff(edges)[:count]).any():
                raise ValueError(f"prefix: for each of {count} documents give a number up to its length, got {lengths}")
            row += [[start, start + n] for n, start in zip(lengths, edges, strict=False) if n]
    if spans is not None:
        for row, pairs in zip(by_row, of_each_row("spans", pairs_of(spans), len(starts)), strict=True):
            row += pairs
    for row, edges in zip(by_row, starts, strict=True):
        row.sort()
        for start, stop in row:
            at = int(np.searchsorted(edges, start, "right"))
            if start >= stop or at >= len(edges) or stop > edges[at]:
                where = f"documents start and end at {edges.tolist()}"
                raise ValueError(f"spans: ({start}, {stop}) is no range of tokens within one document; {where}")
        if wrong := [pair for pair in pairwise(row) if pair[1][0] < pair[0][1]]:
            raise ValueError(f"spans overlap: {wrong[0][0]} and {wrong[0][1]}; join them, or make them shorter")
    most = max(map(len, by_row))
    if most == 0:
        return None
    return np.array([row + [[edges[-1]] * 2] * (most - len(row)) for row, edges in zip(by_row, starts, strict=True)])


def pairs_of(spans: Any) -> list[list[list[int]]]:
    """Pairs of whole numbers for each row, from those of one row or of all."""
    given = list(plain(spans))
    rows = [given] if not given or is_pair(given[0]) else given
    for row in rows:
        if not all(map(is_pair, row)):
            raise ValueError(f"spans: expected pairs (start, stop) of whole numbers, got {row}")
    return [rows_of("spans", row) if row else [] for row in rows]


def is_pair(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) == 2 and not any(isinstance(n, (list, tuple)) for n in x)


def of_each_row(name: str, given: list[Any], rows: int) -> list[Any]:
    if len(given) != rows:
        raise ValueError(f"{name} has {len(given)} rows, the documents have {rows}; give as many")
    return given


def parents_in(starts: Row, rows: list[list[int]]) -> Row:
    """The parents of the segments of each row, [rows, n]; rows with fewer segments end in empty ones without."""
    padded, count = [], starts.shape[1] - 1
    for row in of_each_row("parents", rows, len(starts)):
        if len(row) > count or (len(rows) == 1 and len(row) != count):
            raise ValueError(f"parents: {len(row)} numbers for {count} segments; give one for each")
        for i, parent in enumerate(row):
            if parent >= i:
                raise ValueError(f"parents are not a tree: segment {i} has parent {parent}, which must come before it")
        padded.append(row + [-1] * (count - len(row)))
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
