"""Checkpoints: written beside the training, complete or not there at all, and checked before they are loaded.

    runs/NAME/checkpoints/step-00000100/   its files: stored.py
    runs/NAME/checkpoints/step-00000100.part/   the same while it is being written; never read
    runs/NAME/checkpoints/step-00000100.aside/   left behind, since the run went on from an older one; never read

A checkpoint holds whole tensors in pieces, so any number of ranks can read it.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.comms import lost, messages
from ringattn.conf.schema import Train
from ringattn.launch.train import data, metrics, stored
from ringattn.launch.train.stored import A_STEP, Damaged, Saved, complete, damage, name_of, numbered, part_of


class Checkpoints:
    """The checkpoints of one run. Saving goes on while training does; at most one is being written at a time.

    Training waits only while its tensors are copied into buffers that are kept; a thread does everything else. From a
    GPU they are copied while the next step runs, up to where it would change them.
    """

    def __init__(self, folder: Path, keep: int, group: Any):
        self.folder, self.keep = folder / "checkpoints", keep
        self.group = group  # its own, so that its words do not mix with the training's
        self.writing: Future[None] | None = None
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.copies: dict[str, Tensor] = {}  # what this rank holds of each tensor
        self.index: dict[str, Saved] = {}
        self.copied: Any = None  # the event after which a GPU has copied

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Copy everything now, write it while training goes on. `state` is small and goes into JSON."""
        self.finish()
        self.copy(model, optimizer)
        self.writing = self.thread.submit(self.write, step, {"step": step, **state})

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
                self.index[name] = Saved.of(tensor)
                self.copies[name] = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
            with torch.cuda.stream(aside):
                self.copies[name].copy_(own, non_blocking=True)
        if aside is not None:
            if self.copied is None:
                optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self.copied))
            self.copied = aside.record_event()

    def write(self, step: int, state: dict[str, Any]) -> None:
        """The copies into a folder, every rank its part; visible under its name when all of it is there."""
        if self.copied is not None:
            torch.cuda.set_device(self.copied.device)  # this thread's, which would else take the first GPU
            self.copied.synchronize()
        unfinished, whole = self.folder / f"{name_of(step)}.part", self.folder / name_of(step)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        try:
            self.together(partial(self.begin, unfinished) if rank == 0 else lambda: None)
            files = self.together(lambda: stored.write_part(unfinished, rank, ranks, self.index, self.copies))
            if rank == 0:
                stored.write_state(unfinished, {**state, "tensors": self.index, "parts": files})
                self.publish(unfinished, whole)
        except Exception as error:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            if lost.of_transport(error):
                raise ConnectionError(f"could not save step {step}: {lost.who_is_missing(str(error))}") from error
            raise OSError(f"could not save step {step} in {self.where(str(error))}") from error

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks; the ranks' results, or one error on all of them."""
        result = problem = None
        try:
            result = action()
        except Exception as error:
            problem = f"{error}" or type(error).__name__
        everyone = messages.gather([result, problem], self.group)
        for _, problem in everyone:
            if problem is not None:
                raise OSError(problem)
        return [result for result, _ in everyone]

    def begin(self, unfinished: Path) -> None:
        """An empty folder to write into. The run's own folder is not made again if it was deleted."""
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(f"{self.folder.parent} was deleted or moved while the run wrote to it")
        shutil.rmtree(unfinished, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        unfinished.mkdir()

    def publish(self, unfinished: Path, whole: Path) -> None:
        """Give a checkpoint its name, once all of it is on the disk, and delete those that are too many."""
        stored.durable_names(unfinished)
        shutil.rmtree(whole, ignore_errors=True)
        unfinished.rename(whole)
        stored.durable_names(self.folder)
        for old in [p for p in complete(self.folder) if p.name <= whole.name][: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def where(self, why: str) -> str:
        """The folder and what was wrong, with the room on its disk, which may be full."""
        other = any(word in why for word in ("denied", "Read-only", "deleted or moved"))
        return f"{self.folder}{'' if other else room(self.folder)}: {why}"

    def poll(self) -> None:
        """Raise what went wrong with a checkpoint that has ended."""
        if self.writing and self.writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the one that is being written; raise what went wrong."""
        if self.writing is not None:
            future, self.writing = self.writing, None
            future.result()


def room(folder: Path) -> str:
    """How much fits where a folder is, and what to do if it is little."""
    try:
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.is_dir())).free / 1e6
    except OSError:
        return ""
    return f", where {free:,.0f} MB are free (free space, or use folder=PATH)"


def begin_of(resume: str | None, folder: Path, started_at: float) -> list[Path]:
    """The checkpoints that a run may go on from, oldest first: its own, or one that was named and those saved since.

    `started_at` tells its own from older ones: all attempts of a run have the same.
    """
    own = numbered(folder)
    if resume is None or resume == "auto":
        return own
    since = [p for p in own if saved_by(started_at, p)]
    if not since:
        read_state(Path(resume))  # whose error names the alternatives
    return [Path(resume), *since]


def newest(paths: Sequence[Path], group: Any = None) -> Path | None:
    """The last of these checkpoints that is as it was saved; a ValueError where none is, None where there is none.

    All ranks check together, each its share of the parts; the list is rank 0's, which prints what it skips.
    """
    problems: dict[Path, str] = {}
    paths, rank, ranks = [Path(path) for path in everyones([str(path) for path in paths], group)[0]], 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for path in reversed(paths):
        problem = next(filter(None, everyones(damage(path, rank, ranks), group)), None)
        if problem is None:
            for broken, why in problems.items() if rank == 0 else ():
                metrics.echo(f"{broken} cannot be read ({why}); goes on from an older one")
            return path
        problems[path] = problem
    if len(problems) == 1:
        raise ValueError(unreadable(*next(iter(problems.items()))))
    if problems:
        every = "; ".join(f"{path} cannot be read ({why})" for path, why in problems.items())
        raise ValueError(f"no checkpoint can be read: {every}; start another run=NAME")
    return None


def everyones(mine: Any, group: Any = None) -> list[Any]:
    """What each rank has, in their order."""
    return messages.gather(mine, group) if dist.is_initialized() else [mine]


def saved_by(started_at: float, path: Path) -> bool:
    """Whether a run that began then saved this checkpoint; not if it cannot be read."""
    try:
        return read_state(path).get("started_at") == started_at
    except ValueError:
        return False


def set_aside(folder: Path, begin: Path) -> list[Path]:
    """Rename the checkpoints that are newer than the one a run goes on from: they are another future of it."""
    newer = [p for p in numbered(folder) if (stored.step_of(p) or 0) > (stored.step_of(begin) or 0)]
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
    start_moments(optimizer)
    whole = tensors(model, optimizer)
    problem = None
    try:
        stored.load(path, whole)
    except (*stored.UNREADABLE, RuntimeError) as error:
        problem = stored.reason(error)
    if problem := next(filter(None, everyones(problem)), None):
        raise ValueError(unreadable(path, problem))
    torch.set_rng_state(whole["@rng"])
    return state


def about(config: Train, corpus: data.Corpus) -> dict[str, Any]:
    """What must be the same when a run goes on: the model, the data, and what decides their order."""
    return {
        "model": dataclasses.asdict(config.model),
        "seed": config.seed,
        "seq_len": config.seq_len,
        A_STEP: config.batch * config.accumulate * config.strategy.data,
        "data": {
            "documents": config.data.documents,
            "held_out": config.data.held_out,
            "tokens": f"{len(corpus)} with checksum {data.checksum(corpus):08x}",  # wherever they lie now
        },
    }


def matching(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The saved state of a checkpoint of this training (`about`); a ValueError for any other.

    What an older checkpoint does not contain is not compared.
    """
    state = read_state(path)
    differ = list(differences(state, about))
    if differ:
        raise ValueError(f"{path} is of another training: {'; '.join(differ)}; use the same, or start another run=NAME")
    return state


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, own in here.items():
        other = there.get(key, own)
        if isinstance(own, dict):
            yield from differences(other, own, f"{prefix}{key}.")
        elif other != own:
            yield f"{prefix}{key} is {other!r} there and {own!r} here"


def read_state(path: Path) -> dict[str, Any]:
    """The state of a complete checkpoint, with the number of sequences of a step; a ValueError if it cannot be read."""
    others = complete(path.parent)
    if path not in others:
        below = complete(path / "checkpoints") or complete(path)
        if below:
            raise ValueError(f"{path} is a folder above checkpoints; use resume={below[-1]}")
        names = ", ".join(p.name for p in others) or "none"
        raise ValueError(f"{path} is not a complete checkpoint; complete there: {names}")
    try:
        return stored.read_state(path)
    except Damaged as error:
        raise ValueError(unreadable(path, str(error))) from None


def unreadable(path: Path, why: str) -> str:
    """The error for a broken checkpoint."""
    older = [str(p) for p in complete(path.parent) if p.name < path.name]
    instead = f"use resume=PATH to go on from an older one: {', '.join(older)}" if older else "there is no older one"
    return f"{path} cannot be read ({' '.join(why.split())}); {instead}"
