"""Gather: all keys at once, one kernel call a group of heads; in backward the keys' gradients are scattered home.

While one group is computed, the keys of the next one arrive and the gradients of the previous one leave. Simple, and
fast for short sequences; it needs O(T) memory for the keys of two groups.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from ringattn.comms.axis import All, Axis, Done, Pending, Then, one_ahead
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.rows import rows_of
from ringattn.kernels.total import Total, in_dtype
from ringattn.layouts.layout import Layout
from ringattn.torch.attention.steps import Entered, Grads, Score, Seen
from ringattn.torch.sharding import order_of


def gather_forward(
    groups: Iterable[Entered], axis: Axis, layout: Layout, where: Intervals | None, kernel: Score
) -> Iterator[Partial]:
    """Attention of this rank's queries over all keys, brought into their global order."""
    for q, k, v, start in one_ahead(gathered(group, axis, layout) for group in groups):
        seen = where and kernel.attend(q, k, v, where, carry=start, out_dtype=q.dtype)
        yield seen or start or empty(q, v.shape[-1])
        del k, v  # frees their memory before the group after the next is allocated


def gather_backward(
    groups: Iterable[Seen], axis: Axis, layout: Layout, where: Intervals | None, kernel: Score, with_delta: bool
) -> Iterator[Grads]:
    """(dq, dk, dv) in float32, and delta if `with_delta`."""

    def going_home() -> Iterator[Pending]:
        for q, k, v, out, lse, dout, dlse, _ in one_ahead(gathered(group, axis, layout) for group in groups):
            rows, delta = rows_of(kernel.kernel, out, lse, dout, dlse, with_delta)
            totals = kernel.backward((q, k, v), where, rows) if where else map(Total, (q, k, v))
            dq, *grads = (in_dtype(grad, accumulator(x)) for grad, x in zip(totals, (q, k, v), strict=True))
            del k, v, rows, totals
            home = [axis.reduce_scatter(reordered(x, layout, back=False), 1) for x in grads]
            del grads
            yield All(Done(dq), *home, Done(delta))

    return one_ahead(going_home())


def gathered(group: Entered | Seen, axis: Axis, layout: Layout) -> Pending:
    """A group (q, k, v, ...) with the keys and values of all ranks."""
    q, k, v, *rest = group
    pending = All(axis.all_gather(k, 1), axis.all_gather(v, 1))
    return Then(pending, lambda coming: (q, *(reordered(x, layout, back=True) for x in coming), *rest))


def reordered(x: Tensor, layout: Layout, back: bool) -> Tensor:
    """From the global order into that of the shards, or `back`."""
    return x if layout.in_order else x.index_select(1, order_of(layout, x.device, back, True))
