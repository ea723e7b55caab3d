"""A transformers model over sequences that are spread over ranks: `prepare`, `unprepare`, and its `forward`.

The prepared model takes whole sequences, the same on every rank of the plan, and does what only the whole knows:
positions, shifted labels, padding, packed documents, and the loss that is averaged over the tokens of all ranks.

    B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn.models.hf import generate as hf_generate
from ringattn.models.hf import linear as hf_linear
from ringattn.models.hf import trl as hf_trl
from ringattn.models.hf import vision as hf_vision
from ringattn.models.hf.attention import NAME, Call, hide_last, register, show_last, stretched
from ringattn.models.hf.choice import Spread, axes_of, source_of
from ringattn.models.hf.dealt import Dealt, dealt, joined
from ringattn.models.hf.kept import Kept, kept
from ringattn.models.hf.packed import IGNORED as IGNORED
from ringattn.models.hf.packed import documents, following, given_documents, places, refuse_mask
from ringattn.models.hf.refusals import LOSSES, accepted, refuse, refuse_other_attention
from ringattn.models.loss import compare_ranks, mean_over_ranks
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.planning import Plan
from ringattn.spec import Docs
from ringattn.torch.agree import watched
from ringattn.torch.same_data import compare_data


def prepare(
    model: nn.Module,
    plan: Any,
    *,
    axes: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    over: Sequence[Any] = (),
    compare: bool = True,
    averaged: bool = False,
) -> nn.Module:
    """The same model, whose `forward` takes whole sequences and computes this rank's tokens.

    `plan` is a plan, or a mesh, over which one is chosen by predicted time, from the heads, dims and windows of the
    model's config and the length of the first batch (or `seq_len`); `axes` are the mesh's as in `ringattn.plan`.
    `hf.plan_of(model).explain()` shows the choice.

    model(input_ids, labels=, attention_mask=, position_ids=) gives `loss`, the mean over the real tokens of all
    ranks, and `logits` [B, t, V] of this rank's tokens (`hf.whole(model, logits)` joins them; with labels, rows that
    are packed or padded are dealt out as one row without padding, unless a plan names another layout). Its gradients
    are this rank's share: sum them over ranks, or set `averaged` for what averages them over all ranks, as DDP and FSDP
    do. With `num_items_in_batch` the loss is a sum, divided by it. `logits_to_keep` gives the logits of those tokens,
    of the last n or at given positions, on every rank. `attention_mask` [B, T] marks padding on either side;
    `position_ids` that start again mark packed documents; `docs`, a ringattn.Docs of the whole sequences, describes
    them instead, with prefixes or as trees, where a label is what the token before it along its branch predicts. `over`
    are further axes to average over (a data axis), or
    their names in the mesh. Another length than the plan's is spread in the same way. Within peft's adapters or
    torch.compile, the inner model is prepared; prepare before wrapping in DDP or FSDP. The model gets its own copy of
    its config, so others made from that do not change. Token ids and labels are compared between the ranks of the plan,
    at first and then now and then, unless `compare` is False.
    """
    bare = inner(model)
    source = source_of(plan, axes, seq_len)
    over = axes_of(source, over)
    refuse(bare, source)
    register()
    give_own_configs(model)
    configs = [(config, config._attn_implementation) for config in configs_of(bare)]
    decoder = hf_vision.decoder_of(bare)
    if decoder is None:
        bare.set_attn_implementation(NAME)
    else:
        hf_vision.towers_keep_theirs(bare, decoder)
        hf_vision.cut_at(decoder)
    hooks: list[Any] = []
    rotaries = stretched(bare)
    for rotary in rotaries:
        hooks.append(rotary.register_forward_pre_hook(show_last, with_kwargs=True))
        hooks.append(rotary.register_forward_hook(hide_last))
    for layer in hf_linear.linear_layers(bare):
        hf_linear.replace(layer)
    new = {
        "ringattn": Spread(source, over, is_counted(bare), compare, averaged),
        "ringattn_last": None,  # how the latest batch was spread
        "local_forward": bare.forward,
        "forward": MethodType(forward_of(bare), bare),  # not a closure: a copy of the model runs its own weights
        "generate": MethodType(hf_generate.generate, bare),
        "_prepare_cache_for_generation": MethodType(hf_generate.prepare_cache, bare),
        "accepts_loss_kwargs": True,  # Trainer: the loss takes num_items_in_batch
    }
    attributes = {name: vars(bare)[name] for name in new if name in vars(bare)}
    vars(bare).update(new, ringattn_before=Before(tuple(new), attributes, configs, hooks, rotaries, rule_of(bare)))
    if isinstance(source, Plan) or seq_len is not None:
        plan_of(bare)
    return model


def plan_of(model: Any) -> Plan:
    """The plan of a prepared model: the given one, or the one that was chosen (for its longest sequences, if now)."""
    bare = inner(model)
    if not hasattr(bare, "ringattn"):
        raise ValueError(f"this {type(bare).__name__} is not prepared; call hf.prepare(model, mesh) first")
    plan: Plan = bare.ringattn.first(bare)
    return plan


@dataclass
class Before:
    """What `unprepare` removes and restores: attributes of the model, the attention of its configs, and hooks.

    And what of the model's modules each call needs, which would take long to look for.
    """

    new: tuple[str, ...]
    attributes: dict[str, Any]
    configs: list[tuple[Any, str | None]]
    hooks: list[Any]
    stretched: list[nn.Module]  # rotary angles that depend on the length
    rule: nn.Module | None  # what numbers positions by a rule of its own


def whole(model: Any, x: Tensor) -> Tensor:
    """The whole rows [B, T, ...] of what the last call of a prepared model gave of this rank's tokens."""
    bare = inner(model)
    if getattr(bare, "ringattn_last", None) is None:
        raise ValueError("nothing to join: call the prepared model first")
    return joined(bare.ringattn_last, x)


