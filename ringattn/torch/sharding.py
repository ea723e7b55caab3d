"""A rank's part of a sequence: cutting it out, putting the whole together again, and which of it is padding.

A slot is a place for one token: rank by rank, Ulysses ranks inside of ring ranks, `plan.local_len` slots each.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.check.arguments import of_arguments
from ringattn.check.attention import of_dim, of_part, of_roll, of_whole
from ringattn.comms.axis import Axis, Pending, Then
from ringattn.layouts.layout import positions_of
from ringattn.masks.spec import Docs, raise_if
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.torch.agree import agree, describe, note, refuse
from ringattn.torch.check import of_types


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the function's tensors by its arguments, of which the first is a plan: by this rank's place in it too.

    Under a FakeTensorMode make new ones, which hold no numbers. Others are made outside of inference mode, even if it
    is on: a later call may keep them for its backward pass.
    """
    made = lru_cache(maxsize=64)(torch.inference_mode(False)(lambda place, *args: function(*args)))

    def call(plan: Plan, *args: Any) -> Any:
        fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return made(plan.place, plan, *args) if fakes is None else function(plan, *args)

    return call


def positions(plan: Plan, docs: Docs | None = None) -> Tensor:
    """The global positions of this rank's tokens, never decreasing; those of padding are `seq_len` - 1.

    In trees, depths along their branches.
    """
    raise_if(of_arguments(docs=docs))
    at = np.minimum(own_positions(plan), plan.seq_len - 1)
    return torch.from_numpy(at if docs is None or docs.depths is None else docs.depths[..., at]).to(plan.device)


def real_positions(plan: Plan) -> Tensor:
    """Whether each of this rank's tokens belongs to the sequence, [T_local]; False for padding."""
    return torch.from_numpy(own_positions(plan) < plan.seq_len).to(plan.device)


def own_positions(plan: Plan) -> np.ndarray:
    """The positions of this rank's tokens; those from `seq_len` on are padding."""
    return local_positions(plan, *plan.place)


@lru_cache(maxsize=64)
def local_positions(plan: Plan, ring_rank: int, ulysses_rank: int) -> np.ndarray:
    return positions_of(plan.tokens.held(ring_rank, ulysses_rank))


def shard(x: Tensor, plan: Plan, dim: int = 1, compare: bool = True) -> Tensor:
    """This rank's tokens of `x`, whose dim `dim` is the whole sequence; padded with zeros if need be. Always a copy."""
    raise_if(of_types(x=x) or of_dim(x, dim) or of_whole(x, dim, plan, plan.local_len))
    if compare:
        note(x, plan)
    if plan.tokens.many:
        at = own_positions(plan)
        mine = x.index_select(dim, torch.from_numpy(at[at < plan.seq_len]).to(x.device))
    else:
        before: list[Any] = [slice(None)] * (dim % x.dim())
        parts = [x[*before, r.start : r.stop : r.step] for r in plan.tokens.held(*plan.place)]
        mine = torch.cat(parts, dim).contiguous()  # cut at the end of x
    padding = plan.local_len - mine.shape[dim]
    return F.pad(mine, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, padding]) if padding else mine


