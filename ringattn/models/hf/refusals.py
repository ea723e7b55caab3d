"""What a prepared model cannot do: refused by name, before anything of the model is changed, or in the call."""

from inspect import signature
from typing import Any

from torch import nn

from ringattn.check.arguments import NO_DROPOUT
from ringattn.models.hf.attention import ARGUMENTS, CHUNKED, NAME
from ringattn.models.hf.choice import heads_of
from ringattn.models.hf.linear import convolutions, linear_layers, names
from ringattn.models.hf.packed import PACKING, UNUSED
from ringattn.models.hf.vision import decoder_of
from ringattn.plans.plan import Plan
from ringattn.plans.segments import segments_problem
from ringattn.plans.sizes import heads_problem

LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")  # of models that predict the next token
POOLED = ("SequenceClassification", "MultipleChoice", "NextSentencePrediction")
LAYERS = ("full_attention", "sliding_attention", CHUNKED)
POINTWISE = ("mlp", "moe")  # layers that mix no tokens
LINEAR = "linear_attention"
ROUTERS = "that adds a loss over this rank's tokens only, which is not supported"


def refuse(model: nn.Module, plan: Any) -> None:
    name = type(model).__name__
    if isinstance(plan, Plan) and (plan.heads is not None or plan.head_dim is not None):
        raise ValueError("make the plan without heads and head_dim: a model's layers may differ in them")
    if hasattr(model, "ringattn"):
        raise ValueError(f"this {name} is already prepared; use it as it is, or hf.unprepare(model) first")
    refuse_model(model, name)
    if not isinstance(plan, Plan):
        return
    if linear_layers(model) and (problem := segments_problem(plan)):
        raise ValueError(f"{name} has linear layers, and {problem}")
    heads = heads_of(model)
    if heads is not None and (problem := heads_problem(*heads, ulysses=plan.ulysses, ring=plan.ring)):
        raise ValueError(f"{name}: {problem}")


def refuse_model(model: nn.Module, name: str) -> None:
    if hasattr(getattr(model, "module", None), "set_attn_implementation"):
        raise ValueError(f"this model is wrapped in {name}: prepare before wrapping, {name}(hf.prepare(model, plan))")
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{name} is not a transformers model")
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    linear = linear_layers(model)
    spread: Any = decoder_of(model) or model  # towers keep their attention
    supported: Any = linear or spread._supports_attention_backend or uses_interface(model)  # the call checks the rest
    if not (type(spread)._can_set_attn_implementation() and supported):
        raise ValueError(f"{name} does not use transformers' attention interface, so its attention cannot be replaced")
    if any(kind in name for kind in POOLED):
        raise ValueError(f"{name} predicts from one token, which only one rank holds, and is not supported")
    supported_types = {*LAYERS, *POINTWISE, *(getattr(layer, "layer_type", LINEAR) for layer in linear)}
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - supported_types):
        raise ValueError(
            f"{name} has layers of type {', '.join(others)}; supported are {', '.join(LAYERS)}, and linear attention "
            "by the delta rule or Mamba-2"
        )
    ours = {id(module) for module in convolutions(model)}
    running: Any = model if text is config else model.get_decoder()  # type: ignore[operator]  # towers see no text
    convolving = [m for m in running.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if mixing := sorted({type(m).__name__ for m in convolving if id(m) not in ours}):
        raise ValueError(f"{name} also mixes tokens by {', '.join(mixing)}, which is not spread over ranks")
    if getattr(text, "output_router_logits", False):
        raise ValueError(f"{name} has output_router_logits in its config: {ROUTERS}; set it to False")
    if getattr(text, "attention_dropout", 0.0):
        raise ValueError(f"{name} has attention_dropout={text.attention_dropout}; set it to 0: {NO_DROPOUT}")


def uses_interface(model: nn.Module) -> bool:
    """Whether a model that does not declare it has attention that can be replaced, and takes positions."""
    takes = "position_ids" in signature(model.forward).parameters
    return takes and any("ALL_ATTENTION_FUNCTIONS" in names(module) for module in model.modules())


def refuse_other_attention(model: Any) -> None:
    way = model.config.get_text_config()._attn_implementation
    if way != NAME:
        raise ValueError(
            f"{type(model).__name__} was prepared, and then given {way!r} as its attention; leave it as prepare set it"
        )


def refuse_other_loss(model: Any) -> None:
    """A ValueError about labels of a model that does not predict the next token."""
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    kind = "a loss_function of its own" if hasattr(model, "_loss_function") else kind
    if kind not in LOSSES:
        raise ValueError(
            f"{name} is trained by another loss ({kind}) than that of the next token, which is the one here; leave out "
            "labels, and work the loss out from its logits"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} gives no logits, so it has no use for labels; prepare a ...ForCausalLM, for example")


def accepted(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that keep their meaning when a rank holds a part of the sequence."""
    if kwargs.get("return_dict") is False:
        raise ValueError("return_dict=False is not supported: a prepared model gives loss and logits by name")
    wanted = {k: v for k, v in kwargs.items() if v is not None and v is not False and k != "use_cache"}
    if unknown := sorted(set(wanted) - {*ARGUMENTS, *PACKING, *UNUSED}):
        raise ValueError(f"a prepared model does not take {', '.join(unknown)}")
    if wanted.get("output_router_logits"):
        raise ValueError(f"output_router_logits: {ROUTERS}")
    return {k: v for k, v in wanted.items() if k not in (*PACKING, *UNUSED)}
