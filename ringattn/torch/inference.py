"""Attention of new tokens against a cache that is spread over ranks: prefill and decode.

    B batch   T new tokens   H query heads   G key/value heads   D head dim   V value dim

`prefill` appends a chunk of a prompt and attends; `decode` does the same for a few tokens that every rank knows. Both
merge partials over ranks, and both attend to intervals of what each rank holds.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn import kernels
from ringattn.check import of_choice, of_filled, of_keys, of_lengths, of_start, of_tree, of_window
from ringattn.comms.axis import Axis, Done, Pending, meanwhile
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import (
    FORMS,
    Partial,
    Streams,
    add_sinks,
    empty,
    from_streams,
    merge_stack,
    packed,
    unpacked,
)
from ringattn.layout import Layout
from ringattn.planning import Plan, hardware_of, heads_problem
from ringattn.serving import WAYS, exchange_over, exchange_way, keys_at_once, queries_at_once
from ringattn.spec import AttentionSpec, whole
from ringattn.torch import agree, check
from ringattn.torch.agree import watched
from ringattn.torch.cache import KVCache
from ringattn.torch.chunk import Chunk, guests_of, in_any_order, own_pieces, part_of, pieces_of, whereabouts_on
from ringattn.torch.ring import pieces, room_for, with_next
from ringattn.torch.steps import Score, problem_of, score_of

CAUSAL = AttentionSpec()


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
    start: int | Sequence[int] | None = None,
    move: str = "auto",
    keys: int | None = None,
) -> Tensor:
    """Append a chunk of the prompt to the cache, and attend to everything so far: out [B, T_local, H, V].

    q, k and v are this rank's part of the chunk under `plan` (the cache's plan `for_length(chunk)`). `start` is where
    the chunk begins, checked against the cache if given. `move` says what travels: "queries", "keys", or what leaves
    less time exposed (`cache.explain` says which). `keys` cuts the other way too: at most so many of a rank's keys
    are attended to, or sent, at once. Nothing is differentiable: a cache keeps keys without their graph.
    """
    spec = CAUSAL if spec is None else spec
    check_chunk(q, k, v, plan, cache, spec, sinks, start, move, keys)
    q, k, v, keys = q.detach(), k.detach(), v.detach(), whole(keys)
    chunk = Chunk(spec, plan.seq_len, tuple(cache.lengths.tolist()), cache.holders())
    way = cache.moves(plan, q.shape[2]).way if move == "auto" else move
    new = everyone(torch.cat([k, v], -1), plan)
    if way == "keys" and cache.ranks > 1:
        part = attend_travelling(q, new, plan, cache, chunk, keys or keys_at_once(plan.local_len))
    else:
        guests = Guests(q, plan) if cache.ranks > 1 else None
        k, v = parted(new.wait(), cache)
        cache.keep(k, v, plan.seq_len, plan.tokens)
        del new, k, v  # of all ranks: not to be held while queries attend
        chunk = chunk._replace(holders=cache.holders())
        if guests:
            part = guests.attend(cache, chunk, keys, q.dtype if sinks is None else torch.float32)
        else:
            part = attend_cache(q, cache, chunk._replace(queries=plan.tokens.shard(0)), keys)
    part = part if sinks is None else add_sinks(part, sinks.detach())
    return part.out.to(q.dtype)


def check_chunk(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, spec: AttentionSpec, sinks: Tensor | None,
    start: int | Sequence[int] | None, move: str, keys: int | None,
) -> None:  # fmt: skip
    """Raise on all ranks alike, before the cache is touched, if this chunk cannot be.

    A kind of call that was found right once is looked up: then only the cache's lengths are new.
    """
    problem = of_choice("move", move, ("auto", *WAYS)) or of_keys(keys)
    call = (plan, spec, move, whole(keys), *kinds(q, k, v, sinks))
    if problem is None and call in cache.known and not watched(plan):
        problem = of_cache(cache, plan, spec, start) or cache.overflow(plan.seq_len)
        if problem:
            raise ValueError(problem)
        return
    problem = (
        problem
        or check.of_tensors(q, k, v)
        or check.of_heads(q, k, v, plan, sinks)
        or of_lengths(q, k, plan, AttentionSpec(causal=False), (plan.local_len, plan.local_len))
        or of_cache(cache, plan, spec, start)
        or cache.problem(k, v, plan.seq_len)
    )
    settle(cache, plan, spec, {"q": q, "k": k, "v": v, "sinks": sinks}, f"move={move}, keys={whole(keys)}", problem)
    kernel_for(q, cache, spec)
    cache.known[call] = False


def kinds(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Any, ...]:
    """What a call's tensors are, as words that can be looked up."""
    dtypes, devices = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    more = None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    return q.shape, k.shape, v.shape, dtypes, devices, more, check.have_tangents(q, k, v, sinks)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
    form: str = "lse",
    parents: Sequence[int] | None = None,
    **unknown: Any,
) -> Tensor:
    """The next token or tokens, the same q, k, v [B, n, H or G, D] on every rank: out [B, n, H, V] on every rank.

    Each rank attends to the keys it holds; the partials of all ranks are exchanged once and merged in rank order, as
    (out, lse) or with form="streams" as (out, max, sum). Several tokens see each other causally; `parents`, the token
    that each one follows, may say so and nothing else. Nothing is differentiable, as in `prefill`.

    On a GPU the host asks the device for nothing, and a call can be captured in a CUDA graph once it has been made
    outside of one. Replays append without asking for room: what does not fit is dropped.
    """
    spec = CAUSAL if spec is None else spec
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    quick = ready(q, k, v, cache, spec, sinks, form, parents, unknown, capturing)
    if quick:
        return decode_quickly(q, k, v, cache, spec, sinks, form, capturing)
    q, k, v = q.detach(), k.detach(), v.detach()
    before, n = tuple(cache.lengths.tolist()), q.shape[1]
    cache.keep(k, v, n)
    chunk = Chunk(spec, n, before, cache.holders())
    part = attend_cache(q, cache, chunk)
    return merged_everywhere(packed(part, form), cache.plan, form, sinks, q.dtype)


