"""Checkpoints: written beside the training, complete or not there at all, and read without running anything they hold.

    runs/NAME/checkpoints/step-00000100/   state.json, .metadata and one file a rank
    runs/NAME/checkpoints/step-00000100.part/   the same while it is being written; never read

A checkpoint holds whole tensors in pieces, so any number of ranks can read it.
"""

import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

from ringattn.conf.schema import Model


class Checkpoints:
    """The checkpoints of one run. Saving goes on while training does; at most one is being written at a time."""

    def __init__(self, folder: Path, keep: int, group: Any):
        self.folder, self.keep = folder / "checkpoints", keep
        self.group = group  # its own, so that its words do not mix with the training's
        self.writing: tuple[int, Any] | None = None

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Copy everything now, write it while training goes on. `state` is small and goes into JSON."""
        self.finish()
        part = self.folder / f"{name_of(step)}.part"
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            (part / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        dist.barrier(self.group)
        copies = {n: t if t.is_cuda else t.clone() for n, t in tensors(model, optimizer).items()}
        future = dcp.async_save(copies, checkpoint_id=str(part), process_group=self.group)
        self.writing = step, future

    def poll(self) -> None:
        """Make a finished checkpoint visible."""
        if self.writing and self.writing[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the one that is being written; raise what went wrong."""
        if self.writing is None:
            return
        step, future = self.writing
        self.writing = None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            free = shutil.disk_usage(self.folder).free / 1e6
            raise OSError(
                f"could not save step {step} in {self.folder}, where {free:,.0f} MB are free: {root(error)}"
            ) from error
        if dist.get_rank() == 0:
            whole = self.folder / name_of(step)
            shutil.rmtree(whole, ignore_errors=True)
            (self.folder / f"{name_of(step)}.part").rename(whole)
            for old in complete(self.folder)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def root(error: BaseException) -> str:
    """The innermost reason, in one line."""
    failures = [failure[0] for failure in getattr(error, "failures", {}).values()]
    if failures:  # of several ranks: what the system said before what torch made of it
        return str(next((f for f in failures if isinstance(f, OSError)), failures[0]))
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that can be loaded, oldest first."""
    found = folder.glob("step-*") if folder.is_dir() else []
    return sorted(
        p for p in found if p.name[5:].isdigit() and (p / ".metadata").is_file() and (p / "state.json").is_file()
    )


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, the optimizer's moments and the random state, by name."""
    named = {name: weight.detach() for name, weight in model.named_parameters()}
    moments = {
        f"{name}@{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }
    return {**named, **moments, "@rng": torch.get_rng_state()}


def start_moments(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's moments before its first step, so that there is something to load into."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            optimizer.state[weight] = {"step": torch.zeros(()), **zeros}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: Model) -> dict[str, Any]:
    """Everything back where it was; returns the saved state. A checkpoint of another model is refused first."""
    state = matching(path, config)
    reader = Reader(str(path))
    reader.read_metadata()  # refuses a strange index before anything is changed
    start_moments(optimizer)
    whole = tensors(model, optimizer)
    dcp.load(whole, storage_reader=reader)
    torch.set_rng_state(whole["@rng"])
    return state


def matching(path: Path, config: Model) -> dict[str, Any]:
    """The saved state of a checkpoint of this model; a ValueError for any other."""
    state = read_state(path)
    there, here = state["model"], asdict(config)
    differ = [f"{k} is {there.get(k)} there and {here[k]} here" for k in here if there.get(k) != here[k]]
    if differ:
        raise ValueError(f"{path} holds another model: {'; '.join(differ)}")
    return state


def read_state(path: Path) -> dict[str, Any]:
    found = complete(path.parent)
    if path not in found:
        others = ", ".join(p.name for p in found) or "none"
        raise ValueError(f"{path} is not a complete checkpoint; complete there: {others}")
    return json.loads((path / "state.json").read_text())


class Reader(dcp.FileSystemReader):
    """torch's reader, whose index is a pickle: here it may name the classes of an index, and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = Index(file).load()
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# What the index of a checkpoint is made of; None for all classes of the module itself.
INDEX: dict[str, set[str] | None] = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class Index(pickle.Unpickler):
    """Builds the index of a checkpoint and refuses to build, or to call, anything else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = INDEX.get(module, set())
        if allowed is not None and name in allowed:
            return super().find_class(module, name)
        found = super().find_class(module, name) if allowed is None and "." not in name else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise ValueError(f"the checkpoint's index asks for {module}.{name}, which no index needs; it was not loaded")
