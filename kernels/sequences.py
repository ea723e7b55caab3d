"""Intervals as sequences: runs of queries with a range of keys each, all under the same mask.

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

MANY, MEAN_QUERIES = 16, 32  # more than MANY sequences must have MEAN_QUERIES queries each on average


class Sequences(NamedTuple):
    """`cells` [n, 4]: of each sequence the queries [start, stop) and the keys [start, stop), in the queries' order.

    Of these keys a query sees those up to its own, if the mask is `causal`, and of those the last `window` + 1.
    """

    cells: np.ndarray
    causal: bool
    window: int | None = None


def sequences_of(begin: np.ndarray, end: np.ndarray) -> Sequences | None:
    """The intervals [T] as sequences of one mask, or None if they are too many to compute them fast.

    >>> sequences_of(np.array([0, 0, 4, 4, 9]), np.array([3, 4, 6, 7, 9])).cells.tolist()
    [[0, 2, 0, 4], [2, 4, 4, 7]]
    """
    live = begin < end
    both, low, high = live[1:] & live[:-1], np.diff(begin), np.diff(end)
    slides = both & (low == 1) & (high == 1) & (begin[1:] < end[:-1])
    grows = both & (low == 0) & (high == 1) | slides
    same = both & (low == 0) & (high == 0)
    causal = bool(np.count_nonzero(grows) >= np.count_nonzero(same))
    joins = np.concatenate([[False], grows if causal else same, [False]])  # a query and the one before it
    first, last = np.flatnonzero(live & ~joins[:-1]), np.flatnonzero(live & ~joins[1:])
    if len(first) > max(MANY, len(begin) // MEAN_QUERIES):
        return None
    window = int((end - begin)[live].max()) - 1 if causal and slides.any() else None
    start = np.repeat(begin[first], last + 1 - first)
    sees = start if window is None else np.maximum(start, end[live] - window - 1)
    if (begin[live] != sees).any():
        return None
    return Sequences(np.stack([first, last + 1, begin[first], end[last]], 1), causal, window)


def unseen(steps: Sequence[Intervals]) -> list[slice]:
    """The queries of a batch row that see no key in any of these steps."""
    live = np.any([np.less(*where.host)[0] for where in steps], 0)
    edges = np.flatnonzero(np.diff(live, prepend=True, append=True)).tolist()
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
