"""Which tokens a rank of the ring holds: contiguous, striped or zigzag, for any length.

A shard is a few Python ranges in increasing order, so its positions are sorted, and the local index of a global
position is a sum of clipped divisions: searchsorted without the array.

    contiguous   0 0 0 0 1 1 1 1      rank r holds one block
    striped      0 1 0 1 0 1 0 1      rank r holds every size-th token
    zigzag       0 0 1 1 1 1 0 0      rank r holds block r from the front and block r from the back
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np

LAYOUTS = ("contiguous", "striped", "zigzag")
Shard = tuple[range, ...]


@dataclass(frozen=True)
class Layout:
    """`length` tokens over the ring, padded at the end so that every shard has the same `shard_len`."""

    name: str
    length: int
    ring: int = 1
    multiple: int = 1  # each shard's length is a multiple of it: the Ulysses size

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ValueError(f"layout={self.name!r}: choose one of {', '.join(LAYOUTS)}")

    @property
    def padded_length(self) -> int:
        unit = self.ring * (lcm(2, self.multiple) if self.name == "zigzag" else self.multiple)
        return max(1, -(-self.length // unit)) * unit

    @property
    def shard_len(self) -> int:
        return self.padded_length // self.ring

    def shard(self, rank: int) -> Shard:
        """The global positions of one ring rank's tokens, as ranges; positions from `length` on are padding."""
        n, total = self.shard_len, self.padded_length
        if self.name == "striped":
            return (range(rank, total, self.ring),)
        if self.name == "contiguous" or self.ring == 1:
            return (range(rank * n, (rank + 1) * n),)
        half = n // 2
        return range(rank * half, (rank + 1) * half), range(total - (rank + 1) * half, total - rank * half)

    def positions(self, rank: int) -> np.ndarray:
        return np.concatenate([np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in self.shard(rank)])

    def order(self) -> np.ndarray:
        """The global positions of all shards, one rank after the other: `x[order]` is the sharded order of x."""
        return np.concatenate([self.positions(r) for r in range(self.ring)])


def sorted_positions(shard: Shard) -> np.ndarray:
    """The positions of a shard, whose ranges may interleave."""
    positions = np.concatenate([np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in shard])
    positions.sort(kind="stable")
    return positions


def count_below(shard: Shard, position: Any) -> Any:
    """How many of the shard's positions are below `position`: searchsorted(positions, position), in closed form.

    Works on numpy arrays, tensors and traced arrays.
    """
    counts = (position - r.start if r.step == 1 else (position - r.start + r.step - 1) // r.step for r in shard)
    return sum(count.clip(0, len(r)) for count, r in zip(counts, shard, strict=True))


def to_local(shard: Shard, begin: Any, end: Any) -> tuple[Any, Any]:
    """Each global interval [begin, end) as an interval of the shard's local indices."""
    return count_below(shard, begin), count_below(shard, end)
