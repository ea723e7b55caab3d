"""Where documents lie on a rank: fragments of them, cut into rows of one length. Numpy, no tensors.

A fragment is what a segment holds of a document, at least one token. It is cut into rows of equally many tokens, the
last of which is filled up. So a row holds tokens of one document only, and to a kernel rows are a batch without
documents. A fragment begins with its document, or goes on from the segment before; it ends with its document, or goes
on in the next segment.

Documents are counted row by row of the batch, as many in each: document i of row b is number b * width + i.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringattn.planning import Plan
from ringattn.segments import order, segments
from ringattn.spec import Docs

BLOCK = 64  # tokens: what a kernel computes at once, and about what a row costs beside its tokens, for its map
LEVEL = 1024  # tokens: what a level costs on a GPU, where a launch waits for the level before; on a CPU nothing

Ints = np.ndarray


class Fragments(NamedTuple):
    """The fragments of a rank, those with more rows first; each field is [fragments]."""

    segment: Ints  # b * P + p: segment p of this rank, in row b of the batch
    document: Ints
    first: Ints  # the place of its first token in [B * T]
    tokens: Ints
    begins: Ints  # whether its document begins with it
    ends: Ints


class Cut(NamedTuple):
    """How fragments are cut: into rows of `length` tokens.

    `levels[i]` fragments have more than i rows. First come the first rows of all fragments, then the second rows, and
    so on: row i of fragment f is number sum(levels[:i]) + f.
    """

    length: int
    levels: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.levels)

    def row(self, fragment: Ints, i: Ints) -> Ints:
        """The number of row i of a fragment."""
        found: Ints = np.cumsum([0, *self.levels])[i] + fragment
        return found

    def rows_of(self, fragment: int) -> list[int]:
        """The numbers of all rows of a fragment."""
        return [sum(self.levels[:i]) + fragment for i, count in enumerate(self.levels) if fragment < count]


def fragments(plan: Plan, docs: Docs, batch: int, firsts: Ints, length: int) -> Fragments:
    """The fragments in this rank's segments, whose first tokens are at the positions `firsts` [P]."""
    starts = np.broadcast_to(docs.starts, (batch, docs.starts.shape[1]))[:, None]
    begin = np.maximum(starts[..., :-1], firsts[None, :, None])  # [B, P, documents of a row]
    end = np.minimum(starts[..., 1:], firsts[None, :, None] + length)
    b, p, i = np.nonzero(end > begin)
    begin, end, P = begin[b, p, i], end[b, p, i], len(firsts)
    found = Fragments(
        b * P + p, b * (starts.shape[-1] - 1) + i, (b * P + p) * length + begin - firsts[p], end - begin,
        starts[b, 0, i] == begin, starts[b, 0, i + 1] == end,
    )  # fmt: skip
    return found


def cut(found: Fragments, level: int = 0) -> tuple[Fragments, Cut]:
    """The fragments, those with more rows first, and the cut that costs least, if a level costs `level` tokens."""
    if not len(found.tokens):
        return found, Cut(1, (1,))  # kernels take at least one row; it stays empty
    length = row_length(found.tokens, level)
    rows = -(-found.tokens // length)
    falling = np.argsort(-rows, kind="stable")
    levels = tuple(int((rows > i).sum()) for i in range(rows.max()))
    return Fragments(*(x[falling] for x in found)), Cut(length, levels)


def row_length(tokens: Ints, level: int = 0) -> int:
    """The length of rows for fragments of so many tokens: long rows are filled up more, short ones are more maps, and
    more levels one after the other, each of which costs `level` tokens.

    Rows hold at most twice the tokens, and 128 more for each fragment.
    """
    longest = int(tokens.max())
    options = [longest]
    while BLOCK << len(options) - 1 < longest:
        options.append(BLOCK << len(options) - 1)

    def cost(length: int) -> tuple[bool, int]:
        rows = -(-tokens // length)
        count = int(rows.sum())
        too_many = count * length > 2 * (int(tokens.sum()) + BLOCK * len(tokens))
        return too_many, count * (-(-length // BLOCK) + 1) * BLOCK + int(rows.max()) * level

    return min(options, key=cost)


@lru_cache(maxsize=32)
def homes(plan: Plan, docs: Docs, batch: int) -> tuple[dict[tuple[int, int], Ints], Ints]:
    """(for each rank (ring, ulysses) the documents whose last token it holds, the documents without tokens)."""
    walk, length = order(plan), plan.local_len // segments(plan)
    starts = np.broadcast_to(docs.starts, (batch, docs.starts.shape[1]))
    last, empty = starts[:, 1:].ravel() - 1, (starts[:, 1:] == starts[:, :-1]).ravel()
    rank_of = np.array([r * plan.ulysses + u for r, u, _ in walk])
    where = np.where(empty, -1, rank_of[np.maximum(last, 0) // length])
    ranks = [(r, u) for r in range(plan.ring) for u in range(plan.ulysses)]
    return {rank: np.flatnonzero(where == i) for i, rank in enumerate(ranks)}, np.flatnonzero(empty)
