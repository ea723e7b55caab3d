"""Attention of new tokens against a cache that is spread over ranks: prefill and decode.

    B batch   T new tokens   H query heads   G key/value heads   D head dim   V value dim

`prefill` appends a chunk of a prompt and attends; `decode` does the same for a few tokens that every rank has. Both
bind the call (`call.py`), then run it. In a prefill over ranks either queries travel to the keys and their partials
come back (`Guests`), or keys travel to the queries (`attend_travelling`). In decode every rank has all queries, and
partials are merged in rank order, so that every rank has the same bits (`merged_everywhere`).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.check.cache import drafts
from ringattn.comms.axis import Axis, Done, Pending, Slices
from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, add_sinks, empty, merge_stack, packed, unpacked
from ringattn.layouts.layout import Layout
from ringattn.masks.spec import AttentionSpec
from ringattn.plans.plan import Plan
from ringattn.serving import queries_at_once
from ringattn.torch.attention.call import CAUSAL
from ringattn.torch.attention.ring import with_next
from ringattn.torch.attention.transfers import exchange_for
from ringattn.torch.dispatch import autocast
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.call import Decode, Prefill, Visit, bind_decode, bind_prefill, visits_of
from ringattn.torch.inference.chunk import Chunk, guests_of, in_any_order, ranges_of
from ringattn.torch.sharding import inverse_of


def prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, *, spec: AttentionSpec | None = None,
    sinks: Tensor | None = None, move: str = "auto", keys: int | None = None,
) -> Tensor:  # fmt: skip
    """`ringattn.prefill` in torch: out [B, T_local, H, V]; not differentiable, since a cache keeps no graph."""
    spec = CAUSAL if spec is None else spec
    q, k, v = autocast(q, k, v, dtype=cache.k.dtype)
    call = bind_prefill(q, k, v, plan, cache, spec, sinks, move, keys)
    q, k, v = q.detach(), k.detach(), v.detach()
    chunk = Chunk(spec, plan.seq_len, tuple(cache.lengths.tolist()), cache.holders())
    way = cache.way(plan, q.shape[2]) if move == "auto" else move
    new = everyone(torch.cat([k, v], -1), plan)
    with cache.unless_it_fails():
        if way == "keys" and cache.ranks > 1:
            partial = attend_travelling(q, new, call, cache, chunk)
        else:
            guests = Guests(q, plan) if cache.ranks > 1 else None
            k, v = split_keys(new.wait(), cache)
            cache.keep(k, v, plan.seq_len, plan.tokens)
            del new, k, v  # of all ranks: frees their memory before queries attend
            chunk = chunk._replace(holders=cache.holders())
            if guests:
                partial = guests.attend(call, cache, chunk, q.dtype if sinks is None else torch.float32)
            else:
                partial = call.attend(q, cache, chunk._replace(queries=plan.tokens.shard(0)), call.most)
        partial = partial if sinks is None else add_sinks(partial, sinks.detach())
        return partial.out.to(q.dtype)


def decode(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, *, spec: AttentionSpec | None = None, sinks: Tensor | None = None,
    parents: Sequence[int] | None = None, **unknown: Any,
) -> Tensor:  # fmt: skip
    """`ringattn.decode` in torch: the same q, k, v [B, n, H or G, D] and out [B, n, H, V] on every rank.

    Each rank attends to the keys it holds; the partials of all ranks are exchanged once and merged in rank order.

    On a GPU the host reads nothing from the device, and a call can be captured in a CUDA graph once it has run outside
    of one. Replays append without checking for room: tokens that do not fit are dropped.
    """
    spec = CAUSAL if spec is None else spec
    q, k, v = autocast(q, k, v, dtype=cache.k.dtype)
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    call = bind_decode(q, k, v, cache, spec, sinks, parents, unknown, capturing)
    if call.quick:
        return decode_quickly(call, q, k, v, cache, sinks, capturing)
    q, k, v = q.detach(), k.detach(), v.detach()
    before, n = tuple(cache.lengths.tolist()), q.shape[1]
    with cache.unless_it_fails():
        cache.keep(k, v, n)
        partial = call.attend(q, cache, Chunk(spec, n, before, cache.holders(), parents=drafts(parents)))
        return merged_everywhere(packed(partial), call, sinks, q.dtype)


def decode_quickly(
    call: Decode, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, sinks: Tensor | None, capturing: bool
) -> Tensor:
    """Append, attend and merge in a few launches that read the lengths on the device."""
    from ringattn.kernels.attention.triton import append, decode, merge

    n, spec = q.shape[1], call.spec
    cache.make_room(n)
    stripes, window = cache.stripes, spec.behind  # a call with other masks is not quick
    local = stripes.origin, stripes.block, stripes.round, cache.rank * stripes.block  # this rank's positions
    where = append.append(k, v, cache.k, cache.v, cache.filled, local, causal=spec.causal, window=window)
    splits = decode.splits_for(q, cache.v, cache.v.shape[1] if capturing else cache.reach(n))
    partials = decode.decode_splits(q, cache.k, cache.v, where, call.scale, spec.softcap, splits)
    if cache.ranks == 1:
        out = merge.merge_stack(partials, None, sinks, dtype=q.dtype).out
    elif partials.lse.dtype == torch.float32:
        rows = torch.empty(*q.shape[:3], v.shape[-1] + 1, dtype=torch.float32, device=q.device)
        merge.merge_stack(partials, into=unpacked(rows, call.value_dim))
        out = merged_everywhere(rows, call, sinks, q.dtype)
    else:
        partial: Partial = merge.merge_stack(partials)
        out = merged_everywhere(packed(partial), call, sinks, q.dtype)
    cache.grow(n, capturing)
    return out


def merged_everywhere(rows: Tensor, call: Decode, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The merge of all ranks' packed partials and of the sinks, the same bits on every rank."""
    partial = None
    for axis, at_once in call.exchange:
        rows = rows if partial is None else packed(partial)
        if at_once:
            last = axis is call.exchange[-1][0] and sinks is None
            every = axis.all_gather(rows[None], 0).wait()
            partial = merged(unpacked(every, call.value_dim), dtype if last else torch.float32)
        else:
            partial = shared(rows, axis, call.value_dim)
    if partial is None:  # one rank
        partial = unpacked(rows, call.value_dim)
    partial = partial if sinks is None else add_sinks(partial, sinks.detach())
    return partial.out.to(dtype).contiguous()


