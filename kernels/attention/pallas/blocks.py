"""How many queries and keys a block holds: the most that fit into vector memory, with little padding."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

LANES = 128
MIB = 2**20

# The vector memory that one kernel may use, by generation (its number, and 1 for the larger chip of that number): half
# of what a core has, or the compiler's default of 16 MiB.
VMEM: dict[Any, int] = {(4, 0): 16 * MIB, (5, 0): 64 * MIB, (5, 1): 32 * MIB, (6, 0): 64 * MIB, (7, 0): 32 * MIB}
DEFAULT = 16 * MIB
SIZES = ((1024, 1024), (1024, 512), (512, 512), (512, 256), (256, 256), (128, 128))


class Blocks(NamedTuple):
    """Queries and keys of a block, each a multiple of 128, and the compiler's limit of vector memory."""

    q: int
    k: int
    vmem: int = DEFAULT


class Shape(NamedTuple):
    """What the memory of a tile depends on, besides its size."""

    head_dim: int
    value_dim: int
    itemsize: int
    resident: int = 0  # bytes of a number of dk and dv, if those of a whole key head stay in memory

    @classmethod
    def of(cls, q: Array, v: Array, resident: int = 0) -> "Shape":
        return cls(q.shape[3], v.shape[3], q.dtype.itemsize, resident)


def needs(q: int, k: int, shape: Shape, keys: int) -> int:
    """About how many bytes a backward kernel, which needs the most, takes: tiles, double buffers and accumulators.

    Compiled kernels were found to take six bytes a pair of a tile for each byte of the dtype.
    """
    width, size = shape.head_dim + shape.value_dim, shape.itemsize
    sums = shape.resident * width * (keys + -keys % k) + 20 * shape.head_dim * q if shape.resident else 12 * width * k
    return 6 * size * q * k + 2 * size * width * (q + k) + sums + 256 * q


def fits(shape: Shape, keys: int, arch: tuple[int, int] | None, given: Blocks | None) -> bool:
    """Whether the given blocks, or the smallest, fit into vector memory."""
    q, k, limit = given or (*SIZES[-1], VMEM.get(arch, DEFAULT))
    return needs(q, k, shape, keys) <= limit


def blocks_for(queries: int, keys: int, shape: Shape, arch: tuple[int, int] | None, given: Blocks | None) -> Blocks:
    """The given blocks, or the largest that fit into memory; evened out over these lengths."""
    limit = VMEM.get(arch, DEFAULT)
    fit = [size for size in SIZES if needs(*size, shape, keys) <= limit]
    q, k, vmem = given or (*(fit or SIZES[-1:])[0], limit)
    return Blocks(divided(queries, q), divided(keys, k), vmem)


def divided(length: int, most: int) -> int:
    """The size of equal blocks of at most `most` that cover the length, rounded up to whole lanes.

    >>> divided(700, 512), divided(5, 512), divided(1024, 512)
    (384, 128, 512)
    """
    pieces = max(1, -(-length // most))
    return max(1, -(-length // (pieces * LANES))) * LANES


def by_heads(x_BTHD: Array, block: int) -> Array:
    """[B, H, T, D], T padded to whole blocks."""
    return padded(jnp.einsum("bthd->bhtd", x_BTHD), 2, block)


def columns(x_BTHD: Array, block: int, fill: float = 0.0) -> Array:
    """[B, H, D, T], T padded to whole blocks."""
    return padded(jnp.einsum("bthd->bhdt", x_BTHD), 3, block, fill)


def padded(x: Array, dim: int, block: int, fill: float = 0.0) -> Array:
    pad = -x.shape[dim] % block
    return jnp.pad(x, [(0, pad if i == dim else 0) for i in range(x.ndim)], constant_values=fill) if pad else x
