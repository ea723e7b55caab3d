"""Tokens that change places between the ranks of a plan.

A slot is a place for one token: rank by rank, Ulysses ranks inside of ring ranks, `plan.local_len` slots each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.comms.axis import Axis, Pending, Then
from ringattn.plans.plan import Plan

Place = tuple[int, int]  # ring rank, Ulysses rank


class Exchange:
    """Slot i gets the token of slot `source[i]`, or zeros if that is -1. A token may go to several slots.

    `sizes` are the ring ranks, the Ulysses ranks, and the tokens of each; `source` names equally many slots a rank.
    Only tokens that change ranks travel: along the Ulysses axis to the column of their destination, then along the
    ring. They are sent in the order of their destination slots, so no indices are sent with them. It refers to no
    process groups, so it may be cached for equal plans with other groups.
    """

    def __init__(self, sizes: tuple[int, int, int], place: Place, source: np.ndarray, device: torch.device):
        (ring, ulysses, self.tokens), (r, u), self.device = sizes, place, device
        self.slots = len(source) // (ring * ulysses)
        to = np.flatnonzero(source >= 0)
        from_r, from_u, token = np.unravel_index(source[to], sizes)
        to_r, to_u, slot = np.unravel_index(to, (ring, ulysses, self.slots))
        mine, column = (from_r == r) & (from_u == u), (from_r == r) & (to_u == u)
        give = [token[mine & (to_u == other)] for other in range(ulysses)]
        self.give, self.given = self.tensor(np.concatenate(give)), [len(x) for x in give]
        met = [to[column & (from_u == other)] for other in range(ulysses)]
        sort = np.argsort(np.concatenate(met))
        self.met, self.sort, self.unsort = [len(x) for x in met], self.tensor(sort), self.tensor(np.argsort(sort))
        self.leave = np.bincount(to_r[column], minlength=ring).tolist()
        arriving = (to_r == r) & (to_u == u)
        self.arrive = np.bincount(from_r[arriving], minlength=ring).tolist()
        self.put = self.tensor(np.concatenate([slot[arriving & (from_r == other)] for other in range(ring)]))

    def tensor(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(self.device)

    def carry(self, x: Tensor, plan: Plan, dim: int) -> Tensor:
        """The tokens of this rank's slots, from every rank's `x`, whose tokens lie along `dim`."""
        tokens: Tensor = self.start(x.movedim(dim, 0), plan).wait()
        return tokens.movedim(0, dim)

    def start(self, x: Tensor, plan: Plan, what: str = "tokens") -> Pending:
        """`carry` in flight, along dim 0."""
        column = hop(plan.ulysses_axis, x.index_select(0, self.give).split(self.given), self.met, what)
        leaving = column.index_select(0, self.sort) if plan.ulysses > 1 else column
        slots = x.new_zeros(self.slots, *x.shape[1:])
        flying = sent(plan.ring_axis, leaving.split(self.leave), self.arrive, what)
        return Then(flying, lambda arrived: slots.index_copy_(0, self.put, arrived))

    def carry_back(self, x: Tensor, plan: Plan, dim: int) -> Tensor:
        """The reverse: for each of this rank's tokens the sum of the slots that it went to."""
        x = x.movedim(dim, 0)
        leaving = hop(plan.ring_axis, x.index_select(0, self.put).split(self.arrive), self.leave)
        column = leaving.index_select(0, self.unsort) if plan.ulysses > 1 else leaving
        given = hop(plan.ulysses_axis, column.split(self.met), self.given)
        return x.new_zeros(self.tokens, *x.shape[1:]).index_add_(0, self.give, given).movedim(0, dim)


def hop(axis: Axis, parts: Sequence[Tensor], counts: list[int], what: str = "tokens") -> Tensor:
    """Send one part to each rank of an axis; `counts` entries come from each, joined in the order of the ranks."""
    joined: Tensor = sent(axis, parts, counts, what).wait()
    return joined


def sent(axis: Axis, parts: Sequence[Tensor], counts: list[int], what: str) -> Pending:
    """`hop` in flight."""
    here = parts[axis.rank]
    arrived = [here if r == axis.rank else here.new_empty(n, *here.shape[1:]) for r, n in enumerate(counts)]
    out = {r: [x] for r, x in enumerate(parts) if r != axis.rank and len(x)}
    flying = axis.move(out, {r: [x] for r, x in enumerate(arrived) if r != axis.rank and len(x)}, what=what)
    return Then(flying, lambda _: torch.cat(arrived) if len(arrived) > 1 else here)


class Exchanged(torch.autograd.Function):
    """This rank's tokens after an exchange; gradients are exchanged back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, plan: Plan, dim: int, back: bool = False) -> Tensor:
        ctx.exchange, ctx.plan, ctx.dim, ctx.back = exchange, plan, dim, back
        return (exchange.carry_back if back else exchange.carry)(x.detach(), plan, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchanged.apply(grad, ctx.exchange, ctx.plan, ctx.dim, not ctx.back), None, None, None, None
