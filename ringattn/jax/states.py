"""The exchange of linear attention in JAX: from what each device's segments do to a state, the state before each.

    B batch   P segments a device   N chunks   H heads   K key dim   V value dim

The ways it may go are those of ringattn.segments. By `gather` every device holds the states of all, and XLA lets the
products within chunks run beside it. By `ring` and `pipeline` a device holds its own: the state hops in a loop, and
each hop has a share of those products beside it. The backward pass of a relay is a relay in reverse, over the gradients
of the states and beside the gradients of those products; kept for it is the state that arrived.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringattn.comms.jax import MeshAxis, relay
from ringattn.jax.sharding import sequence_axes
from ringattn.kernels.jax_chunkwise import Step, composed, walk
from ringattn.kernels.pallas.varying import axes_of, vary
from ringattn.planning import Plan
from ringattn.segments import Way, order, passes, segments

Work = Callable[[Any, Any], Any]  # of arrays that have gradients, and of some that have none: [N, ...]


def exchange(plan: Plan, way: Way, own: Step, start: Array, work: Work, given: Any) -> tuple[Array, Array, Any]:
    """The state before each of this device's segments, [B * P, H, K, V], the one behind all, and `work(*given)`.

    `own` is what each segment does, [B * P, ...]; `start` is before the first of all. The end state is right on the
    device that holds the last segment: see `everywhere`.
    """
    if plan.ring * plan.ulysses == 1:
        return start, own.after(start), work(*given)
    if way.name == "gather" or plan.ring == 1:
        return *through_all(plan, own, start), work(*given)
    return around(plan, way.pieces, own, start, work, given)


def through_all(plan: Plan, own: Step, start: Array) -> tuple[Array, Array]:
    """Every device composes all segments."""
    U, parts, walked = plan.ulysses, segments(plan), order(plan)
    at = np.array([(r * U + u) * parts + p for r, u, p in walked])
    every = jax.tree.map(partial(gathered, plan, (plan.ulysses_axis, plan.ring_axis)), own)
    before, end = walk(jax.tree.map(lambda x: x[at], every), start)
    place = np.argsort(at).astype(np.int32).reshape(plan.ring, U, parts)
    return rows(before[jnp.asarray(place)[plan.ring_axis.rank, plan.ulysses_axis.rank]]), end


def around(plan: Plan, pieces: int, own: Step, start: Array, work: Work, given: Any) -> tuple[Array, Array, Any]:
    """Once or, in zigzag, there and back round the ring; Ulysses ranks hold pieces of one shard, and go alike."""
    shard, parts, trips = jax.tree.map(partial(gathered, plan, (plan.ulysses_axis,)), own), segments(plan), passes(plan)
    found, made, state = [], [], start
    for i in range(trips):
        steps, share = jax.tree.map(lambda x, i=i: x[len(x) * i // trips : len(x) * (i + 1) // trips], (shard, given))
        (arrays, fixed), whole = share, composed(steps)
        relayed = vary((whole, state, arrays), axes_of(whole, state, arrays))
        before, state, done = passed(Line(plan.ring_axis, pieces, i == 1, work), *relayed, fixed)
        found.append(walk(steps, before)[0])
        made.append(done)
    mine = lax.dynamic_slice_in_dim(jnp.concatenate(found), plan.ulysses_axis.rank * parts, parts)
    return rows(mine), state, jax.tree.map(lambda *x: jnp.concatenate(x), *made)


class Line(NamedTuple):
    """How a state passes the devices of an axis: in how many pieces of the key dim, which way, beside what work."""

    axis: MeshAxis
    pieces: int
    reverse: bool
    work: Work


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def passed(line: Line, own: Step, start: Array, arrays: Any, fixed: Any) -> tuple[Array, Array, Any]:
    """The state before this device; behind it, if it is the last one, zeros elsewhere; and `work(arrays, fixed)`."""
    cut = Step(pieces_of(own.factor, line.pieces), pieces_of(own.kv, line.pieces))

    def onward(i: Any, state: Array) -> Array:
        return Step(cut.factor[i], cut.kv[i]).after(state)

    def work(both: Any) -> Any:
        return line.work(*both)

    given = arrays, fixed
    room = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work, given))
    room = vary(room, axes_of(arrays))
    before, made = relay(line.axis, pieces_of(start, line.pieces), onward, line.reverse, work, given, room)
    before = jnp.moveaxis(before, 0, 2).reshape(start.shape)
    last = line.axis.rank == (0 if line.reverse else line.axis.size - 1)
    return before, jnp.where(last, own.after(before), 0), made


def passed_fwd(line: Line, own: Step, start: Array, arrays: Any, fixed: Any) -> tuple[Any, Any]:
    found = passed(line, own, start, arrays, fixed)
    return found, (own.factor, found[0], arrays, fixed)


def passed_bwd(line: Line, saved: Any, given: Any) -> tuple[Step, Array, Any, None]:
    """The gradient of the state behind a device is what passes it in reverse: factor * (of behind) + (of before)."""
    factor, before, arrays, fixed = saved
    dbefore, dend, dmade = given

    def work(both: Any, fixed: Any) -> Any:
        arrays, dmade = both
        return jax.vjp(lambda x: line.work(x, fixed), arrays)[1](dmade)[0]

    back = Line(line.axis, line.pieces, not line.reverse, work)
    dbehind, dstart, darrays = passed(back, Step(factor, dbefore), dend, (arrays, dmade), fixed)
    dfactor = (before * dbehind).sum(-1, keepdims=True)
    if factor.shape[2] == 1:
        dfactor = dfactor.sum(2, keepdims=True)
    return Step(dfactor, dbehind), dstart, darrays, None


passed.defvjp(passed_fwd, passed_bwd)


def pieces_of(x: Array, n: int) -> Array:
    """[B, H, K, X] as [n, B, H, K / n, X]; what all keys share is in every piece."""
    B, H, K, X = x.shape
    if K == 1:
        return jnp.broadcast_to(x, (n, B, H, 1, X))
    return jnp.moveaxis(x.reshape(B, H, n, K // n, X), 2, 0)


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


def everywhere(plan: Plan, x: Array) -> Array:
    """What the device with the last segment has, on all of them, as a value that JAX knows to be the same."""
    names = sequence_axes(plan) if isinstance(plan.ring_axis, MeshAxis) else ()
    ring, ulysses, _ = order(plan)[-1]
    last = (jnp.int32(plan.ring_axis.rank) == ring) & (jnp.int32(plan.ulysses_axis.rank) == ulysses)
    return lax.psum(jnp.where(last, x, 0), names) if names else x