def unprepare(model: nn.Module) -> nn.Module:
    """The same model as it was before `prepare`, with the weights that it has now; also inside of peft's adapters.

    Undone are the forward of the model and of its linear layers, generate, the attention of its configs (unless it was
    changed since), and the hooks of rotary angles. The model keeps its own copy of its config. The name of this
    attention stays registered with transformers, and changes no other model.
    """
    bare = inner(model)
    name = type(bare).__name__
    if not hasattr(bare, "ringattn"):
        raise ValueError(f"this {name} is not prepared; nothing is to be undone")
    if not is_ours(bare.forward):
        raise ValueError(
            f"the forward of this {name} was wrapped after prepare; undo that first (accelerate: "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
    before = bare.ringattn_before
    for hook in before.hooks:
        hook.remove()
    for rotary in before.stretched:
        vars(rotary).pop("ringattn_last", None)
    for layer in hf_linear.linear_layers(bare):
        hf_linear.restore(layer)
    if (decoder := hf_vision.decoder_of(bare)) is not None:
        hf_vision.undo(decoder)
    for config, way in before.configs:
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = way
    for attribute in (*before.new, "ringattn_before", "ringattn_fused"):
        vars(bare).pop(attribute, None)
    vars(bare).update(before.attributes)
    return model


@contextmanager
def prepared(model: nn.Module, plan: Any, **options: Any) -> Iterator[nn.Module]:
    """`with prepared(model, plan) as model:` prepares the model, and undoes that at the end of the block.

    Call backward in the block too if activations are recomputed there.
    """
    found = prepare(model, plan, **options)
    try:
        yield found
    finally:
        unprepare(model)


def inner(model: Any) -> Any:
    """The model inside of peft's adapters and of torch.compile."""
    while "_orig_mod" in getattr(model, "_modules", {}):
        model = model._orig_mod
    return inner(model.get_base_model()) if hasattr(model, "get_base_model") else model


def give_own_configs(model: nn.Module) -> None:
    """Replace each config that modules hold by a copy, so that no other model that was made from it changes."""
    copies: dict[int, Any] = {}  # of deepcopy: what was shared within the model stays shared
    for module in model.modules():
        for name, x in vars(module).items():
            if hasattr(x, "sub_configs"):
                vars(module)[name] = deepcopy(x, copies)


def configs_of(model: nn.Module) -> list[Any]:
    """Every config whose attention `set_attn_implementation` may change, once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in waiting:
        if id(config) not in found and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


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
    hf_vision.refuse_rows(self, position_ids)
    if (cache := kwargs.pop("past_key_values", None)) is not None:
        if any(x is not None for x in following.values()):
            raise ValueError("labels with past_key_values: a cache has no gradients; leave one of them out")
        x = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        refuse_mask(attention_mask)
        return hf_generate.with_cache(self, cache, x, attention_mask, position_ids, logits_to_keep, kwargs)
    head, docs = kwargs.pop("fused_lm_head", False), kwargs.get("docs")
    if head and docs is not None:
        raise ValueError("docs with fused_lm_head are not supported; pass packed documents by position_ids")
    plan, given, later = cut(self, input_ids, attention_mask, position_ids, following, inputs_embeds, kwargs)
    one_row = self.ringattn_last if isinstance(self.ringattn_last, Dealt) else None
    if head:
        whole = next(iter(targets_of(labels, shift_labels, None)), None)  # TRL's labels ignore padding
        whole = one_row.row(whole) if one_row and whole is not None else whole
        with hf_vision.cutting(self, later):
            return hf_trl.log_probs(self, plan, given, whole, shift_labels is not None, num_items_in_batch)
    kept = few(self, logits_to_keep, plan, following, given)
    with hf_vision.cutting(self, later):
        output = self.local_forward(**given)
    guard(self, output)
    if kept is not None:
        return changed(output, logits=kept.join(output.logits))
    targets = targets_of(labels, shift_labels, attention_mask, docs)
    targets = [one_row.row(x) for x in targets] if one_row else targets
    return with_loss(self, output, targets, plan, num_items_in_batch) if targets else output


@cache
def named(kind: Any) -> Any:
    """`forward` with the arguments of the models of this class: Trainer and generate read which there are."""

    @torch.compiler.disable(recursive=False)
    @wraps(forward)
    def prepared_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    prepared_forward.__signature__ = signature(kind.forward)
    return prepared_forward


def forward_of(model: Any) -> Any:
    """The forward of prepared models of this class: the same function for all of them."""
    kind: Any = type(model)
    return named(kind)


def is_ours(method: Any) -> bool:
    function = getattr(method, "__func__", None)
    return function is not None and function is forward_of(method.__self__)


def targets_of(
    labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None, docs: Docs | None = None
) -> list[Tensor]:
    """What each token [B, T] is to predict: IGNORED for the last token of a row, and what padding predicts.

    Several, if several branches go on from some token; none without labels.
    """
    found = [] if shift_labels is None else [shift_labels]
    if labels is not None and not found:
        found = [F.pad(labels[:, 1:], (0, 1), value=IGNORED)] if docs is None else following(labels, docs)
    return found if attention_mask is None else [x.masked_fill(~attention_mask.bool(), IGNORED) for x in found]


def keep_outermost(model: Any) -> None:
    """Have a prepared model cut sequences first again, if TRL has put its own forward around that."""
    if hasattr(model, "ringattn") and hf_trl.is_head(model.forward):
        model.ringattn_fused = model.forward
        model.forward = MethodType(forward_of(model), model)


@torch.compiler.disable
def few(
    self: Any, keep: int | Tensor, plan: Plan, following: dict[str, Tensor | None], given: dict[str, Any]
) -> Kept | None:
    """The tokens whose logits are wanted, if that is not all; the model computes those of this rank."""
    if not isinstance(keep, Tensor) and not keep:
        return None
    if any(x is not None for x in following.values()):
        raise ValueError("logits_to_keep with labels: the loss needs the logits of all tokens; leave one of them out")
    if not hf_generate.takes_kept(self):
        raise ValueError(f"{type(self).__name__} does not take logits_to_keep; leave it out")
    found = kept(keep, plan, next(x for x in given.values() if isinstance(x, Tensor)).device)
    given["logits_to_keep"] = found.mine
    return found


@torch.compiler.disable
def cut(
    self: Any, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None,
    following: dict[str, Tensor | None], inputs_embeds: Tensor | None, kwargs: dict[str, Any],
) -> tuple[Plan, dict[str, Any], hf_vision.Cut | None]:  # fmt: skip
    """The plan for these sequences, and what the model itself is called with: this rank's tokens.

    With images it is called with all tokens, and its decoder cuts them.
    """
    B, T = sizes(input_ids, inputs_embeds, position_ids, following)
    (labels,) = following.values()
    plan, name = self.ringattn.local(self, T), type(self).__name__
    docs = kwargs.pop("docs", None)
    if docs is None:
        where = documents(B, T, attention_mask, position_ids, kwargs)
    else:
        where = given_documents(docs, (B, T), attention_mask, kwargs)
    refuse_other_attention(self)
    if labels is not None and (hasattr(self, "_loss_function") or getattr(self, "loss_type", None) not in LOSSES):
        kind = "a loss_function of its own" if hasattr(self, "_loss_function") else self.loss_type
        raise ValueError(
            f"{name} is trained by another loss ({kind}) than that of the next token, which is the one here; leave out "
            "labels, and work the loss out from its logits"
        )
    if labels is not None and self.get_output_embeddings() is None:
        raise ValueError(f"{name} gives no logits, so it has no use for labels; prepare a ...ForCausalLM, for example")
    either = (("input_ids", input_ids), ("inputs_embeds", inputs_embeds))
    x = {name: one for name, one in either if one is not None}
    media = hf_vision.media_of(self, kwargs)
    if self.ringattn.compare:
        hf_vision.compare(plan, {**media, "input_ids": input_ids})
    own = torch.arange(T, device=next(iter(x.values())).device)[None]
    positions = position_ids
    if docs is not None and (media or self.ringattn_before.rule is not None):
        raise ValueError(f"docs in a call of {name} with images, or with positions of its own, are not supported")
    if positions is None and not media:
        positions = counted(self, x, attention_mask) if docs is None else places(docs, own)
    one_row = None if labels is None or media else dealt(self, plan, where, attention_mask, (B, T))
    self.ringattn_last = one_row or plan
    if media:
        later = hf_vision.Cut(Call(plan, where), (B, T), own, partial(plan.shard, compare=False))
        given = hf_vision.all_tokens({**x, **media, "position_ids": positions}, attention_mask, later)
    else:
        given, later = of_text(self, x, own if positions is None else positions, one_row, Call(plan, where)), None
    if labels is None:
        compare_data(plan, watched(plan))
    return one_row.plan if one_row else plan, {**given, "use_cache": False, **accepted(kwargs)}, later


def of_text(self: Any, x: dict[str, Tensor], positions: Tensor, one_row: Dealt | None, call: Call) -> dict[str, Any]:
    """What the model is called with of text alone: this rank's tokens."""
    B, T = next(iter(x.values())).shape[:2]
    positions = positions.expand(*positions.shape[:-2], B, T)
    for rotary in self.ringattn_before.stretched:
        rotary.ringattn_last = positions.max()
    if one_row:
        call = Call(one_row.plan, one_row.docs)
        x = {name: one_row.row(one) for name, one in x.items()}
        rows = [one_row.row(one) for one in (positions if positions.dim() == 3 else [positions])]
        positions = torch.stack(rows) if positions.dim() == 3 else rows[0]
    shards = {name: call.plan.shard(one, dim=1, compare=False) for name, one in x.items()}
    return {**shards, "position_ids": call.plan.shard(positions, dim=-1, compare=False), "ringattn": call}


@torch.compiler.disable
def guard(self: Any, output: Any) -> None:
    """Refuse a backward pass that would recompute layers of a model that is no longer prepared: they would be wrong."""

    def check(grad: Tensor) -> None:
        if not hasattr(self, "ringattn") and any(getattr(m, "gradient_checkpointing", False) for m in self.modules()):
            raise ValueError(
                f"backward of this {type(self).__name__} recomputes its layers, and it was unprepared since forward; "
                "call backward before unprepare, inside of `with hf.prepared(...)`"
            )

    for x in output.values():
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(check)


@torch.compiler.disable
def with_loss(self: Any, output: Any, targets: list[Tensor], plan: Plan, items: Any) -> Any:
    """The model's output, and first of all the loss over all ranks."""
    spread = self.ringattn
    loss = mean_loss(output.logits, targets, plan, spread.over, spread.compare, items)
    return changed(output, loss=scaled(loss, spread.ranks) if spread.averaged else loss)


def changed(output: Any, **new: Any) -> Any:
    """The model's output with other values, which come first."""
    return type(output)(**{**new, **{name: x for name, x in output.items() if name not in new}})


def scaled(loss: Tensor, ranks: int) -> Tensor:
    """The same loss, whose gradient is `ranks` times as large: a mean over the ranks makes it their sum."""
    return loss + (ranks - 1) * (loss - loss.detach())


def sizes(input_ids: Any, inputs_embeds: Any, position_ids: Any, following: dict[str, Any]) -> tuple[int, int]:
    """(B, T) of what was given; a ValueError about what is no tensor of that shape."""
    name, given = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if given is None:
        raise ValueError("pass input_ids or inputs_embeds: whole sequences, the same on every rank")
    dims = 2 if inputs_embeds is None else 3
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is of type {type(given).__name__}; pass torch.tensor({name})")
    if given.dim() != dims:
        kind = "[batch, tokens]" if dims == 2 else "[batch, tokens, width]"
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected {kind}")
    B, T = given.shape[:2]
    one = [((B, T),)] * len(following)
    several = tuple((*rows, b, T) for b in (B, 1) for rows in ((), (3,), (4,)))  # of M-RoPE
    for (other, x), shapes in zip((*following.items(), ("position_ids", position_ids)), (*one, several), strict=True):
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in shapes):
            found = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
            raise ValueError(f"{other} {found}; expected a tensor of shape ({B}, {T}), whole as {name} is")
    return B, T


