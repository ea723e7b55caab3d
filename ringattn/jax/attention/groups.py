"""Heads in groups: while a kernel works on one, the next one arrives and the results of the last one go home.

As `ringattn.comms.axis.one_ahead` in torch, but in one loop, whose body is compiled once: the first step also sends
zeros, and the last one also brings the first group again. A kernel hides both. XLA hides only what a barrier holds
beside a kernel; see ring.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringattn.kernels.varying import axes_of, vary


def one_ahead(
    bring: Callable[[Any], list[Any]], work: Callable[[Any, list[Any]], tuple[Any, Any]],
    send: Callable[[Any], list[Any]], groups: int,
) -> tuple[Any, Any]:  # fmt: skip
    """What came home and what stays here, the heads of all groups side by side.

    bring(group) -> the transfers of what a group needs
    work(group, what arrived) -> what to send, what to keep
    send(what to send) -> its transfers
    """
    here = landed(bring(0))
    if groups == 1:
        made, kept = work(0, here)
        return landed(send(made)), kept
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: work(0, here)[0]))

    def step(carry: Any, group: Any) -> tuple[Any, Any]:
        here, made = carry
        coming, leaving = bring((group + 1) % groups), send(made)
        made, kept = work(group, here)
        coming, leaving, made, kept = lax.optimization_barrier((coming, leaving, made, kept))
        return (landed(coming), made), (landed(leaving), kept)

    carry = here, vary(nothing, axes_of(here))
    (_, made), (home, kept) = lax.scan(step, carry, jnp.arange(groups))
    home = jax.tree.map(lambda others, last: jnp.concatenate([others[1:], last[None]]), home, landed(send(made)))
    return jax.tree.map(side_by_side, home), jax.tree.map(side_by_side, kept)


def landed(transfers: Sequence[Any]) -> list[Any]:
    return [transfer.wait() for transfer in transfers]


def of_heads(arrays: Any, group: Any, groups: int) -> Any:
    """One group of the heads, which are dim 2 of all arrays."""

    def of_group(x: Any) -> Any:
        size = x.shape[2] // groups
        return lax.dynamic_slice_in_dim(x, group * size, size, axis=2)

    return arrays if groups == 1 else jax.tree.map(of_group, arrays)


def side_by_side(x: Any) -> Any:
    """[groups, B, T, heads of a group, ...] -> [B, T, heads, ...]."""
    return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])