class Gathered(torch.autograd.Function):
    """What all ranks hold, joined along a dim in the order of ranks, or `back`: this rank's part of the sum over all
    ranks. Each is the gradient of the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, dim: int, back: bool = False) -> Tensor:
        ctx.how = plan, dim, not back
        for axis in (plan.ring_axis, plan.ulysses_axis) if back else (plan.ulysses_axis, plan.ring_axis):
            x = (axis.reduce_scatter if back else axis.all_gather)(x, dim).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Gathered.apply(grad, *ctx.how), None, None, None


class Exchange:
    """Slot i gets the token of slot `source[i]`, or zeros if that is -1. A token may go to several slots.

    Each rank has `tokens`; `source` names equally many slots a rank. Only tokens that change ranks travel: along the
    Ulysses axis to the column of their destination, then along the ring. They are sent in the order of their
    destination slots, so no indices are sent with them. It refers to no process groups, so it may be cached for equal
    plans with other groups.
    """

    def __init__(self, plan: Plan, tokens: int, source: np.ndarray, device: torch.device):
        ring, ulysses, (r, u), self.tokens, self.device = plan.ring, plan.ulysses, plan.place, tokens, device
        self.slots = len(source) // (ring * ulysses)
        to = np.flatnonzero(source >= 0)
        from_r, from_u, token = np.unravel_index(source[to], (ring, ulysses, tokens))
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
        column = sent(plan.ulysses_axis, x.index_select(0, self.give).split(self.given), self.met, what).wait()
        leaving = column.index_select(0, self.sort) if plan.ulysses > 1 else column
        slots = x.new_zeros(self.slots, *x.shape[1:])
        flying = sent(plan.ring_axis, leaving.split(self.leave), self.arrive, what)
        return Then(flying, lambda arrived: slots.index_copy_(0, self.put, arrived))

    def carry_back(self, x: Tensor, plan: Plan, dim: int) -> Tensor:
        """The reverse: for each of this rank's tokens the sum of the slots that it went to."""
        x = x.movedim(dim, 0)
        leaving = sent(plan.ring_axis, x.index_select(0, self.put).split(self.arrive), self.leave).wait()
        column = leaving.index_select(0, self.unsort) if plan.ulysses > 1 else leaving
        given = sent(plan.ulysses_axis, column.split(self.met), self.given).wait()
        return x.new_zeros(self.tokens, *x.shape[1:]).index_add_(0, self.give, given).movedim(0, dim)


def sent(axis: Axis, parts: Sequence[Tensor], counts: list[int], what: str = "tokens") -> Pending:
    """One part to each rank of an axis, in flight; `counts` entries come from each, joined in the order of ranks."""
    mine = parts[axis.rank]
    arrived = [mine if r == axis.rank else mine.new_empty(n, *mine.shape[1:]) for r, n in enumerate(counts)]
    out = {r: [x] for r, x in enumerate(parts) if r != axis.rank and len(x)}
    flying = axis.move(out, {r: [x] for r, x in enumerate(arrived) if r != axis.rank and len(x)}, what=what)
    return Then(flying, lambda _: torch.cat(arrived) if len(arrived) > 1 else mine)


def summed(x: Tensor, *axes: Axis) -> Tensor:
    """The sum over all ranks of the axes, on each of them."""
    for axis in axes:
        if axis.size > 1:
            flat = F.pad(x.flatten(), [0, -x.numel() % axis.size])
            x = axis.all_gather(axis.reduce_scatter(flat).wait()).wait()[: x.numel()].view_as(x)
    return x


class Exchanged(torch.autograd.Function):
    """This rank's tokens after an exchange; gradients are exchanged back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, plan: Plan, dim: int, back: bool = False) -> Tensor:
        ctx.exchange, ctx.plan, ctx.dim, ctx.back = exchange, plan, dim, back
        return (exchange.carry_back if back else exchange.carry)(x.detach(), plan, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchanged.apply(grad, ctx.exchange, ctx.plan, ctx.dim, not ctx.back), None, None, None, None


@cached
def inverse_of(plan: Plan, device: torch.device) -> Tensor:
    """Where each token of the sequence is in the order of all ranks' tokens."""
    return torch.from_numpy(np.argsort(plan.tokens.order())).to(device, non_blocking=True)


