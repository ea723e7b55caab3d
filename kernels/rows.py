"""The rows of a backward pass: what it needs of each query besides q. They are made once for all of its steps."""

from typing import Any

from ringattn.kernels import partial
from ringattn.kernels.arrays import Array, is_torch
from ringattn.kernels.partial import rounded

EVERY, OF_QUERIES, OF_KEYS = (0, 1, 2), (0,), (1, 2)  # which gradients of q, k and v
NONE = (None, None, None)


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


def row_delta(out: Array, dout: Array, dlse: Array | None = None) -> Array:
    """rowsum(dout * out) - dlse, in one fused pass on GPUs."""
    if is_torch(out) and out.is_cuda and out.itemsize < 8:
        from ringattn.kernels.attention.triton import backward  # triton is part of torch for GPUs

        return backward.row_delta(out, dout, dlse)
    return partial.row_delta(out, dout, dlse)
