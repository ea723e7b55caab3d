"""Look-ups that are right under automatic, explicit and manual axes of a mesh.

On explicit axes the type of an array says what cuts it, and JAX refuses a gather or a search whose result it cannot
type. Comparing with every entry and adding up has a type everywhere, and XLA stores no table for it.

R rows   N entries   T tokens
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


@partial(jax.jit, inline=True)
def up_to(sorted_RN: Any, at: Array) -> Array:
    """How many entries of each row are at most `at`, [T] or [R, T]: [R, T]."""
    return (jnp.asarray(sorted_RN)[:, None] <= at[..., None]).sum(-1, dtype=jnp.int32)


@partial(jax.jit, inline=True)
def entry(x_RN: Any, i_RT: Array) -> Array:
    """x[r, i[r, t]], a whole number; 0 where there is no such entry."""
    x = jnp.asarray(x_RN)
    return jnp.where(jnp.arange(x.shape[1]) == i_RT[..., None], x[:, None], 0).sum(-1).astype(x.dtype)


def rows_of(table: Array, at: Array) -> Array:
    """table[at], cut as `at` is."""
    there = explicit(at)
    return table[at] if there is None else table.at[at].get(out_sharding=there.update(spec=P(*there.spec, None)))


def uncut(x: Array, dim: int) -> Array:
    """`x`, of which no explicit axis cuts `dim`."""
    there = explicit(x)
    if there is None or there.spec[dim] is None:
        return x
    return jax.reshard(x, there.update(spec=P(*(None if i == dim else cut for i, cut in enumerate(there.spec)))))


def cut_as(x: Array, other: Array) -> Array:
    """`x`, cut by explicit axes as `other` is, which has as many dims."""
    there = explicit(other)
    return x if there is None else jax.reshard(x, there)


def explicit(x: Array) -> NamedSharding | None:
    """What the type of `x` says of the explicit axes of its mesh; None if there are none."""
    there = jax.typeof(x).sharding
    return there if AxisType.Explicit in there.mesh.axis_types else None
