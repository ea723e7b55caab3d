"""Which pairs of blocks have work, as the list of a kernel's grid steps.

A kernel's grid steps are the entries of this list, so pairs of blocks that see nothing of each other cost nothing. The
intervals may be traced, and may differ from device to device. An entry is one int32, read before the blocks are
fetched: the staying block (whose result is accumulated), the passing block, and five flags.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringattn.kernels.intervals import Intervals

BITS = 13  # of a block's number
# Flags: the first and the last entry of a staying block; some query of the pair sees some key, every query sees all;
# no query's interval begins behind the first key.
FIRST, LAST, WORK, WHOLE, BEGUN = 1, 2, 4, 8, 16
FLAGS = 5


class Ranges(NamedTuple):
    """For each block of queries, [rows, n]: the key blocks [first, last) it sees, and those it sees completely."""

    first: Array
    last: Array
    whole_first: Array
    whole_last: Array

    @classmethod
    def of(cls, where: Intervals, block_q: int, block_k: int) -> "Ranges":
        """From intervals whose length is a multiple of block_q."""
        begin, end = (x.reshape(x.shape[0], -1, block_q) for x in (where.begin, where.end))
        some = begin < end
        first = jnp.where(some, begin, jnp.iinfo(jnp.int32).max).min(-1) // block_k
        last = (jnp.where(some, end, 0).max(-1) + block_k - 1) // block_k
        return cls(jnp.minimum(first, last), last, (begin.max(-1) + block_k - 1) // block_k, end.min(-1) // block_k)

    def queries(self, key_blocks: int) -> tuple[Array, Array]:
        """For each block of keys, [rows, key_blocks]: the query blocks [first, last) that see it."""
        k, q = jnp.arange(key_blocks), jnp.arange(self.first.shape[1])
        seen = (self.first[..., None] <= k) & (k < self.last[..., None])  # [rows, queries, keys]
        first = jnp.where(seen, q[:, None], len(q)).min(1)
        last = jnp.where(seen, q[:, None] + 1, 0).max(1)
        return jnp.minimum(first, last), last


class Worklist(NamedTuple):
    """Entries [rows, most], of which the first `steps` run; rows with fewer entries end in entries without flags."""

    entries: Array
    steps: Array


def by_queries(ranges: Ranges, key_blocks: int) -> Worklist:
    """Query blocks stay, and the key blocks they see pass."""
    return listed(ranges, ranges.first, ranges.last, key_blocks, queries_stay=True)


def by_keys(ranges: Ranges, key_blocks: int) -> Worklist:
    """Key blocks stay, and the query blocks that see them pass."""
    return listed(ranges, *ranges.queries(key_blocks), ranges.first.shape[1], queries_stay=False)


def listed(ranges: Ranges, first: Array, last: Array, passing_blocks: int, queries_stay: bool) -> Worklist:
    """The list, in order of staying blocks. Each has at least one entry, so that its result is always written."""
    rows, n = first.shape
    if max(n, passing_blocks) > 1 << BITS:
        raise NotImplementedError(
            f"{max(n, passing_blocks)} blocks of tokens on one device, and at most {1 << BITS} are supported; "
            "use larger blocks or more devices"
        )
    counts = jnp.maximum(last - first, 1)
    stops = jnp.cumsum(counts, 1)
    at = jnp.broadcast_to(jnp.arange(n * passing_blocks, dtype=jnp.int32), (rows, n * passing_blocks))
    stay = jnp.minimum((stops[:, None, :] <= at[..., None]).sum(-1, dtype=jnp.int32), n - 1)

    def of(x: Array, i: Array) -> Array:
        return jnp.take_along_axis(x, i, 1)

    place = at - of(stops - counts, stay)
    passing = jnp.minimum(of(first, stay) + place, passing_blocks - 1)
    q, k = (stay, passing) if queries_stay else (passing, stay)
    listed = at < stops[:, -1:]
    work = listed & (of(ranges.first, q) <= k) & (k < of(ranges.last, q))
    begun = work & (of(ranges.whole_first, q) <= k)
    whole = begun & (k < of(ranges.whole_last, q))
    flags = ((place == 0) * FIRST | (place == of(counts, stay) - 1) * LAST) * listed
    flags = flags | work * WORK | whole * WHOLE | begun * BEGUN
    return Worklist((stay << (BITS + FLAGS) | passing << FLAGS | flags).astype(jnp.int32), stops[:, -1].max())


def staying(entry: Array) -> Array:
    return entry >> (BITS + FLAGS)


def passing(entry: Array) -> Array:
    return (entry >> FLAGS) & ((1 << BITS) - 1)
