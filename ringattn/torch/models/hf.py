"""Models of the transformers library over sequences that are spread over ranks: `prepare(model, plan)`, `OverRanks`.

The prepared model takes whole sequences, the same on every rank of the plan, and does what only the whole knows:
positions, shifted labels, padding, packed documents, and the loss that is averaged over the tokens of all ranks.

    B batch   T all tokens   t this rank's tokens   V vocabulary
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ringattn import api
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch.agree import watched
from ringattn.torch.models.loss import token_mean
from ringattn.torch.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.torch.same_data import compare_data

NAME = "ringattn"  # what transformers calls this attention
OTHERS = 64  # lengths beside the plan's own whose plans are kept
IGNORED = -100  # a label that does not count


def prepare(model: nn.Module, plan: Plan, *, over: Sequence[Any] = (), compare: bool = True) -> nn.Module:
    """The same model, whose `forward` takes whole sequences and computes this rank's tokens.

    model(input_ids, labels=, attention_mask=, position_ids=) gives `loss`, the mean over the real tokens of all
    ranks, and `logits` [B, t, V] of this rank's tokens (plan.unshard joins them). Its gradients are this rank's share:
    sum them over ranks, never average. `attention_mask` [B, T] marks padding on either side; `position_ids` that start
    again mark packed documents. `over` names further axes to average over (a data axis). Another length than the plan's
    is spread in the same way. A model with peft's adapters is prepared inside of them. Token ids and labels are
    compared between the ranks of the plan, at first and then now and then, unless `compare` is False.
    """
    outer, model = model, model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    refuse(model, plan, over)
    register()
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    model.ringattn = Spread({plan.seq_len: plan}, tuple(over), numbered_by(model), is_counted(model), compare)
    for rotary in stretched(model):
        rotary.register_forward_pre_hook(show_last, with_kwargs=True)
        rotary.register_forward_hook(hide_last)
    model.local_forward = model.forward
    model.forward = MethodType(forward, model)  # not a closure: a copy of the model runs its own weights
    model.generate = generate
    model.accepts_loss_kwargs = False  # Trainer: the loss is a mean, of each batch by itself
    return outer


@dataclass(frozen=True)
class Spread:
    """Where a prepared model's sequences lie, by length, and the axes that its loss is also averaged over."""

    plans: dict[int, Plan]
    over: tuple[Any, ...]
    numbered: str | None  # the module that would number the tokens by a rule of its own, not from 0 on
    counted: bool = False  # whether the model counts real tokens where padding comes first
    compare: bool = True  # whether ranks compare what they are given

    def local(self, T: int) -> Plan:
        if T not in self.plans:
            first, *others = self.plans
            if len(others) == OTHERS:
                del self.plans[others[0]]
            self.plans[T] = self.plans[first].for_length(T)
        return self.plans[T]

    def __deepcopy__(self, memo: Any) -> "Spread":
        return self  # a copy of the model has the same ranks

    def __reduce__(self) -> Any:
        raise TypeError("a prepared model belongs to its ranks; save its state_dict() or save_pretrained(FOLDER)")


@torch.compiler.disable(recursive=False)
def forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What a prepared model does with whole sequences. torch.compile takes what lies in between: the layers."""
    plan, given = cut(self, input_ids, attention_mask, position_ids, labels, inputs_embeds, kwargs)
    output = self.local_forward(**given)
    return output if labels is None else with_loss(self, output, labels, attention_mask, plan)


@torch.compiler.disable
def cut(
    self: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    inputs_embeds: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Plan, dict[str, Any]]:
    """The plan for these sequences, and what the model itself is called with: this rank's tokens."""
    B, T = sizes(input_ids, inputs_embeds, position_ids, labels)
    plan, device = self.ringattn.local(T), (input_ids if inputs_embeds is None else inputs_embeds).device  # type: ignore[union-attr]
    where, name = documents(B, T, attention_mask, position_ids), type(self).__name__
    way = self.config.get_text_config()._attn_implementation
    if way != NAME:
        raise ValueError(f"{name} was prepared, and then given {way!r} as its attention; leave that as prepare set it")
    if labels is not None and (hasattr(self, "_loss_function") or getattr(self, "loss_type", None) not in LOSSES):
        kind = "a loss_function of its own" if hasattr(self, "_loss_function") else self.loss_type
        raise ValueError(
            f"{name} is trained by another loss ({kind}) than that of the next token, which is the one here; leave out "
            "labels, and work the loss out from its logits"
        )
    if labels is not None and self.get_output_embeddings() is None:
        raise ValueError(f"{name} gives no logits, so labels mean nothing to it; prepare a ...ForCausalLM, say")
    if position_ids is None and self.ringattn.numbered:
        raise ValueError(
            f"{self.ringattn.numbered} numbers the tokens by a rule of its own, for which it must see all of them; say "
            "position_ids, as its create_position_ids_from_input_ids gives them"
        )
    positions = torch.arange(T, device=device)[None] if position_ids is None else position_ids
    if position_ids is None and self.ringattn.counted and attention_mask is not None:
        positions = (attention_mask.cumsum(1) * attention_mask).long() - 1
    named = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    shards = {name: plan.shard(x, dim=1, compare=self.ringattn.compare) for name, x in named.items() if x is not None}
    for rotary in stretched(self):
        rotary.ringattn_last = positions.max()
    shards["position_ids"] = plan.shard(positions.expand(B, T), dim=1, compare=False)
    if labels is None:
        compare_data(plan, watched(plan))
    return plan, {**shards, "use_cache": False, "ringattn": Call(plan, where), **accepted(kwargs)}


