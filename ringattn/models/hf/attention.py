"""What transformers calls in the layers of a prepared model: attention, masks, and rotary angles."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringattn import api
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.masks.values import Value
from ringattn.models.hf.packed import places
from ringattn.plans.plan import Plan

NAME = "ringattn"  # what transformers calls this attention
CHUNKED = "chunked_attention"  # layers whose window is a block of positions
ARGUMENTS = ("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch")
PASSED = {*ARGUMENTS, "position_ids", "use_cache", "cache_position", "logits_to_keep"}
# what layers pass on and attention ignores


class Call(Value):
    """What every attention layer of one forward pass must know; it travels with the layers' keyword arguments."""

    plan: Plan
    docs: Docs | None
    cache: Any = None  # of generate.py
    spread: bool = False  # with a cache: whether each rank has a part of the new tokens, or all of them
    lengths: Tensor | None = None  # with a cache: how many tokens of each row are real, if padding follows them
    asked: Any = None  # the mask of all layers, an Asked, if the decoder that they are in would not hand it on


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, ringattn: Call | None = None,
    is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: [B, H, t, D] in, [B, t, H, V] out."""
    name = type(module).__name__  # this runs once a layer: what follows takes microseconds
    ringattn = needed(ringattn, name)
    more = [k for k in sorted(others.keys() - PASSED) if others[k] is not None and others[k] is not False]
    chunk, spans = None, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = ringattn.asked if attention_mask is None else attention_mask
    if isinstance(asked, Asked):
        keys, spans, attention_mask = asked.keys, asked.docs, None
        causal = causal or asked.causal
        if layer_type(module) == CHUNKED:
            chunk = keys
        else:
            sliding_window = keys or sliding_window
    if attention_mask is not None or more:
        what = ", ".join(["a mask of its own"] * (attention_mask is not None) + more)
        raise ValueError(f"{name} passes {what} to its attention, which is not supported over ranks")
    if dropout:
        raise ValueError(f"{name} has attention dropout {dropout}, which has no exact form over ranks; set it to 0")
    if sliding_window and not causal:
        raise ValueError(f"{name} sees {sliding_window} keys to both sides, which is not supported in a prepared model")
    made: Any = AttentionSpec if torch.compiler.is_compiling() else kept_spec
    spec = made(causal=causal, window=sliding_window or None, chunk=chunk, softcap=softcap, scale=scaling)
    if module.__dict__.get("attn_temperature_tuning") and not module.use_rope:
        query = placed_temperatures(module, query, ringattn)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if ringattn.cache is not None:
        if not hasattr(module, "layer_idx"):
            raise ValueError(f"{name} has no layer_idx, by which its cache would be found; use_cache=False works")
        plan = ringattn.plan if ringattn.spread else None
        return ringattn.cache.attend(module.layer_idx, q, k, v, plan, spec, s_aux, spans), None
    return api.attention(q, k, v, ringattn.plan, spec=spec, docs=spans or ringattn.docs, sinks=s_aux), None


kept_spec = lru_cache(AttentionSpec)  # the same in every layer and step: its checks cost more than a call


def needed(call: Call | None, name: str) -> Call:
    if call is None:
        raise ValueError(
            f"{name} was called outside a prepared model (call model(...) after ringattn.hf.prepare(model, plan)), or "
            "by one that does not hand its keyword arguments on, and cannot be spread over ranks"
        )
    return call


def layer_type(module: nn.Module) -> str | None:
    types, i = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return None if types is None or i is None else types[i]


def placed_temperatures(module: Any, query: Tensor, call: Call) -> Tensor:
    """Queries of Llama 4, which it scales by their places in a document, and has scaled by those on this rank."""
    if call.cache is not None:
        raise ValueError(
            f"{type(module).__name__} scales queries by their places (attn_temperature_tuning), which is not supported "
            "with a cache over ranks; set it to False in the config, or use_cache=False"
        )

    def scales(at: Tensor) -> Tensor:
        return torch.log1p(torch.floor((at.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    at = places(call.docs, call.plan.positions().cpu()[None])
    ratio = (scales(at) / scales(torch.arange(query.shape[2]))).to(query)
    return query * ratio[:, None, :, None]


class NotAMask(AttributeError, ValueError):
    """A layer reads its mask. An AttributeError, since wrappers ask all that layers receive whether it has a dtype."""


class Asked(Value):
    """Stands for a mask, in layers that say only by it how far they see, or which tokens see one another."""

    keys: int | None  # the window
    sees: Any = None  # (row, head, query, key), of a mask of whole sequences
    causal: bool = False  # also in layers that are not, but for the tokens that see one another
    docs: Docs | None = None  # with the ranges of these tokens, where they are not the call's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotAMask(
            f"a layer of this model changes its mask{f', a sliding window of {self.keys} keys,' if self.keys else ''} "
            f"before its attention (it reads mask.{name}): a mask of its own is not supported over ranks"
        )


def asked_mask(
    *args: Any, local_size: int | None = None, attention_mask: Any = None, mask_function: Any = None, **kwargs: Any
) -> Asked | None:
    """The mask is in the intervals. Without this entry transformers would drop padding without a word.

    Models with towers make masks of whole sequences, with an attention_mask, in which images may see both ways.
    """
    whole = attention_mask is not None and getattr(mask_function, "__name__", "") != "causal_mask_function"
    return Asked(local_size, mask_function if whole else None) if whole or local_size is not None else None


def spans_of(sees: Any, document_BT: Tensor) -> list[list[tuple[int, int]]]:
    """The ranges of tokens that see one another in each row of a causal mask; a ValueError about any other mask.

    `sees(row, head, query, key)` takes indices of any shape. No token sees another document (or padding), which are
    numbered.
    """
    (B, T), device = document_BT.shape, document_BT.device
    rows, head = torch.arange(B, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)

    def see(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = torch.as_tensor(sees(row, head, query, key), device=device)
        return seen & (document_BT[row, query] == document_BT[row, key])

    every = torch.arange(T - 1, device=device)[None]
    ahead = see(rows, every, every + 1).numpy(force=True)
    edges = np.diff(np.pad(ahead, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    spans = [
        list(zip(np.flatnonzero(row == 1).tolist(), (np.flatnonzero(row == -1) + 1).tolist(), strict=True))
        for row in edges
    ]
    for i, row in enumerate(spans):
        if not row:
            continue
        start, stop = torch.tensor(row, device=device).T
        whole = see(rows[i], start, stop - 1) & see(rows[i], stop - 1, start)
        later = see(rows[i], start[:, None], start) & (start[:, None] < start)
        if not bool(whole.all()) or bool(later.any()):
            raise ValueError(
                "this model has images that are longer than its window, or that see later images: masks over ranks "
                "have ranges of tokens that see one another whole, and nothing else behind them"
            )
    return spans


def stretched(model: nn.Module) -> list[nn.Module]:
    """The modules whose rotary angles depend on how long the sequence is, which they take from the last position."""
    modules = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
            modules.append(module)
    return modules


def with_last(self: Any, x: Tensor, position_ids: Tensor, *more: Any, **given: Any) -> tuple[Tensor, ...]:
    """Their (cos, sin), computed with one more position: the last one of the whole sequence, wherever it lies."""
    last = self.ringattn_last.to(position_ids).expand(*position_ids.shape[:-1], 1)
    angles = self.ringattn_forward(x, torch.cat([position_ids, last], -1), *more, **given)
    return tuple(each[..., :-1, :] for each in angles)


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, asked_mask)
