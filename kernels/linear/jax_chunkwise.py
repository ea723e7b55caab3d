"""Linear attention on one device in jax.numpy, chunk by chunk; JAX derives the gradients.

    B batch   T tokens   H heads   N chunks   C tokens a chunk   K key dim   V value dim   G gates a head, K or 1

The cuts of `chunkwise.py` separate the pairs within a chunk. Every exponent is a sum of gates, at most 0,
and never a difference, so gradients of gates are not differences either. A chunk maps the state by a factor, which is 0
if a document begins in it, and a summand. By the delta rule a chunk writes U - W before, where `before` is the state
before it, and U and W solve a triangular system. The backward pass recomputes the work within each chunk.

Functions without `_chunk` in their name take the results of `chunks`, `gates` and `begins`.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.varying import axes_of, vary

CHUNK = 64
AT_ONCE = 2**20  # the size of one tensor of the working set
LOWEST = -1e30  # 64 of them still add up to a float32


def cuts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For blocks of 2, 4, 8, ... tokens, each cut in the middle: three masks [levels, C, C].

    The gates t from the cut to i, the gates t behind j up to the cut, and the pairs (i, j) on both sides of it.
    """
    half = 2 ** np.arange(CHUNK.bit_length() - 1)[:, None, None]
    t = np.arange(CHUNK)
    i, j = t[:, None], t[None]
    same = i // (2 * half) == j // (2 * half)
    second = t // half % 2 == 1  # [levels, 1, C]
    row = second.swapaxes(1, 2)
    return same & row & second & (j <= i), same & ~row & ~second & (j > i), same & row & ~second


AFTER, AHEAD, SPLIT = cuts()
UNTIL, LATER = np.tri(CHUNK), np.tri(CHUNK, k=-1).T  # the gates up to t, and those after it


class Map(NamedTuple):
    """What some tokens do to the state: factor * state + kv.

    `factor` is a decay of each row, [..., K or 1, 1], and for the delta rule a matrix [..., K, K].
    """

    factor: Array
    kv: Array

    def after(self, state: Array) -> Array:
        return self.times(state) + self.kv

    def then(self, later: "Map") -> "Map":
        return Map(later.times(self.factor), later.after(self.kv))

    def times(self, x: Array) -> Array:
        return self.factor * x if self.factor.shape[-1] == 1 else product(self.factor, x)

    def unit(self) -> Array:
        """The factor of the map that changes nothing."""
        if self.factor.shape[-1] == 1:
            return jnp.ones_like(self.factor)
        return jnp.broadcast_to(jnp.eye(self.factor.shape[-1], dtype=self.factor.dtype), self.factor.shape)

    def transposed(self, kv: Array) -> "Map":
        """The map of gradients whose factor is the transpose of this one."""
        rows = self.factor.shape[-1] == 1
        return Map(self.factor if rows else jnp.matrix_transpose(self.factor), kv)

    def factor_gradient(self, before: Array, dbehind: Array) -> Array:
        """The gradient for the factor, from the state before these tokens and the gradient for that behind them."""
        if self.factor.shape[-1] > 1:
            return product(dbehind, jnp.matrix_transpose(before))
        rows = (before * dbehind).sum(-1, keepdims=True)
        return rows if self.factor.shape[-2] > 1 else rows.sum(-2, keepdims=True)


def written(k: Array, v: Array, g: Array, beta: Array | None, begin: Array | None) -> Array:
    """What each chunk writes: v, or by the delta rule [U, W], of which U - W before is written."""
    return v if beta is None else over_chunks(solved_chunk, k, v, g, beta, begin)


def maps_of(k: Array, v: Array, written: Array, g: Array, begin: Array | None) -> Map:
    """The map of each chunk, [N, B, H, ...]."""
    return over_chunks(partial(map_of_chunk, v.shape[-1]), k, written, g, begin)


def within(arrays: tuple[Array, Array, Array, Array], begin: Array | None) -> Array:
    """What tokens read of what their own chunks write, (q, k, written, g) -> [N, B, H, C, ...]; needs no state."""
    return over_chunks(lambda q, k, written, g, begin: product(seen(weights(q, k, g), begin), written), *arrays, begin)


def passing(q: Array, g: Array, begin: Array | None, inner: Array, before: Array) -> Array:
    """The output [N, B, H, C, V]: `inner`, the result of `within`, and what is read of the states before the chunks."""
    return over_chunks(passing_chunk, q, g, begin, inner, before)


def composed(maps: Map, reverse: bool = False) -> Map:
    """The composition of all maps along the first dim, in order, or in reverse order."""
    first = Map(*(x[0] for x in maps))
    nothing = vary(Map(first.unit(), jnp.zeros_like(first.kv)), axes_of(maps))
    return lax.scan(lambda done, each: (done.then(each), None), nothing, maps, reverse=reverse)[0]


def walk(maps: Map, start: Array, reverse: bool = False) -> tuple[Array, Array]:
    """The state before each map, and the one behind the last."""
    start = vary(start, axes_of(maps, start))
    end, before = lax.scan(lambda state, each: (each.after(state), state), start, maps, reverse=reverse)
    return before, end


