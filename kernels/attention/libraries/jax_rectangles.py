"""Attention by rectangles on JAX arrays: their partials merge, and with the lse over all keys their gradients add up.

One program serves all devices, so the rectangles of a step are a `switch` among the few sets of rectangles that occur.
As `rectangles.py` for torch, except that nothing is written in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringattn.kernels.arrays import accumulator, in_sums, sum_of
from ringattn.kernels.intervals import Intervals, Rectangle
from ringattn.kernels.partial import NEVER, Partial, empty, merge
from ringattn.kernels.varying import axes_of, vary

# (q, k, v, mask, **score) -> out [B, T, H, V], lse [B, T, H], and (q, k, v, rows, mask, **score) -> dq, dk, dv:
# rows are what `prepare` gives in place of (dout, lse, delta); score is scale, softcap and the kernel's own options.
Forward = Callable[..., tuple[Array, Array]]
Backward = Callable[..., tuple[Array, Array, Array]]


def over_rectangles(name: str, forward: Forward, backward: Backward) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`attend` and `attend_backward` of a JaxKernel, from a vendor's two functions of one rectangle."""

    def attend(
        q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, *, carry: Partial | None = None, **score: Any
    ) -> Partial:
        arrays = vary((q_BTHD, k_BSGD, v_BSGV), axes_of(q_BTHD, k_BSGD, v_BSGV, carry, where.begin))
        part = chosen(name, where, partial(forward_over, partial(forward, **score)), arrays)
        return part if carry is None else merge(in_sums(carry), in_sums(part))

    def attend_backward(
        q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Any,
        *, dq: Array | None = None, **score: Any,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        arrays: Any = q_BTHD, k_BSGD, v_BSGV, (dout_BTHV, lse_BTH, delta_BTH)
        arrays = vary(arrays, axes_of(arrays, dq, where.begin))
        new, dk, dv = chosen(name, where, partial(backward_over, partial(backward, **score)), arrays)
        return new if dq is None else sum_of(dq, new), dk, dv

    return attend, attend_backward


def chosen(name: str, where: Intervals, run: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """run(rectangles, *arrays) with the rectangles of this device and step."""
    if where.choice is None:
        raise NotImplementedError(
            f"{name} needs rectangles that are known before the program runs, and these intervals have none; use "
            "kernel='reference', which takes any intervals"
        )
    sets = where.choice.sets
    single = all(len(rectangles) == 1 for rectangles in sets)
    if len(sets) == 1:
        return run(sets[0], single, *arrays)
    return lax.switch(where.choice.which, [partial(run, rectangles, single) for rectangles in sets], *arrays)


def forward_over(
    forward: Forward, rectangles: tuple[Rectangle, ...], single: bool, q: Array, k: Array, v: Array
) -> Partial:
    """The partial of these rectangles; of one `single` in the dtype of the inputs, in which it is computed anyway."""
    total = empty(q, v.shape[-1])
    for rows, keys, mask in rectangles:
        new = Partial(*forward(q[:, rows], k[:, keys], v[:, keys], mask))
        if single:
            return Partial(around(new.out, rows, q), around(new.lse, rows, q, NEVER))
        new = merge(Partial(total.out[:, rows], total.lse[:, rows]), new)
        total = Partial(put(total.out, rows, new.out), put(total.lse, rows, new.lse))
    return total


def backward_over(
    backward: Backward, rectangles: tuple[Rectangle, ...], single: bool, q: Array, k: Array, v: Array, rows: Any
) -> tuple[Array, Array, Array]:
    """The gradients of these rectangles: their sums, or those of one `single` in the dtypes that it gives."""
    totals: list[Any] = [None, None, None]
    for queries, keys, mask in rectangles:
        here = jax.tree.map(lambda x, at=queries: x[:, at], rows)
        parts = backward(q[:, queries], k[:, keys], v[:, keys], here, mask)
        ats = (queries, keys, keys)
        if single:
            dq, dk, dv = (around(grad, at, x) for grad, at, x in zip(parts, ats, (q, k, v), strict=True))
            return dq, dk, dv
        totals = [added(*each) for each in zip(totals, parts, ats, (q, k, v), strict=True)]
    missing = (jnp.zeros(x.shape, accumulator(x)) if t is None else t for t, x in zip(totals, (q, k, v), strict=True))
    dq, dk, dv = vary(tuple(missing), axes_of(q, k, v, rows))
    return dq, dk, dv


def added(total: Array | None, grad: Array, at: slice, like: Array) -> Array:
    """total with `grad` added to its [:, at]; without a total, `grad` with zeros around it."""
    grad = in_sums(grad)
    return around(grad, at, like) if total is None else put(total, at, total[:, at] + grad)


def around(grad: Array, at: slice, like: Array, fill: float = 0.0) -> Array:
    """`grad` as the [:, at] of an array with as many tokens as `like`, with `fill` elsewhere.

    It is added to a total behind the `switch`: a branch that updates the total must copy it first, since all branches
    get it.
    """
    edges = [(0, 0), (at.start, like.shape[1] - at.stop)] + [(0, 0)] * (grad.ndim - 2)
    return jnp.pad(grad, edges, constant_values=fill)


def put(total: Array, at: slice, value: Array) -> Array:
    """`total` with `value` as its [:, at]."""
    return value if value.shape == total.shape else lax.dynamic_update_slice_in_dim(total, value, at.start, 1)
