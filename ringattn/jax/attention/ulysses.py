"""Ulysses: trade a slice of the sequence with all heads for the whole ring shard with a slice of the heads.

Each of the two is the other's adjoint, which JAX derives. Key heads are repeated where the Ulysses size does not divide
them. Padding is cleared on the way, forward and backward, so that whatever a caller's padding holds, even NaN, never
meets a real token.
"""

import jax.numpy as jnp
from jax import Array

from ringattn.comms.jax import MeshAxis
from ringattn.cost import replicas
from ringattn.kernels.partial import NEVER

Real = Array | None  # [1 or B, T_local]: which tokens are real; None when all are


def enter(q: Array, k: Array, v: Array, axis: MeshAxis, real: Real, real_keys: Real) -> tuple[Array, Array, Array]:
    """[B, T / U, H, D] of every rank -> [B, T, H / U, D], padding zeroed."""
    times = replicas(k.shape[2], axis.size)
    k, v = (cleared(x, real_keys) for x in (k, v))
    k, v = (jnp.repeat(x, times, axis=2) if times > 1 else x for x in (k, v))
    q, k, v = (axis.all_to_all(x, split=2, join=1).wait() for x in (cleared(q, real), k, v))
    return q, k, v


def leave(out: Array, lse: Array, axis: MeshAxis, real: Real) -> tuple[Array, Array]:
    """[B, T, H / U, V] of every rank -> [B, T / U, H, V]; a row of padding is 0 with an lse of -inf."""
    out, lse = (axis.all_to_all(x, split=1, join=2).wait() for x in (out, lse))
    return cleared(out, real), cleared(lse, real, NEVER)


def cleared(x: Array, real: Real, fill: float = 0.0) -> Array:
    """`x` [B, T, ...] with `fill` where tokens are padding."""
    return x if real is None else jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.full_like(x, fill))
