"""Where the sequences of a prepared model lie: by a plan, or by one that is chosen over a mesh for its attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringattn import choosing
from ringattn.comms import mesh as meshes
from ringattn.masks.spec import AttentionSpec
from ringattn.masks.values import Value
from ringattn.plans.plan import Plan
from ringattn.plans.sizes import DTYPES

SEQ_LEN = 32768  # tokens that a plan is made for where neither the caller, a batch nor the model names a length
PLANS_KEPT = 64  # of other lengths than the first
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Choice:
    """A mesh over which the plan is chosen when the first batch comes, or for `seq_len` tokens.

    The axes of the mesh that `axes` does not name play the role of their name, as in `ringattn.plan`.
    """

    mesh: Any
    axes: Mapping[str, Any] | None = None
    seq_len: int | None = None
    strategy: str = "auto"
    layout: str = "auto"

    def plan(self, model: nn.Module, seq_len: int | None = None) -> Plan:
        """The plan with the least predicted time for the model's attention; all ranks of the mesh call this together.

        Its heads and dims are left out again, since layers may differ in them.
        """
        config: Any = model.config
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or SEQ_LEN
        length = self.seq_len or self.longest(seq_len) or longest
        chosen = choosing.plan(
            self.mesh, axes=self.axes, seq_len=length, strategy=self.strategy, layout=self.layout, **attention_of(model)
        )
        return chosen.replace(heads=None, head_dim=None, value_dim=None).for_length(seq_len or length)

    def longest(self, seq_len: int | None) -> int | None:
        """The longest batch of all ranks of the mesh: those of other data ranks must choose the same sizes."""
        if seq_len is None:
            return None
        length = torch.tensor([seq_len], device=self.mesh.device_type)
        for name in meshes.axis_names(self.mesh):
            length = meshes.axis(self.mesh, name, "group").all_gather(length).wait().amax(0, keepdim=True)
        return int(length)


class Spread(Value):
    """Where a prepared model's sequences lie, and the axes that its loss is also averaged over."""

    source: Plan | Choice
    over: tuple[Any, ...]
    counted: bool = False  # whether the model counts real tokens where padding comes first
    linear: bool = False  # whether it has layers of linear attention
    averaged: bool = False  # whether gradients are averaged over ranks afterwards, instead of summed
    compare: bool = True  # whether ranks compare what they are given
    offload: bool = False
    plans: dict[int, Plan] = field(default_factory=dict)  # by length, the first one first

    @property
    def size(self) -> int:
        if isinstance(self.source, Plan):
            return self.source.ring * self.source.ulysses
        return math.prod(choosing.target_of(self.source.mesh, "auto", self.source.axes).sizes[0])

    @property
    def ranks(self) -> int:
        """How many ranks a gradient is reduced over."""
        return self.size * math.prod(axis.size for axis in self.over)

    def first(self, model: nn.Module, T: int | None = None) -> Plan:
        """The plan whose choices those of other lengths share; it is chosen now, for T tokens, if there is none yet."""
        if not self.plans:
            plan = self.source if isinstance(self.source, Plan) else self.source.plan(model, T)
            self.plans[plan.seq_len] = plan
        return next(iter(self.plans.values()))

    def local(self, model: nn.Module, T: int) -> Plan:
        self.first(model, T)
        if T not in self.plans:
            first, *others = self.plans
            if len(others) == PLANS_KEPT:
                del self.plans[others[0]]
            self.plans[T] = self.plans[first].for_length(T)
        return self.plans[T]

    def __deepcopy__(self, memo: Any) -> "Spread":
        return self  # a copy of the model has the same ranks

    def __reduce__(self) -> Any:
        raise TypeError("a prepared model belongs to its ranks; save its state_dict() or save_pretrained(FOLDER)")


def replace(module: nn.Module, **new: Any) -> None:
    """Give a module other attributes, as methods and not closures: a copy of it runs its own weights."""
    vars(module)["ringattn_before"] = {name: vars(module).get(name) for name in new}
    vars(module).update(new)


