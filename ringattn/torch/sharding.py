"""A rank's part of a sequence: cutting it out, putting the whole together again, and which of it is padding."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.check.arguments import of_arguments
from ringattn.check.attention import of_packed
from ringattn.layouts.layout import Layout, positions_of
from ringattn.masks.spec import Docs, raise_if, whole
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.torch import same_data
from ringattn.torch.agree import agree, describe
from ringattn.torch.check import of_types
from ringattn.torch.exchange import Exchange, Exchanged, Place


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the function's tensors by its arguments; under a FakeTensorMode make new ones, which hold no numbers.

    They are made outside of inference mode, even if it is on: a later call may keep them for its backward pass.
    """
    cached = lru_cache(maxsize=64)(torch.inference_mode(False)(function))

    def call(*args: Any) -> Any:
        fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        return (cached if fakes is None else function)(*args)

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
    return local_positions(plan, plan.ring_axis.rank, plan.ulysses_axis.rank)


@lru_cache(maxsize=64)
def local_positions(plan: Plan, ring_rank: int, ulysses_rank: int) -> np.ndarray:
    return positions_of(plan.tokens.held(ring_rank, ulysses_rank))


def shard(x: Tensor, plan: Plan, dim: int = 1, compare: bool = True) -> Tensor:
    """This rank's tokens of `x`, whose dim `dim` is the whole sequence; padded with zeros if need be. Always a copy."""
    check_whole(x, plan, dim)
    if compare:
        same_data.note(x, plan)
    if plan.tokens.many:
        at = own_positions(plan)
        mine = x.index_select(dim, torch.from_numpy(at[at < plan.seq_len]).to(x.device))
    else:
        own = plan.tokens.held(plan.ring_axis.rank, plan.ulysses_axis.rank)
        before: list[Any] = [slice(None)] * (dim % x.dim())
        mine = torch.cat([x[*before, r.start : r.stop : r.step] for r in own], dim).contiguous()  # cut at the end of x
    padding = plan.local_len - mine.shape[dim]
    return F.pad(mine, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, padding]) if padding else mine