def shared(rows: Tensor, axis: Any, value_dim: int) -> Partial:
    """Each rank merges its share of the rows, and sends it to all."""
    flat = rows.flatten(0, -2)[:, None, None]
    pad = -len(flat) % axis.size
    (stack,) = axis.all_to_all([F.pad(flat, [0] * 6 + [0, pad])], 0, 0).wait()
    stack = stack.unflatten(0, (axis.size, -1))
    everyone = axis.all_gather(packed(merged(unpacked(stack, value_dim))), 0).wait()[: len(flat)]
    return unpacked(everyone.reshape(rows.shape), value_dim)


def everyone(x: Tensor, plan: Plan) -> Pending:
    """A transfer of every rank's tokens: [tokens of all shards in rank order, B, ...]."""
    return plan.ring_axis.all_gather(plan.ulysses_axis.all_gather(x.movedim(1, 0), 0).wait(), 0)


def split_keys(new: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """k and v, [B, tokens, G, D or V], from the result of `everyone`."""
    k, v = new.movedim(0, 1).split([cache.k.shape[-1], cache.v.shape[-1]], -1)
    return k, v


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
        local, *self.run = guests_of(blocks, self.axis.rank, queries_at_once(rows))
        self.run.append(local)
        self.current, trip = exchange_for(self.axis, self.run[0], (self.q,))
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
            room, trip = exchange_for(self.axis, following, (self.q,))
            with self.axis.sharing(*trip, f"queries after {label}") as coming:
                partial = call.attend(self.current[0], cache, chunk._replace(queries=step.keys), call.most)
            leaving.wait()
            if step.send or step.receive:
                into = {r: Slices([x[r] for x in partials], rows) for r, rows in step.send.items()}
                outgoing = {r: Slices(partial, places.at) for r, places in step.receive.items()}
                leaving = self.axis.move(outgoing, into, what=f"partials of {label}")
            else:
                for x, mine in zip(partials, partial, strict=True):
                    x[self.axis.rank].copy_(mine)
            coming.wait()
            self.current = room
            del partial
        if self.within.size == 1:
            return merged(partials, dtype)
        share = packed(merged(partials)).movedim(1, 0)  # [T, B, H, V + 1 or 2]
        (stack,) = self.within.all_to_all([share], 0, 0).wait()
        stack = stack.unflatten(0, (self.within.size, -1)).movedim(1, 2)
        return merged(unpacked(stack, call.value_dim), dtype)


def attend_travelling(q: Tensor, new: Pending, call: Prefill, cache: KVCache, chunk: Chunk) -> Partial:
    """Attention of this rank's own queries over all ranks' keys, then over the chunk's, which the cache then keeps.

    At most `call.keys` keys of each rank arrive at a time, from all ranks at once, while earlier ones and as many local
    ones are computed. If a plan has both axes, "local" is a whole ring rank.
    """
    kernels, plan, partial = call.kernels(q.shape[1]), call.plan, None
    axis, inner = axes_of(plan)
    local = range(axis.rank * inner.size, (axis.rank + 1) * inner.size)
    groups = tuple(local), tuple(r for r in range(cache.ranks) if r not in local)
    chunk = chunk._replace(queries=plan.tokens.held(*plan.place))
    plans = ranges_of(chunk, groups, call.keys, q.device, kernels.needs_rectangles)
    sources = [r for r in range(axis.size) if r != axis.rank]
    visits: list[Visit] = []
    for part, kept in ((each, kept) for ranges, kept in zip(plans, cache.memory(), strict=True) for each in ranges):
        mine = [in_blocks(x[:, part.keys], cache.stripes.block, inner) for x in kept]
        room = [x.new_empty(x.shape[0], len(sources), *x.shape[1:]) for x in mine]
        into = {r: [x[:, i] for x in room] for i, r in enumerate(sources)}
        with axis.sharing(dict.fromkeys(sources, mine), into, "cached keys") as coming:
            partial = kernels.attend(q, [*visits, Visit(mine, part.seen[0])], partial)
        coming.wait()
        visits = [in_order(room, part.seen[1])]
    k, v = split_keys(new.wait().index_select(0, inverse_of(plan, q.device)[: chunk.tokens]), cache)
    (ranges,) = ranges_of(chunk.alone, ((0,),), call.keys * cache.ranks, q.device, kernels.needs_rectangles)
    partial = kernels.attend(q, [*visits, *visits_of(ranges, k, v)], partial)
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


def merged(stack: Partial, dtype: torch.dtype = torch.float32) -> Partial:
    """Stacked partials [ranks, ...] merged in rank order: on GPUs in one kernel, whose out has `dtype`."""
    if stack.out.is_cuda and stack.out.dtype == torch.float32:
        from ringattn.kernels.attention.triton import merge

        return merge.merge_stack(stack, dtype=dtype)
    return merge_stack(stack)
