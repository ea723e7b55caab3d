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
    work, order = np.array([pairs(docs, spec) for docs in batches], float), np.arange(len(batches))
    lap, place = np.divmod(order, size)  # there and back, the longest first
    rank = np.empty_like(order)
    rank[np.argsort(-work, kind="stable")] = np.where(lap % 2, size - 1 - place, place)
    while True:  # exchange a sequence of the busiest rank for another, while the longer of both ranks is shorter then
        load = np.bincount(rank, work, size)
        busiest = int(load.argmax())
        moved = work[rank == busiest][:, None] - work  # [of the busiest, any]: the work that would move
        after = np.where(rank == busiest, np.inf, np.maximum(load[busiest] - moved, load[rank] + moved))
        i, j = divmod(int(after.argmin()), len(work))
        if after[i, j] >= load[busiest] * (1 - 1e-9):
            return [np.flatnonzero(rank == r).tolist() for r in range(size)]
        rank[np.flatnonzero(rank == busiest)[i]], rank[j] = rank[j], busiest


def pairs(docs: Docs | Sequence[int], spec: AttentionSpec) -> int:
    """The (query, key) pairs that are seen in all rows of these documents."""
    given = docs if isinstance(docs, Docs) else Docs.from_lengths(docs)
    return int(work_of(spec, given.length, docs=given).below(given.length))
