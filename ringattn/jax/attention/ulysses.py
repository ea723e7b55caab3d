"""Ulysses: trade a slice of the sequence with all heads for the whole ring shard with a slice of the heads.

Each of the two is the other's adjoint. Key heads are repeated where the Ulysses size does not divide
them. Padding is cleared on the way, forward and backward, so that whatever a caller's padding holds, even NaN, never
meets a real token.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from ringattn.comms.axis import Pending
from ringattn.comms.jax import MeshAxis
from ringattn.plans.cost import replicas

Real = Array | None  # [1 or B, T_local]: which tokens are real; None when all are


def ready(q: Array, k: Array, v: Array, axis: MeshAxis, real: Real, real_keys: Real) -> tuple[Array, Array, Array]:
    """[B, T / U, H, D] to be exchanged, padding zeroed."""
    times = replicas(k.shape[2], axis.size)
    k, v = (cleared(x, real_keys) for x in (k, v))
    k, v = (jnp.repeat(x, times, axis=2) if times > 1 else x for x in (k, v))
    return cleared(q, real), k, v


def enter(arrays: Sequence[Array], axis: MeshAxis) -> Pending:
    """[B, T / U, H, ...] of every rank -> [B, T, H / U, ...]."""
    return axis.all_to_all(arrays, 2, 1)


def leave(arrays: Sequence[Array], axis: MeshAxis) -> Pending:
    """[B, T, H / U, ...] of every rank -> [B, T / U, H, ...]."""
    return axis.all_to_all(arrays, 1, 2)


def cleared(x: Array, real: Real, fill: float = 0.0) -> Array:
    """`x` [B, T, ...] with `fill` where tokens are padding."""
    return x if real is None else jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.full_like(x, fill))