@cached
def shard_order_of(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of all ring shards in their order, and the inverse."""
    return pair(plan.tokens.shard_order(), device)


@cached
def swapped_of(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """`plan.tokens.swapped` of this rank, and its inverse; None if it changes nothing."""
    order = plan.tokens.swapped(plan.place[0])
    return None if order is None else pair(order, device)


def pair(order: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """An order and its inverse, on the device."""
    there, back = (torch.from_numpy(x).to(device, non_blocking=True) for x in (order, np.argsort(order)))
    return there, back


def unshard(x: Tensor, plan: Plan, dim: int = 1) -> Tensor:
    """The whole sequence from every rank's part: the inverse of `shard`, padding removed; differentiable."""
    dim = agreed(of_mine(x, plan, dim), x, plan, dim, call="unshard")
    return Gathered.apply(x, plan, dim).index_select(dim, inverse_of(plan, x.device)[: plan.seq_len])


def roll(x: Tensor, plan: Plan, shift: int = -1, dim: int = 1, docs: Docs | None = None, fill: Any = None) -> Tensor:
    """Position p of the sequence gets position p - shift; `fill` where that is outside of it or of p's document."""
    problem = of_mine(x, plan, dim) or of_roll(x, dim, plan, shift, docs)
    dim = agreed(problem, x, plan, dim, docs, call="roll", shift=shift)
    moved = Exchanged.apply(x, shifted(plan, int(shift), x.device), plan, dim)
    outside = ~within(plan, int(shift), docs, x.device)
    shape = [n if i == dim else len(outside) if i == 0 else 1 for i, n in enumerate(x.shape)]
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    if integers and fill is None and not x.dtype.is_signed:
        moved = moved.long()  # bytes have no -100
    return moved.masked_fill(outside.view(shape), (-100 if integers else 0) if fill is None else fill)


def agreed(problem: str | None, x: Tensor, plan: Plan, dim: int, docs: Docs | None = None, **call: Any) -> int:
    """The dim, counted from the first, of a call that all ranks make alike. Raises the same error on all ranks."""
    if problem:
        refuse(problem, plan)
    gradients = torch.is_grad_enabled() and x.requires_grad
    agree(plan, describe(plan, None, {"x": x}, docs, dim=dim % x.dim(), gradients=gradients, **call))
    return dim % x.dim()


@cached
def shifted(plan: Plan, shift: int, device: torch.device) -> Exchange:
    """Every position p gets position p - shift, if both are in the sequence."""
    order, T = plan.tokens.order(), plan.seq_len
    come = order - shift
    inside = (order < T) & (come >= 0) & (come < T)
    source = np.where(inside, np.argsort(order)[np.where(inside, come, 0)], -1)
    return Exchange(plan, plan.local_len, source, device)


@cached
def within(plan: Plan, shift: int, docs: Docs | None, device: torch.device) -> Tensor:
    """For each position p of this rank, whether p - shift is in the same document, [1 or rows, T_local]."""
    at, rows = own_positions(plan), []
    for starts in np.array([[0, plan.seq_len]]) if docs is None else (docs.first or docs).starts:
        i = np.searchsorted(starts[1:], at, "right")
        begin, end = (np.append(x, plan.seq_len)[i] for x in (starts, starts[1:]))
        rows.append((at < starts[-1]) & (at - shift >= begin) & (at - shift < end))
    return torch.from_numpy(np.stack(rows)).to(device)


def of_mine(x: Tensor, plan: Plan, dim: int) -> str | None:
    """Dim `dim` of x has this rank's tokens."""
    return of_types(x=x) or of_dim(x, dim) or of_part(x, dim, plan, plan.local_len, "a rank of this plan holds")


@cached
def real_tokens(plan: Plan, docs: Docs | None, device: torch.device) -> Tensor | None:
    """Which of this rank's tokens are real, [1 or rows, T_local]; None when all of them are."""
    if not plan.padded and (docs is None or not docs.padded):
        return None
    limit = np.minimum(plan.seq_len, docs.starts[:, -1:] if docs is not None else plan.seq_len)
    real = own_positions(plan)[None] < np.reshape(limit, (-1, 1))
    return None if real.all() else torch.from_numpy(real).to(device)


def real_queries(mask: Mask, device: torch.device) -> Tensor | None:
    """Which of this rank's queries see a key by a mask of slices, [1, T_local]; None when all of them do."""
    assert mask.seeing is not None
    begun, over = (np.searchsorted(edges, own_positions(mask.plan), "right") for edges in mask.seeing)
    return None if (begun > over).all() else torch.from_numpy(begun > over)[None].to(device)