def mean_loss(
    logits_BtV: Tensor, targets: list[Tensor], plan: Plan, over: Sequence[Any], compare: bool = True, items: Any = None
) -> Tensor:
    """The mean cross entropy of the targets [B, T] of all ranks that count; with `items`, their sum divided by it."""
    first, *more = targets
    labels = plan.shard(first, dim=1, compare=compare).to(logits_BtV.device)
    counted = plan.shard(first != IGNORED, dim=1, compare=False).to(logits_BtV.device)
    at_once = tokens_at_once(LOGITS, logits_BtV.shape[-1], len(logits_BtV))
    losses = in_pieces(cross_entropy, at_once, logits_BtV, labels)
    if more:  # of a few tokens, where branches go on from them
        others = plan.shard(torch.stack(more) - IGNORED, dim=2, compare=False).to(logits_BtV.device) + IGNORED
        n, rows, at = (others != IGNORED).nonzero(as_tuple=True)
        parting = cross_entropy(logits_BtV[rows, at][None], others[n, rows, at][None])
        losses, counted = torch.cat([losses.flatten(), parting[0]]), F.pad(counted.flatten(), (0, len(at)), value=True)
    compare_ranks(plan, "the loss of a prepared model", over)
    return mean_over_ranks(losses, counted, plan, over, items)


