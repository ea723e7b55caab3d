"""Which pairs of blocks have work, as the list of a kernel's grid steps.

A kernel's grid steps are the entries of this list, so pairs of blocks that see nothing of each other cost nothing. The
intervals may be traced, and may differ from device to device. An entry is one int32, read before the blocks are
fetched: the staying block (whose result is accumulated), the passing block, its kind and two flags.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringattn.kernels.intervals import Intervals

BITS = 13  # of a block's number
FIRST, LAST = 1, 2  # flags: the first and the last entry of a staying block
# The kind of a pair of blocks: no query sees any key; some do; no interval begins behind the first key, so that only
# ends cut; these ends are stairs; every query sees all keys.
NO_WORK, ANY_KEYS, ENDS, STAIRS, WHOLE = range(5)
FLAGS = 5  # bits of the kind and the flags
STEP = 256  # stairs: of each so many queries, none sees a key behind as many keys, and all see those before


class Ranges(NamedTuple):
    """For each block of queries, [rows, n]: the key blocks [first, last) it sees, and those it sees completely.

    `stairs` is the key block in which its ends may be stairs, -1 if in none: that on the diagonal of a causal mask.
    """

    first: Array
    last: Array
    whole_first: Array
    whole_last: Array
    stairs: Array

    @classmethod
    def of(cls, where: Intervals, block_q: int, block_k: int) -> "Ranges":
        """From intervals whose length is a multiple of block_q."""
        begin, end = (x.reshape(x.shape[0], -1, block_q) for x in (where.begin, where.end))
        some = begin < end
        first = jnp.where(some, begin, jnp.iinfo(jnp.int32).max).min(-1) // block_k
        last = (jnp.where(some, end, 0).max(-1) + block_k - 1) // block_k
        begun, whole = (begin.max(-1) + block_k - 1) // block_k, end.min(-1) // block_k
        return cls(jnp.minimum(first, last), last, begun, whole, stairs(end, block_k))

    def queries(self, key_blocks: int) -> tuple[Array, Array]:
        """For each block of keys, [rows, key_blocks]: the query blocks [first, last) that see it."""
        k, q = jnp.arange(key_blocks), jnp.arange(self.first.shape[1])
        seen = (self.first[..., None] <= k) & (k < self.last[..., None])  # [rows, queries, keys]
        first = jnp.where(seen, q[:, None], len(q)).min(1)
        last = jnp.where(seen, q[:, None] + 1, 0).max(1)
        return jnp.minimum(first, last), last


def stairs(end: Array, block_k: int) -> Array:
    """The key block of each block of queries, [rows, n], in which its ends, [rows, n, block_q], are stairs, or -1."""
    rows, n, block_q = end.shape
    if block_q != block_k or block_q % STEP or block_q == STEP:
        return jnp.full((rows, n), -1, jnp.int32)
    end, steps = end.reshape(rows, n, -1, STEP), STEP * jnp.arange(block_q // STEP)
    low, high = (end.min(-1) - steps).min(-1), (end.max(-1) - steps).max(-1) - STEP
    return jnp.where(high <= low // block_k * block_k, low // block_k, -1)


def listed(ranges: Ranges, key_blocks: int, queries_stay: bool) -> tuple[Array, Array]:
    """Entries [rows, most], of which the first `steps` run, and these; rows with fewer end in entries without flags.

    They are in order of staying blocks: of queries, which the key blocks they see pass, or of keys likewise. Each has
    at least one entry, so that its result is always written.
    """
    first, last = (ranges.first, ranges.last) if queries_stay else ranges.queries(key_blocks)
    passing_blocks = key_blocks if queries_stay else ranges.first.shape[1]
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

    nth = at - of(stops - counts, stay)
    passing = jnp.minimum(of(first, stay) + nth, passing_blocks - 1)
    q, k = (stay, passing) if queries_stay else (passing, stay)
    some = at < stops[:, -1:]
    work = some & (of(ranges.first, q) <= k) & (k < of(ranges.last, q))
    begun = of(ranges.whole_first, q) <= k
    kind = jnp.where(k < of(ranges.whole_last, q), WHOLE, jnp.where(of(ranges.stairs, q) == k, STAIRS, ENDS))
    kind = jnp.where(work, jnp.where(begun, kind, ANY_KEYS), NO_WORK)
    flags = ((nth == 0) * FIRST | (nth == of(counts, stay) - 1) * LAST) * some | kind << 2
    return (stay << (BITS + FLAGS) | passing << FLAGS | flags).astype(jnp.int32), stops[:, -1].max()


def staying(entry: Array) -> Array:
    return entry >> (BITS + FLAGS)


def passing(entry: Array) -> Array:
    return (entry >> FLAGS) & ((1 << BITS) - 1)


def kind_of(entry: Array) -> Array:
    return (entry >> 2) & 7
