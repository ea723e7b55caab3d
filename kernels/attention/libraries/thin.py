"""Steps in which queries see few keys, for a library whose kernel takes all queries and cannot merge into a carry.

Our own kernel takes these: it merges in place, skips what sees nothing, and its cost is that of the pairs. In backward
few keys are few programs; so where most queries of a long row see some, they go as several rows of a batch, whose sums
are added up. One H100, 65,536 queries, times without this over times with it: a window of 700 keys of the rank before
4.4 forward, 4 first keys 1.32 forward and 1.15 backward.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.attention.libraries.rectangles import cached, own_kernel, sliced
from ringattn.kernels.intervals import Intervals, extent, within
from ringattn.kernels.partial import Partial
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.rows import EVERY, NONE, Rows
from ringattn.kernels.total import Total

KEYS_A_QUERY = 1024  # keys a query: with fewer our own kernel takes less than another pass over all queries
LONG_ROW = 4096  # queries of a row that goes as several


class Thin(NamedTuple):
    """Few keys a query, for our own kernel: the keys that are seen, and the intervals counted from the first.

    sparse   whether most queries among those that see some see none
    rows     as how many rows of a batch the queries of a backward pass go, so that few keys are many programs
    """

    keys: slice
    where: Intervals
    sparse: bool
    rows: int


def thin(where: Intervals) -> Thin | None:
    """The intervals as few keys a query, if they are and the host knows it."""
    return cached(where, "thin", lambda: thinned(where))


def thinned(where: Intervals) -> Thin | None:
    if where.host is None or len(where.host[0]) != 1:
        return None
    begin, end = (x.astype(np.int64) for x in where.host)
    (queries, keys), seen = extent(where), np.maximum(end - begin, 0)
    live = np.count_nonzero(seen)
    if int(seen.sum()) >= KEYS_A_QUERY * live:
        return None
    T = begin.shape[1]
    few = keys.stop - keys.start <= KEYS_A_QUERY and T >= LONG_ROW and 2 * live >= T
    rows = next(n for n in (32, 16, 8, 4, 2, 1) if T % n == 0) if few else 1
    return Thin(keys, within(where, slice(0, T), keys.start), 2 * live < queries.stop - queries.start, rows)


def as_rows(x: Tensor, n: int) -> Tensor:
    """The queries of the only row of a batch as so many rows."""
    return x[0].unflatten(0, (n, -1))


def with_thin(kernel: TorchKernel) -> TorchKernel:
    """The kernel; steps with few keys a query go to our own."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, where: Intervals, *, carry: Partial | None = None,
        out_dtype: torch.dtype | None = None, **score: Any,
    ) -> Partial:  # fmt: skip
        few = thin(where) if carry is not None else None
        if few is None:
            return kernel.attend(q, k, v, where, carry=carry, out_dtype=out_dtype, **score)
        k, v = sliced(k, few.keys), sliced(v, few.keys)
        return own_kernel(q).attend(q, k, v, few.where, carry=carry, out_dtype=out_dtype or accumulator(q), **score)

    def gradients(
        tensors: tuple[Tensor, Tensor, Tensor], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
        into: tuple[Any, Any, Any] = NONE, *, final: bool = False, **score: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        q, k, v = tensors
        few = None if final else thin(where)
        n = few.rows if few is not None and len(q) == 1 else 1
        if few is None or not (few.sparse or n > 1):
            return kernel.backward(tensors, where, rows, want, into, final=final, **score)
        k, v = sliced(k, few.keys), sliced(v, few.keys)
        where, dq = few.where, into[0]
        if n > 1:
            k, v = (x.expand(n, -1, -1, -1) for x in (k, v))
            q, begin, end = (as_rows(x, n) for x in (q, where.begin, where.end))
            where = Intervals(begin, end, host=tuple(x.reshape(n, -1) for x in where.host))
            rows = Rows(*(None if x is None else as_rows(x, n) for x in (rows.dout, rows.lse, rows.delta, rows.out)))
            dq = None if dq is None else as_rows(dq, n)
        grads = own_kernel(q).backward((q, k, v), where, rows, EVERY, (dq, None, None), **score)
        sums = Total(tensors[1]), Total(tensors[2])
        for total, grad in zip(sums, grads[1:], strict=True):
            total.add(grad.sum(0, keepdim=True) if n > 1 else grad, few.keys)
        return grads[0].view(tensors[0].shape) if grads[0] is not dq or dq is None else into[0], *sums

    return replace(kernel, attend=attend, backward=gradients)
