"""Models with towers for images or sound: each rank runs the towers on all of them, and the decoder on its tokens.

The model's own code merges what its towers give into the embeddings of the whole sequence. Where it calls its text
decoder, whatever has a row a token is cut. The gradient of each rank is that of its tokens, in the towers too.

    B batch   T all tokens   t this rank's tokens   N places of images
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.masks.spec import Docs
from ringattn.models.hf.attention import ARGUMENTS, NAME, PASSED, Asked, Call, spans_of, stretched
from ringattn.models.hf.choice import replace
from ringattn.plans.plan import Plan
from ringattn.torch.agree import note

TEXT = {*ARGUMENTS, "use_cache", "cache_position"}  # what models of text alone take too, in what `forward` leaves
TYPES = "token_type_ids"
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Share:
    """How one forward pass calls the text decoder: which of the tokens [B, T] are this rank's, and their call."""

    def __init__(
        self, call: Call, shape: tuple[int, int], default: Tensor, take: Callable[[Tensor, int], Tensor],
        padding: Tensor | None = None,
    ):  # fmt: skip
        self.call, self.shape, self.take = call, shape, take
        self.default = default  # positions [B, T], where the model leaves them to its decoder
        self.first = [0] * shape[0] if padding is None else padding.tolist()  # the tokens that the call's begin with

    def positions(self, rotaries: list[nn.Module], given: Tensor | None) -> dict[str, Tensor]:
        """This rank's positions, of which a token may have several: [B, T] or [3 or 4, B, T] is cut."""
        x = self.default if given is None else given
        for rotary in rotaries:
            rotary.ringattn_last = x.max()
        return {"position_ids": self.take(x.expand(*x.shape[:-2], *self.shape), x.dim() - 1)}

    def text(self, x: dict[str, Tensor], rotaries: list[nn.Module], given: Tensor | None) -> dict[str, Any]:
        mine = {name: self.take(tokens, 1) for name, tokens in x.items()}
        return {**mine, **self.positions(rotaries, given), "ringattn": self.call}

    def __deepcopy__(self, memo: Any) -> "Share":
        return self


def decoder_of(model: Any) -> Any:
    """The text decoder of a model that also has towers; None of a model of text alone."""
    if model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    takes = decoder is not model and "inputs_embeds" in signature(type(decoder).forward).parameters
    return decoder if takes else None


def cut_at(model: Any, decoder: Any) -> None:
    """Have the decoder cut whole sequences while its `ringattn_cut` is set. Towers keep their attention."""
    decoder.set_attn_implementation(NAME)
    for config in (model.config, model.config.get_text_config()):  # by which models make masks for their decoder
        config._attn_implementation_internal = NAME
    replace(decoder, ringattn_cut=None, ringattn_forward=decoder.forward, forward=MethodType(forward, decoder))


@torch.compiler.disable(recursive=False)
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the text decoder of a prepared model does: this rank's tokens, if it is given all of them."""
    if self.ringattn_cut is not None:
        args, kwargs = (), cut_arguments(self, self.ringattn_cut, args, kwargs)
    return self.ringattn_forward(*args, **kwargs)


@contextmanager
def cutting(model: Any, share: Share | None) -> Iterator[None]:
    """Within this block the text decoder of the model is given all tokens, and cuts them."""
    decoder = None if share is None else decoder_of(model)
    if decoder is None:
        yield
        return
    decoder.ringattn_cut = share
    try:
        yield
    finally:
        decoder.ringattn_cut = None


def turns_by_rows(model: Any) -> bool:
    """Whether a token has several positions (M-RoPE)."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return any("rope_section" in name for name in rope) or any(hasattr(m, "mrope_section") for m in model.modules())


def all_tokens(given: dict[str, Any], attention_mask: Tensor | None, share: Share) -> dict[str, Any]:
    """What the model is called with where its decoder cuts: all tokens, and what its towers see."""
    given = {name: x for name, x in given.items() if x is not None}
    if attention_mask is None:  # with one, transformers looks for no packed documents: these are in the call
        attention_mask = torch.ones(share.shape, dtype=torch.long, device=share.default.device)
    return {**given, "attention_mask": attention_mask}


def turned(model: nn.Module, B: int) -> Any:
    """How many more positions than tokens each row has after images with M-RoPE, [B, 1]; 0 without them."""
    every: Any = model.modules()
    deltas = next((m.rope_deltas for m in every if getattr(m, "rope_deltas", None) is not None), None)
    return 0 if deltas is None else deltas.repeat_interleave(B // len(deltas), 0)  # of beams: a row is several


def media_of(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for images and sound, which are removed from kwargs; {} if there are none."""
    if decoder_of(model) is None:
        return {}
    names = signature(model.local_forward).parameters.keys() - TEXT
    media = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    media = {name: x for name, x in media.items() if x is not None}
    prefixed = TYPES in names and getattr(model.config.get_text_config(), "use_bidirectional_attention", False)
    if prefixed and TYPES not in media:
        raise ValueError(
            f"{type(model).__name__} sees its prefix both ways: pass {TYPES}, as its processor returns them (0 in the "
            "prefix, 1 behind it); what it would see without them depends on the attention implementation"
        )
    return media


