"""Gather: all keys at once, one kernel call a group of heads; in backward the keys' gradients are scattered.

While one group is computed, the keys of the next one arrive and the gradients of the previous one leave. Simple, and
fast for short sequences; it needs O(T) memory for the keys of two groups.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ringattn.comms.axis import All, Axis, Pending, Then
from ringattn.torch.attention.steps import Grads
from ringattn.torch.attention.ulysses import Order


def gathered(group: Sequence[Any], axis: Axis, order: Order) -> Pending:
    """A group (q, k, v, ...) with the keys and values of all ranks, in the order of the sequence."""
    q, k, v, *rest = group

    def ready(arrived: list[Tensor]) -> tuple[Tensor, ...]:
        return q, *(arrived if order is None else [x.index_select(1, order[1]) for x in arrived]), *rest

    return Then(All(axis.all_gather(k, 1), axis.all_gather(v, 1)), ready)


def scattered(grads: Grads, axis: Axis, order: Order) -> Pending:
    """Gradients (dq, dk, dv, delta) for all keys, in float32, as the sums over all ranks for this rank's."""
    dq, *of_keys, delta = grads
    sums = [axis.reduce_scatter(x if order is None else x.index_select(1, order[0]), 1) for x in of_keys]
    return Then(All(*sums), lambda arrived: (dq, *(x.to(dq.dtype) for x in arrived), delta))
