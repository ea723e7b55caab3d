"""Gather: all keys at once, one kernel call; in backward the keys' gradients are summed and scattered home.

Simple, and fast for short sequences; it needs O(T) memory for the keys.
"""

from jax import Array

from ringattn.comms.jax import MeshAxis
from ringattn.jax.attention.steps import Score, Sight
from ringattn.jax.sharding import reordered
from ringattn.kernels.partial import Partial


def gather_forward(
    q: Array, k: Array, v: Array, axis: MeshAxis, sight: Sight, score: Score, start: Partial | None
) -> Partial:
    """Attention of this device's queries over all keys, brought into their global order."""
    return score.attend(q, *gathered(k, v, axis, sight), sight.everywhere, carry=start)


def gather_backward(
    q: Array, k: Array, v: Array, axis: MeshAxis, sight: Sight, score: Score, rows: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32; `rows` are this device's dout, lse and delta, as the kernel wants them."""
    dq, dk, dv = score.attend_backward(q, *gathered(k, v, axis, sight), sight.everywhere, *rows)
    home = [axis.reduce_scatter(reordered(x, sight.keys, 1), 1) for x in (dk, dv)]
    return dq, home[0].wait(), home[1].wait()


def gathered(k: Array, v: Array, axis: MeshAxis, sight: Sight) -> tuple[Array, Array]:
    pending = [axis.all_gather(x, 1) for x in (k, v)]
    k, v = (reordered(x.wait(), sight.keys, 1, back=True) for x in pending)
    return k, v
