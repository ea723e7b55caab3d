"""The forward of a prepared model, which takes whole sequences, the same on every rank of the plan.

It does what only the whole knows: positions, shifted labels, padding, packed documents.

    B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec
from ringattn.models.batch import Dealt, dealt
from ringattn.models.hf import generate as hf_generate
from ringattn.models.hf import memory as hf_memory
from ringattn.models.hf import trl as hf_trl
from ringattn.models.hf import vision as hf_vision
from ringattn.models.hf.attention import Call
from ringattn.models.hf.choice import Choice, attention_of, compiled
from ringattn.models.hf.packed import counted, documents, given_documents, places, refuse_mask
from ringattn.models.hf.refusals import accepted, refuse_other_attention, refuse_other_loss
from ringattn.models.hf.targets import Kept, changed, kept, targets_of, wanted, with_loss
from ringattn.plans.plan import Plan


@torch.compiler.disable(recursive=False)
def forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    shift_labels: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    """What a prepared model does with whole sequences. torch.compile takes what lies in between: the layers."""
    following = {"labels": labels} if shift_labels is None else {"shift_labels": shift_labels}
    either = (("input_ids", input_ids), ("inputs_embeds", inputs_embeds))
    x = {name: value for name, value in either if value is not None}
    if (name := hf_generate.cache_among(kwargs)) is not None:
        if any(x is not None for x in following.values()):
            raise ValueError(f"labels with {name}: a cache has no gradients; leave one of them out")
        refuse_mask(attention_mask)
        return hf_generate.with_cache(self, name, x, attention_mask, position_ids, logits_to_keep, kwargs)
    head, docs = kwargs.pop("fused_lm_head", False), kwargs.get("docs")
    if head and docs is not None:
        raise ValueError("docs with fused_lm_head are not supported; pass packed documents by position_ids")
    given, later = local_inputs(self, x, attention_mask, position_ids, following, kwargs)
    batch: Dealt = self.ringattn_last
    mask = None if head else attention_mask  # TRL's labels ignore padding
    asked = wanted(targets_of(labels, shift_labels, mask, docs), batch, self.ringattn.compare)
    with hf_vision.cutting(self, later), hf_memory.offloading(self):
        if head:
            return hf_trl.log_probs(self, given, asked, shift_labels is not None, num_items_in_batch)
        kept = few(self, logits_to_keep, batch.plan, following, given)
        output = hf_memory.run(self, given, asked)
    guard(self, output)
    if kept is not None:
        return changed(output, logits=kept.join(output.logits))
    return with_loss(self, output, asked, batch.plan, num_items_in_batch) if asked else output


def made_forward(kind: Any) -> Any:
    """`forward` with the arguments of the models of this class: Trainer and generate read which there are."""

    @torch.compiler.disable(recursive=False)
    @wraps(forward)
    def prepared_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    prepared_forward.__signature__ = signature(kind.forward)
    return prepared_forward


forward_of: Callable[[Any], Any] = cache(made_forward)  # the same for all models of a class


def keep_outermost(model: Any) -> None:
    """Have a prepared model cut sequences first again, if TRL has put its own forward around that."""
    if hasattr(model, "ringattn") and hf_trl.is_head(model.forward):
        model.ringattn_fused = model.forward
        model.forward = MethodType(forward_of(type(model)), model)


@torch.compiler.disable
def few(self: Any, keep: int | Tensor, plan: Plan, following: dict[str, Any], given: dict[str, Any]) -> Kept | None:
    """The tokens whose logits are wanted, if that is not all; the model computes those of this rank."""
    if not isinstance(keep, Tensor) and not keep:
        return None
    if any(x is not None for x in following.values()):
        raise ValueError("logits_to_keep with labels: the loss needs the logits of all tokens; leave one of them out")
    if not hf_generate.takes_kept(self):
        raise ValueError(f"{type(self).__name__} does not take logits_to_keep; leave it out")
    tokens = kept(keep, plan, next(x for x in given.values() if isinstance(x, Tensor)).device)
    given["logits_to_keep"] = tokens.mine
    return tokens


@torch.compiler.disable
def local_inputs(
    self: Any, x: dict[str, Tensor], attention_mask: Tensor | None, position_ids: Tensor | None,
    following: dict[str, Tensor | None], kwargs: dict[str, Any],
) -> tuple[dict[str, Any], hf_vision.Share | None]:  # fmt: skip
    """What the model itself is called with for these sequences: this rank's tokens, by `ringattn_last`.

    With images it is called with all tokens, and its decoder cuts them.
    """
    B, T = sizes(self, x, position_ids, following)
    plan = self.ringattn.local(self, T)
    docs = kwargs.pop("docs", None)
    if docs is None:
        where = documents(B, T, attention_mask, position_ids, kwargs)
    else:
        where = given_documents(docs, (B, T), attention_mask, kwargs)
    refuse_other_attention(self)
    labeled = any(x is not None for x in following.values())
    if labeled:
        refuse_other_loss(self)
    media = hf_vision.media_of(self, kwargs)
    if self.ringattn.compare:
        hf_vision.compare(plan, {**media, "input_ids": x.get("input_ids")})
    default = torch.arange(T, device=next(iter(x.values())).device)[None]
    positions = position_ids
    if docs is not None and (media or self.ringattn_numbering is not None):
        name = type(self).__name__
        raise ValueError(f"docs in a call of {name} with images, or with positions of its own, are not supported")
    if positions is None and not media:
        positions = counted(self, x, attention_mask) if docs is None else places(docs, default)
    batch = Dealt(plan, where, None, (B, T))
    if labeled and not media:
        batch = dealt_out(self, batch, attention_mask)
    self.ringattn_last = batch

    def take(x: Tensor, dim: int) -> Tensor:
        return batch.plan.shard(batch.row(x, dim), dim, compare=False)

    share = hf_vision.Share(Call(batch.plan, batch.docs), (B, T), default, take)
    if media:
        given = hf_vision.all_tokens({**x, **media, "position_ids": positions}, attention_mask, share)
    else:
        given = share.text(x, self.ringattn_stretched, positions)
    return {**given, "use_cache": False, **accepted(kwargs)}, share if media else None


def dealt_out(model: Any, batch: Dealt, attention_mask: Tensor | None) -> Dealt:
    """The batch as one row, if the model's plans leave the layout open, or deal out documents, and the batch has some.

    Layers of linear attention, which compute documents in rows of their own then, cost more: models with such layers
    are dealt out on request, and not where they are compiled, since that would be done anew for each batch.
    """
    plan, docs, source, linear = batch.plan, batch.docs, model.ringattn.source, model.ringattn.linear
    if docs is None or plan.ring == 1:
        return batch
    is_open = isinstance(source, Choice) and source.layout == "auto" and not linear
    if not (is_open or plan.layout == "balanced") or (linear and compiled(model)):
        return batch
    if not docs.plain and (batch.shape[0] > 1 or docs.padded):
        return batch
    real = None if attention_mask is None else attention_mask.bool().numpy(force=True)
    return dealt(plan, docs, attention_of(model).get("spec", AttentionSpec()), batch.shape, real)


@torch.compiler.disable
def guard(self: Any, output: Any) -> None:
    """Refuse a backward pass that would recompute layers of a model that is no longer prepared: they would be wrong."""

    def check(grad: Tensor) -> None:
        if not hasattr(self, "ringattn") and any(getattr(m, "gradient_checkpointing", False) for m in self.modules()):
            raise ValueError("backward recomputes layers of a model that was unprepared: call backward before that")

    for x in output.values():
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(check)


def sizes(model: Any, x: dict[str, Any], position_ids: Any, following: dict[str, Any]) -> tuple[int, int]:
    """(B, T) of what was given; a ValueError about what is no tensor of that shape."""
    if not x:
        raise ValueError("pass input_ids or inputs_embeds: whole sequences, the same on every rank")
    name, given = list(x.items())[-1]
    dims = ["batch", "tokens"] if name == "input_ids" else ["batch", "tokens", "width"]
    if not isinstance(given, Tensor) or given.dim() != len(dims):
        raise ValueError(f"{name} {described(given)}; expected a tensor [{', '.join(dims)}]")
    B, T = given.shape[:2]
    several = ((), (3,), (4,)) if getattr(position_ids, "ndim", 2) == 3 and hf_vision.turns_by_rows(model) else ((),)
    shapes = {key: [(B, T)] for key in following} | {"position_ids": [(*n, b, T) for b in (B, 1) for n in several]}
    for other, x in (*following.items(), ("position_ids", position_ids)):
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes[other]):
            raise ValueError(f"{other} {described(x)}; expected a tensor of shape ({B}, {T}), whole as {name} is")
    return B, T


def described(x: Any) -> str:
    return f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
