"""Which tokens a rank of the ring holds: contiguous, striped or zigzag, for any length.

A shard is a few Python ranges in increasing order, so its positions are sorted, and the local index of a global
position is a sum of clipped divisions: searchsorted without the array.

    contiguous   0 0 0 0 1 1 1 1      rank r holds one block
    striped      0 1 0 1 0 1 0 1      rank r holds every size-th token
    zigzag       0 0 1 1 1 1 0 0      rank r holds block r from the front and block r from the back

What is laid out so is the whole sequence, or each of its documents (`cut`).
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np

from ringattn.spec import Docs, raise_if

LAYOUTS = ("contiguous", "striped", "zigzag")
Shard = tuple[range, ...]
FEW = 4  # ranges: of more of them, which do not interleave, the one of a position is looked up


@dataclass(frozen=True)
class Layout:
    """`length` tokens over the ring, padded at the end so that every shard has the same `shard_len`.

    Each shard is cut contiguously among `multiple` Ulysses ranks. With `cut` each of these documents, and the padding
    after them, is laid out over all ranks, and what the Ulysses ranks of one ring rank hold is its shard.
    """

    name: str
    length: int
    ring: int = 1
    multiple: int = 1  # each shard's length is a multiple of it: the Ulysses size
    cut: Docs | None = None

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ValueError(f"layout={self.name!r}: choose one of {', '.join(LAYOUTS)}")
        if self.cut is not None:
            raise_if(self._cut_problem(self.cut))

    def _cut_problem(self, docs: Docs) -> str | None:
        """Why these documents cannot be cut over all ranks, if they cannot."""
        ranks = self.ring * self.multiple
        if self.name == "striped":
            return "layout='striped' deals out the tokens of every document as it is: use the plan without for_docs"
        if docs.length != self.length:
            return f"{docs}: the plan is for {self.length} tokens; make them the same"
        if docs.first is None:
            return f"{docs}: rows with other documents would lie on other ranks; put the rows one after the other"
        unit = 2 * ranks if self.name == "zigzag" and ranks > 1 else ranks
        if odd := [stop - start for start, stop in self.pieces if (stop - start) % unit]:
            return (
                f"a document of {odd[0]} tokens cannot be cut over {ranks} ranks in layout={self.name!r}: pad each "
                f"document (and what follows the last one) to a multiple of {unit} tokens"
            )
        return None

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """What is laid out: the whole sequence, or each document that has tokens, and the padding after them."""
        if self.cut is None:
            return [(0, self.padded_length)]
        edges = [*self.cut.starts[0].tolist(), self.length]
        return [(start, stop) for start, stop in pairwise(edges) if start < stop]

    @property
    def padded_length(self) -> int:
        if self.cut is not None:
            return self.length
        unit = self.ring * (lcm(2, self.multiple) if self.name == "zigzag" else self.multiple)
        return max(1, -(-self.length // unit)) * unit

    @property
    def shard_len(self) -> int:
        return self.padded_length // self.ring

    def shard(self, rank: int) -> Shard:
        """The global positions of one ring rank's tokens, as ranges; positions from `length` on are padding."""
        if self.name == "striped":
            return (range(rank, self.padded_length, self.ring),)
        if self.name == "contiguous" or self.ring == 1:
            blocks = [(start, (stop - start) // self.ring) for start, stop in self.pieces]
            return tuple(range(start + rank * n, start + (rank + 1) * n) for start, n in blocks)
        found: list[range] = []
        for start, stop in self.pieces:
            n = (stop - start) // (2 * self.ring)
            found += range(start + rank * n, start + (rank + 1) * n), range(stop - (rank + 1) * n, stop - rank * n)
        return tuple(found)

    def positions(self, rank: int) -> np.ndarray:
        return np.concatenate([np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in self.shard(rank)])

    def held(self, rank: int, inner: int) -> np.ndarray:
        """The global positions of what one Ulysses rank holds of a ring rank's shard, never decreasing."""
        if self.cut is not None:
            everyone = replace(self, ring=self.ring * self.multiple, multiple=1)
            return everyone.positions(rank * self.multiple + inner)
        n = self.shard_len // self.multiple
        return self.positions(rank)[inner * n : (inner + 1) * n]

    def order(self) -> np.ndarray:
        """The global positions of what all ranks hold, one after the other: `x[order]` is the sharded order of x."""
        if self.cut is None or self.multiple == 1:
            return np.concatenate([self.positions(r) for r in range(self.ring)])
        return np.concatenate([self.held(r, u) for r in range(self.ring) for u in range(self.multiple)])

    @property
    def shards(self) -> "Layout":
        """The layout of whole ring shards, whose tokens are in the order of their positions."""
        return self if self.cut is None else replace(self, multiple=1)

    def swapped(self, rank: int) -> np.ndarray | None:
        """Where each token of a ring rank's shard lies among those of its Ulysses ranks; None if just there."""
        if self.cut is None or self.multiple == 1:
            return None
        return np.argsort(np.concatenate([self.held(rank, u) for u in range(self.multiple)]))


def sorted_positions(shard: Shard) -> np.ndarray:
    """The positions of a shard, whose ranges may interleave."""
    positions = np.concatenate([np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in shard])
    positions.sort(kind="stable")
    return positions


def count_below(shard: Shard, position: Any) -> Any:
    """How many of the shard's positions are below `position`: searchsorted(positions, position), in closed form.

    Works on numpy arrays, tensors and traced arrays.
    """
    if len(shard) > FEW and shard[0].step == 1 and isinstance(position, np.ndarray):
        starts, lengths = (np.array([f(r) for r in shard]) for f in (lambda r: r.start, len))
        i = np.searchsorted(starts, position, "right") - 1
        here = (np.cumsum(lengths) - lengths)[i] + np.minimum(position - starts[i], lengths[i])
        return np.where(i < 0, 0, here)
    counts = (position - r.start if r.step == 1 else (position - r.start + r.step - 1) // r.step for r in shard)
    return sum(count.clip(0, len(r)) for count, r in zip(counts, shard, strict=True))


def to_local(shard: Shard, begin: Any, end: Any) -> tuple[Any, Any]:
    """Each global interval [begin, end) as an interval of the shard's local indices."""
    return count_below(shard, begin), count_below(shard, end)
