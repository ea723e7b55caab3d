"""Ulysses: trade a slice of the sequence with all heads for the whole ring shard with a slice of the heads.

`enter` runs before the ring and `leave` after it; each is the other's adjoint. Both take one group of heads at a time,
so that one group travels while another is computed; while a single one travels nothing is. Where Ulysses ranks hold no
consecutive pieces of the shard (a plan that cuts documents), `order` says where each of its tokens lies among theirs,
and the inverse of that. Key heads are repeated if the Ulysses size does not divide them, and the gradients of the
copies are summed. Padding is zeroed on the way, forward and backward, so that nothing in a caller's padding, not even
NaN, reaches a real token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, Pending, Then
from ringattn.comms.memory import copy
from ringattn.kernels.arrays import accumulator
from ringattn.plans.cost import replicas

Real = Tensor | None  # [1 or B, T_local]: which tokens are real; None when all are
Order = tuple[Tensor, Tensor] | None  # where tokens lie, and the inverse; None: they need no other order


def enter(
    tensors: Sequence[Tensor], real: Sequence[Real], axis: Axis, group: int, groups: int, order: Order = None
) -> Pending:
    """[B, T / U, H, ...] of every rank -> [B, T, H / groups / U, ...]: this rank's heads of a group, padding zeroed."""
    tensors = [cleared(of_group(x, axis.size, group, groups), r) for x, r in zip(tensors, real, strict=True)]

    def ready(arrived: list[Tensor]) -> list[Tensor]:
        arrived = [x.flatten(2, 3) for x in arrived]
        return arrived if order is None else [x.index_select(1, order[0]) for x in arrived]

    return Then(axis.all_to_all(tensors, 2, 1, groups > 1 or None), ready)


def of_group(x: Tensor, ranks: int, group: int, groups: int) -> Tensor:
    """[B, T, H, ...] -> [B, T, ranks, h, ...]: of each rank's heads those that a group needs; a view."""
    x = x.unflatten(2, (ranks, -1))
    heads = x.shape[3]
    return x if groups == 1 else x.narrow(3, group * heads // groups, max(1, heads // groups))


def leave(tensors: Sequence[Tensor], axis: Axis, groups: int, order: Order = None) -> Pending:
    """[B, T, h, ...] of every rank -> [B, T / U, h * U, ...]: all ranks' heads of a group."""
    tensors = tensors if order is None else [x.index_select(1, order[1]) for x in tensors]
    return axis.all_to_all(tensors, 1, 2, groups > 1 or None)


def joined(groups: Sequence[Tensor], ranks: int = 1) -> Tensor:
    """The inverse, of all groups: the heads of each rank side by side."""
    if len(groups) == 1:
        return groups[0]
    B, T, heads, *rest = groups[0].shape
    whole = groups[0].new_empty(B, T, len(groups) * heads, *rest)
    places = whole.unflatten(2, (ranks, -1)).chunk(len(groups), 3)
    for place, x in zip(places, groups, strict=True):
        copy(place, x.unflatten(2, (ranks, -1)))
    return whole


def repeated(x: Tensor, axis: Axis) -> Tensor:
    """Key heads, each repeated until the Ulysses size divides their number."""
    times = replicas(x.shape[2], axis.size)
    return x.repeat_interleave(times, 2) if times > 1 else x


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the copies of each key head, in float32."""
    times = x.shape[2] // kv_heads
    if times == 1:
        return x
    return x.unflatten(2, (kv_heads, times)).sum(3, dtype=accumulator(x)).to(x.dtype)


def cleared(x: Tensor, real: Real, fill: float = 0.0) -> Tensor:
    """`x` [B, T, ...] with `fill` where tokens are padding."""
    return x if real is None else torch.where(real.reshape(*real.shape, *[1] * (x.dim() - 2)), x, fill)