def joined(x: Array, tokens: int) -> Array:
    """[N, B, H, C, X] -> [B, T, H, X]: the inverse of `chunks`."""
    N, B, H, C, X = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)[:, :tokens]


def solved_chunk(k: Array, v: Array, g: Array, beta: Array, begin: Array | None) -> Array:
    """[U, W] of the delta rule, side by side."""
    reads = beta * seen(weights(k, k, g), begin) * np.tri(CHUNK, k=-1, dtype=k.dtype)
    rhs = beta * jnp.concatenate([v, k * from_start(g, begin)], -1)
    return product(inverse(reads), rhs)


def inverse(lower: Array) -> Array:
    """(1 + lower)^-1 for strictly lower triangular matrices [..., C, C], by halves: products only.

    Two blocks with known inverses, and the corner between them, make a block of twice their size. XLA's own triangular
    solve is a call of LAPACK on CPUs, where devices that wait for each other leave it no thread.
    """
    inverse = jnp.broadcast_to(jnp.eye(CHUNK, dtype=lower.dtype), lower.shape)
    for corner in SPLIT:  # the barrier: TPU compilers fail where they join the difference to its product
        inverse = inverse - lax.optimization_barrier(product(inverse, product(jnp.where(corner, lower, 0), inverse)))
    return inverse


def map_of_chunk(V: int, k: Array, written: Array, g: Array, begin: Array | None) -> Map:
    to_end, across = jnp.exp(summed(LATER, g)), jnp.exp(g.sum(-2))[..., None]
    if begin is not None:
        last = begin[:, None, -1:]
        to_end = to_end * (last <= jnp.arange(CHUNK))[..., None]
        across = across * (last < 0)[..., None]
    left = product(jnp.matrix_transpose(k * to_end), written)
    if written.shape[-1] == V:
        return Map(across, left)
    return Map(across * jnp.eye(k.shape[-1], dtype=k.dtype) - left[..., V:], left[..., :V])


def passing_chunk(q: Array, g: Array, begin: Array | None, inner: Array, before: Array) -> Array:
    V = before.shape[-1]
    reader = q * from_start(g, begin)
    if inner.shape[-1] > V:
        reader = reader - inner[..., V:]
    return inner[..., :V] + product(reader, before)


def from_start(g: Array, begin: Array | None) -> Array:
    """The decay from the state before the chunk to each token."""
    decay = jnp.exp(summed(UNTIL, g))
    return decay if begin is None else decay * (begin < 0)[:, None, :, None]


def seen(weights: Array, begin: Array | None) -> Array:
    """The weights of pairs of one document, 0 for others."""
    return weights if begin is None else weights * (begin[..., None] <= jnp.arange(CHUNK))[:, None]


def weights(q: Array, k: Array, g: Array) -> Array:
    """(q_i . decay from j to i . k_j) for all pairs j <= i: [B, H, C, C]; the level that cuts a pair gives it."""
    own = (q * k).sum(-1)[..., None] * np.eye(CHUNK, dtype=q.dtype)
    q, k, g = (x[..., None, :, :] for x in (q, k, g))
    pairs = product(q * jnp.exp(summed(AFTER, g)), jnp.matrix_transpose(k * jnp.exp(summed(AHEAD, g))))
    return own + jnp.where(SPLIT, pairs, 0).sum(-3)


def summed(which: np.ndarray, g: Array) -> Array:
    """The sums of the gates of a chunk that the mask `which` [..., C, C] selects."""
    return product(jnp.asarray(which, g.dtype), g)


def product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def over_chunks(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` of each chunk, a few at a time (one if sizes are symbolic); the backward pass recomputes it."""
    x: Array = arrays[0]
    size = len(AFTER) * prod(x.shape[1:])
    few = min(len(x), AT_ONCE // size) if isinstance(size, int) else 1
    return lax.map(jax.checkpoint(lambda each: function(*each)), arrays, batch_size=max(1, few))


def chunks(x: Array) -> Array:
    """[B, T, H, X] as [N, B, H, C, X] in the accumulator's dtype; the last chunk is padded with zeros."""
    B, T, H, X = x.shape
    filled = jnp.pad(x.astype(accumulator(x)), ((0, 0), (0, -T % CHUNK), (0, 0), (0, 0)))
    return filled.reshape(B, -1, CHUNK, H, X).transpose(1, 0, 3, 2, 4)


def gates(like: Array, g: Array | None) -> Array:
    """The chunks of g with a last dim of K or 1; zeros if g is None.

    Sums of gates are products with masks, which -inf would make NaN; e to the power of `LOWEST` is 0 just as well.
    """
    if g is None:
        g = jnp.zeros_like(like[..., 0])
    return jnp.maximum(chunks((g if g.ndim == 4 else g[..., None]).astype(accumulator(like))), LOWEST)


def begins(begin: Array | None) -> Any:
    """`begin` [1 or B, T] as [N, 1 or B, C], counted from the first token of each chunk."""
    if begin is None:
        return None
    filled = jnp.pad(begin, ((0, 0), (0, -begin.shape[1] % CHUNK)), mode="edge")
    each = filled.reshape(len(begin), -1, CHUNK).swapaxes(0, 1)
    return each - CHUNK * jnp.arange(len(each), dtype=begin.dtype)[:, None, None]