@torch.compiler.disable
def with_loss(self: Any, output: Any, labels: Tensor, attention_mask: Tensor | None, plan: Plan) -> Any:
    """The model's output, and first of all the loss over all ranks."""
    spread = self.ringattn
    loss = mean_loss(output.logits, labels, attention_mask, plan, spread.over, spread.compare)
    return type(output)(**{"loss": loss, **{name: x for name, x in output.items() if name != "loss"}})


class OverRanks:
    """Has transformers' Trainer train a prepared model: `class LongTrainer(hf.OverRanks, Trainer): ...`.

    Ranks of one plan get the same examples, and those of a data axis (`prepare(..., over=(axis,))`) different ones. DDP
    and FSDP average gradients over all ranks: here they come out as sums of the ranks' shares.
    """

    args: Any
    model: Any

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        for name in ("label_smoother", "compute_loss_func", "compute_metrics"):
            if getattr(self, name, None) is not None:
                raise ValueError(f"this trainer has a {name}, which needs all logits on one rank; leave it out")
        output = model(**inputs)
        share = output.loss - output.loss.detach()  # zero, with this rank's gradient
        loss = output.loss + (self.args.world_size - 1) * share
        return (loss, output) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """The loss alone: no rank has all logits."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> DataLoader[Any]:
        way = self.args.train_sampling_strategy
        if way not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={way!r} deals out examples by their lengths, others to each rank, and the "
                "ranks of a plan need the same: say 'random' or 'sequential'"
            )
        return self.loader(self.train_dataset, self.args.train_batch_size, way == "random")  # type: ignore[attr-defined]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        found = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        found = self.eval_dataset[found] if isinstance(found, str) else found  # type: ignore[attr-defined]
        return self.loader(found, self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.loader(test_dataset, self.args.eval_batch_size)

    def loader(self, dataset: Any, batch: int, shuffle: bool = False) -> DataLoader[Any]:
        """Batches of the dataset: the same for all ranks of a plan, and each data rank's own."""
        over = self.model.ringattn.over
        ranks = math.prod(axis.size for axis in over)
        mine = 0
        for axis in over:
            mine = mine * axis.size + axis.rank
        said = {name: getattr(self.args, f"dataloader_{name}") for name in LOADING}
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler: Any = None
        if not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, ranks, mine, shuffle, seed, said["drop_last"])
        elif ranks > 1:
            raise ValueError(
                f"{type(dataset).__name__} is an IterableDataset, which every rank reads for itself: it cannot be "
                f"dealt out to {ranks} data ranks; give a dataset with a length, or make a mesh without a data axis"
            )
        collate = self._get_collator_with_removed_columns(self.data_collator)  # type: ignore[attr-defined]
        loader: Any = DataLoader(dataset, batch, sampler=sampler, collate_fn=collate, **said)
        ordered = dataset if sampler is None else sampler
        if hasattr(ordered, "set_epoch"):  # Trainer tells the loader, or where a restart skips batches what makes them
            loader.set_epoch = loader.batch_sampler.set_epoch = ordered.set_epoch
        return loader


LOADING = (  # what Trainer's dataloader_ arguments say of a DataLoader
    "drop_last",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "in_order",
)


@dataclass(frozen=True)
class Call:
    """What every attention layer of one forward pass must know; it travels with the layers' keyword arguments."""

    plan: Plan
    docs: Docs | None


