"""Along which mesh axes a value varies, inside shard_map; none outside of it, or with check_vma=False."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def axes_of(*values: Any) -> frozenset[str]:
    """The mesh axes along which at least one of the values varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(values)))


def vary(value: Any, axes: frozenset[str]) -> Any:
    """The same values, marked as varying along these axes: the type of a loop's carry must not change."""

    def varied(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varied, value)


def in_turn(work: Callable[[Any], Any], values: Any) -> Any:
    """`work(values)` of a function that must not vary, such as an interpreted Pallas kernel: JAX's interpreter refuses
    operands that do. Every device computes for all of them and keeps its own, which only tests can afford.
    """
    axes = tuple(sorted(axes_of(values)))
    if not axes:
        return work(values)
    here, size = lax.axis_index(axes), lax.axis_size(axes)

    def of_all(x: Array) -> Array:
        mine = (jnp.arange(size) == here).reshape(-1, *[1] * x.ndim)
        exact = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return lax.psum(jnp.where(mine, x.astype(exact), 0), axes).astype(x.dtype)

    return jax.tree.map(lambda x: x[here], lax.map(work, jax.tree.map(of_all, vary(values, frozenset(axes)))))
