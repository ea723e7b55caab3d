"""Heads in groups: while a kernel works on one, the next one arrives and the results of the last one return.

As `ringattn.comms.axis.one_ahead` in torch, but in one loop, whose body is compiled once: the first step also sends
zeros, and the last one also receives the first group again. A kernel hides both. XLA hides only what a barrier holds
beside a kernel; see ring.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringattn.comms.axis import Pending
from ringattn.kernels.varying import axes_of, vary


def one_ahead(
    receive: Callable[[Any], Pending], work: Callable[[Any, list[Any]], tuple[Any, Any, Any]],
    send: Callable[[Any], Pending], groups: int, ranks: int = 1,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """What returned and what stays, the heads of all groups side by side, and the sum of what they share.

    receive(group) -> the transfer of what a group needs
    work(group, what arrived) -> what to send, what to keep, what to add to that of the other groups
    send(what to send) -> its transfer, of the heads of so many ranks
    """
    arrived = receive(0).wait()
    if groups == 1:
        made, kept, total = work(0, arrived)
        return send(made).wait(), kept, total
    shapes = jax.eval_shape(lambda: work(0, arrived)[::2])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(carry: Any, group: Any) -> tuple[Any, Any]:
        arrived, (made, total) = carry
        arriving, leaving = receive((group + 1) % groups), send(made)
        made, kept, more = work(group, arrived)
        arriving, leaving, made, kept, more = lax.optimization_barrier((arriving, leaving, made, kept, more))
        return (arriving.wait(), (made, jax.tree.map(jnp.add, total, more))), (leaving.wait(), kept)

    carry = arrived, vary(nothing, axes_of(arrived))
    (_, (made, total)), (sent, kept) = lax.scan(step, carry, jnp.arange(groups))
    sent = jax.tree.map(lambda others, last: jnp.concatenate([others[1:], last[None]]), sent, send(made).wait())
    return jax.tree.map(partial(side_by_side, ranks=ranks), sent), jax.tree.map(side_by_side, kept), total


def of_heads(arrays: Any, group: Any, groups: int, ranks: int = 1) -> Any:
    """One group of the heads of each rank; heads are dim 2 of all arrays."""

    def of_group(x: Any) -> Any:
        x = x.reshape(*x.shape[:2], ranks, groups, -1, *x.shape[3:])
        x = lax.dynamic_index_in_dim(x, group, 3, keepdims=False)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    return arrays if groups == 1 else jax.tree.map(of_group, arrays)


def side_by_side(x: Any, ranks: int = 1) -> Any:
    """The inverse, of all groups: [groups, B, T, heads of a group, ...] -> [B, T, heads, ...]."""
    x = jnp.moveaxis(x.reshape(*x.shape[:3], ranks, -1, *x.shape[4:]), 0, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[5:])
