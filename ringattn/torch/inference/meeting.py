"""How new queries attend to the keys of a cache that is spread over ranks, range by range.

`attend_cache` attends to the keys that this rank holds. With several ranks, either queries travel to the keys and their
partials come back (`Guests`), or keys travel to the queries (`attend_travelling`). In decode every rank has all
queries, and partials are merged in rank order, so that every rank has the same bits (`merged_everywhere`).
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.comms.axis import Axis, Done, Pending, Slices
from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, Streams, add_sinks, empty, merge_stack, packed, partial_of, unpacked
from ringattn.layout import Layout
from ringattn.planning import Plan
from ringattn.serving import queries_at_once
from ringattn.torch.attention.ring import room_for, with_next
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.call import CacheCall, Decode, Kernels, Prefill
from ringattn.torch.inference.chunk import (
    Chunk,
    guests_of,
    in_any_order,
    own_ranges,
    ranges_of,
    whereabouts_on,
)


def everyone(x: Tensor, plan: Plan) -> Pending:
    """A transfer of every rank's tokens: [tokens of all shards in rank order, B, ...]."""
    return plan.ring_axis.all_gather(plan.ulysses_axis.all_gather(x.movedim(1, 0), 0).wait(), 0)


def parted(new: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """k and v, [B, tokens, G, D or V], from the result of `everyone`."""
    k, v = new.movedim(0, 1).split([cache.k.shape[-1], cache.v.shape[-1]], -1)
    return k, v


class Visit(NamedTuple):
    """Keys and values, [B, ..., G, D or V], in the order of positions, and the queries' intervals, if not empty."""

    kept: Sequence[Tensor]
    where: Intervals | None


def attended(q: Tensor, kernels: Kernels, visits: Iterable[Visit], partial: Partial | None) -> Partial | None:
    """Attention of the queries over the keys of each visit, merged into `partial`; None if they saw none."""
    for kept, where in visits:
        if where is not None:
            k, v = (x.flatten(1, -3) for x in kept)
            partial = kernels.of(where).attend(q, k, v, where, carry=partial)
    return partial


def attend_cache(q: Tensor, call: CacheCall, cache: KVCache, chunk: Chunk, keys: int | None = None) -> Partial:
    """Attention of a chunk's queries over the keys that this rank holds, at most `keys` of them at once."""
    kernels, partial = call.kernels(q.shape[1]), None
    plans = ranges_of(chunk, ((cache.rank,),), keys, q.device, kernels.needs_rectangles)
    for ranges, (k, v) in zip(plans, cache.memory(), strict=True):
        visits = [Visit((k[:, each.keys], v[:, each.keys]), *each.seen) for each in ranges]
        partial = attended(q, kernels, visits, partial)
    return partial or empty(q, cache.v.shape[-1])


def axes_of(plan: Plan) -> tuple[Axis, Axis]:
    """The axis along which queries or keys travel block by block, and the one within a block, if the plan has two."""
    return (plan.ring_axis, plan.ulysses_axis) if plan.ring > 1 else (plan.ulysses_axis, plan.ring_axis)


class Guests:
    """The queries of all ranks, which come to the keys of this rank block by block, and whose partials go home.

    While one block attends, the next one and the partials of the previous one travel. This rank's own queries attend
    last, which hides the last transfer. If a plan has both axes, a block is that of a whole ring rank.
    """

    def __init__(self, q: Tensor, plan: Plan):
        self.axis, self.within = axes_of(plan)
        blocks = plan.tokens if plan.ring > 1 else Layout("contiguous", plan.tokens.padded_length, plan.ulysses)
        self.q = self.within.all_gather(q, 1).wait().contiguous()
        rows = self.q.shape[0] * self.q.shape[1] * self.q.shape[2]
        at_home, *self.run = guests_of(blocks, self.axis.rank, queries_at_once(rows))
        self.run.append(at_home)
        self.here, trip = room_for(self.run[0], self.q)
        with self.axis.sharing(*trip, f"queries of step 1 of {len(self.run)}, prefill") as self.coming:
            pass  # the caller's work comes before `attend`, which waits

    def attend(self, call: Prefill, cache: KVCache, chunk: Chunk, dtype: torch.dtype) -> Partial:
        """This rank's partial over the keys of all ranks, merged in rank order; its out may have `dtype`."""
        rows = (self.axis.size, *self.q.shape[:3])  # by the rank that has the keys
        out = torch.empty(*rows, cache.v.shape[-1], dtype=accumulator(self.q), device=self.q.device)
        partials = Partial(out, torch.empty(rows, dtype=fine(self.q), device=self.q.device))
        leaving: Pending = Done()
        self.coming.wait()
        for i, (step, following) in enumerate(with_next(self.run)):
            label = f"step {i + 1} of {len(self.run)}, prefill"
            room, trip = room_for(following, self.q)
            with self.axis.sharing(*trip, f"queries after {label}") as coming:
                partial = attend_cache(self.here[0], call, cache, chunk._replace(queries=step.keys), call.most)
            leaving.wait()
            if step.shown or step.brought:
                home = {r: Slices([x[r] for x in partials], rows) for r, rows in step.shown.items()}
                away = {r: Slices(partial, places.at) for r, places in step.brought.items()}
                leaving = self.axis.move(away, home, what=f"partials of {label}")
            else:
                for x, mine in zip(partials, partial, strict=True):
                    x[self.axis.rank].copy_(mine)
            coming.wait()
            self.here = room
            del partial
        if self.within.size == 1:
            return merged(partials, dtype)
        share = packed(merged(partials), call.form).movedim(1, 0)  # [T, B, H, V + 1 or 2]
        stack = self.within.all_to_all(share, 0, 0).wait().unflatten(0, (self.within.size, -1))
        return merged(unpacked(stack.movedim(1, 2), call.form), dtype)


def attend_travelling(q: Tensor, new: Pending, call: Prefill, cache: KVCache, chunk: Chunk) -> Partial:
    """Attention of this rank's own queries over all ranks' keys, then over the chunk's, which the cache then keeps.

    At most `call.keys` keys of each rank arrive at a time, from all ranks at once, while earlier ones and as many local
    ones are computed. If a plan has both axes, "local" is a whole ring rank.
    """
    kernels, plan, partial = call.kernels(q.shape[1]), call.plan, None
    axis, inner = axes_of(plan)
    local = range(axis.rank * inner.size, (axis.rank + 1) * inner.size)
    groups = tuple(local), tuple(r for r in range(cache.ranks) if r not in local)
    chunk = chunk._replace(queries=plan.tokens.held(plan.ring_axis.rank, plan.ulysses_axis.rank))
    plans = ranges_of(chunk, groups, call.keys, q.device, kernels.needs_rectangles)
    sources = [r for r in range(axis.size) if r != axis.rank]
    visits: list[Visit] = []
    for here, kept in ((each, kept) for ranges, kept in zip(plans, cache.memory(), strict=True) for each in ranges):
        mine = [in_blocks(x[:, here.keys], cache.stripes.block, inner) for x in kept]
        room = [x.new_empty(x.shape[0], len(sources), *x.shape[1:]) for x in mine]
        into = {r: [x[:, i] for x in room] for i, r in enumerate(sources)}
        with axis.sharing(dict.fromkeys(sources, mine), into, "cached keys") as coming:
            partial = attended(q, kernels, [*visits, Visit(mine, here.seen[0])], partial)
        coming.wait()
        visits = [in_order(room, here.seen[1])]
    k, v = parted(new.wait().index_select(0, whereabouts_on(q.device, plan.tokens, chunk.tokens)), cache)
    placed = chunk.spec.chunk is not None or chunk.spec.first  # else the chunk's own tokens see each other as any do
    own = chunk._replace(before=chunk.before if placed else (), holders=())
    ranges = own_ranges(own, call.keys * cache.ranks, q.device, kernels.needs_rectangles)
    partial = attended(q, kernels, [*visits, *(Visit((k[:, at], v[:, at]), where) for at, where in ranges)], partial)
    cache.keep(k, v, chunk.tokens)
    return partial or empty(q, cache.v.shape[-1])


def in_order(room: Sequence[Tensor], where: Intervals | None) -> Visit:
    """A visit of the keys that arrived, [B, sources, blocks, ...], sorted by position where that matters."""
    keys = prod(room[0].shape[1:-2])
    return Visit(room if in_any_order(where, keys) else [x.transpose(1, 2) for x in room], where)


def in_blocks(x: Tensor, block: int, inner: Axis) -> Tensor:
    """[B, keys, G, D] as [B, blocks, inner ranks, keys of a block, G, D], in order."""
    x = x.unflatten(1, (-1, min(block, x.shape[1])))
    return x[:, :, None] if inner.size == 1 else inner.all_gather(x[:, :, None], 2).wait()


def merged_everywhere(rows: Tensor, call: Decode, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The merge of all ranks' packed partials and of the sinks, the same bits on every rank."""
    partial = None
    for axis, at_once in call.exchange:
        rows = rows if partial is None else packed(partial, call.form)
        if at_once:
            last = axis is call.exchange[-1][0] and sinks is None
            every = axis.all_gather(rows[None], 0).wait()
            partial = merged(unpacked(every, call.form), dtype if last else torch.float32)
        else:
            partial = shared(rows, axis, call.form)
    if partial is None:  # one rank
        partial = partial_of(rows, call.form)
    partial = partial if sinks is None else add_sinks(partial, sinks.detach())
    return partial.out.to(dtype).contiguous()


def shared(rows: Tensor, axis: Any, form: str) -> Partial:
    """Each rank merges its share of the rows, and sends it to all."""
    flat = rows.flatten(0, -2)[:, None, None]
    pad = -len(flat) % axis.size
    stack = axis.all_to_all(F.pad(flat, [0] * 6 + [0, pad]), 0, 0).wait().unflatten(0, (axis.size, -1))
    everyone = axis.all_gather(packed(merged(unpacked(stack, form)), form), 0).wait()[: len(flat)]
    return partial_of(everyone.reshape(rows.shape), form)


def merged(stack: Partial | Streams, dtype: torch.dtype = torch.float32) -> Partial:
    """Stacked partials [ranks, ...] merged in rank order: on GPUs in one kernel, whose out has `dtype`."""
    if stack.out.is_cuda and stack.out.dtype == torch.float32:
        from ringattn.kernels.attention.triton import merge

        return merge.merge_stack(stack, dtype=dtype)
    return merge_stack(stack)
