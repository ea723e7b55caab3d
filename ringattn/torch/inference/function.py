"""Attention of new tokens against a cache that is spread over ranks: prefill and decode.

    B batch   T new tokens   H query heads   G key/value heads   D head dim   V value dim

`prefill` appends a chunk of a prompt and attends; `decode` does the same for a few tokens that every rank has.
`meeting.py` attends to the keys of each rank, `exchange.py` merges the partials of all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn import kernels
from ringattn.check import of_choice, of_filled, of_keys, of_lengths, of_start, of_unknown, of_window
from ringattn.kernels.partial import add_sinks, form_of, packed, unpacked
from ringattn.planning import Plan, heads_problem
from ringattn.serving import MOVES, keys_at_once
from ringattn.spec import AttentionSpec, whole
from ringattn.torch import agree, check
from ringattn.torch.agree import watched
from ringattn.torch.attention.function import autocast
from ringattn.torch.attention.steps import problem_of
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.chunk import Chunk
from ringattn.torch.inference.exchange import merged_everywhere
from ringattn.torch.inference.meeting import Guests, attend_cache, attend_travelling, everyone, kernel_for, parted

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
    the chunk begins, checked against the cache if given. `move` is what travels: "queries", "keys", or "auto", which
    leaves less time exposed (`cache.explain` shows which). `keys` is the most keys of a rank that are attended to, or
    sent, at once. Not differentiable: a cache keeps keys without their graph.
    """
    spec = CAUSAL if spec is None else spec
    q, k, v = autocast(q, k, v, dtype=cache.k.dtype)
    check_chunk(q, k, v, plan, cache, spec, sinks, start, move, keys)
    q, k, v, keys = q.detach(), k.detach(), v.detach(), whole(keys)
    chunk = Chunk(spec, plan.seq_len, tuple(cache.lengths.tolist()), cache.holders())
    way = cache.moves(plan, q.shape[2]).way if move == "auto" else move
    new = everyone(torch.cat([k, v], -1), plan)
    with cache.unless_it_fails():
        if way == "keys" and cache.ranks > 1:
            part = attend_travelling(q, new, plan, cache, chunk, keys or keys_at_once(plan.local_len))
        else:
            guests = Guests(q, plan) if cache.ranks > 1 else None
            k, v = parted(new.wait(), cache)
            cache.keep(k, v, plan.seq_len, plan.tokens)
            del new, k, v  # of all ranks: frees their memory before queries attend
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
    """Raise the same error on all ranks, before the cache is changed, if this chunk is wrong.

    Kinds of calls that passed once are cached: then only the cache's lengths are checked.
    """
    problem = of_choice("move", move, ("auto", *MOVES)) or of_keys(keys)
    call = (plan, spec, move, whole(keys), *kinds(q, k, v, sinks))
    if problem is None and call in cache.known and not watched(plan):
        problem = of_cache(cache, plan, spec, start) or cache.overflow(plan.seq_len)
        if problem:
            raise ValueError(problem)
        return
    problem = (
        problem
        or check.of_tensors(q, k, v)
        or check.of_plan_and_sinks(q, k, v, plan, sinks)
        or of_lengths(q, k, plan, AttentionSpec(causal=False), (plan.local_len, plan.local_len))
        or of_cache(cache, plan, spec, start)
        or cache.problem(k, v, plan.seq_len)
    )
    settle(cache, plan, spec, {"q": q, "k": k, "v": v, "sinks": sinks}, f"move={move}, keys={whole(keys)}", problem)
    kernel_for(q, cache, spec)
    cache.know(call, quick=False)


def kinds(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Any, ...]:
    """Shapes, dtypes and devices of a call's tensors, as a dictionary key."""
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
    **unknown: Any,
) -> Tensor:
    """Attention of the next tokens, the same q, k, v [B, n, H or G, D] on every rank: out [B, n, H, V] on every rank.

    Each rank attends to the keys it holds; the partials of all ranks are exchanged once and merged in rank order.
    Several tokens see each other causally. Not differentiable, as in `prefill`.

    On a GPU the host reads nothing from the device, and a call can be captured in a CUDA graph once it has run outside
    of one. Replays append without checking for room: tokens that do not fit are dropped.
    """
    spec = CAUSAL if spec is None else spec
    q, k, v = autocast(q, k, v, dtype=cache.k.dtype)
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    quick = ready(q, k, v, cache, spec, sinks, unknown, capturing)
    if quick:
        return decode_quickly(q, k, v, cache, spec, sinks, capturing)
    q, k, v = q.detach(), k.detach(), v.detach()
    before, n = tuple(cache.lengths.tolist()), q.shape[1]
    with cache.unless_it_fails():
        cache.keep(k, v, n)
        chunk = Chunk(spec, n, before, cache.holders())
        part, form = attend_cache(q, cache, chunk), form_of(q)
        return merged_everywhere(packed(part, form), cache.plan, form, sinks, q.dtype)


