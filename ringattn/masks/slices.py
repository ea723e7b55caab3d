"""A mask that is given as slices of queries and keys, as MagiAttention takes them."""

from typing import Any

import numpy as np

from ringattn.masks.crossing import Bands, common
from ringattn.masks.numeric import plain, whole
from ringattn.masks.spec import Docs

KINDS = "full", "causal", "inverse", "both"
COMPARED = 256  # slices at once with all others


class Mask(Docs):
    """Which query sees which key, as slices; `from_slices` makes it. Masks compare by value, as documents do.

    `slices` is int64 [1, n, 5]: queries [start, stop), keys [start, stop), and the number of the kind.
    """

    @classmethod
    def from_slices(cls, q_ranges: Any, k_ranges: Any, kinds: Any, total: int) -> "Mask":
        """Slices of a sequence of `total` tokens: in slice i the queries of q_ranges[i] see keys of k_ranges[i].

        "full"     all of them
        "causal"   the last query sees all, each one before it one key less at the end
        "inverse"  the first query sees all, each one after it one key less at the beginning
        "both"     both: the first query sees the first keys, the last query the last ones

        No query may see a key by two slices. A query in no slice sees nothing. With a window, chunk or first of the
        spec it sees what both allow, counted along the whole row; causal is for the slices to say.

        >>> Mask.from_slices([(0, 4), (4, 6)], [(0, 4), (0, 2)], ["causal", "full"], total=6)
        Mask(2 slices, 6 tokens)
        """
        size = whole(total)
        if size is None or size < 1:
            raise ValueError(f"total={total!r}: the number of tokens, a whole number of at least 1")
        words = [kinds] * len(q_ranges) if isinstance(kinds, str) else list(kinds)
        if not len(q_ranges) == len(k_ranges) == len(words):
            raise ValueError(
                f"{len(q_ranges)} ranges of queries, {len(k_ranges)} of keys and {len(words)} kinds; give equally many"
            )
        if wrong := [kind for kind in words if kind not in KINDS]:
            raise ValueError(f"kinds: {wrong[0]!r}; choose one of {', '.join(KINDS)}")
        sides = [ranges("q_ranges", q_ranges, size), ranges("k_ranges", k_ranges, size)]
        number = np.array([KINDS.index(kind) for kind in words], np.int64)[:, None]
        slices = np.concatenate([*sides, number], 1)
        check_apart(slices)
        return cls(np.array([[0, size]]), size, slices=slices[None])


def ranges(name: str, given: Any, total: int) -> np.ndarray:
    """Pairs (start, stop) within `total`, [n, 2]."""
    pairs = np.asarray(plain(given) if len(given) else np.zeros((0, 2), int))
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected pairs (start, stop) of whole numbers, got {given!r}")
    start, stop = pairs.T
    wrong = np.flatnonzero((start < 0) | (start > stop) | (stop > total))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] = {tuple(pairs[wrong[0]].tolist())} is no range within total={total}")
    return pairs.astype(np.int64)


def of_slices(slices: np.ndarray) -> Bands:
    """Slices [n, 5] as bands: one each, without queries that see nothing."""
    start, stop, begin, end, kind = slices.T
    lean, rise = kind // 2, kind % 2
    whole = Bands(start, stop, begin, end, 0 * kind, 0 * kind)
    return common(whole, Bands(start, stop, begin, end - rise * (stop - 1 - start), lean, rise))


def check_apart(slices: np.ndarray) -> None:
    """Raise if a query sees a key by two slices: those whose queries and keys meet as rectangles are compared."""
    bands = of_slices(slices)
    bands = bands.some(np.argsort(bands.start, kind="stable"))
    number, end = np.arange(len(bands.start)), bands.last_end
    behind = np.searchsorted(bands.start, bands.stop)  # each band: the first that starts when it has stopped
    for i in range(0, len(number), COMPARED):
        some, later = number[i : i + COMPARED, None], number[i : behind[i : i + COMPARED].max()]
        share_keys = (bands.begin[later] < end[some]) & (bands.begin[some] < end[later])
        first, other = np.nonzero((some < later) & (later < behind[some]) & share_keys)
        twice = common(bands.some(first + i), bands.some(other + i))
        if len(twice.start):
            start, stop, begin, *_ = (int(x[0]) for x in twice)
            raise ValueError(f"slices overlap: queries {start} to {stop} see keys from {begin} on in two of them")