def cross_entropy(logits_BtV: Tensor, labels_Bt: Tensor) -> Tensor:
    """In float32, of each token that has a label; 0 for the others."""
    logits, labels = logits_BtV.float().flatten(0, 1), labels_Bt.flatten()
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED).view_as(labels_Bt)


def counted(model: Any, x: dict[str, Tensor], attention_mask: Tensor | None) -> Tensor | None:
    """The positions that a model gives whole sequences, if that is not one after the other."""
    found = numbered(model.ringattn_before.rule, x.get("input_ids"), x.get("inputs_embeds"))
    if found is None and model.ringattn.counted and attention_mask is not None:
        return (attention_mask.cumsum(1) * attention_mask).long() - 1
    return found


RULES = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"


def rule_of(model: nn.Module) -> nn.Module | None:
    """The embeddings that give whole sequences positions by a rule of their own, as RoBERTa's do, if there are any."""
    return next((m for m in model.modules() if hasattr(m, RULES[0])), None)


def numbered(embeddings: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
    """The positions by that rule; None without one."""
    name, x = (RULES[0], input_ids) if inputs_embeds is None else (RULES[1], inputs_embeds)
    rule = getattr(embeddings, name, None)
    return None if rule is None else rule(x, embeddings.padding_idx)


def is_counted(model: nn.Module) -> bool:
    """Whether positions are counted over the real tokens: an embedding of positions that takes the padding mask."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return any("attention_mask" in signature(m.forward).parameters for m in embeddings)
