"""Checkpoints: written beside the training, complete or not there at all, and read without running anything they hold.

    runs/NAME/checkpoints/step-00000100/   state.json, .metadata and one file a rank
    runs/NAME/checkpoints/step-00000100.part/   the same while it is being written; never read
    runs/NAME/checkpoints/step-00000100.aside/   given up, as the run went on from an older one; never read

A checkpoint holds whole tensors in pieces, so any number of ranks can read it.
"""

import json
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception
from torch.distributed.tensor import DTensor

A_STEP = "batch x accumulate x strategy.data"  # sequences in a step, as a user says how many


class Checkpoints:
    """The checkpoints of one run. Saving goes on while training does; at most one is being written at a time.

    Training waits only while its tensors are copied into buffers that are kept; a thread does everything else. From a
    GPU they are copied while the next step runs, up to where it would change them.
    """

    def __init__(self, folder: Path, keep: int, group: Any):
        self.folder, self.keep = folder / "checkpoints", keep
        self.group = group  # its own, so that its words do not mix with the training's
        self.writing: tuple[int, Future[None]] | None = None
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.copies: dict[str, Tensor] = {}
        self.copied: Any = None  # what a GPU says when it has copied

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Copy everything now, write it while training goes on. `state` is small and goes into JSON."""
        self.finish()
        self.copy(model, optimizer)
        self.writing = step, self.thread.submit(self.write, step, {"step": step, **state})

    @torch.no_grad()
    def copy(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Into memory of the host that stays, pinned where it comes from a GPU."""
        whole = tensors(model, optimizer)
        gpus = [t.device for t in whole.values() if t.is_cuda]
        aside = torch.cuda.Stream(gpus[0]) if gpus else None
        if aside is not None:
            aside.wait_stream(torch.cuda.current_stream())
        for name, tensor in whole.items():
            own = part_of(tensor)
            if name not in self.copies:
                buffer = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
                spread = isinstance(tensor, DTensor)
                self.copies[name] = DTensor(buffer, tensor._spec, requires_grad=False) if spread else buffer  # type: ignore[attr-defined]
            with torch.cuda.stream(aside):
                part_of(self.copies[name]).copy_(own, non_blocking=True)
        if aside is not None:
            if self.copied is None:
                optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self.copied))
            self.copied = aside.record_event()

    def write(self, step: int, state: dict[str, Any]) -> None:
        """The copies into a folder, every rank its part; visible under its name when all of it is there."""
        if self.copied is not None:
            torch.cuda.set_device(self.copied.device)  # this thread's, which would else take the first GPU
            self.copied.synchronize()
        part, whole = self.folder / f"{name_of(step)}.part", self.folder / name_of(step)
        said: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                (part / "state.json").write_text(json.dumps(state, indent=1))
            except OSError as error:
                said = [str(error)]
        try:
            dist.broadcast_object_list(said, group=self.group, device=torch.device("cpu"))
            if said[0] is not None:
                raise OSError(said[0])
            dcp.save(self.copies, checkpoint_id=str(part), process_group=self.group)
        except (Exception, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(part, ignore_errors=True)
            why = root(error)
            closed = "denied" in why or "Read-only" in why  # else torch may call a full disk what it likes
            where = str(self.folder) if closed else f"{self.folder}{room(self.folder)}"
            raise OSError(f"could not save step {step} in {where}: {why}") from error
        if dist.get_rank() == 0:
            shutil.rmtree(whole, ignore_errors=True)
            part.rename(whole)
            for old in [p for p in complete(self.folder) if p.name <= whole.name][: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)

    def poll(self) -> None:
        """Raise what went wrong with a checkpoint that has ended."""
        if self.writing and self.writing[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the one that is being written; raise what went wrong."""
        if self.writing is not None:
            (_, future), self.writing = self.writing, None
            future.result()


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def room(folder: Path) -> str:
    """How much fits where a folder is, and what to do if it is little."""
    try:
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.is_dir())).free / 1e6
    except OSError:
        return ""
    return f", where {free:,.0f} MB are free (free space, or say folder=PATH)"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def root(error: BaseException) -> str:
    """The innermost reason, in one line."""
    failures = [failure[0] for failure in getattr(error, "failures", {}).values()]
    if failures:  # of several ranks: what the system said before what torch made of it
        error = next((f for f in failures if isinstance(f, OSError)), failures[0])
        return str(error) or type(error).__name__
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return str(error) or type(error).__name__


def complete(folder: Path) -> list[Path]:
    """The checkpoints that can be loaded, oldest first."""
    found = folder.glob("step-*") if folder.is_dir() else []
    return sorted(
        p for p in found if p.name[5:].isdigit() and (p / ".metadata").is_file() and (p / "state.json").is_file()
    )


def begin_of(resume: str | None, folder: Path, started_at: float) -> Path | None:
    """The checkpoint that a run goes on from: its newest, or one that was named, until the run has saved one since.

    `started_at` tells its own from older ones: all attempts of a run have the same.
    """
    own = complete(folder)
    if resume not in (None, "auto"):
        own = [p for p in own if saved_by(started_at, p)] or [Path(resume)]
    return own[-1] if own else None


def saved_by(started_at: float, path: Path) -> bool:
    """Whether a run that began then saved this checkpoint; not if it cannot be read."""
    try:
        return read_state(path).get("started_at") == started_at
    except ValueError:
        return False


def set_aside(folder: Path, begin: Path) -> list[Path]:
    """Rename the checkpoints that are newer than the one a run goes on from: they are another future of it."""
    newer = [p for p in complete(folder) if p.name > begin.name]
    for path in newer:
        aside = path.with_suffix(".aside")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return newer


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
            counted = weight.device if group["fused"] else None  # where fused AdamW looks for its steps
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            optimizer.state[weight] = {"step": torch.zeros((), device=counted), **zeros}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> dict[str, Any]:
    """Everything back where it was; returns the saved state. A checkpoint of another training is refused first."""
    state = matching(path, about)
    reader = Reader(str(path))
    try:
        reader.read_metadata()  # refuses a strange index before anything is changed
        start_moments(optimizer)
        whole = tensors(model, optimizer)
        dcp.load(whole, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise ValueError(unreadable(path, root(error))) from error
    torch.set_rng_state(whole["@rng"])
    return state


def matching(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The saved state of a checkpoint of this training (trainer.about); a ValueError for any other.

    What an older checkpoint does not say is not asked.
    """
    state = read_state(path)
    differ = list(differences(state, about))
    if differ:
        raise ValueError(f"{path} is of another training: {'; '.join(differ)}; say the same, or start another run=NAME")
    return state


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, own in here.items():
        other = there.get(key, own)
        if isinstance(own, dict):
            yield from differences(other, own, f"{prefix}{key}.")
        elif other != own:
            yield f"{prefix}{key} is {other!r} there and {own!r} here"


def read_state(path: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself, and how many sequences its steps had; a ValueError where it cannot."""
    found = complete(path.parent)
    if path not in found:
        below = complete(path / "checkpoints") or complete(path)
        if below:
            raise ValueError(f"{path} is a folder above checkpoints; say resume={below[-1]}")
        others = ", ".join(p.name for p in found) or "none"
        raise ValueError(f"{path} is not a complete checkpoint; complete there: {others}")
    try:
        state = json.loads((path / "state.json").read_text())
        _ = {**state["model"], **state.get("data", {})}
        return {**state, A_STEP: state["sequences"] // state["step"]}
    except (ValueError, KeyError, TypeError, ArithmeticError, OSError) as error:
        raise ValueError(unreadable(path, f"state.json: {type(error).__name__} {error}")) from None


def unreadable(path: Path, why: str) -> str:
    """What to say of a checkpoint that is broken."""
    older = [str(p) for p in complete(path.parent) if p.name < path.name]
    instead = f"say resume=PATH to go on from an older one: {', '.join(older)}" if older else "there is no older one"
    return f"{path} cannot be read ({' '.join(why.split())}); {instead}"


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
