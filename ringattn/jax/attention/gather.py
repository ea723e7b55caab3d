"""Gather: all keys at once, for one group of heads after the other; in backward their gradients are scattered.

Simple, and fast for short sequences; it needs O(T) memory for the keys of a group.
"""

from functools import partial
from typing import Any

from jax import Array

from ringattn.comms.axis import All
from ringattn.jax.attention.groups import of_heads, one_ahead
from ringattn.jax.attention.steps import Score, Visible
from ringattn.jax.lookup import reordered
from ringattn.kernels.arrays import in_sums
from ringattn.kernels.partial import Partial
from ringattn.plans.spmd import SharedRecipe


def gather_forward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, visible: Visible, score: Score, start: Partial | None
) -> Partial:
    """Attention of this device's queries over all keys, brought into their global order."""
    groups = groups_of(recipe)

    def work(group: Any, keys: list[Array]) -> tuple[Any, Any, Any]:
        q_here, carry = of_heads((q, start), group, groups)
        return (), Partial(*score.attend(q_here, *in_order(keys, visible), visible.everywhere, carry=carry)), ()

    return one_ahead(partial(arriving, (k, v), recipe), work, lambda _: All(), groups)[1]


def gather_backward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, visible: Visible, score: Score, rows: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), the sums in float32; `rows` are this device's dout, lse and delta, as the kernel wants them.

    On TPUs the gradients of keys travel by rotations and are added here: for v4 and v5p XLA makes a sum of bfloat16 of
    its own reduce-scatter.
    """
    groups, axis = groups_of(recipe), recipe.plan.ring_axis
    axis = axis.rotating if groups > 1 or (recipe.plan.device == "tpu" and axis.size > 1) else axis

    def work(group: Any, keys: list[Array]) -> tuple[Any, Any, Any]:
        q_here, rows_here = of_heads((q, rows), group, groups)
        dq, *grads = score.attend_backward(q_here, *in_order(keys, visible), visible.everywhere, *rows_here)
        return grads, dq, ()

    def send(grads: Any) -> All:
        return All(*[axis.reduce_scatter(reordered(in_sums(x), visible.keys, 1), 1) for x in grads])

    (dk, dv), dq, _ = one_ahead(partial(arriving, (k, v), recipe), work, send, groups)
    return dq, dk, dv


def groups_of(recipe: SharedRecipe) -> int:
    """With Ulysses its exchange is in groups, and the keys of each are gathered at once."""
    return recipe.groups if recipe.plan.ulysses == 1 else 1


def arriving(keys: tuple[Array, Array], recipe: SharedRecipe, group: Any) -> All:
    """The keys and values of all devices, of one group of heads."""
    groups, axis = groups_of(recipe), recipe.plan.ring_axis
    axis = axis.rotating if groups > 1 else axis
    return All(*[axis.all_gather(x, 1) for x in of_heads(keys, group, groups)])


def in_order(keys: list[Array], visible: Visible) -> list[Array]:
    return [reordered(x, visible.keys, 1, back=True) for x in keys]
