"""accelerate's context parallelism by ringattn: `accelerator = hf.over_ranks(Accelerator(...))`."""

from contextlib import nullcontext
from typing import Any, TypeVar

from torch import nn

from ringattn.comms import mesh as meshes
from ringattn.models.hf import model as hf_model
from ringattn.models.hf.choice import Choice

A = TypeVar("A")
DATA = ("dp_replicate", "dp_shard")  # accelerate's names of the axes of a mesh
CONTEXT = "cp"


def over_ranks(accelerator: A, *, seq_len: int | None = None, strategy: str = "auto", layout: str = "auto") -> A:
    """The same accelerator, whose `prepare` also calls `hf.prepare`, over its context-parallel ranks.

    Make it with ParallelismConfig(cp_size=N). Models take whole sequences, their loss is the mean over all ranks of the
    mesh, and gradients are right after DDP or FSDP averages them. Batches are whole also inside of
    `maybe_context_parallel`, which does nothing. The plan is chosen by predicted time, for `seq_len` tokens or the
    length of the first batch, as far as `strategy` and `layout` leave a choice; they are those of `ringattn.plan`.
    """
    if getattr(getattr(accelerator, "parallelism_config", None), "cp_size", 1) < 2:
        raise ValueError(
            f"this {type(accelerator).__name__} has no context parallelism; make it with "
            "Accelerator(parallelism_config=ParallelismConfig(cp_size=N), fsdp_plugin=...). accelerate refuses that on "
            "CPUs and without FSDP2; there, leave it out, and call "
            "hf.prepare(model, ringattn.init_mesh(sequence=N), averaged=True)"
        )

    def prepare_models(*args: Any) -> tuple[Any, ...]:
        """What `Accelerator.prepare` calls before it wraps models in FSDP or DDP."""
        for arg in args:
            if isinstance(arg, nn.Module):
                prepare_for(accelerator, arg, seq_len=seq_len, strategy=strategy, layout=layout)
        return args

    accelerator._prepare_cp = prepare_models  # type: ignore[attr-defined]
    accelerator.maybe_context_parallel = lambda *a, **b: nullcontext()  # type: ignore[attr-defined]
    return accelerator


def prepare_for(accelerator: Any, model: nn.Module, **choices: Any) -> None:
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
    over = [meshes.axis(mesh, name) for name in DATA if meshes.axis_size(mesh, name) > 1]
    hf_model.prepare(model, Choice(mesh, {"sequence": CONTEXT}, **choices), over=over, averaged=True)