def inner(model: Any) -> Any:
    """The model inside of peft's adapters and of torch.compile."""
    while "_orig_mod" in getattr(model, "_modules", {}):
        model = model._orig_mod
    return inner(model.get_base_model()) if hasattr(model, "get_base_model") else model


def compiled(model: Any) -> bool:
    running = torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
    return running or any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


def source_of(plan: Any, axes: Mapping[str, Any] | None, seq_len: int | None) -> Plan | Choice:
    """What the plans of a model come from: a plan, or a mesh and how its axes are named."""
    if isinstance(plan, Plan | Choice):
        if axes is not None or seq_len is not None:
            raise ValueError("axes and seq_len belong to a mesh: give hf.prepare the mesh instead of a plan")
        return plan
    if not hasattr(plan, "device_type"):
        raise ValueError(
            f"plan is of type {type(plan).__name__}; pass a mesh of torch, as ringattn.init_mesh(sequence=N) makes it, "
            "or ringattn.plan(mesh, seq_len=...)"
        )
    return Choice(plan, axes, seq_len)


def axes_of(source: Plan | Choice, over: Any) -> tuple[Any, ...]:
    """Axes to average over, given as axes, or as names of the mesh's."""
    if not isinstance(over, list | tuple) or not all(isinstance(x, str) or hasattr(x, "rank") for x in over):
        raise ValueError(f"over={over!r}: pass axes, as in over=(ringattn.comms.mesh.axis(mesh, 'data'),)")
    named = [name for name in over if isinstance(name, str)]
    have = () if isinstance(source, Plan) else meshes.axis_names(source.mesh)
    if missing := sorted(set(named) - set(have)):
        raise ValueError(f"over={over!r}: hf.prepare is given no mesh with an axis {missing[0]!r}, but {have}")
    return tuple(meshes.axis(source.mesh, x) if isinstance(x, str) else x for x in over)  # type: ignore[union-attr]


def attention_of(model: Any) -> dict[str, Any]:
    """What `ringattn.plan` takes of the model's attention: heads, dims, dtype and spec; {} if its config lacks them.

    Of layers that differ, the heads that all sizes must divide, and the mask of those that see furthest.
    """
    text = model.config.get_text_config()
    heads = heads_of(model)
    if heads is None:
        return {}
    nope, rope = (getattr(text, f"qk_{kind}_head_dim", None) for kind in ("nope", "rope"))
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dim = nope + rope if nope and rope else dim
    dtype, is_causal = str(model.dtype).removeprefix("torch."), causal(model)
    kinds = set(getattr(text, "layer_types", None) or [SLIDING])
    window = getattr(text, "sliding_window", None) if is_causal and kinds == {SLIDING} else None  # of every layer
    return {
        "heads": heads,
        "head_dim": dim,
        "value_dim": getattr(text, "v_head_dim", None) or dim,
        "dtype": dtype if dtype in DTYPES else None,
        "spec": AttentionSpec(causal=is_causal, window=window or None),
    }


def heads_of(model: Any) -> tuple[int, int] | None:
    """(query, key) heads that a rank's layers have: those of the config, of which tensor parallelism leaves a part."""
    text = model.config.get_text_config()
    heads = common(getattr(text, "num_attention_heads", None))
    keys = common(getattr(text, "num_key_value_heads", None)) or heads
    split = getattr(model, "_tp_size", None) or 1
    if not heads or not keys or heads % keys or heads % split:
        return None
    return heads // split, max(1, keys // split)


def common(x: Any) -> int:
    return math.gcd(*x) if isinstance(x, list | tuple) else (x or 0)


def causal(model: Any) -> bool:
    """Whether tokens of text see none behind them; towers do."""
    text = model if model.config.get_text_config() is model.config else model.get_decoder()
    return all(getattr(module, "is_causal", True) for module in text.modules())