def ready(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec, sinks: Tensor | None, form: str,
    parents: Sequence[int] | None, unknown: dict[str, Any], capturing: bool,
) -> bool:  # fmt: skip
    """Raise on all ranks alike, before the cache is touched, if this call cannot be; else whether it can go quickly.

    A kind of call that was found right once is looked up: then only the cache's lengths are new.
    """
    problem = of_choice("form", form, tuple(FORMS))
    call = (spec, form, *kinds(q, k, v, sinks))
    quick = None if problem else cache.known.get(call)
    if capturing:
        problem = problem or of_capture(cache, quick)
    elif quick is not None and not unknown and parents is None and cache.window is None and not watched(cache.plan):
        problem = of_filled(cache.lengths) or cache.overflow(k.shape[1])
    else:
        problem = (
            problem
            or of_tree(q.shape[1], parents, unknown)
            or check.of_tensors(q, k, v)
            or heads_problem(q.shape[2], k.shape[2], ulysses=1)
            or check.of_sinks_of(q, sinks)
            or of_cache(cache, cache.plan, spec, None)
            or of_filled(cache.lengths)
            or cache.problem(k, v, k.shape[1])
        )
        if problem is None and q.shape[1] != k.shape[1]:
            problem = f"q has {q.shape[1]} tokens, k and v {k.shape[1]}; every new token has all three"
        settle(cache, cache.plan, spec, {"q": q, "k": k, "v": v, "sinks": sinks}, f"form={form}", problem)
        quick = cache.known[call] = is_quick(q, v, cache, spec)
    if problem:
        raise ValueError(problem)
    return bool(quick)


def is_quick(q: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec) -> bool:
    """Whether the decode kernel serves, so that nothing of a step has to be planned on the host."""
    problem = problem_of(q, cache.k, v, spec, tiles=False, few=True)
    return cache.prefix is None and kernels.select(problem, cache.plan.kernel).name == "decode"


def of_capture(cache: KVCache, quick: bool | None) -> str | None:
    if cache.window is not None:
        return "a cache with a window moves its keys as it fills: decode on it cannot be captured"
    if quick is None:
        return "call decode once, like this, before it is captured: to compile it, and to agree with the other ranks"
    if not quick:
        return "only the decode kernel, on a cache that is no fork, can be captured: others plan on the host"
    return None


