"""The rows of a backward pass: what it needs of each query besides q. They are made once for all of its steps."""

from collections.abc import Callable
from typing import Any

from ringattn.kernels.arrays import Array, accumulator, astype, is_torch, namespace
from ringattn.kernels.partial import NEVER

EVERY, OF_QUERIES, OF_KEYS = (0, 1, 2), (0,), (1, 2)  # which gradients of q, k and v
NO_SUMS = (None, None, None)


class Rows:
    """dout, the lse over all keys, and either delta = rowsum(dout * out) - dlse or the out that it follows from.

    `made` is a kernel's cache: what it makes of these rows in its first step.
    """

    __slots__ = "delta", "dout", "lse", "made", "out"

    def __init__(self, dout: Array, lse: Array, delta: Array | None, out: Array | None = None):
        self.dout, self.lse, self.delta, self.out = dout, lse, delta, out
        self.made: Any = None

    def heads(self, at: slice) -> "Rows":
        """The rows of some query heads."""
        return Rows(*(None if x is None else x[:, :, at] for x in (self.dout, self.lse, self.delta, self.out)))


def with_delta(dout: Array, lse: Array, delta: Array | None, out: Array | None) -> Rows:
    """`prepare` of a kernel that takes delta."""
    return Rows(*rounded(dout, lse, row_delta(out, dout) if delta is None else delta))


def with_out(dout: Array, lse: Array, delta: Array | None, out: Array | None) -> Rows:
    """`prepare` of a kernel that computes delta from out, and takes delta where there is no out."""
    return Rows(*rounded(dout, lse, delta if out is None else None), out)


def rows_of(
    kernel: Any, out: Array, lse: Array, dout: Array, dlse: Array | None, needs_delta: bool
) -> tuple[Rows, Array | None]:
    """The rows of a backward pass as the kernel takes them, and delta if the caller needs it.

    A kernel that computes delta gets `out`, unless the lse has a gradient too, which is a term of delta.
    """
    by_out = dlse is None
    delta = None if by_out and not needs_delta else row_delta(out, dout, dlse)
    return kernel.prepare(dout, lse, delta, out if by_out else None), delta


def row_delta(out: Array, dout: Array, dlse: Array | None = None) -> Array:
    """rowsum(dout * out) - dlse: all that the backward pass needs of out and of the lse's gradient."""
    if is_torch(out) and out.is_cuda and out.itemsize < 8:
        from ringattn.kernels.attention.triton.stats import row_delta as in_one_pass  # triton is part of torch for GPUs

        return in_one_pass(out, dout, dlse)
    xp, dtype = namespace(out), accumulator(out)
    delta = xp.sum(astype(dout, dtype) * astype(out, dtype), axis=-1)
    return delta if dlse is None else delta - dlse


def rounded(
    dout: Array, lse: Array, delta: Array | None, kept: Callable[[Array], Array] | None = None
) -> tuple[Array, Array, Any]:
    """(dout, lse, delta) of a backward pass, with the lse rounded to the dtype of scores, and dout, delta corrected.

    Rounding the lse changes the weights exp(score - lse) of a query by one factor for all keys. In gradients weights
    only appear in products with dout or delta, so these are multiplied by its inverse. `delta` is None for a kernel
    that computes it from out. `kept` gives the lse that a kernel really uses, if it rounds once more.
    """
    exact = accumulator(dout)
    if lse.dtype == exact:
        return dout, lse, delta
    xp, low = namespace(lse), astype(lse, exact)
    taken = astype(low, lse.dtype) if kept is None else kept(low)
    off = xp.where(lse == NEVER, xp.zeros_like(lse), taken - lse)
    factor = astype(xp.exp(off), exact)
    return dout * factor[..., None], low, None if delta is None else astype(delta, exact) * factor
