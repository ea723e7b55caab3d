"""Which packed sequences of a global batch go to which data rank, so that data ranks finish together."""

from collections.abc import Sequence

import numpy as np

from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs, whole


def balance(
    batches: Sequence[Docs | Sequence[int]], ranks: int, spec: AttentionSpec | None = None
) -> list[list[int]]:  # fmt: skip
    """[rank]: the numbers of the sequences that a data rank takes, equally many and with nearly equal work.

    `batches` are the documents of each sequence of the global batch, or their lengths. A step takes as long as its
    slowest data rank, and the pairs that documents see differ by the square of their lengths; within a sequence
    layout="balanced" does the same for the ranks that share it. The mean over the tokens of all ranks stays the same.

    >>> balance([[8], [4, 4], [4, 4], [2, 2, 2, 2]], ranks=2)
    [[0, 3], [1, 2]]
    """
    size, spec = whole(ranks), AttentionSpec() if spec is None else spec
    if size is None or size < 1:
        raise ValueError(f"ranks={ranks!r}: the number of data ranks, at least 1")
    if not len(batches) or len(batches) % size:
        raise ValueError(f"{len(batches)} sequences for {size} data ranks: each takes equally many; give a multiple")
    work = np.array([pairs(docs, spec) for docs in batches], float)
    held: list[list[int]] = [[] for _ in range(size)]
    load = np.zeros(size)
    for i in np.argsort(-work, kind="stable").tolist():  # the longest first, to whoever has least and room
        rank = min((r for r in range(size) if len(held[r]) < len(batches) // size), key=lambda r: load[r])
        held[rank].append(i)
        load[rank] += work[i]
    while swapped(held, load, work):
        pass
    return [sorted(own) for own in held]


def pairs(docs: Docs | Sequence[int], spec: AttentionSpec) -> int:
    """The (query, key) pairs that are seen in all rows of these documents."""
    given = docs if isinstance(docs, Docs) else Docs.from_lengths(docs)
    return int(work_of(spec, given.length, docs=given).below(given.length))


def swapped(held: list[list[int]], load: np.ndarray, work: np.ndarray) -> bool:
    """Exchange a sequence of the busiest rank for a shorter one, if the longer of both ranks is shorter then."""
    high = int(load.argmax())
    best = (float(load[high]) * (1 - 1e-9), -1, -1, -1)
    for low in np.argsort(load)[:8].tolist():
        if low == high:
            continue
        more = work[held[high]][:, None] - work[held[low]]  # [of high, of low]: the work that would move
        after = np.maximum(load[high] - more, load[low] + more)
        at = divmod(int(after.argmin()), after.shape[1])
        best = min(best, (float(after[at]), int(low), *at))
    _, low, i, j = best
    if low < 0:
        return False
    moved = work[held[high][i]] - work[held[low][j]]
    held[high][i], held[low][j] = held[low][j], held[high][i]
    load[high] -= moved
    load[low] += moved
    return True
