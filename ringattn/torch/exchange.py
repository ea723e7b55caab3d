"""Tokens that change places between the ranks of a plan.

A slot is a place for one token: rank by rank, Ulysses ranks inside of ring ranks, `plan.local_len` slots each.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.planning import Plan

Place = tuple[int, int]  # ring rank, Ulysses rank


class Exchange:
    """Slot i gets the token of slot `source[i]`, or zeros if that is -1. No token goes to two slots.

    `sizes` are the ring ranks, the Ulysses ranks, and the slots of each.
    Only tokens that change ranks travel: along the Ulysses axis to the column of their destination, then along the
    ring. They are sent in the order of their destination slots, so no indices are sent with them. It refers to no
    process groups, so it may be cached for equal plans with other groups.
    """

    def __init__(self, sizes: tuple[int, int, int], place: Place, source: np.ndarray, device: torch.device):
        self.sizes, self.place, self.source, self.device = sizes, place, source, device
        (ring, ulysses, _), (r, u) = sizes, place
        to = np.flatnonzero(source >= 0)
        (from_r, from_u, token), (to_r, to_u, slot) = (np.unravel_index(x, sizes) for x in (source[to], to))
        mine, column = (from_r == r) & (from_u == u), (from_r == r) & (to_u == u)
        self.give = [self.tensor(token[mine & (to_u == other)]) for other in range(ulysses)]
        met = [to[column & (from_u == other)] for other in range(ulysses)]
        self.met, self.sort = [len(x) for x in met], self.tensor(np.argsort(np.concatenate(met)))
        self.leave = np.bincount(to_r[column], minlength=ring).tolist()
        arriving = (to_r == r) & (to_u == u)
        self.arrive = np.bincount(from_r[arriving], minlength=ring).tolist()
        self.put = self.tensor(np.concatenate([slot[arriving & (from_r == other)] for other in range(ring)]))

    def tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(self.device)

    @cached_property
    def back(self) -> "Exchange":
        """Every token back to the slot it came from."""
        source = np.full_like(self.source, -1)
        to = np.flatnonzero(self.source >= 0)
        source[self.source[to]] = to
        return Exchange(self.sizes, self.place, source, self.device)

    def carry(self, x: Tensor, plan: Plan, dim: int) -> Tensor:
        """The tokens of this rank's slots, from every rank's `x`, whose tokens lie along `dim`."""
        x = x.movedim(dim, 0)
        column = hop(plan.ulysses_axis, [x.index_select(0, at) for at in self.give], self.met)
        leaving = column.index_select(0, self.sort) if plan.ulysses > 1 else column
        arrived = hop(plan.ring_axis, list(leaving.split(self.leave)), self.arrive)
        return x.new_zeros(x.shape).index_copy(0, self.put, arrived).movedim(0, dim)


def hop(axis: Axis, parts: list[Tensor], counts: list[int]) -> Tensor:
    """Send one part to each rank of an axis; `counts` tokens come from each, joined in the order of the ranks."""
    here = parts[axis.rank]
    arrived = [here if r == axis.rank else here.new_empty(n, *here.shape[1:]) for r, n in enumerate(counts)]
    out = {r: [x] for r, x in enumerate(parts) if r != axis.rank and len(x)}
    axis.move(out, {r: [x] for r, x in enumerate(arrived) if r != axis.rank and len(x)}, what="tokens").wait()
    return torch.cat(arrived) if len(arrived) > 1 else here


class Exchanged(torch.autograd.Function):
    """This rank's tokens after an exchange; gradients are exchanged back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, plan: Plan, dim: int) -> Tensor:
        ctx.exchange, ctx.plan, ctx.dim = exchange, plan, dim
        return exchange.carry(x.detach(), plan, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchanged.apply(grad, ctx.exchange.back, ctx.plan, ctx.dim), None, None, None