def sizes(input_ids: Any, inputs_embeds: Any, position_ids: Any, labels: Any) -> tuple[int, int]:
    """(B, T) of what was given; a ValueError about what is no tensor of that shape."""
    name, given = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if given is None:
        raise ValueError("say input_ids or inputs_embeds: whole sequences, the same on every rank")
    dims = 2 if inputs_embeds is None else 3
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is of type {type(given).__name__}; say torch.tensor({name})")
    if given.dim() != dims:
        kind = "[batch, tokens]" if dims == 2 else "[batch, tokens, width]"
        raise ValueError(f"{name} has shape {tuple(given.shape)}; expected {kind}")
    B, T = given.shape[:2]
    for other, x, rows in (("labels", labels, (B,)), ("position_ids", position_ids, (B, 1))):
        if x is not None and (not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != T or x.shape[0] not in rows):
            found = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is of type {type(x).__name__}"
            several = "; several positions a token (M-RoPE) are not supported" * (getattr(x, "ndim", 0) == 3)
            raise ValueError(f"{other} {found}; expected a tensor of shape ({B}, {T}), whole as {name} is{several}")
    return B, T


def documents(B: int, T: int, attention_mask: Tensor | None, position_ids: Tensor | None) -> Docs | None:
    """The documents that a padding mask and the positions describe; None where every row is one whole document.

    A row is cut where padding begins or ends, and where a position is not the one before plus one.
    """
    if attention_mask is not None and tuple(attention_mask.shape) != (B, T):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected ({B}, {T}), 1 where a token is real: "
            "masks of another kind are said by position_ids (packed documents) or by the model's configuration"
        )
    cuts = np.zeros((B, T), bool)
    if attention_mask is not None:
        real = attention_mask.bool().numpy(force=True)
        cuts[:, 1:] |= real[:, 1:] != real[:, :-1]
        if (cuts.sum(1) > 2).any() or ((cuts.sum(1) == 2) & real[:, 0]).any():
            raise ValueError("attention_mask has padding between real tokens; it may stand before or after them")
    if position_ids is not None:
        positions = position_ids.expand(B, T).numpy(force=True)
        cuts[:, 1:] |= np.diff(positions, axis=1) != 1
    if not cuts.any():
        return None
    return Docs.from_lengths([np.diff([0, *np.flatnonzero(row), T]).tolist() for row in cuts])


def mean_loss(
    logits_BtV: Tensor, labels_BT: Tensor, mask: Tensor | None, plan: Plan, over: Sequence[Any], compare: bool = True
) -> Tensor:
    """The mean cross entropy of each token's successor, over the labels of all ranks that count."""
    following = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    if mask is not None:
        following = following.masked_fill(~mask.bool(), IGNORED)  # what padding predicts does not count
    labels = plan.shard(following, dim=1, compare=compare).to(logits_BtV.device)
    counted = plan.shard(following != IGNORED, dim=1, compare=False).to(logits_BtV.device)
    at_once = tokens_at_once(LOGITS, logits_BtV.shape[-1], len(logits_BtV))
    return token_mean(in_pieces(cross_entropy, at_once, logits_BtV, labels), plan, mask=counted, over=over)


def cross_entropy(logits_BtV: Tensor, labels_Bt: Tensor) -> Tensor:
    """In float32, of each token that has a label; 0 for the others."""
    logits, labels = logits_BtV.float().flatten(0, 1), labels_Bt.flatten()
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED).view_as(labels_Bt)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ringattn: Call | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, t, D] in, [B, t, H, V] out."""
    name = type(module).__name__
    if ringattn is None:
        raise ValueError(
            f"{name} was called outside a prepared model (call model(...) after ringattn.hf.prepare(model, plan)), or "
            "by one that does not hand its keyword arguments on, and cannot be spread over ranks"
        )
    more = sorted(k for k, v in others.items() if v is not None and v is not False and k not in TOLD)
    if isinstance(attention_mask, Sliding):
        sliding_window, attention_mask = attention_mask.keys, None
    if attention_mask is not None or more:
        what = ", ".join(["a mask of its own"] * (attention_mask is not None) + more)
        raise ValueError(f"{name} asks its attention for {what}, which is not supported over ranks")
    if dropout:
        raise ValueError(f"{name} has attention dropout {dropout}, which has no exact form over ranks; set it to 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window and not causal:
        raise ValueError(f"{name} sees {sliding_window} keys to both sides; only windows that count back are supported")
    spec = AttentionSpec(causal=causal, window=sliding_window or None, softcap=softcap, scale=scaling)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = api.attention(q, k, v, ringattn.plan, spec=spec, docs=ringattn.docs, sinks=s_aux)
    return out, None


@dataclass(frozen=True)
class Sliding:
    """What stands for a sliding mask, for layers that say how far they see by their mask alone."""

    keys: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ValueError(
            f"a layer of this model changes its mask, a sliding window of {self.keys} keys, before its attention (it "
            f"asks for mask.{name}): a mask of its own is not supported over ranks"
        )


def asked_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Sliding | None:
    """The mask is in the intervals. Without this entry transformers would drop padding without a word."""
    return None if local_size is None else Sliding(local_size)


def stretched(model: nn.Module) -> list[nn.Module]:
    """The modules whose rotary angles depend on how long the sequence is, which they take from the last position."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
            found.append(module)
    return found


