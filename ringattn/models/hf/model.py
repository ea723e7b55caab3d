"""A transformers model over sequences that are spread over ranks: `prepare` and `unprepare`.

B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ringattn.models.hf import generate as hf_generate
from ringattn.models.hf import linear as hf_linear
from ringattn.models.hf import vision as hf_vision
from ringattn.models.hf.attention import NAME, register, stretched, with_last
from ringattn.models.hf.choice import Spread, axes_of, inner, replace, source_of
from ringattn.models.hf.forward import forward_of
from ringattn.models.hf.packed import is_counted, numbering_of
from ringattn.models.hf.refusals import refuse
from ringattn.plans.plan import Plan


def prepare(
    model: nn.Module,
    plan: Any,
    *,
    axes: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    over: Sequence[Any] = (),
    compare: bool = True,
    averaged: bool = False,
    offload: bool = False,
) -> nn.Module:
    """The same model, whose `forward` takes whole sequences and computes this rank's tokens.

    `plan` is a plan, or a mesh, over which one is chosen by predicted time, from the heads, dims and windows of the
    model's config and the length of the first batch (or `seq_len`); `axes` are the mesh's as in `ringattn.plan`.
    `hf.plan_of(model).explain()` shows the choice.

    model(input_ids, labels=, attention_mask=, position_ids=) gives `loss`, the mean over the real tokens of all
    ranks, and `logits` [B, t, V] of this rank's tokens (`hf.whole(model, logits)` joins them; with labels, rows that
    are packed or padded are dealt out as one row without padding, unless a plan names another layout). Its gradients
    are this rank's share: sum them over ranks, or set `averaged` for what averages them, as DDP and FSDP do. With
    `num_items_in_batch` the loss is a sum, divided by it. `logits_to_keep`, a number or positions, gives the logits of
    these tokens on every rank. `attention_mask` [B, T] marks padding on either side, `position_ids` that start again
    packed documents; `docs`, a ringattn.Docs of the whole sequences, describes them instead, with prefixes or as trees.
    `over` are further axes to average over (a data axis), or their names in the mesh. Within peft's adapters or
    torch.compile, the inner model is prepared; prepare before wrapping in DDP or FSDP. The model gets its own copy of
    its config. Token ids and labels are compared between the ranks of the plan, at first and then now and then, unless
    `compare` is False. `offload` has what recomputed layers keep for backward wait on the host while others run.
    """
    bare = inner(model)
    source = source_of(plan, axes, seq_len)
    over = axes_of(source, over)
    refuse(bare, source)
    register()
    configs = give_own_configs(model)
    decoder = hf_vision.decoder_of(bare)
    if decoder is None:
        bare.set_attn_implementation(NAME)
    else:
        hf_vision.cut_at(bare, decoder)
    rotaries, linear = stretched(bare), hf_linear.linear_layers(bare)
    for rotary in rotaries:
        replace(rotary, ringattn_last=None, ringattn_forward=rotary.forward, forward=MethodType(with_last, rotary))
    for layer in linear:
        replace(layer, forward=hf_linear.spread(layer))
    replace(
        bare,
        ringattn=Spread(source, over, is_counted(bare), bool(linear), averaged, compare, offload),
        ringattn_last=None,  # the latest batch, a Dealt
        ringattn_fused=None,  # the forward that TRL put around this one
        ringattn_configs=configs,
        ringattn_stretched=rotaries,
        ringattn_numbering=numbering_of(bare),
        local_forward=bare.forward,
        forward=MethodType(forward_of(type(bare)), bare),
        generate=MethodType(hf_generate.generate, bare),
        _prepare_cache_for_generation=MethodType(hf_generate.prepare_cache, bare),
    )
    if isinstance(source, Plan) or seq_len is not None:
        plan_of(bare)
    return model


def give_own_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """Replace each config that modules hold by a copy, so that other models do not change; with their attention."""
    copies: dict[int, Any] = {}  # of deepcopy: what was shared within the model stays shared
    for module in model.modules():
        for name, x in vars(module).items():
            if hasattr(x, "sub_configs"):
                vars(module)[name] = deepcopy(x, copies)
    return [(x, x._attn_implementation) for x in copies.values() if hasattr(x, "_attn_implementation")]


def unprepare(model: nn.Module) -> nn.Module:
    """The same model as it was before `prepare`, with the weights that it has now; also inside of peft's adapters.

    The attention of its configs stays if it was changed since. The model keeps its own copy of its config.
    """
    bare = inner(model)
    if not hasattr(bare, "ringattn") or getattr(bare.forward, "__func__", None) is not forward_of(type(bare)):
        raise ValueError(
            f"this {type(bare).__name__} is not prepared, or its forward was wrapped after that; undo that first "
            "(accelerate: accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
    for config, way in bare.ringattn_configs:
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = way
    for module in bare.modules():
        before = vars(module).pop("ringattn_before", {})
        for name in before:
            del vars(module)[name]
        vars(module).update({name: x for name, x in before.items() if x is not None})
    return model


@contextmanager
def prepared(model: nn.Module, plan: Any, **options: Any) -> Iterator[nn.Module]:
    """`with prepared(model, plan) as model:` prepares the model, and undoes that at the end of the block.

    Call backward in the block too if activations are recomputed there.
    """
    ready = prepare(model, plan, **options)
    try:
        yield ready
    finally:
        unprepare(model)


def plan_of(model: Any) -> Plan:
    """The plan of a prepared model: the given one, or the one that was chosen (for its longest sequences, if now)."""
    bare = inner(model)
    if not hasattr(bare, "ringattn"):
        raise ValueError(f"this {type(bare).__name__} is not prepared; call hf.prepare(model, mesh) first")
    return bare.ringattn.first(bare)


def whole(model: Any, x: Tensor) -> Tensor:
    """The whole rows [B, T, ...] of what the last call of a prepared model gave of this rank's tokens."""
    bare = inner(model)
    if getattr(bare, "ringattn_last", None) is None:
        raise ValueError("nothing to join: call the prepared model first")
    return bare.ringattn_last.whole(x)
