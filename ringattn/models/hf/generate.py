"""`generate` of a prepared model: transformers' own loop, with caches over ranks.

A prompt is spread over the ranks of the plan; after that every rank has each new token. Left padding moves behind the
prompt while that is read, and is then dropped from the caches, whose rows have lengths of their own.

    B batch   n new tokens   V vocabulary
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache as cached
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ringattn import api
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.hf import vision as hf_vision
from ringattn.models.hf.attention import Call
from ringattn.models.hf.refusals import accepted, refuse_other_attention
from ringattn.models.hf.targets import kept
from ringattn.plans.plan import Plan
from ringattn.serving import KVCache
from ringattn.torch.agree import note

LOCAL_TOKENS = 16  # at most so many new tokens are not spread over ranks
LOOPS = ("greedy_search", "sample", "beam_search", "beam_sample")  # of transformers, whose caches only grow


class RanksCache:
    """What `generate` takes for a cache: one `ringattn.KVCache` a layer, for `max_len` tokens a row, or its state."""

    is_compileable = is_croppable = False
    is_linear = (False,)  # of any layers: the number of tokens is known

    def __init__(self, plan: Plan, max_len: int):
        self.plan, self.max_len = plan, max_len
        self.layers: dict[int, Any] = {}
        self.states: dict[int, Tensor] = {}  # of linear layers, [B, H, K, V], the same on every rank
        self.tails: dict[int, Tensor] = {}  # the last tokens, which their convolutions will still need
        self.length = 0  # of every row, with its padding
        self.turned: Any = 0  # [B, 1], how many more positions than tokens there are: images with M-RoPE
        self.padding: Tensor | None = None  # [B], how many tokens of padding each row has begun with so far

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, spec: AttentionSpec, sinks: Any,
        docs: Any = None,
    ) -> Tensor:  # fmt: skip
        """Append to the layer's cache and attend to it; without a plan every rank has all of the tokens."""
        if layer not in self.layers:
            sizes: Any = {"kv_heads": k.shape[2], "head_dim": k.shape[3], "value_dim": v.shape[3], "dtype": k.dtype}
            self.layers[layer] = KVCache.allocate(self.plan, batch=len(k), max_len=self.max_len, **sizes)
        cache = self.layers[layer]
        if docs is not None:  # with images that see both ways: the cache is filled, and the prompt sees itself
            if plan is None or self.length:
                raise ValueError("images that are seen both ways behind a cache are not supported; give one prompt")
            api.prefill(q, k, v, plan, cache, spec=spec, sinks=sinks)
            return api.attention(q, k, v, plan, spec=spec, docs=docs, sinks=sinks)
        if plan is None:
            return api.decode(q, k, v, cache, spec=spec, sinks=sinks)
        return api.prefill(q, k, v, plan, cache, spec=spec, sinks=sinks)

    def grow(self, n: int, padded: bool) -> None:
        """Count n more tokens; if some are padding, drop it: it is now behind the real ones."""
        self.length += n
        if padded and self.padding is not None:
            for cache in self.layers.values():
                cache.truncate((self.length - self.padding).tolist())

    def begun(self) -> bool:
        """Whether every row has a real token, which decode needs."""
        return self.length > 0 and (self.padding is None or bool((self.padding < self.length).all()))

    def reserve(self, max_len: int) -> None:
        if max_len > self.max_len:
            self.max_len = max_len
            self.layers = {layer: cache.enlarged(max_len, max_len) for layer, cache in self.layers.items()}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row beam_idx[i]."""
        for cache in self.layers.values():
            cache.select(beam_idx)
        for rows in (self.states, self.tails):
            rows.update({layer: x[beam_idx.to(x.device)] for layer, x in rows.items()})


def with_cache(
    self: Any, cache_name: str, x: dict[str, Tensor], attention_mask: Tensor | None,
    position_ids: Tensor | None, keep: int | Tensor, given: dict[str, Any],
) -> Any:  # fmt: skip
    """The model's output for new tokens, the same on every rank: logits [B, kept, V] of the last `keep`, or of all."""
    cache = given.pop(cache_name)
    if not isinstance(cache, RanksCache):
        raise ValueError(
            f"{cache_name} is of type {type(cache).__name__}: a prepared model takes the cache over ranks that its "
            "own generate(..., return_dict_in_generate=True) returns"
        )
    if isinstance(keep, Tensor):
        raise ValueError("logits_to_keep with a cache: a number of last tokens, not positions")
    refuse_other_attention(self)
    name, tokens = next(iter(x.items()))
    B, n = tokens.shape[:2]
    spread, plan = self.ringattn, cache.plan
    if spread.compare and name == "input_ids":
        note(tokens, plan)
    padding = padding_of(attention_mask, cache, B, n)
    if any(layer.room() < n for layer in cache.layers.values()):
        raise ValueError(
            f"{cache_name} has {cache.length} tokens a row and no room for {n} more: make it with max_len="
            f"{cache.length + n} or more, as in {cache_name}=hf.RanksCache(plan, max_len)"
        )
    default = torch.arange(cache.length, cache.length + n, device=tokens.device).expand(B, n)
    default = default if cache.padding is None else (default - cache.padding[:, None]).clamp(min=0)
    default = default + cache.turned
    media, n_kept = hf_vision.media_of(self, given), min(keep or n, n)
    local_keep: Any = n_kept
    chunk, call = None, Call(plan, None, cache)
    if n > LOCAL_TOKENS or padding is not None or not cache.begun():
        chunk = Chunk(spread.local(self, n), B, n_kept, padding, tokens.device)
        call, local_keep = chunk.call(cache), chunk.few.mine
    share = hf_vision.Share(call, (B, n), default, chunk.take if chunk else lambda x, dim: x, padding)
    if media:
        mask = None if attention_mask is None else attention_mask[:, -n:]
        media = {name: x[:, -n:] if name.endswith(hf_vision.TYPES) else x for name, x in media.items()}
        new, later = hf_vision.all_tokens({name: tokens, "position_ids": position_ids, **media}, mask, share), share
    else:
        new, later = share.text({name: tokens}, self.ringattn_stretched, position_ids), None
    if takes_kept(self):
        new["logits_to_keep"] = local_keep
    with torch.no_grad(), hf_vision.cutting(self, later):
        output = self.local_forward(**new, **{"use_cache": False, **accepted(given)})
    logits = output.logits if chunk is None or takes_kept(self) else output.logits[:, local_keep]
    logits = logits[:, -n_kept:] if chunk is None else chunk.join(logits)
    cache.grow(n, padding is not None)
    kind: Any = type(output)
    cache.turned = hf_vision.turned(self, B) if media else cache.turned
    return kind(**{**output, "logits": logits, result_name(kind): cache})


