"""Look-ups, and the order of a plan, that are right under automatic, explicit and manual axes of a mesh.

On explicit axes the type of an array says what cuts it, and JAX refuses a search or a gather whose result it cannot
type: there they run as on automatic axes, and are given the type of what is looked up.

R rows   N entries   T tokens
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringattn.layouts.layout import Layout


@partial(jax.jit, inline=True)
def up_to(sorted_RN: Any, at: Array) -> Array:
    """How many entries of each row are at most `at`, [T] or [R, T]: [R, T]."""
    search = jax.vmap(partial(jnp.searchsorted, side="right"))
    return by_rows(lambda x, at: search(x, at).astype(jnp.int32), jnp.asarray(sorted_RN), at)


@partial(jax.jit, inline=True)
def entry(x_RN: Any, i_RT: Array) -> Array:
    """x[r, i[r, t]], a whole number; 0 where there is no such entry."""

    def taken(x: Array, i: Array) -> Array:
        there = (i >= 0) & (i < x.shape[1])
        return jnp.where(there, jnp.take_along_axis(x, i.clip(0, x.shape[1] - 1), 1), 0)

    return by_rows(taken, jnp.asarray(x_RN), i_RT)


def by_rows(look_up: Callable[[Array, Array], Array], x_RN: Array, at: Array) -> Array:
    """`look_up` with as many rows of both, cut as `at` is, and its rows as those of either."""
    at = at if at.ndim == 2 else at[None]
    rows = at.shape[0] if x_RN.shape[0] == 1 else x_RN.shape[0]  # perhaps symbolic

    def both(x: Array, at: Array) -> Array:
        return look_up(*(jnp.broadcast_to(each, (rows, each.shape[1])) for each in (x, at)))

    cuts = [(each, there) for each in (x_RN, at) if (there := explicit(each)) is not None]
    if not cuts:
        return both(x_RN, at)
    row_cut = next((there.spec[0] for each, there in cuts if each.shape[0] == rows and there.spec[0] is not None), None)
    token_cut = next((there.spec[1] for each, there in cuts if each is at), None)
    spec = cuts[0][1].update(spec=P(row_cut, token_cut))
    return jax.sharding.auto_axes(both, out_sharding=spec)(x_RN, at)


def spoiled(x: Array, *starts: Any) -> Array:
    """`x` with NaN in rows of the batch whose traced ids have more documents than there is room for."""
    for each in starts:
        if each is not None and not isinstance(each, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating):
            bad = each[:, -1] < 0
            bad = bad if len(bad) == 1 else jnp.repeat(bad, x.shape[0] // len(bad))  # a state a document
            x = jnp.where(bad.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
    return x


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


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def padded(x: Array, pad: int, dim: int) -> Array:
    """`x` with this many zeros appended along `dim`, in any dtype, also that of random keys."""
    nothing = jnp.zeros_like(x, shape=(*x.shape[:dim], pad, *x.shape[dim + 1 :]))
    return jnp.concatenate([x, cut_as(nothing, x)], dim)


def reordered(x: Array, layout: Layout, dim: int, back: bool = False) -> Array:
    """`x[layout.order()]` along `dim`; with `back` the inverse."""
    return x if layout.in_order else dealt(x, layout, dim, back)


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # or the order is sent to a device in each call
def dealt(x: Array, layout: Layout, dim: int, back: bool) -> Array:
    """Stripes are a transpose, ranges of neighbouring tokens a permutation of blocks."""
    ring, before, after = layout.ring, x.shape[:dim], x.shape[dim + 1 :]
    shards = [layout.shard(r) for r in range(ring)]
    if shards == [(range(r, layout.padded_length, ring),) for r in range(ring)]:
        grid = (ring, layout.shard_len) if back else (layout.shard_len, ring)
        return x.reshape(*before, *grid, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    block = gcd(*(n for shard in shards for r in shard for n in (r.start, r.stop)))
    order = layout.shard_order()[::block] // block
    order = np.argsort(order) if back else order
    return jnp.take(x.reshape(*before, len(order), block, *after), order, axis=dim).reshape(x.shape)


def explicit(x: Array) -> NamedSharding | None:
    """What the type of `x` says of the explicit axes of its mesh; None if there are none."""
    there = jax.typeof(x).sharding
    return there if AxisType.Explicit in there.mesh.axis_types else None
