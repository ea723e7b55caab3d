"""accelerate's context parallelism by ringattn: `accelerator = hf.over_ranks(Accelerator(...))`."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ringattn.comms import mesh as meshes
from ringattn.models.hf import model as hf_model
from ringattn.models.hf.choice import Choice

A = TypeVar("A")
DATA = ("dp_replicate", "dp_shard")  # accelerate's names of the axes of a mesh
CONTEXT = "cp"
ANYWHERE = "call hf.prepare(model, ringattn.init_mesh(sequence=N), averaged=True) and leave out ParallelismConfig"


def over_ranks(
    accelerator: A,
    *,
    seq_len: int | None = None,
    ulysses: int | None = None,
    strategy: str = "auto",
    layout: str = "auto",
) -> A:
    """The same accelerator, whose `prepare` also calls `hf.prepare`, over its context-parallel ranks.

    Make it with ParallelismConfig(cp_size=N). Models take whole sequences, their loss is the mean over all ranks of the
    mesh, and gradients are right after DDP or FSDP averages them. Batches are whole also inside of
    `maybe_context_parallel`, which does nothing. The plan is chosen by predicted time, for `seq_len` tokens or the
    length of the first batch, as far as `ulysses` (how many of the ranks are Ulysses ranks), `strategy` and `layout`
    leave a choice; they are those of `ringattn.plan`.
    """
    if not hasattr(accelerator, "parallelism_config"):
        raise ValueError(f"accelerator is of type {type(accelerator).__name__}; pass accelerate's Accelerator")
    config: Any = accelerator.parallelism_config
    size = getattr(config, "cp_size", 1)
    if size < 2:
        raise ValueError(
            "this accelerator has no context parallelism; make it with "
            "Accelerator(parallelism_config=ParallelismConfig(cp_size=N), fsdp_plugin=...). accelerate refuses that on "
            f"CPUs and without FSDP2; there, {ANYWHERE}"
        )
    if ulysses is not None and (not isinstance(ulysses, int) or ulysses < 1 or size % ulysses):
        raise ValueError(f"ulysses={ulysses!r}: choose a whole number that divides cp_size={size}")
    choices = {"ulysses": ulysses, "seq_len": seq_len, "strategy": strategy, "layout": layout}
    accelerator._prepare_cp = partial(prepare_all, accelerator, choices)  # type: ignore[attr-defined]
    accelerator.maybe_context_parallel = unchanged  # type: ignore[attr-defined]
    return accelerator


def on_cpus(device: Any) -> bool:
    """Whether accelerate runs several ranks on CPUs, for which it has neither FSDP nor a ParallelismConfig."""
    from accelerate import PartialState

    return str(PartialState(cpu=device.type == "cpu").distributed_type.value) == "MULTI_CPU"


def unchanged(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """What stands for `maybe_context_parallel`: batches stay whole, and the prepared model cuts them."""
    return nullcontext()


def prepare_all(accelerator: Any, choices: dict[str, Any], *args: Any) -> tuple[Any, ...]:
    """What `Accelerator.prepare` calls where there is context parallelism, before it wraps models in FSDP or DDP."""
    for arg in args:
        if isinstance(arg, nn.Module):
            prepare_for(accelerator, arg, **choices)
    return args


def prepare_for(accelerator: Any, model: nn.Module, *, ulysses: int | None = None, **choices: Any) -> None:
    """`hf.prepare` over the ranks of the accelerator's mesh, unless the model is prepared for as many."""
    mesh = accelerator.torch_device_mesh
    size = meshes.axis_size(mesh, CONTEXT)
    spread = getattr(hf_model.inner(model), "ringattn", None)
    if spread is not None:
        if spread.size != size or not spread.averaged:
            raise ValueError(
                f"the model was prepared for {spread.size} ranks, averaged={spread.averaged}, and the "
                f"accelerator has cp_size={size} and averages gradients; leave hf.prepare to the accelerator"
            )
        return
    axes: Any = {"sequence": CONTEXT}
    over = [meshes.axis(mesh, name) for name in DATA if meshes.axis_size(mesh, name) > 1]
    if ulysses is not None:
        mesh, axes = meshes.split(mesh, CONTEXT, {"ring": size // ulysses, "ulysses": ulysses}), None
    hf_model.prepare(model, Choice(mesh, axes, **choices), over=over, averaged=True)
