"""Gather: all keys at once, one kernel call; in backward the keys' gradients are summed and scattered home.

Simple, and fast for short sequences; it needs O(T) memory for the keys.
"""

from jax import Array

from ringattn.jax.attention.steps import Score, Sight
from ringattn.jax.sharding import reordered
from ringattn.kernels.partial import Partial
from ringattn.spmd import SharedRecipe


def gather_forward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, sight: Sight, score: Score, start: Partial | None
) -> Partial:
    """Attention of this device's queries over all keys, brought into their global order."""
    return score.attend(q, *gathered(k, v, recipe), sight.everywhere, carry=start)


def gather_backward(
    q: Array, k: Array, v: Array, recipe: SharedRecipe, sight: Sight, score: Score, rows: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32; `rows` are this device's dout, lse and delta, as the kernel wants them."""
    dq, dk, dv = score.attend_backward(q, *gathered(k, v, recipe), sight.everywhere, *rows)
    home = [recipe.plan.ring_axis.reduce_scatter(reordered(x, sight.keys, 1), 1) for x in (dk, dv)]
    return dq, home[0].wait(), home[1].wait()


def gathered(k: Array, v: Array, recipe: SharedRecipe) -> tuple[Array, Array]:
    """The keys and values of all devices, in their global order."""
    pending = [recipe.plan.ring_axis.all_gather(x, 1) for x in (k, v)]
    k, v = (reordered(x.wait(), recipe.plan.keys.tokens, 1, back=True) for x in pending)
    return k, v