def show_last(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One more position, the last one of the whole sequence, wherever it lies."""
    x, positions = args[0], kwargs.pop("position_ids") if "position_ids" in kwargs else args[1]
    last = module.ringattn_last.to(positions).expand(len(positions), 1)
    return (x, torch.cat([positions, last], 1), *args[2:]), kwargs


def hide_last(module: nn.Module, args: Any, angles: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(cos, sin) without it."""
    return tuple(x[:, :-1] for x in angles)


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, asked_mask)


LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")  # of models that predict the next token
POOLED = ("SequenceClassification", "MultipleChoice", "NextSentencePrediction")
LAYERS = ("full_attention", "sliding_attention")
ARGUMENTS = ("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch")
ROUTERS = "that adds a loss over this rank's tokens only, which is not supported"
TOLD = (*ARGUMENTS, "position_ids", "use_cache", "cache_position")  # layers are told these, beside their attention


def refuse(model: nn.Module, plan: Any, over: Any) -> None:
    """A ValueError that names what cannot be, before anything of the model is changed."""
    name = type(model).__name__
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is of type {type(plan).__name__}; say ringattn.plan(mesh, seq_len=...)")
    if plan.heads is not None or plan.head_dim is not None:
        raise ValueError("make the plan without heads and head_dim: a model's layers may differ in them")
    if not isinstance(over, list | tuple) or not all(hasattr(axis, "rank") for axis in over):
        raise ValueError(f"over={over!r}: say axes, as in over=(ringattn.comms.mesh.axis(mesh, 'data'),)")
    if hasattr(model, "ringattn"):
        raise ValueError(f"this {name} is already prepared; prepare a new model, or a copy made before")
    refuse_model(model, name)


def refuse_model(model: nn.Module, name: str) -> None:
    """A ValueError that names what of the model cannot be spread over ranks."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{name} is not a transformers model")
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if not (type(model)._can_set_attn_implementation() and model._supports_attention_backend):  # type: ignore[attr-defined]
        raise ValueError(f"{name} does not use transformers' attention interface, so its attention cannot be replaced")
    if any(kind in name for kind in POOLED):
        raise ValueError(f"{name} reads its answer off one token of the sequence, which lies on one rank only")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYERS))
    if others:
        raise ValueError(f"{name} has layers of type {', '.join(others)}; supported are {', '.join(LAYERS)}")
    mixing = sorted({type(m).__name__ for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)})
    if mixing:
        raise ValueError(f"{name} also mixes tokens by {', '.join(mixing)}, which is not spread over ranks")
    if getattr(text, "output_router_logits", False):
        raise ValueError(f"{name} has output_router_logits in its config: {ROUTERS}; set it to False")
    if getattr(text, "attention_dropout", 0.0):
        raise ValueError(
            f"{name} has attention_dropout={text.attention_dropout}; set it to 0, dropout is not supported"
        )


def numbered_by(model: nn.Module) -> str | None:
    """What of the model makes positions of its own where none are given."""
    rules = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"
    return next((type(m).__name__ for m in model.modules() if any(hasattr(m, rule) for rule in rules)), None)


def is_counted(model: nn.Module) -> bool:
    """Whether positions are counted over the real tokens: an embedding of positions that asks for the padding mask."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return any("attention_mask" in signature(m.forward).parameters for m in embeddings)


def generate(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "a prepared model gives the logits of this rank's tokens, from which generate() would take the wrong ones; "
        "generate with the model as it was, or token by token with ringattn.KVCache, prefill and decode"
    )


def accepted(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that keep their meaning when a rank holds a part of the sequence."""
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict=False is not supported: a prepared model gives loss and logits by name")
    found = {k: v for k, v in kwargs.items() if v is not None and v is not False and k != "use_cache"}
    if type(found.get("logits_to_keep")) is int and found["logits_to_keep"] == 0:
        del found["logits_to_keep"]  # all of them
    unknown = sorted(set(found) - set(ARGUMENTS))
    if unknown:
        raise ValueError(f"a prepared model does not take {', '.join(unknown)}")
    if found.get("output_router_logits"):
        raise ValueError(f"output_router_logits: {ROUTERS}")
    return {k: v for k, v in found.items() if k != "num_items_in_batch"}