def ready(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec, sinks: Tensor | None,
    unknown: dict[str, Any], capturing: bool,
) -> bool:  # fmt: skip
    """Raise the same error on all ranks, before the cache is changed, if this call is wrong; else return `is_quick`.

    Kinds of calls that passed once are cached: then only the cache's lengths are checked.
    """
    problem, call = None, (spec, *kinds(q, k, v, sinks))
    quick = cache.known.get(call)
    if capturing:
        problem = of_capture(cache, quick)
    elif quick is not None and not unknown and cache.window is None and not watched(cache.plan):
        problem = of_filled(cache.lengths) or cache.overflow(k.shape[1])
    else:
        problem = (
            of_unknown("decode", unknown, "spec", "tree")
            or check.of_tensors(q, k, v)
            or heads_problem(q.shape[2], k.shape[2], ulysses=1)
            or check.of_sinks_for(q, sinks)
            or of_cache(cache, cache.plan, spec, None)
            or of_filled(cache.lengths)
            or cache.problem(k, v, k.shape[1])
        )
        if problem is None and q.shape[1] != k.shape[1]:
            problem = f"q has {q.shape[1]} tokens, k and v {k.shape[1]}; every new token has all three"
        settle(cache, cache.plan, spec, {"q": q, "k": k, "v": v, "sinks": sinks}, "decode", problem)
        quick = is_quick(q, v, cache, spec)
        cache.know(call, quick)
    if problem:
        raise ValueError(problem)
    return bool(quick)


def is_quick(q: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec) -> bool:
    """Whether the decode kernel supports the call, so that the host plans nothing per step."""
    problem = problem_of(q, cache.k, v, spec, tiles=False, few=True)
    return cache.prefix is None and kernels.select(problem, cache.plan.kernel).name == "decode"


def of_capture(cache: KVCache, quick: bool | None) -> str | None:
    """Why a call cannot be captured in a CUDA graph; `quick` is None if no call of its kind ran before."""
    if cache.window is not None:
        return "a cache with a window moves its keys as it fills: decode on it cannot be captured"
    if quick is None:
        return "call decode once like this before it is captured, to compile it and to compare it between ranks"
    if not quick:
        return "only the decode kernel, on a cache that is no fork, can be captured: others plan on the host"
    return None


def of_cache(cache: KVCache, plan: Plan, spec: AttentionSpec, start: int | Sequence[int] | None) -> str | None:
    """Why a chunk with this plan, spec and start does not fit the cache, or None."""
    if (plan.ring, plan.ulysses) != (cache.plan.ring, cache.plan.ulysses) or plan.axes is not cache.plan.axes:
        return f"the cache was allocated for another plan ({cache.plan}); use its plan.for_length({plan.seq_len})"
    return of_window(cache.window, spec) or of_start(start, cache.lengths)


def settle(
    cache: KVCache, plan: Plan, spec: AttentionSpec, call: dict[str, Tensor | None], how: str, problem: str | None
) -> None:
    """Raise the same error on all ranks, before the cache is changed; where words are cheap, compare lengths too."""
    words = agree.describe(plan, spec, call, None, call="on a cache", how=how)
    if watched(plan):
        words["cache"] = f"{cache}, window {cache.window}, {cache.stripes}"
    agree.agree(plan, words, problem)


def decode_quickly(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec, sinks: Tensor | None,
    capturing: bool,
) -> Tensor:  # fmt: skip
    """Append, attend and merge in a few launches that read the lengths on the device."""
    from ringattn.kernels.triton import append, decode, merge

    n = q.shape[1]
    cache.make_room(n)
    where = append.append(k, v, cache.k, cache.v, cache.filled, cache.here, causal=spec.causal, window=spec.window)
    splits = decode.splits_for(q, cache.v, cache.v.shape[1] if capturing else cache.reach(n))
    scale = spec.scale_for(q.shape[-1])
    parts = decode.decode_splits(q, cache.k, cache.v, where, scale, spec.softcap, splits)
    if cache.ranks == 1:
        out = merge.merge_stack(parts, None, sinks, dtype=q.dtype).out
    else:
        rows, form = torch.empty(*q.shape[:3], v.shape[-1] + 1, dtype=torch.float32, device=q.device), form_of(q)
        part = merge.merge_stack(parts, into=unpacked(rows, "lse") if form == "lse" else None)
        out = merged_everywhere(rows if form == "lse" else packed(part, form), cache.plan, form, sinks, q.dtype)
    cache.grow(n, capturing)
    return out
