"""A result is a partial, and partials merge.

    out  [B, T, H, V]   softmax(scores) @ v over the keys seen so far, normalised
    lse  [B, T, H]      log(sum(exp(scores))), natural logarithm; -inf if no key was seen; float64 in torch for float32
                        inputs, since a merge needs small differences between large numbers

Merging is associative and commutative, and `empty` is its neutral element, so keys may arrive in any blocks and in any
order. Written once for torch and jax.numpy.
"""

from functools import reduce
from typing import NamedTuple

from ringattn.kernels.arrays import Array, accumulator, astype, fine, full, namespace

NEVER = float("-inf")  # the lse of a row that has seen no key


class Partial(NamedTuple):
    """Attention over the keys seen so far: `out` normalised, `lse` its natural log-sum-exp."""

    out: Array
    lse: Array


def empty(q: Array, value_dim: int) -> Partial:
    """Attention over no keys: zeros, and an lse of -inf."""
    rows = tuple(q.shape[:3])
    return Partial(full((*rows, value_dim), 0.0, accumulator(q), q), full(rows, NEVER, fine(q), q))


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys.

    exp(lse_b) / (exp(lse_a) + exp(lse_b)) = sigmoid(lse_b - lse_a) is the weight of b, so
    out = out_a - sigmoid(lse_b - lse_a) * (out_a - out_b). Only an lse of -inf is an empty side: NaN stays NaN.
    """
    a, b = normalise_empty(a), normalise_empty(b)
    xp = namespace(a.out)
    nothing = (a.lse == NEVER) & (b.lse == NEVER)
    gap = xp.where(nothing, xp.zeros_like(a.lse), b.lse - a.lse)  # -inf - -inf is NaN
    apart = a.out - b.out
    out = a.out - astype(sigmoid(gap), accumulator(apart))[..., None] * apart
    lse_a, lse_b = [xp.where(nothing, xp.zeros_like(x), x) for x in (a.lse, b.lse)]  # at -inf twice its gradient is NaN
    return Partial(out, xp.where(nothing, xp.full_like(a.lse, NEVER), xp.logaddexp(lse_a, lse_b)))


def normalise_empty(part: Partial) -> Partial:
    """The partial with out = 0 where the lse is -inf: a kernel may have written anything there."""
    xp = namespace(part.out)
    return Partial(xp.where((part.lse == NEVER)[..., None], xp.zeros_like(part.out), part.out), part.lse)


def add_sinks(part: Partial, sinks_H: Array) -> Partial:
    """One more key a head, with the logit `sinks_H` and a value of zero: a merge with Partial(0, sinks)."""
    xp = namespace(part.out)
    lse = xp.broadcast_to(astype(sinks_H, part.lse.dtype), part.lse.shape)
    return merge(part, Partial(xp.zeros_like(part.out), lse))


def sink_gradient(sinks_H: Array, lse_BTH: Array, delta_BTH: Array) -> Array:
    """d loss / d sink = -sum over the rows of exp(sink - lse) * delta: a sink is a key whose value is zero."""
    xp = namespace(lse_BTH)
    weight = xp.exp(astype(sinks_H, lse_BTH.dtype) - lse_BTH)
    weight = xp.where(lse_BTH == NEVER, xp.zeros_like(weight), weight)  # -inf - -inf is NaN
    return astype(-(weight * delta_BTH).sum((0, 1)), sinks_H.dtype)


def packed(part: Partial) -> Array:
    """A partial as one array [..., V + 1], or [..., V + 2]: the lse, rounded to the dtype of out, and what is left."""
    xp, dtype = namespace(part.out), accumulator(part.out)
    lse = [astype(part.lse, dtype)]
    if part.lse.dtype != dtype:
        rest = xp.where(part.lse == lse[0], xp.zeros_like(part.lse), part.lse - lse[0])  # -inf - -inf is NaN
        lse.append(astype(rest, dtype))
    return xp.concatenate([astype(part.out, dtype), *(x[..., None] for x in lse)], -1)


def unpacked(rows: Array, value_dim: int) -> Partial:
    """The inverse of `packed`."""
    out, lse, *rest = rows[..., :value_dim], *(rows[..., i] for i in range(value_dim, rows.shape[-1]))
    return Partial(out, astype(lse, fine(rows)) + rest[0] if rest else lse)


def merge_stack(stack: Partial) -> Partial:
    """Merge partials stacked along a first dim, in order."""
    return reduce(merge, [Partial(*part) for part in zip(*stack, strict=True)])


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), for both frameworks; exact at both infinities, with a gradient of zero there."""
    xp = namespace(x)
    return xp.exp(-xp.logaddexp(xp.zeros_like(x), -x))  # exp(-x) alone overflows, and 0 * inf is NaN
