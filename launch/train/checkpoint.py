"""Checkpoints: written beside the training, complete or not there at all, and checked before they are loaded.

runs/NAME/checkpoints/step-00000100/rank-00000.safetensors   the rows of each tensor that rank 0 has
runs/NAME/checkpoints/step-00000100/state.json               the state of the training; a checksum of every file
runs/NAME/checkpoints/step-00000100.part/   the same while it is being written; never read

torch's HuggingFaceStorageReader loads them on any number of ranks. Reading runs no code: there is no pickle.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ringattn.comms import lost
from ringattn.conf.schema import Train
from ringattn.launch.train import data
from ringattn.launch.train.metrics import echo
from ringattn.launch.train.torchrun import together


class Checkpoints:
    """The checkpoints of one run. Saving goes on while training does; at most one is being written at a time.

    Training waits only while its tensors are copied into buffers that are kept; a thread does everything else. From a
    GPU they are copied while the next step runs, up to where it would change them.
    """

    def __init__(self, folder: Path, keep: int, group: Any):
        self.folder, self.keep = folder / "checkpoints", keep
        self.group = group  # its own, so that its messages do not mix with the training's
        self.writing: Future[None] | None = None
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.copies: dict[str, Tensor] = {}  # this rank's part of each tensor
        self.begins: dict[str, list[int]] = {}  # where that begins in the whole tensor
        self.copied: Any = None  # the event after which a GPU has copied

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Copy everything now, write it while training goes on. `state` is small and goes into JSON."""
        self.finish()
        self.copy(model, optimizer)
        self.writing = self.thread.submit(self.write, step, {"step": step, **state})

    @torch.no_grad()
    def copy(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Into memory of the host that stays, pinned where it comes from a GPU."""
        on_gpu = next(model.parameters()).is_cuda
        side_stream = torch.cuda.Stream() if on_gpu else None
        if side_stream is not None:
            side_stream.wait_stream(torch.cuda.current_stream())
        for name, tensor in tensors(model, optimizer).items():
            if dist.get_rank() and not isinstance(tensor, DTensor):  # a count of steps, which all ranks have
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self.copies:
                self.begins[name] = [0] * tensor.dim()
                if isinstance(tensor, DTensor):
                    place = tensor.shape, tensor.device_mesh, tensor.placements
                    self.begins[name] = [*compute_local_shape_and_global_offset(*place)[1]]
                self.copies[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            with torch.cuda.stream(side_stream):
                self.copies[name].copy_(local, non_blocking=True)
        if side_stream is not None:
            if self.copied is None:
                optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self.copied))
            self.copied = side_stream.record_event()

    def write(self, step: int, state: dict[str, Any]) -> None:
        """The copies into a folder, every rank its file; visible under its name when all of it is there."""
        if self.copied is not None:
            torch.cuda.set_device(self.copied.device)  # this thread's, which would else take the first GPU
            self.copied.synchronize()
        whole, rank0 = self.folder / f"step-{step:08d}", dist.get_rank() == 0
        part = whole.with_name(f"{whole.name}.part")
        try:
            together(lambda: self.begin(part) if rank0 else None, self.group)
            files = together(lambda: self.write_file(part), self.group)
            if rank0:
                self.publish(part, whole, {**state, "files": dict(files)})
        except Exception as error:
            if rank0:
                shutil.rmtree(part, ignore_errors=True)
            if lost.of_transport(error):
                raise ConnectionError(f"could not save step {step}: {lost.who_is_missing(str(error))}") from error
            raise OSError(f"could not save {whole} ({error}); free space, or use folder=PATH") from error

    def begin(self, part: Path) -> None:
        """An empty folder to write into. The run's own folder is not made again if it was deleted."""
        shutil.rmtree(part, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        part.mkdir()

    def write_file(self, folder: Path) -> tuple[str, str]:
        """This rank's rows, and in the header where they begin in the whole tensors; the file's name and checksum."""
        local = {name: x for name, x in self.copies.items() if x.numel()}
        offsets = {name: {"saved_offsets": self.begins[name]} for name in local}
        file = folder / f"rank-{dist.get_rank():05d}.safetensors"
        save_file(local, file, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        on_disk(file)
        return file.name, checksum(file)

    def publish(self, part: Path, whole: Path, state: dict[str, Any]) -> None:
        """state.json comes last, which lists all files, then the folder's name; and those go that are too many."""
        (part / "state.json").write_text(json.dumps({**state, "checksum": digest(state)}, indent=1))
        on_disk(part / "state.json")
        on_disk(part)
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
        on_disk(self.folder)
        for old in [path for path in numbered(self.folder) if step_of(path) <= step_of(whole)][: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def finish(self, wait: bool = True) -> None:
        """Raise what went wrong with the one that is being written, or was."""
        if self.writing is not None and (wait or self.writing.done()):
            future, self.writing = self.writing, None
            future.result()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and the optimizer's moments, by name."""
    named = dict(model.named_parameters())
    moments = {f"{name}@{key}": x for name, weight in named.items() for key, x in optimizer.state[weight].items()}
    return {name: weight.detach() for name, weight in named.items()} | moments


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any]) -> int:
    """Everything back where it was; returns the step. A checkpoint of another training is refused first (`about`)."""
    state = matching(path, about)
    _init_optim_state(optimizer)  # moments to load into
    load_tensors(path, tensors(model, optimizer))
    return state["step"]


def matching(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The saved state of a checkpoint of this training (`about`); a ValueError for any other."""
    state = read_state(path)
    differ = [f"{k} is {state.get(k)!r} there and {x!r} here" for k, x in about.items() if state.get(k) != x]
    if differ:
        raise ValueError(f"{path} is of another training: {'; '.join(differ)}; use the same, or start another run=NAME")
    return state


def load_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read these tensors, or this rank's part of them; no rank talks to another."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    except CheckpointException as error:  # which is no Exception
        raise unreadable(path, str(next(iter(error.failures.values()))[0])) from error


def newest(paths: Sequence[Path], group: Any = None) -> Path | None:
    """The last of these checkpoints that is as it was saved; a ValueError where none is, None where there is none.

    All ranks check together, each its share of the files; the list is rank 0's, which prints what it skips.
    """
    problems: list[ValueError] = []
    names, rank, ranks = together(lambda: [str(path) for path in paths], group)[0], 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for path in map(Path, reversed(names)):
        problem = next(filter(None, together(partial(damage, path, rank, ranks), group)), None)
        if problem is None:
            for skipped in problems if rank == 0 else ():
                echo(f"{skipped}; goes on from an older one")
            return path
        problems.append(unreadable(path, problem))
    if problems:
        raise ValueError(f"{'; '.join(map(str, problems))}; name an older one (resume=PATH), or start another run=NAME")
    return None


def about(config: Train, corpus: data.Corpus) -> dict[str, Any]:
    """What must be the same when a run goes on: the model, the data, and what decides their order."""
    return {
        **{f"model.{name}": value for name, value in dataclasses.asdict(config.model).items()},
        "seed": config.seed,
        "seq_len": config.seq_len,
        "batch x accumulate x strategy.data": config.a_step,
        "data.documents": config.data.documents,
        "data.held_out": config.data.held_out,
        "data.tokens": f"{len(corpus)} with checksum {data.checksum(corpus):08x}",  # wherever they lie now
    }


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    return int(path.name.removeprefix("step-"))


def numbered(folder: Path) -> list[Path]:
    """All that has a checkpoint's name, oldest first."""
    return sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", p.name)), key=step_of)


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, whose other files are not checked; a ValueError if it cannot be read."""
    if problem := damage(path):
        raise unreadable(path, problem)
    return json.loads((path / "state.json").read_bytes())


def damage(path: Path, rank: int = 0, ranks: int = 0) -> str | None:
    """What is not as it was saved, if anything: of state.json, and of this rank's share of the other files."""
    try:
        state = json.loads(regular(path / "state.json").read_bytes())
        if state.pop("checksum") != digest(state) or state["step"] != step_of(path):
            return "state.json is not as it was saved"
        files = state["files"]
        if {*files} != {p.name for p in path.glob("*.safetensors")}:
            return "a file is missing, or there is one more"
        for name in sorted(files)[rank::ranks] if ranks else ():
            if checksum(regular(path / name)) != files[name]:
                return f"{name} is not as it was saved"
    except Exception as error:  # a JSON file of any content
        return f"{type(error).__name__}: {error}"
    return None


def unreadable(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} cannot be read ({' '.join(why.split())})")


def regular(file: Path) -> Path:
    """A file of a checkpoint. A pipe or a device would block or never end, and a link leads out of the folder."""
    if file.is_symlink() or not file.is_file():
        raise ValueError(f"{file.name} is no regular file")
    return file


def checksum(file: Path) -> str:
    """CRC-32, which finds damage at several GB a second."""
    return f"{zlib.crc32(np.memmap(file, mode='r').data):08x}"


def digest(state: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def on_disk(path: Path) -> None:
    """A file, or a folder's names, are still there after the machine has failed."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it for a folder
            raise
    finally:
        os.close(opened)
