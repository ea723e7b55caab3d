"""Intervals as sequences: runs of queries with a range of keys each, all of one mask together.

    keys       a a a a b b b      a sequence's last query sees its last key. With a causal mask the one before
    queries 1  x x x              it sees one key less, and so on: here queries 1 and 2, and 3 and 4, which are
            2  x x x x            the ends of two documents, are sequences with keys a and b
            3          x x
            4          x x x

Libraries compute packed sequences in one call, and their queries may lie apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringattn.kernels.intervals import Intervals

SEQUENCES, MEAN_QUERIES = 16, 32  # more than SEQUENCES sequences must have MEAN_QUERIES queries each on average


class Sequences(NamedTuple):
    """`cells` [n, 4]: of each sequence the queries [start, stop) and the keys [start, stop), in the queries' order.

    Of these keys a query sees those up to its own, if the mask is `causal`, and of those the last `window` + 1.
    """

    cells: np.ndarray
    causal: bool
    window: int | None = None


def sequences_of(begin: np.ndarray, end: np.ndarray) -> tuple[Sequences, ...] | None:
    """The intervals [T] as sequences of one mask, or as two sequences of two masks; None if there were too many.

    >>> [x.cells.tolist() for x in sequences_of(np.array([0, 0, 4, 4, 9]), np.array([3, 4, 6, 7, 9]))]
    [[[0, 2, 0, 4], [2, 4, 4, 7]]]
    """
    live = begin < end
    both, low, high = live[1:] & live[:-1], np.diff(begin), np.diff(end)
    slides = both & (low == 1) & (high == 1) & (begin[1:] < end[:-1])
    grows = both & (low == 0) & (high == 1) | slides
    same = both & (low == 0) & (high == 0)
    mostly = bool(np.count_nonzero(grows) >= np.count_nonzero(same))
    turns = np.concatenate([[False], same[1:] & grows[:-1] | grows[1:] & same[:-1]])[: len(same)]
    joins = (same | grows) & ~turns  # a query and the one before it
    if np.count_nonzero(live) - np.count_nonzero(joins) > 2:
        joins = grows if mostly else same
    joins = np.concatenate([[False], joins, [False]])
    first, last = np.flatnonzero(live & ~joins[:-1]), np.flatnonzero(live & ~joins[1:])
    if len(first) > max(SEQUENCES, int(live.sum()) // MEAN_QUERIES):
        return None
    causal = np.where(first < last, np.append(grows, False)[first], mostly)
    cells, of_query = np.stack([first, last + 1, begin[first], end[last]], 1), np.repeat(causal, last + 1 - first)
    begin, end, start = begin[live], end[live], np.repeat(begin[first], last + 1 - first)
    groups = []
    for mask in sorted({*causal.tolist()}):
        at = of_query == mask
        window = int((end - begin)[at].max()) - 1 if mask and slides.any() else None
        if (begin[at] != (start if window is None else np.maximum(start, end - window - 1))[at]).any():
            return None
        groups.append(Sequences(cells[causal == mask], mask, window))
    return tuple(groups)


def unseen(steps: Sequence[Intervals], queries: slice) -> np.ndarray:
    """Which of these queries of a batch row see no key in any of the steps, counted from the first of them."""
    return np.flatnonzero(~np.any([np.less(*where.host)[0, queries] for where in steps], 0))