def compare(plan: Plan, given: dict[str, Any]) -> None:
    for x in given.values():
        if isinstance(x, Tensor):
            note(x.contiguous().view(SAME_SIZE[x.element_size()]) if x.is_floating_point() else x, plan)


@torch.compiler.disable
def cut_arguments(self: Any, share: Share, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the decoder is called with: of each argument the rows of this rank's tokens."""
    name = type(self).__name__
    named = signature(type(self).forward).bind(self, *args, **kwargs).arguments
    del named["self"]
    given = {**named.pop("kwargs", {}), **named}
    mine: dict[str, Any] = share.positions(stretched(self), given.pop("position_ids", None))
    mask, call = mask_of(share, given.pop("attention_mask", None), name), share.call
    if isinstance(mask, Asked):  # of decoders that make masks of what is given, as Gemma's
        mask, call = None, call.replace(asked=mask)
    mine["attention_mask"] = mask
    marks = next((x for x in given.values() if is_a_row_a_token(x, share) and x.dtype == torch.bool), None)
    places = None if marks is None else Places(share, marks)
    for argument, x in given.items():
        if is_a_row_a_token(x, share):
            mine[argument] = share.take(x, 1)
        elif argument not in PASSED and holds_tensors(x):
            if places is None:
                raise ValueError(f"{name} is given {argument} without a row a token: it cannot be spread over ranks")
            mine[argument] = places.take(x, argument)
        else:
            mine[argument] = x
    return {**mine, "ringattn": call}


def is_a_row_a_token(x: Any, share: Share) -> bool:
    return isinstance(x, Tensor) and tuple(x.shape[:2]) == share.shape


def holds_tensors(x: Any) -> bool:
    if isinstance(x, dict):
        x = list(x.values())
    return any(map(holds_tensors, x)) if isinstance(x, list | tuple) else isinstance(x, Tensor) and x.dim() > 0


class Places:
    """Features of the marked tokens only, in the order of the batch: what deepstack adds to hidden states."""

    def __init__(self, share: Share, marks_BT: Tensor):
        number = marks_BT.flatten().long().cumsum(0).sub(1).view(share.shape)
        self.mine, self.all = share.take(number, 1)[share.take(marks_BT, 1)], int(marks_BT.sum())

    def take(self, x: Any, name: str) -> Any:
        """The features [N, ...] of this rank's marked tokens, in a list or a dict if they come so."""
        if isinstance(x, dict):
            return {key: self.take(each, name) for key, each in x.items()}
        if isinstance(x, list | tuple):
            return [self.take(each, name) for each in x]
        if len(x) != self.all:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected a row for each of {self.all} marked tokens")
        return x[self.mine]


def mask_of(share: Share, mask: Any, name: str) -> Any:
    """The mask of each type of layer; padding and documents are in the call."""
    if isinstance(mask, dict):
        return {key: mask_of(share, each, name) for key, each in mask.items()}
    if isinstance(mask, Asked):
        return mask if mask.sees is None else Asked(mask.keys, causal=True, docs=both_ways(share, mask.sees))
    if isinstance(mask, Tensor) and mask.dim() > 2:
        raise ValueError(f"{name} is given a mask {tuple(mask.shape)} of its own, which is not supported over ranks")
    return None


def both_ways(share: Share, sees: Any) -> Docs | None:
    """The documents of the call, in which images, or a prefix, see themselves both ways; None without such tokens."""
    docs, (B, T), device = share.call.docs, share.shape, share.default.device
    first = torch.tensor(share.first, device=device)[:, None]
    at = torch.arange(T, device=device).expand(B, T) - first
    starts = torch.tensor([[0, T]] if docs is None else docs.starts.tolist(), device=device).expand(B, -1)
    spans = spans_of(sees, torch.searchsorted(starts.contiguous(), at.contiguous(), right=True))
    if not any(spans):
        return None
    kept = [[(a - n, b - n) for a, b in row if a >= n] for row, n in zip(spans, share.first, strict=True)]
    return Docs.from_lengths(starts.diff(dim=1), pad_to=T, spans=kept)
