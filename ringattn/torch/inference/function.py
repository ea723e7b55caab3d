"""Attention of new tokens against a cache that is spread over ranks: prefill and decode.

    B batch   T new tokens   H query heads   G key/value heads   D head dim   V value dim

`prefill` appends a chunk of a prompt and attends; `decode` does the same for a few tokens that every rank has. Both
bind the call (`call.py`), then run it (`meeting.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.check.cache import drafts
from ringattn.kernels.partial import Partial, add_sinks, packed, unpacked
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec
from ringattn.torch.bind import CAUSAL, autocast
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.call import Decode, bind_decode, bind_prefill
from ringattn.torch.inference.chunk import Chunk
from ringattn.torch.inference.meeting import (
    Guests,
    attend_cache,
    attend_travelling,
    everyone,
    merged_everywhere,
    parted,
)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, *, spec: AttentionSpec | None = None,
    sinks: Tensor | None = None, start: int | Sequence[int] | None = None, move: str = "auto", keys: int | None = None,
) -> Tensor:  # fmt: skip
    """`ringattn.prefill` in torch: out [B, T_local, H, V]; not differentiable, since a cache keeps no graph."""
    spec = CAUSAL if spec is None else spec
    q, k, v = autocast(q, k, v, dtype=cache.k.dtype)
    call = bind_prefill(q, k, v, plan, cache, spec, sinks, start, move, keys)
    q, k, v = q.detach(), k.detach(), v.detach()
    chunk = Chunk(spec, plan.seq_len, tuple(cache.lengths.tolist()), cache.holders())
    way = cache.moves(plan, q.shape[2]).way if move == "auto" else move
    new = everyone(torch.cat([k, v], -1), plan)
    with cache.unless_it_fails():
        if way == "keys" and cache.ranks > 1:
            partial = attend_travelling(q, new, call, cache, chunk)
        else:
            guests = Guests(q, plan) if cache.ranks > 1 else None
            k, v = parted(new.wait(), cache)
            cache.keep(k, v, plan.seq_len, plan.tokens)
            del new, k, v  # of all ranks: frees their memory before queries attend
            chunk = chunk._replace(holders=cache.holders())
            if guests:
                partial = guests.attend(call, cache, chunk, q.dtype if sinks is None else torch.float32)
            else:
                partial = attend_cache(q, call, cache, chunk._replace(queries=plan.tokens.shard(0)), call.most)
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
        partial = attend_cache(q, call, cache, Chunk(spec, n, before, cache.holders(), parents=drafts(parents)))
        return merged_everywhere(packed(partial, call.form), call, sinks, q.dtype)


def decode_quickly(
    call: Decode, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, sinks: Tensor | None, capturing: bool
) -> Tensor:
    """Append, attend and merge in a few launches that read the lengths on the device."""
    from ringattn.kernels.attention.triton import append, decode, merge

    n, spec = q.shape[1], call.spec
    cache.make_room(n)
    kept = spec.behind  # a call with other masks is not quick
    where = append.append(k, v, cache.k, cache.v, cache.filled, cache.here, causal=spec.causal, window=kept)
    splits = decode.splits_for(q, cache.v, cache.v.shape[1] if capturing else cache.reach(n))
    partials = decode.decode_splits(q, cache.k, cache.v, where, call.scale, spec.softcap, splits)
    if cache.ranks == 1:
        out = merge.merge_stack(partials, None, sinks, dtype=q.dtype).out
    elif call.form == "lse":
        rows = torch.empty(*q.shape[:3], v.shape[-1] + 1, dtype=torch.float32, device=q.device)
        merge.merge_stack(partials, into=unpacked(rows, call.form))
        out = merged_everywhere(rows, call, sinks, q.dtype)
    else:
        partial: Partial = merge.merge_stack(partials)
        out = merged_everywhere(packed(partial, call.form), call, sinks, q.dtype)
    cache.grow(n, capturing)
    return out
