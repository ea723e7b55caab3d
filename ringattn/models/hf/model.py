"""A transformers model over sequences that are spread over ranks: `prepare` and `unprepare`.

B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ringattn.models.hf import generate as hf_generate
from ringattn.models.hf import linear as hf_linear
from ringattn.models.hf import vision as hf_vision
from ringattn.models.hf.attention import NAME, hide_last, register, show_last, stretched
from ringattn.models.hf.choice import Spread, axes_of, source_of
from ringattn.models.hf.dealt import joined
from ringattn.models.hf.forward import forward_of, is_ours
from ringattn.models.hf.positions import is_counted, rule_of
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
    linear = hf_linear.linear_layers(bare)
    for layer in linear:
        hf_linear.replace(layer)
    new = {
        "ringattn": Spread(source, over, is_counted(bare), compare, averaged),
        "ringattn_last": None,  # how the latest batch was spread
        "local_forward": bare.forward,
        "forward": MethodType(forward_of(bare), bare),  # not a closure: a copy of the model runs its own weights
        "generate": MethodType(hf_generate.generate, bare),
        "_prepare_cache_for_generation": MethodType(hf_generate.prepare_cache, bare),
    }
    attributes = {name: vars(bare)[name] for name in new if name in vars(bare)}
    before = Before(tuple(new), attributes, configs, hooks, rotaries, rule_of(bare), bool(linear))
    vars(bare).update(new, ringattn_before=before)
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
    linear: bool  # whether there are layers of linear attention


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
    ready = prepare(model, plan, **options)
    try:
        yield ready
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
    configs: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in waiting:
        if id(config) not in configs and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())