def of_cache(cache: KVCache, plan: Plan, spec: AttentionSpec, start: int | Sequence[int] | None) -> str | None:
    """Whether a chunk's plan, spec and place are the cache's."""
    if (plan.ring, plan.ulysses) != (cache.plan.ring, cache.plan.ulysses) or plan.axes is not cache.plan.axes:
        return f"the cache was allocated for another plan ({cache.plan}); use its plan.for_length({plan.seq_len})"
    return of_window(cache.window, spec) or of_start(start, cache.lengths)


def settle(
    cache: KVCache, plan: Plan, spec: AttentionSpec, call: dict[str, Tensor | None], how: str, problem: str | None
) -> None:
    """Raise alike on all ranks, before the cache is touched; where words are cheap, lengths are compared too."""
    words = {**agree.describe(plan, spec, call, None), "how": how}
    if watched(plan):
        words["cache"] = str(cache)
    agree.agree(plan, words, problem)


def everyone(x: Tensor, plan: Plan) -> Pending:
    """Every rank's tokens, on their way: [tokens of all shards, one after the other, B, ...]."""
    return plan.ring_axis.all_gather(plan.ulysses_axis.all_gather(x.movedim(1, 0), 0).wait(), 0)


def parted(new: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """k and v, [B, tokens, G, D or V], of what `everyone` brought."""
    k, v = new.movedim(0, 1).split([cache.k.shape[-1], cache.v.shape[-1]], -1)
    return k, v


def kernel_for(q: Tensor, cache: KVCache, spec: AttentionSpec) -> kernels.Kernel:
    """What attends to a cache; NotImplementedError with every reason where nothing can."""
    return kernels.select(problem_of(q, cache.k, cache.v, spec, tiles=True, few=True), cache.plan.kernel)


class Visit(NamedTuple):
    """Keys and values, [B, ..., G, D or V], in the order of their positions, and what is seen of them, if anything."""

    kept: Sequence[Tensor]
    where: Intervals | None


class Meeting:
    """Queries that meet pieces of a cache one after the other, each merged into what was found before."""

    def __init__(self, q: Tensor, cache: KVCache, spec: AttentionSpec):
        self.q, self.cache, self.spec, self.part = q, cache, spec, None
        self.tiled = kernel_for(q, cache, spec).tiles  # whether the kernel is one that asks for tiles
        self.scores: dict[bool, Score] = {}

    def of(self, visits: Iterable[Visit]) -> None:
        for kept, where in visits:
            if where is None:
                continue
            k, v = (x.flatten(1, -3) for x in kept)
            rectangles = self.tiled and where.tiles is not None
            if rectangles not in self.scores:
                every = [where] if self.tiled else [where._replace(tiles=None)]
                self.scores[rectangles] = score_of(self.q, k, v, self.spec, self.cache.plan.kernel, every, few=True)
            self.part = self.scores[rectangles].attend(self.q, k, v, where, carry=self.part)

    def end(self) -> Partial:
        return self.part or empty(self.q, self.cache.v.shape[-1])


def attend_cache(q: Tensor, cache: KVCache, chunk: Chunk, keys: int | None = None) -> Partial:
    """Attention of a chunk's queries over the keys this rank holds, at most `keys` of them at once."""
    meeting = Meeting(q, cache, chunk.spec)
    plans = pieces_of(chunk, ((cache.rank,),), keys, q.device, meeting.tiled)
    for cuts, (k, v) in zip(plans, cache.memory(), strict=True):
        for piece in cuts:
            meeting.of([Visit((k[:, piece.keys], v[:, piece.keys]), *piece.seen)])
    return meeting.end()


def axes_of(plan: Plan) -> tuple[Axis, Axis]:
    """The axis along which queries or keys travel block by block, and the one within a block, if the plan has two."""
    return (plan.ring_axis, plan.ulysses_axis) if plan.ring > 1 else (plan.ulysses_axis, plan.ring_axis)


class Guests:
    """Everyone's queries, who come to the keys of this rank block after block, and whose partials go home again.

    The next block is on its way while one attends, and so are the partials of the one before. Those at home attend
    last: beside them the last guests leave. Where a plan has both axes a block is of a whole ring rank.
    """

    def __init__(self, q: Tensor, plan: Plan):
        self.axis, self.within = axes_of(plan)
        blocks = plan.tokens if plan.ring > 1 else Layout("contiguous", plan.tokens.padded_length, plan.ulysses)
        self.q = self.within.all_gather(q, 1).wait().contiguous()
        rows = self.q.shape[0] * self.q.shape[1] * self.q.shape[2]
        at_home, *self.run = guests_of(blocks, self.axis.rank, queries_at_once(rows))
        self.run.append(at_home)
        self.here, out, into = room_for(self.run[0], self.q)
        self.coming = self.axis.move(out, into, what=f"queries of step 1 of {len(self.run)}, prefill")

    def attend(self, cache: KVCache, chunk: Chunk, keys: int | None, dtype: torch.dtype) -> Partial:
        """This rank's partial over the keys of all, merged in rank order; its out may be of `dtype`."""
        rows = (self.axis.size, *self.q.shape[:3])  # by the rank that has the keys
        room = partial(torch.empty, dtype=accumulator(self.q), device=self.q.device)
        found = Partial(room(*rows, cache.v.shape[-1]), room(rows))
        leaving: Pending = Done()
        self.coming.wait()
        for i, (stop, following) in enumerate(with_next(self.run)):
            say = f"step {i + 1} of {len(self.run)}, prefill"
            asking = chunk._replace(queries=stop.shard)
            work = partial(attend_cache, self.here[0], cache, asking, keys)
            self.here, out, into = room_for(following, self.q)
            part, self.coming = meanwhile(self.axis, work, out, into, f"queries after {say}")
            leaving.wait()
            if stop.readers or stop.brought:
                home = {r: pieces([x[r] for x in found], stop.own) for r in stop.readers}
                away = {r: pieces(part, places) for r, places in stop.brought.items()}
                leaving = self.axis.move(away, home, what=f"partials of {say}")
            else:
                for x, mine in zip(found, part, strict=True):
                    x[self.axis.rank].copy_(mine)
            self.coming.wait()
            del work, part
        if self.within.size == 1:
            return merged(found, dtype)
        share = packed(merged(found), "lse").movedim(1, 0)  # [T, B, H, V + 1]
        stack = self.within.all_to_all(share, 0, 0).wait().unflatten(0, (self.within.size, -1))
        return merged(unpacked(stack.movedim(1, 2), "lse"), dtype)


def attend_travelling(q: Tensor, new: Pending, plan: Plan, cache: KVCache, chunk: Chunk, keys: int) -> Partial:
    """Attention of this rank's own queries over all ranks' keys, and then over the chunk's, which the cache then keeps.

    Of each rank at most `keys` come at a time, from all at once, beside the work on as many that are here and on those
    that came before. Where a plan has both axes, "here" is a whole ring rank.
    """
    meeting = Meeting(q, cache, chunk.spec)
    axis, inner = axes_of(plan)
    here = range(axis.rank * inner.size, (axis.rank + 1) * inner.size)
    groups = tuple(here), tuple(r for r in range(cache.ranks) if r not in here)
    shard = plan.tokens.shard(plan.ring_axis.rank)
    chunk = chunk._replace(queries=part_of(shard, plan.local_slice(plan.ulysses_axis.rank)))
    plans = pieces_of(chunk, groups, keys, q.device, meeting.tiled)
    sources = [r for r in range(axis.size) if r != axis.rank]
    visits: list[Visit] = []
    for piece, kept in ((piece, kept) for cuts, kept in zip(plans, cache.memory(), strict=True) for piece in cuts):
        mine = [in_blocks(x[:, piece.keys], cache.stripes.block, inner) for x in kept]
        room = [x.new_empty(x.shape[0], len(sources), *x.shape[1:]) for x in mine]
        into = {r: [x[:, i] for x in room] for i, r in enumerate(sources)}
        work = partial(meeting.of, [*visits, Visit(mine, piece.seen[0])])
        _, coming = meanwhile(axis, work, dict.fromkeys(sources, mine), into, "cached keys")
        coming.wait()
        visits = [in_order(room, piece.seen[1])]
    k, v = parted(new.wait().index_select(0, whereabouts_on(q.device, plan.tokens, chunk.tokens)), cache)
    own = own_pieces(chunk, keys * cache.ranks, q.device, meeting.tiled)
    meeting.of([*visits, *(Visit((k[:, cut], v[:, cut]), where) for cut, where in own)])
    cache.keep(k, v, chunk.tokens)
    return meeting.end()


def in_order(room: Sequence[Tensor], where: Intervals | None) -> Visit:
    """A visit of what came, [B, sources, blocks, ...]: brought into the order of positions where that matters."""
    keys = prod(room[0].shape[1:-2])
    return Visit(room if in_any_order(where, keys) else [x.transpose(1, 2) for x in room], where)


def in_blocks(x: Tensor, block: int, inner: Axis) -> Tensor:
    """[B, keys, G, D] as [B, blocks, inner ranks, keys of a block, G, D]: the keys of inner ranks too, in order."""
    x = x.unflatten(1, (-1, min(block, x.shape[1])))
    return x[:, :, None] if inner.size == 1 else inner.all_gather(x[:, :, None], 2).wait()


def decode_quickly(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec, sinks: Tensor | None, form: str,
    capturing: bool,
) -> Tensor:  # fmt: skip
    """Append, attend and merge in a few launches that read the lengths where they are, on the device."""
    from ringattn.kernels.triton import append, decode, merge

    n = q.shape[1]
    cache.make_room(n)
    where = append.append(k, v, cache.k, cache.v, cache.filled, cache.here, causal=spec.causal, window=spec.window)
    splits = decode.splits_for(q, cache.v, cache.v.shape[1] if capturing else cache.reach(n))
    scale = spec.scale_for(q.shape[-1])
    parts = decode.decode_splits(q, cache.k, cache.v, where, scale, spec.softcap, splits, "lse")
    cache.grow(n, capturing)
    if cache.ranks == 1:
        return merge.merge_stack(parts, None, sinks, dtype=q.dtype).out
    rows = torch.empty(*q.shape[:3], v.shape[-1] + 1, dtype=torch.float32, device=q.device)
    part = merge.merge_stack(parts, into=unpacked(rows, "lse"))
    return merged_everywhere(rows if form == "lse" else packed(part, form), cache.plan, form, sinks, q.dtype)


def merged_everywhere(rows: Tensor, plan: Plan, form: str, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The merge of all ranks' packed partials and of the sinks, the same bits on every rank."""
    part, axes = None, [axis for axis in (plan.ulysses_axis, plan.ring_axis) if axis.size > 1]
    for axis in axes:
        rows = rows if part is None else packed(part, form)
        road = rows.nbytes, axis.size, hardware_of(plan.device)
        over = axis.over(exchange_over(*road))
        if exchange_way(*road) == "gather":
            last = axis is axes[-1] and sinks is None
            part = merged(unpacked(over.all_gather(rows[None], 0).wait(), form), dtype if last else torch.float32)
        else:
            part = shared(rows, over, form)
    if part is None:  # one rank
        part = unpacked(rows, form) if form == "lse" else from_streams(unpacked(rows, form))
    part = part if sinks is None else add_sinks(part, sinks.detach())
    return part.out.to(dtype).contiguous()


def shared(rows: Tensor, axis: Any, form: str) -> Partial:
    """Each rank merges its share of the rows, and hands it to all."""
    flat = rows.flatten(0, -2)[:, None, None]
    pad = -len(flat) % axis.size
    stack = axis.all_to_all(F.pad(flat, [0] * 6 + [0, pad]), 0, 0).wait().unflatten(0, (axis.size, -1))
    everyone = axis.all_gather(packed(merged(unpacked(stack, form)), "lse"), 0).wait()[: len(flat)]
    return unpacked(everyone.reshape(*rows.shape[:-1], -1), "lse")


def merged(stack: Partial | Streams, dtype: torch.dtype = torch.float32) -> Partial:
    """Stacked partials [ranks, ...] merged in rank order: in one kernel on GPUs, which makes an out of `dtype`."""
    if stack.out.is_cuda and stack.out.dtype == torch.float32:
        from ringattn.kernels.triton import merge

        return merge.merge_stack(stack, dtype=dtype)
    return merge_stack(stack)
