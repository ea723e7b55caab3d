"""Gated linear attention on one device in jax.numpy, chunk by chunk; JAX derives the gradients.

    B batch   T tokens   H heads   N chunks   C tokens a chunk   K key dim   V value dim   G gates a head, K or 1

The cuts of ringattn.kernels.chunkwise separate the pairs within a chunk. Every exponent is a sum of gates, at most 0,
and never a difference, so gradients of gates are not differences either. A chunk maps the state by a factor, which is 0
if a document begins in it, and a summand. The backward pass recomputes the work within each chunk.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.pallas.varying import axes_of, vary

CHUNK = 64
AT_ONCE = 2**20  # the size of one tensor of the working set


def cuts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For blocks of 2, 4, 8, ... tokens, each cut in the middle: three masks [levels, C, C].

    The gates t from the cut to i, the gates t behind j up to the cut, and the pairs (i, j) on both sides of it.
    """
    half = 2 ** np.arange(CHUNK.bit_length() - 1)[:, None, None]
    t = np.arange(CHUNK)
    one, other = t[:, None], t[None]
    same = one // (2 * half) == other // (2 * half)
    second = t // half % 2 == 1  # [levels, 1, C]
    row = second.swapaxes(1, 2)
    return same & row & second & (other <= one), same & ~row & ~second & (other > one), same & row & ~second


AFTER, AHEAD, PARTED = cuts()
UNTIL, LATER = np.tri(CHUNK), np.tri(CHUNK, k=-1).T  # the gates up to t, and those after it


class Step(NamedTuple):
    """The map of the state by some tokens: factor * state + kv, with factor [..., K or 1, 1]."""

    factor: Array
    kv: Array

    def after(self, state: Array) -> Array:
        return self.factor * state + self.kv

    def then(self, later: "Step") -> "Step":
        return Step(self.factor * later.factor, later.after(self.kv))


def steps_of(k: Array, v: Array, g: Array | None, begin: Array | None) -> Step:
    """The map of each chunk, [N, B, H, ...]. Arguments are those of ringattn.kernels.linear."""
    return over_chunks(step_of_chunk, chunks(k), chunks(v), gates(k, g), begins(begin))


def pairs(
    q: Array, k: Array, v: Array, g: Array | None, begin: Array | None, scale: float
) -> tuple[tuple[Array, Array, Array, Array], Array | None]:
    """The arguments of `within`, [N, ...]: those with a gradient, and the one without."""
    return (chunks(q) * scale, chunks(k), chunks(v), gates(k, g)), begins(begin)


def within(arrays: tuple[Array, Array, Array, Array], begin: Array | None) -> Array:
    """What tokens read from their own chunks, [N, B, H, C, V]; needs no state."""
    return over_chunks(within_chunk, *arrays, begin)


def passing(q: Array, g: Array | None, begin: Array | None, before: Array, scale: float) -> Array:
    """What tokens read from the states before their chunks, [N, B, H, C, V]."""
    return over_chunks(passing_chunk, chunks(q) * scale, gates(q, g), begins(begin), before)


def composed(steps: Step, reverse: bool = False) -> Step:
    """The composition of all steps along the first dim, in order, or in reverse order."""
    nothing = vary(Step(jnp.ones_like(steps.factor[0]), jnp.zeros_like(steps.kv[0])), axes_of(steps))
    return lax.scan(lambda done, step: (done.then(step), None), nothing, steps, reverse=reverse)[0]


def walk(steps: Step, start: Array, reverse: bool = False) -> tuple[Array, Array]:
    """The state before each step, and the one behind the last."""
    start = vary(start, axes_of(steps, start))
    end, before = lax.scan(lambda state, step: (step.after(state), state), start, steps, reverse=reverse)
    return before, end


def joined(x: Array, tokens: int) -> Array:
    """[N, B, H, C, X] -> [B, T, H, X]: the inverse of `chunks`."""
    N, B, H, C, X = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)[:, :tokens]


def step_of_chunk(k: Array, v: Array, g: Array, begin: Array | None) -> Step:
    to_end, across = jnp.exp(summed(LATER, g)), jnp.exp(g.sum(-2))[..., None]
    if begin is not None:
        last = begin[:, None, -1:]
        to_end = to_end * (last <= jnp.arange(CHUNK))[..., None]
        across = across * (last < 0)[..., None]
    return Step(across, product(jnp.matrix_transpose(k * to_end), v))


def within_chunk(q: Array, k: Array, v: Array, g: Array, begin: Array | None) -> Array:
    w = weights(q, k, g)
    seen = True if begin is None else (begin[..., None] <= jnp.arange(CHUNK))[:, None]
    return product(w * seen, v)


def passing_chunk(q: Array, g: Array, begin: Array | None, before: Array) -> Array:
    from_start = jnp.exp(summed(UNTIL, g))
    if begin is not None:
        from_start = from_start * (begin < 0)[:, None, :, None]
    return product(q * from_start, before)


def weights(q: Array, k: Array, g: Array) -> Array:
    """(q_i . decay from j to i . k_j) for all pairs j <= i: [B, H, C, C]; the level that cuts a pair gives it."""
    own = (q * k).sum(-1)[..., None] * np.eye(CHUNK, dtype=q.dtype)
    q, k, g = (x[..., None, :, :] for x in (q, k, g))
    pairs = product(q * jnp.exp(summed(AFTER, g)), jnp.matrix_transpose(k * jnp.exp(summed(AHEAD, g))))
    return own + jnp.where(PARTED, pairs, 0).sum(-3)


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
    """The chunks of g with a last dim of K or 1; zeros if g is None."""
    if g is None:
        g = jnp.zeros_like(like[..., 0])
    return chunks((g if g.ndim == 4 else g[..., None]).astype(accumulator(like)))


def begins(begin: Array | None) -> Array | None:
    """`begin` [1 or B, T] as [N, 1 or B, C], counted from the first token of each chunk."""
    if begin is None:
        return None
    filled = jnp.pad(begin, ((0, 0), (0, -begin.shape[1] % CHUNK)), mode="edge")
    each = filled.reshape(len(begin), -1, CHUNK).swapaxes(0, 1)
    return each - CHUNK * jnp.arange(len(each), dtype=begin.dtype)[:, None, None]
