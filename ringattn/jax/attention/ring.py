"""The ring: keys travel, queries stay, partials merge; backward, the keys' gradients travel one hop behind them.

A hop overlaps a step's work only if it starts before and ends after it. Left alone, XLA moves all hops to the front
(unrolled) or waits for each before the work (in a loop): a barrier around what the hop brings and what the step made
holds them together.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ringattn.comms.jax import MeshAxis
from ringattn.jax.attention.steps import Score, Visible
from ringattn.kernels.arrays import in_sums, sum_of
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.varying import axes_of, vary
from ringattn.plans.spmd import Flight, Rotation, SharedRecipe, route_of

Pair = tuple[Array, Array]


def ring_forward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, visible: Visible, score: Score, start: Partial | None
) -> Partial:
    """Attention of this device's queries over all devices' keys, added up in float32 from `start`."""
    axis = recipe.plan.ring_axis

    def step(flight: Flight, carry: tuple[Pair, Partial], distance: Any) -> tuple[Pair, Partial]:
        keys, part = carry
        arriving = rotate(axis, keys, flight.keys)
        part = Partial(*score.attend(q, *keys, visible.at(distance), carry=part))
        if recipe.rectangles and not flight.keys:  # the last merge may become one pass with what follows
            return arriving, part
        return lax.optimization_barrier((arriving, part))

    runs = route_of(recipe.mask).forward
    if recipe.rectangles:  # the first step is in no loop: it has other rectangles, and nothing to merge with
        (flight, (local, *others)), *rest = runs
        runs = [(flight, [local]), *([(flight, others)] if others else []), *rest]
    else:  # a loop needs something to merge with
        start = start or empty(q, v.shape[-1])
    return travel(runs, step, vary(((k, v), start), axes_of(q, k, v, visible.seen)))[1]


def ring_backward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, visible: Visible, score: Score, rows: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), the sums in float32. `rows` are this device's dout, global lse and delta, as the kernel wants them.

    The work on local keys has two halves: dq while the keys start to travel, (dk, dv) while the others' return. A
    kernel without halves runs while they return, which takes longer, since gradients are float32.
    """
    axis, route = recipe.plan.ring_axis, route_of(recipe.mask)

    def step(flight: Flight, carry: tuple[Pair, Any, Any], distance: Any) -> tuple[Pair, Any, Any]:
        keys, dq, grads = carry  # the first of these steps adds to zero, or to the dq of local keys
        arriving, following = rotate(axis, keys, flight.keys), rotate(axis, grads, flight.grads)
        dq, dk, dv = score.attend_backward(q, *keys, visible.at(distance), *rows, dq=dq)
        arriving, following, dq, dk, dv = lax.optimization_barrier((arriving, following, dq, dk, dv))
        return arriving, dq, sum_of(following, (dk, dv)) if flight.grads else (dk, dv)

    k, v, rows = lax.optimization_barrier((k, v, rows))  # else XLA sends the first hop, and holds its memory, too early
    inputs = (q, k, v, visible.at(0), *rows)
    if not route.hops:
        return score.attend_backward(*inputs)
    arriving, dq = rotate(axis, (k, v), route.hops[0]), None
    if score.halves:
        arriving, dq = lax.optimization_barrier((arriving, score.halves(*inputs)[0]))
    carry = vary((arriving, dq, None), axes_of(q, k, v, rows, visible.seen))
    _, dq, grads = travel(route.backward, step, carry)
    grads, inputs = lax.optimization_barrier((grads, inputs))  # else XLA does this work before there is a hop to hide
    local = score.halves(*inputs) if score.halves else score.attend_backward(*inputs, dq=dq)
    dq = dq if score.halves else local[0]
    returned, *local = lax.optimization_barrier((rotate(axis, grads, route.home), *local[1:]))
    return dq, *sum_of(tuple(local), returned)


def travel(runs: list[tuple[Flight, list[int]]], step: Callable[..., Any], carry: Any) -> Any:
    """Every step in turn; those with the same hops are one loop, however many there are."""
    for flight, distances in runs:
        if len(distances) == 1:
            carry = step(flight, carry, distances[0])
        else:

            def looped(carry: Any, distance: Array, flight: Flight = flight) -> tuple[Any, None]:
                return step(flight, carry, distance), None

            keys, *made = carry  # a step may give them in low precision, but a loop's carry keeps its type
            carry, _ = lax.scan(looped, (keys, *in_sums(made)), jnp.asarray(distances, jnp.int32))
    return carry


def rotate(axis: MeshAxis, pair: Any, hop: Rotation | None) -> Any:
    return pair if hop is None else axis.rotate(pair, hop.shift, hop.senders).wait()