def cache_among(given: dict[str, Any]) -> str | None:
    """The argument that is a cache, by what it can do: its name differs between versions of transformers."""
    return next((name for name, x in given.items() if hasattr(x, "get_seq_length")), None)


@cached
def result_name(kind: Any = None) -> str:
    """What an output of this class calls its cache; by default, what `generate` passes on by the same name."""
    if kind is None:
        from transformers.generation import GenerateDecoderOnlyOutput as kind
    return next(field.name for field in fields(kind) if "Cache" in str(field.type))


class Chunk:
    """New tokens [B, n] spread over ranks, each row's real ones first and then the padding that came before them."""

    def __init__(self, plan: Plan, B: int, n_kept: int, padding: Tensor | None, device: Any):
        self.plan, self.padding, n = plan, padding, plan.seq_len
        every, rows = (torch.arange(size, device=device) for size in (n, B))
        first = 0 if padding is None else padding[:, None]
        self.rows, self.at = rows[:, None], (every + first) % n
        wanted, back = torch.unique((every[None, n - n_kept :] - first) % n, return_inverse=True)
        self.few, self.back = kept(wanted, plan, device), back.view(-1, n_kept).expand(B, n_kept)

    def call(self, cache: RanksCache) -> Call:
        n, padding = self.plan.seq_len, self.padding
        docs = None if padding is None else Docs.from_lengths(torch.stack([n - padding, padding], 1))
        return Call(self.plan, docs, cache, spread=True, lengths=None if padding is None else n - padding)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of x, whose dims before `dim` and at it are rows and tokens."""
        return self.plan.shard(x[(slice(None),) * (dim - 1) + (self.rows, self.at)], dim, compare=False)

    def join(self, logits: Tensor) -> Tensor:
        """The logits of the kept tokens, on every rank."""
        return self.few.join(logits)[self.rows, self.back]


def takes_kept(model: Any) -> bool:
    return "logits_to_keep" in signature(model.local_forward).parameters


def padding_of(attention_mask: Tensor | None, cache: RanksCache, B: int, n: int) -> Tensor | None:
    """How many of these n tokens are padding, in front of each row; only what begins a row may be, in many chunks."""
    if attention_mask is None or bool(attention_mask[:, -n:].all()):
        return None
    if attention_mask.shape != (B, cache.length + n):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected {(B, cache.length + n)}: the "
            f"{cache.length} tokens in the cache, and {n} new ones"
        )
    mask = attention_mask.long()
    if (mask.diff(dim=1) < 0).any():
        raise ValueError("attention_mask has padding behind real tokens; generate takes it on the left of a prompt")
    cache.padding = cache.length + n - mask.sum(1)
    return n - mask[:, -n:].sum(1)


def prepare_cache(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_len: int
) -> None:
    """What transformers' `generate` calls to make its cache."""
    kind, way = generation_config.cache_implementation, str(getattr(generation_mode, "value", generation_mode))
    if kind not in (None, "dynamic"):
        raise ValueError(f"cache_implementation={kind!r}: a prepared model has caches over ranks only; leave it out")
    if way not in LOOPS:
        raise ValueError(f"{way} is not supported over ranks; supported are {', '.join(LOOPS)}")
    plan = self.ringattn.local(self, max_len)
    mask, name = model_kwargs.get("attention_mask"), cache_among(model_kwargs)
    if isinstance(mask, Tensor) and not mask.any(-1).all():
        raise ValueError("attention_mask has a row of padding only; give each row a token")
    if name is None and generation_config.use_cache is not False:
        model_kwargs[result_name()] = RanksCache(plan, max_len)
    elif name is not None and isinstance(cache := model_kwargs[name], RanksCache):
        cache.reserve(max_len)


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate` with whole prompts, the same on every rank, which all sample as the first rank does."""
    with numbers_of_the_first(self.ringattn.first(self)):
        return type(self).generate(self, *args, **kwargs)


@contextmanager
def numbers_of_the_first(plan: Plan) -> Iterator[None]:
    """Every rank of the plan draws the random numbers of the first one; afterwards the others have their own again.

    Within another such block nothing changes: its numbers go on.
    """
    axes = plan.ulysses_axis, plan.ring_axis
    if plan.ring * plan.ulysses == 1 or any(axis.by == "threads" for axis in axes) or plan.axes.kept.get("alike"):
        yield
        return
    device = torch.device(plan.device)
    random: Any = torch.cuda if device.type == "cuda" else torch
    before = random.get_rng_state()
    state = before.to(device).view(torch.int64)[None]
    for axis in axes:
        state = axis.all_gather(state).wait()[:1]
    random.set_rng_state(state[0].view(torch.uint8).cpu())
    plan.axes.kept["alike"] = True
    try:
        yield
    finally:
        plan.axes.kept["alike"] = False
        if any(axis.rank for axis in axes):
            random.set_rng_state(before)