class Gathered(torch.autograd.Function):
    """What all ranks hold, joined along a dim in the order of ranks; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        return plan.ring_axis.all_gather(plan.ulysses_axis.all_gather(x, dim).wait(), dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Scattered.apply(grad, ctx.plan, ctx.dim), None, None


class Scattered(torch.autograd.Function):
    """This rank's part of the sum over all ranks: the transpose of `Gathered`, which is also its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, dim: int) -> Tensor:
        ctx.plan, ctx.dim = plan, dim
        return plan.ulysses_axis.reduce_scatter(plan.ring_axis.reduce_scatter(x, dim).wait(), dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Gathered.apply(grad, ctx.plan, ctx.dim), None, None


@cached
def order_of(layout: Layout, device: torch.device, back: bool = False, shards: bool = False) -> Tensor:
    """`layout.order()` on the device, or with `shards` that of whole ring shards; with `back`, its inverse."""
    order = layout.shard_order() if shards else layout.order()
    return torch.from_numpy(np.argsort(order) if back else order).to(device, non_blocking=True)


@cached
def swapped_of(layout: Layout, rank: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """`layout.swapped(rank)` on the device, and its inverse; None if it changes nothing."""
    order = layout.swapped(rank)
    if order is None:
        return None
    there, back = (torch.from_numpy(x).to(device, non_blocking=True) for x in (order, np.argsort(order)))
    return there, back


def unshard(x: Tensor, plan: Plan, dim: int = 1) -> Tensor:
    """The whole sequence from every rank's part: the inverse of `shard`, padding removed; differentiable."""
    problem = of_part(x, plan, dim)
    keep = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
    words = {} if problem else describe(plan, None, {"x": x}, None, call="unshard", dim=dim % x.dim(), gradients=keep)
    agree(plan, words, problem)
    dim %= x.dim()
    return Gathered.apply(x, plan, dim).index_select(dim, order_of(plan.tokens, x.device, True)[: plan.seq_len])


def roll(x: Tensor, plan: Plan, shift: int = -1, dim: int = 1, docs: Docs | None = None, fill: Any = None) -> Tensor:
    """Position p of the sequence gets position p - shift; `fill` where that is outside of it or of p's document."""
    problem = of_part(x, plan, dim) or of_shift(shift) or of_arguments(docs=docs)
    if problem is None and docs is not None:
        problem = of_packed("docs", docs, plan.seq_len, x.shape[0])
        if problem is None and dim % x.dim() == 0 and docs.first is None:
            problem = f"dim={dim!r}: {docs} are of the rows of dim 0, which cannot also be the sequence"
    keep = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
    how = {} if problem else {"call": "roll", "dim": str(dim % x.dim()), "shift": str(shift), "gradients": str(keep)}
    agree(plan, {} if problem else describe(plan, None, {"x": x}, docs) | how, problem)
    dim, place = dim % x.dim(), (plan.ring_axis.rank, plan.ulysses_axis.rank)
    moved = Exchanged.apply(x, shifted(plan, int(shift), place, x.device), plan, dim)
    outside = ~within(plan, int(shift), docs, place, x.device)
    shape = [n if i == dim else len(outside) if i == 0 else 1 for i, n in enumerate(x.shape)]
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    if integers and fill is None and not x.dtype.is_signed:
        moved = moved.long()  # bytes have no -100
    return moved.masked_fill(outside.view(shape), (-100 if integers else 0) if fill is None else fill)


@cached
def shifted(plan: Plan, shift: int, place: Place, device: torch.device) -> Exchange:
    """Every position p gets position p - shift, if both are in the sequence. `place` is this rank's."""
    order, T = plan.tokens.order(), plan.seq_len
    come = order - shift
    inside = (order < T) & (come >= 0) & (come < T)
    source = np.where(inside, np.argsort(order)[np.where(inside, come, 0)], -1)
    return Exchange((plan.ring, plan.ulysses, plan.local_len), place, source, device)


@cached
def within(plan: Plan, shift: int, docs: Docs | None, place: Place, device: torch.device) -> Tensor:
    """For each position p of this rank, whether p - shift is in the same document, [1 or rows, T_local]."""
    at, rows = local_positions(plan, *place), []
    for starts in np.array([[0, plan.seq_len]]) if docs is None else (docs.first or docs).starts:
        begin, end = (
            np.append(x, plan.seq_len)[np.searchsorted(starts[1:], at, "right")] for x in (starts, starts[1:])
        )
        rows.append((at < starts[-1]) & (at - shift >= begin) & (at - shift < end))
    return torch.from_numpy(np.stack(rows)).to(device)


def of_shift(shift: Any) -> str | None:
    return None if whole(shift) is not None else f"shift={shift!r}: how many places tokens move, a whole number"


def of_part(x: Tensor, plan: Plan, dim: int) -> str | None:
    """Dim `dim` of x has this rank's tokens."""
    problem = of_dim(x, dim)
    if problem is None and x.shape[dim] != plan.local_len:
        hint = "; x is the whole sequence, pass this rank's part" if x.shape[dim] == plan.seq_len else ""
        problem = f"dim {dim} of x has {x.shape[dim]} tokens; a rank of this plan holds {plan.local_len} ({plan}){hint}"
    return problem


def check_whole(x: Tensor, plan: Plan, dim: int) -> None:
    raise_if(of_dim(x, dim))
    if x.shape[dim] != plan.seq_len:
        local = x.shape[dim] == plan.local_len
        hint = "; it is already sharded: shard x once" if local else f"; use plan.for_length({x.shape[dim]})"
        raise ValueError(f"dim {dim} of x has {x.shape[dim]} tokens, the plan is for {plan.seq_len}{hint}")


def of_dim(x: Tensor, dim: int) -> str | None:
    """x has dim `dim`."""
    problem = of_types(x=x)
    if problem is None and not (whole(dim) is not None and -x.dim() <= dim < x.dim()):
        return f"dim={dim!r}: x has shape {tuple(x.shape)}; say which of its {x.dim()} dims is the sequence"
    return problem


def real_tokens(plan: Plan, docs: Docs | None, device: torch.device) -> Tensor | None:
    """Which of this rank's tokens are real, [1 or rows, T_local]; None when all of them are."""
    return _real_tokens(plan, docs, plan.ring_axis.rank, plan.ulysses_axis.rank, device)


@cached
def _real_tokens(
    plan: Plan, docs: Docs | None, ring_rank: int, ulysses_rank: int, device: torch.device
) -> Tensor | None:
    if not plan.padded and (docs is None or not docs.padded):
        return None
    at = local_positions(plan, ring_rank, ulysses_rank)
    limit = np.minimum(plan.seq_len, docs.starts[:, -1:] if docs is not None else plan.seq_len)
    real = at[None] < np.reshape(limit, (-1, 1))
    return None if real.all() else torch.from_numpy(real).to(device)


def real_queries(mask: Mask, device: torch.device) -> Tensor | None:
    """Which of this rank's queries see a key by a mask of slices, [1, T_local]; None when all of them do."""
    assert mask.seeing is not None
    at = local_positions(mask.plan, mask.plan.ring_axis.rank, mask.plan.ulysses_axis.rank)
    begun, over = (np.searchsorted(edges, at, "right") for edges in mask.seeing)
    return None if (begun > over).all() else torch.from_numpy(begun > over)[None].to(device)
