"""A result is a partial, and partials merge.

    out  [B, T, H, V]   softmax(scores) @ v over the keys seen so far, normalised
    lse  [B, T, H]      log(sum(exp(scores))), natural logarithm; -inf if no key was seen; float64 in torch for float32
                        inputs, since a merge needs small differences between large numbers

Merging is associative and commutative, and `empty` is its neutral element, so keys may arrive in any blocks and in any
order. Written once for torch and jax.numpy.
"""

from functools import reduce
from typing import Any, NamedTuple

from ringattn.kernels.arrays import Array, accumulator, astype, fine, full, namespace

NEVER = float("-inf")  # the lse of a row that has seen no key


class Partial(NamedTuple):
    """Attention over the keys seen so far: `out` normalised, `lse` its natural log-sum-exp."""

    out: Array
    lse: Array


class Streams(NamedTuple):
    """The same result as running statistics: `out` = sum(exp(s - max) v), `max`, `sum` = sum(exp(s - max))."""

    out: Array
    max: Array
    sum: Array


FORMS: dict[str, Any] = {"lse": Partial, "streams": Streams}  # the forms in which results travel


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
    weight = sigmoid(astype(gap, accumulator(apart)))[..., None]
    out = a.out - weight * apart
    lse_a, lse_b = (xp.where(nothing, xp.zeros_like(x), x) for x in (a.lse, b.lse))  # at -inf twice its gradient is NaN
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


def to_streams(part: Partial) -> Streams:
    """(out, lse) as statistics in the dtype of out: max is the rounded lse, and sum = exp(lse - max) the rest.

    So the sum is about one, and zero for an empty row.
    """
    xp = namespace(part.out)
    top = astype(part.lse, accumulator(part.out))
    empty = part.lse == NEVER
    total = astype(xp.exp(xp.where(empty, xp.zeros_like(part.lse), part.lse - top)), top.dtype)
    total = xp.where(empty, xp.zeros_like(total), total)
    return Streams(part.out * total[..., None], top, total)


def from_streams(streams: Streams) -> Partial:
    """Statistics as (out / sum, max + log(sum)); an empty row (sum = 0) becomes zeros and -inf."""
    xp = namespace(streams.out)
    seen = streams.sum != 0  # also where it is NaN
    total = xp.where(seen, streams.sum, xp.ones_like(streams.sum))
    top = astype(streams.max, fine(streams.max))
    lse = xp.where(seen, top + xp.log(total), xp.full_like(top, NEVER))
    return Partial(streams.out / total[..., None], lse)


def merge_streams(a: Streams, b: Streams) -> Streams:
    """Both sides brought to the larger maximum, then added."""
    xp = namespace(a.out)
    top = xp.maximum(a.max, b.max)
    safe = xp.where(top == NEVER, xp.zeros_like(top), top)
    scale_a, scale_b = xp.exp(a.max - safe), xp.exp(b.max - safe)
    out = a.out * scale_a[..., None] + b.out * scale_b[..., None]
    return Streams(out, top, a.sum * scale_a + b.sum * scale_b)


def form_of(q: Array) -> str:
    """The form in which partials of such queries travel: streams if the lse has more bits than out, else lse."""
    return "lse" if fine(q) == accumulator(q) else "streams"


def packed(part: Partial, form: str) -> Array:
    """A partial as one array: [..., V + 1], or [..., V + 2] as streams."""
    whole = part if form == "lse" else to_streams(part)
    return namespace(part.out).concatenate([whole[0], *(x[..., None] for x in whole[1:])], -1)


def unpacked(rows: Array, form: str) -> Any:
    """The inverse of `packed`, as Partial or Streams."""
    V = rows.shape[-1] - len(FORMS[form]._fields) + 1
    return FORMS[form](rows[..., :V], *(rows[..., i] for i in range(V, rows.shape[-1])))


def partial_of(rows: Array, form: str) -> Partial:
    """The inverse of `packed`, as Partial."""
    merged = unpacked(rows, form)
    return from_streams(merged) if isinstance(merged, Streams) else merged


def merge_stack(stack: Any) -> Partial:
    """Merge partials (or streams) stacked along a first dim, in order."""
    parts = [type(stack)(*part) for part in zip(*stack, strict=True)]
    return reduce(merge, parts) if isinstance(stack, Partial) else from_streams(reduce(merge_streams, parts))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), for both frameworks; exact at both infinities, with a gradient of zero there."""
    xp = namespace(x)
    return xp.exp(-xp.logaddexp(xp.zeros_like(x), -x))  # exp(-x) alone overflows, and 0 * inf is NaN
