"""How many queries and keys a block holds: as many as the vector memory takes, and no padding for its own sake."""

from typing import NamedTuple

from jax import Array

LANES = 128
MOST = {"q": 1024, "k": 1024}  # forward and backward compile with it on v4, v5e, v5p, v6e and v7x, head dims 64 to 256


class Blocks(NamedTuple):
    """Queries and keys a block, each a multiple of 128, and the vector memory a kernel may take (None: as is usual)."""

    q: int
    k: int
    vmem: int | None = None


def blocks_for(q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, blocks: Blocks | None) -> Blocks:
    """The given blocks, checked, or the largest that divide these lengths with little padding."""
    if blocks is None:
        return Blocks(divided(q_BTHD.shape[1], MOST["q"]), divided(k_BSGD.shape[1], MOST["k"]))
    for name, size in {"q": blocks.q, "k": blocks.k}.items():
        if size < LANES or size % LANES:
            raise ValueError(f"a block of {size} {'queries' if name == 'q' else 'keys'}: make it a multiple of {LANES}")
    return blocks


def divided(length: int, most: int) -> int:
    """The block of equal blocks of at most `most` that cover the length, rounded up to whole lanes.

    >>> divided(700, 512), divided(5, 512), divided(1024, 512)
    (384, 128, 512)
    """
    pieces = max(1, -(-length // most))
    return max(1, -(-length // (pieces * LANES))) * LANES
