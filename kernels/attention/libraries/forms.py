"""Which of a vendor's own masks the intervals of a step are: full, causal, a window, or packed documents.

Vendors run their own masks faster than a general one, since they need no lists of tiles and no mask function.
"""

from typing import NamedTuple

import numpy as np


class Form(NamedTuple):
    """A mask over the queries and keys of a rectangle, whose last query sees the last key.

    Query t of T sees the keys up to t + S - T of S if `causal`, and of these the last `window` + 1 if there is a
    window. With `starts` the rectangle is a row of documents, T equals S, and all of this is so within each document.
    """

    queries: slice
    keys: slice
    causal: bool = False
    window: int | None = None
    starts: tuple[int, ...] | None = None  # of the documents, and the end of the last one


def form_of(begin: np.ndarray, end: np.ndarray) -> Form | None:
    """The form of the intervals [T] that all batch rows share, or None. Empty rows lie before and after its queries.

    >>> form_of(np.array([0, 0, 1, 2]), np.array([1, 2, 3, 4]))
    Form(queries=slice(0, 4, None), keys=slice(0, 4, None), causal=True, window=1, starts=None)
    """
    live = np.flatnonzero(begin < end)
    if not len(live) or len(live) != live[-1] - live[0] + 1:
        return None
    queries = slice(int(live[0]), int(live[-1]) + 1)
    begin, end = (x[queries].astype(np.int64) for x in (begin, end))
    keys = slice(int(begin[0]), int(end[-1]))
    begin, end = begin - keys.start, end - keys.start
    T, S = queries.stop - queries.start, keys.stop - keys.start
    if begin[-1] == 0 and end[0] == S:
        return Form(queries, keys)
    last = np.arange(T) + S - T + 1
    if (end == last).all():
        if begin[-1] == 0:
            return Form(queries, keys, causal=True)
        window = int(S - begin[-1])
        if (begin == np.maximum(last - window, 0)).all():
            return Form(queries, keys, causal=True, window=window - 1)
    if T != S:
        return None
    at, causal = np.arange(T), bool((end == last).all())
    starts = np.flatnonzero(begin == at) if causal else np.concatenate([[0], np.flatnonzero(np.diff(begin)) + 1])
    lengths = np.diff(np.append(starts, T))
    first = np.repeat(starts, lengths)  # of each query's document
    if causal:
        within = None if (begin == first).all() else int((at - begin).max())
        if within is None or (begin == np.maximum(first, at - within)).all():
            return Form(queries, keys, True, within, (*starts.tolist(), T))
    elif (begin == first).all() and (end == np.repeat(starts + lengths, lengths)).all():
        return Form(queries, keys, starts=(*starts.tolist(), T))
    return None
