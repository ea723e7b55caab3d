"""The exchange of linear attention in JAX: from the maps of each device's chunks, the state before each.

    B batch   P segments a device   N chunks a segment   H heads   K key dim   V value dim

The ways it may go are those of plans/segments.py. By `gather` every device gets the states of all, and XLA lets the
products within chunks run beside it. By `ring` and `pipeline` a device gets those of its segments: the state hops in a
loop, and each hop has a share of those products beside it. Backward the gradient of the state goes the same way in
reverse, beside the gradients of those products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ringattn.comms.jax import MeshAxis, relay
from ringattn.jax.sharding import sequence_axes
from ringattn.kernels.linear.jax_chunkwise import Map, composed, walk
from ringattn.kernels.varying import axes_of, vary
from ringattn.plans.plan import Plan
from ringattn.plans.segments import Place, Way, order, passes, segments

Work = Callable[[Any, Any], Any]  # of arrays that have gradients, and of some that have none: [N, ...]
STATES = "states"  # what jax.checkpoint finds the states before chunks by


@dataclass(frozen=True)
class Exchange:
    """Along which plan, by which way, in which direction states go, and what is done meanwhile."""

    plan: Plan
    way: Way
    work: Work
    reverse: bool = False

    @property
    def walk(self) -> list[Place]:
        """All segments as the state passes them."""
        return order(self.plan)[:: -1 if self.reverse else 1]


def exchange(
    plan: Plan, way: Way, maps: Map, start: Array, work: Work, given: Any, precomputed: Array | None = None
) -> tuple[Array, Array, Any]:
    """The state before each chunk [N, B * P, H, K, V], the one behind the whole sequence, and `work(*given)`.

    `maps` is what each chunk does, [N, B * P, ...]; `start` is before the first of all, the same on every device. If
    the states before chunks are `precomputed`, nothing is exchanged and the state behind is 0; gradients are the same.
    """
    arrays, fixed = given
    varied = vary((maps, start, arrays), axes_of(maps, start, arrays))
    before, end, made = states(Exchange(plan, way, work), *varied, fixed, precomputed)
    return before, summed(end, plan), made


def summed(end: Array, plan: Plan) -> Array:
    """Over the axes that cut the sequence; one of size 1 only where it counts as different along it."""
    if not isinstance(plan.ring_axis, MeshAxis):
        return end
    sizes, varying = plan.ring_axis.mesh.shape, axes_of(end)
    names = tuple(name for name in sequence_axes(plan) if sizes[name] > 1 or name in varying)
    return lax.psum(end, names) if names else end


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def states(
    call: Exchange, maps: Map, start: Array, arrays: Any, fixed: Any, precomputed: Array | None = None
) -> tuple[Array, Array, Any]:
    """The state before each chunk; behind all, on the device that the walk ends at, zeros elsewhere; the work done.

    `start` is the same on every device, and so it is in reverse: every device gets the sum of those ends.
    """
    plan = call.plan
    if precomputed is not None:
        return precomputed, vary(jnp.zeros_like(start), axes_of(maps, start)), call.work(arrays, fixed)
    if plan.ring * plan.ulysses == 1:
        return *walk(maps, start, call.reverse), call.work(arrays, fixed)
    local = composed(maps, call.reverse)
    if call.way.name == "gather" or plan.ring == 1:
        before, end = through_all(call, local, start)
        made = call.work(arrays, fixed)
    else:
        before, end, made = around(call, local, start, (arrays, fixed))
    ring, ulysses, _ = call.walk[-1]
    on_last = (plan.ring_axis.rank == ring) & (plan.ulysses_axis.rank == ulysses)
    return walk(maps, before, call.reverse)[0], jnp.where(on_last, end, 0), made


def forward(
    call: Exchange, maps: Map, start: Array, arrays: Any, fixed: Any, precomputed: Array | None
) -> tuple[Any, Any]:
    before, end, made = states(call, maps, start, arrays, fixed, precomputed)
    before = checkpoint_name(before, STATES)
    return (before, end, made), (maps, before, arrays, fixed)


def backward(call: Exchange, saved: Any, given: Any) -> tuple[Map, Array, Any, None, None]:
    """The gradient of the state behind a chunk is factor * (that behind the next one) + (what read the state there)."""
    maps, before, arrays, fixed = saved
    dbefore, dend, dmade = given

    def work(both: Any, fixed: Any) -> Any:
        arrays, dmade = both
        return jax.vjp(lambda x: call.work(x, fixed), arrays)[1](dmade)[0]

    back = Exchange(call.plan, call.way, work, not call.reverse)
    dbehind, dstart, darrays = states(back, maps.transposed(dbefore), dend, (arrays, dmade), fixed)
    return Map(maps.factor_gradient(before, dbehind), dbehind), dstart, darrays, None, None


states.defvjp(forward, backward)


def through_all(call: Exchange, local: Map, start: Array) -> tuple[Array, Array]:
    """Every device composes all segments."""
    plan = call.plan
    U, parts, axes = plan.ulysses, segments(plan), (plan.ulysses_axis, plan.ring_axis)
    at = np.array([(r * U + u) * parts + p for r, u, p in call.walk])
    every = jax.tree.map(lambda x: gathered(plan, axes, x)[at], local)
    before, end = walk(every, start)
    inverse = np.argsort(at).astype(np.int32).reshape(plan.ring, U, parts)
    return rows(before[jnp.asarray(inverse)[plan.ring_axis.rank, plan.ulysses_axis.rank]]), end


def around(call: Exchange, local: Map, start: Array, given: Any) -> tuple[Array, Array, Any]:
    """Once or, in zigzag, there and back round the ring; Ulysses ranks hold pieces of one shard, and go alike."""
    plan, parts, trips = call.plan, segments(call.plan), passes(call.plan)
    flip = slice(None, None, -1 if call.reverse else 1)
    shard = jax.tree.map(lambda x: gathered(plan, (plan.ulysses_axis,), x)[flip], local)
    earlier, made, state = [], [], start
    for i in range(trips):
        maps, share = jax.tree.map(lambda x, i=i: x[len(x) * i // trips : len(x) * (i + 1) // trips], (shard, given))
        reverse = i == 1 if trips == 2 else call.reverse
        before, state, done = passed(call, reverse, composed(maps), state, share)
        earlier.append(walk(maps, before)[0])
        made.append(done)
    mine = lax.dynamic_slice_in_dim(jnp.concatenate(earlier)[flip], plan.ulysses_axis.rank * parts, parts)
    return rows(mine), state, jax.tree.map(lambda *x: jnp.concatenate(x), *made)


def passed(call: Exchange, reverse: bool, local: Map, start: Array, given: Any) -> tuple[Array, Array, Any]:
    """The state before this device and behind it, which goes round the ring in pieces; the work done."""
    n = call.way.pieces
    values = pieces_of(local.kv, n)

    def onward(i: Any, state: Array) -> Array:
        return Map(local.factor, values[i]).after(state)

    def work(given: Any) -> Any:
        return call.work(*given)

    buffers = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work, given))
    buffers = vary(buffers, axes_of(given))
    before, made = relay(call.plan.ring_axis, pieces_of(start, n), onward, reverse, work, given, buffers)
    before = jnp.moveaxis(before, 0, 3).reshape(start.shape)
    return before, local.after(before), made


def pieces_of(x: Array, n: int) -> Array:
    """[B, H, K, V] as [n, B, H, K, V / n]."""
    B, H, K, V = x.shape
    return jnp.moveaxis(x.reshape(B, H, K, n, V // n), 3, 0)


def gathered(plan: Plan, axes: tuple[MeshAxis, ...], x: Array) -> Array:
    """[B * P, ...] of every device along the axes, the innermost first, as [their segments, B, ...]."""
    every, parts = x[None], segments(plan)
    for axis in axes:
        every = axis.all_gather(every).wait()
    every = jnp.moveaxis(every.reshape(len(every), -1, parts, *x.shape[1:]), 2, 1)
    return every.reshape(-1, *every.shape[2:])


def rows(mine: Array) -> Array:
    """[P, B, ...] as [B * P, ...]."""
    return jnp.moveaxis(mine, 0, 1).reshape(-1, *mine.shape[2:])
