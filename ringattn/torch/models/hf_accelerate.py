"""accelerate's context parallelism by ringattn: `accelerator = hf.over_ranks(Accelerator(...))`."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ringattn import choosing
from ringattn.comms import mesh as meshes
from ringattn.planning import Plan
from ringattn.ranks import Ranks
from ringattn.torch.models import hf_model

A = TypeVar("A")
DATA = ("dp_replicate", "dp_shard")  # accelerate's names of the axes of a mesh
CONTEXT = "cp"
SEQ_LEN = 32768  # tokens that a plan is made for where neither the caller nor the model names a length


def over_ranks(
    accelerator: A, *, seq_len: int | None = None, ulysses: int = 1, strategy: str = "auto", layout: str = "auto"
) -> A:
    """The same accelerator, whose `prepare` also calls `hf.prepare`, with a plan over its context-parallel ranks.

    Make it with ParallelismConfig(cp_size=N), of which `ulysses` are Ulysses ranks. Models take whole sequences, their
    loss is the mean over all ranks of the mesh, and gradients are right after DDP or FSDP averages them. Batches are
    whole also inside of `maybe_context_parallel`, which does nothing. `seq_len` (the model's longest by default),
    `strategy` and `layout` are those of `ringattn.plan`; batches of other lengths are spread in the same way.
    """
    if not hasattr(accelerator, "parallelism_config"):
        raise ValueError(f"accelerator is of type {type(accelerator).__name__}; pass accelerate's Accelerator")
    config: Any = accelerator.parallelism_config
    size = getattr(config, "cp_size", 1)
    if size < 2:
        raise ValueError(
            "this accelerator has no context parallelism; make it with "
            "Accelerator(parallelism_config=ParallelismConfig(cp_size=N), fsdp_plugin=...)"
        )
    if not isinstance(ulysses, int) or ulysses < 1 or size % ulysses:
        raise ValueError(f"ulysses={ulysses!r}: choose a whole number that divides cp_size={size}")
    alike = choosing.elsewhere("cpu", [(size // ulysses, ulysses)])
    choosing.plan(alike, seq_len=seq_len or SEQ_LEN, strategy=strategy, layout=layout)  # refuses wrong choices now
    choices = {"ulysses": ulysses, "strategy": strategy, "layout": layout}
    accelerator._prepare_cp = partial(prepare_all, accelerator, seq_len, choices)  # type: ignore[attr-defined]
    accelerator.maybe_context_parallel = unchanged  # type: ignore[attr-defined]
    return accelerator


def unchanged(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """What stands for `maybe_context_parallel`: batches stay whole, and the prepared model cuts them."""
    return nullcontext()


def prepare_all(accelerator: Any, seq_len: int | None, choices: dict[str, Any], *args: Any) -> tuple[Any, ...]:
    """What `Accelerator.prepare` calls where there is context parallelism, before it wraps models in FSDP or DDP."""
    for arg in args:
        if isinstance(arg, nn.Module):
            prepare_for(accelerator, arg, seq_len, **choices)
    return args


def prepare_for(accelerator: Any, model: nn.Module, seq_len: int | None, **choices: Any) -> None:
    """`hf.prepare` over the ranks of the accelerator's mesh, unless the model is prepared for as many."""
    mesh = accelerator.torch_device_mesh
    size = meshes.axis_size(mesh, CONTEXT)
    bare = hf_model.inner(model)
    spread = getattr(bare, "ringattn", None)
    if spread is not None:
        plan = spread.plan
        if plan.ring * plan.ulysses != size or not spread.averaged:
            raise ValueError(
                f"the model was prepared for {plan.ring * plan.ulysses} ranks, averaged={spread.averaged}, and the "
                f"accelerator has cp_size={size} and averages gradients; leave hf.prepare to the accelerator"
            )
        return
    if seq_len is None:
        config: Any = getattr(bare, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        seq_len = getattr(text, "max_position_embeddings", None) or SEQ_LEN
    over = [meshes.axis(mesh, name) for name in DATA if meshes.axis_size(mesh, name) > 1]
    hf_model.prepare(model, plan_over(mesh, seq_len, **choices), over=over, averaged=True)


def plan_over(mesh: Any, seq_len: int, *, ulysses: int = 1, strategy: str = "auto", layout: str = "auto") -> Plan:
    """A plan over the context-parallel axis of accelerate's mesh; all ranks make it together."""
    ring = meshes.axis_size(mesh, CONTEXT) // ulysses

    def bind(*_: int) -> Ranks:
        split = meshes.split(mesh, CONTEXT, {"ring": ring, "ulysses": ulysses})
        return Ranks(*meshes.axes(split), device=mesh.device_type)

    target = choosing.Target(mesh.device_type, [(ring, ulysses)], bind)
    return choosing.plan(target, seq_len=seq_len, strategy=strategy, layout=layout)
