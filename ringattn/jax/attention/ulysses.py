"""Ulysses: trade a slice of the sequence with all heads for the whole ring shard with a slice of the heads.

Each of the two is the other's adjoint. Key heads are repeated where the Ulysses size does not divide
them. Padding is cleared on the way, forward and backward, so that whatever a caller's padding holds, even NaN, never
meets a real token.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ringattn.comms.axis import Done
from ringattn.comms.jax import MeshAxis
from ringattn.plans.cost import replicas

Real = Array | None  # [1 or B, T_local]: which tokens are real; None when all are


def ready(q: Array, k: Array, v: Array, axis: MeshAxis, real: Real, real_keys: Real) -> tuple[Array, Array, Array]:
    """[B, T / U, H, D] to be exchanged, padding zeroed."""
    times = replicas(k.shape[2], axis.size)
    k, v = (cleared(x, real_keys) for x in (k, v))
    k, v = (jnp.repeat(x, times, axis=2) if times > 1 else x for x in (k, v))
    return cleared(q, real), k, v


def enter(arrays: Iterable[Array], axis: MeshAxis) -> list[Any]:
    """[B, T / U, H, ...] of every rank -> [B, T, H / U, ...]."""
    return exchanged(arrays, axis, 2, 1)


def leave(arrays: Iterable[Array], axis: MeshAxis) -> list[Any]:
    """[B, T, H / U, ...] of every rank -> [B, T / U, H, ...]."""
    return exchanged(arrays, axis, 1, 2)


def exchanged(arrays: Iterable[Array], axis: Any, split: int, join: int) -> list[Any]:
    """A handle an array; on one device the axis may be a Solo, which has nothing to send."""
    return [Done(x) if axis.size == 1 else axis.all_to_all(x, split, join) for x in arrays]


def cleared(x: Array, real: Real, fill: float = 0.0) -> Array:
    """`x` [B, T, ...] with `fill` where tokens are padding."""
    return x if real is None else jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.full_like(x, fill))
