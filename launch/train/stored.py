"""A checkpoint's folder on disk: every file has a checksum, and nothing in it can run code when it is read.

step-00000100/state.json               the state of the training; dtype and size of each tensor; size and CRC-32 of
                                       every other file; its own CRC-32
step-00000100/rank-00000.safetensors   the rows that rank 0 had of each tensor

A tensor is spread by rows over all ranks that saved it, or rank 0 has it all. Which rows lie where in which file
follows from its size alone, so no index can name another place, nor the same rows twice.
"""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

A_STEP = "batch x accumulate x strategy.data"  # sequences in a step, as a user says how many
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)  # of a JSON file of any content
PIECE = 1 << 22  # bytes read at once
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint8": "U8"}


class Damaged(ValueError):
    """A checkpoint is not as it was saved: which file, and what is wrong with it."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step after which a checkpoint was saved, by its name; None for what has no checkpoint's name."""
    match = re.fullmatch(r"step-([0-9]{8,18})", path.name)
    return int(match[1]) if match and path.name == name_of(int(match[1])) else None


def numbered(folder: Path) -> list[Path]:
    """All that has a checkpoint's name, oldest first."""
    return sorted((p for p in folder.glob("step-*") if step_of(p) is not None), key=lambda p: step_of(p) or 0)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, oldest first; their parts are not checked."""
    return [p for p in numbered(folder) if (p / "state.json").is_file()]


class Saved(NamedTuple):
    """What a checkpoint says of a tensor: it is JSON."""

    dtype: str
    size: list[int]
    spread: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Saved":
        if isinstance(tensor, DTensor):
            assert tensor.device_mesh.ndim == 1 and tensor.placements[0].is_shard(0), tensor.placements
        return cls(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), isinstance(tensor, DTensor))

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """The rows [first, last) that one of some ranks has, as FSDP2 deals them; a scalar has one row."""
        rows = self.size[0] if self.size else 1
        each = -(-rows // ranks) if self.spread else rows
        return min(rows, rank * each), min(rows, (rank + 1) * each)

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        return prod(self.size[1:]) * self.itemsize


Header = dict[str, Any]


def header_of(index: dict[str, Saved], rank: int, ranks: int) -> tuple[Header, int]:
    """The header of a rank's file, and the bytes after it. The widest dtypes come first, so every number is aligned.

    By the offsets in it torch's HuggingFaceStorageReader joins the files.
    """
    header: Header = {"__metadata__": {}}
    offsets, end = {}, 0
    for name, saved in sorted(index.items(), key=lambda each: (-each[1].itemsize, each[0])):
        first, last = saved.rows(rank, ranks)
        begin, end = end, end + (last - first) * saved.row_bytes
        if begin < end:
            shape = [last - first, *saved.size[1:]][: len(saved.size)]
            header[name] = {"dtype": DTYPES[saved.dtype], "shape": shape, "data_offsets": [begin, end]}
            offsets[name] = {"saved_offsets": [first, *[0] * len(shape)][: len(shape)]}
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
    return header, end


def name_of_part(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(path: Path, rank: int, ranks: int, index: dict[str, Saved], local: dict[str, Tensor]) -> Header:
    """The file of one rank, from what it holds of each tensor; its size and checksum."""
    header, _ = header_of(index, rank, ranks)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with durable(path / name_of_part(rank)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in header:
            if name in local:
                file.write(local[name].reshape(-1).view(torch.uint8).numpy().data)
    return checksum(path / name_of_part(rank))


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read these tensors, or what this rank holds of them, from a checkpoint of any number of ranks."""
    state = read_state(path)
    index, ranks = state["tensors"], len(state["parts"])
    for name, tensor in tensors.items():
        here, there = Saved.of(tensor), index.get(name)
        if there is None or here[:2] != there[:2]:
            raise Damaged(f"{name} is {there and there[:2]} there and {here[:2]} here")
    for rank in range(ranks):
        header, _ = header_of(index, rank, ranks)
        with opened(path / name_of_part(rank)) as file:
            base = 8 + int.from_bytes(file.read(8), "little")
            for name in tensors:
                if name in header:
                    read_rows(
                        tensors[name], index[name].rows(rank, ranks), file, base + header[name]["data_offsets"][0]
                    )


@torch.no_grad()
def read_rows(tensor: Tensor, stored: tuple[int, int], file: BinaryIO, at: int) -> None:
    """Read those of the stored rows, the first of which lies there in the file, that this rank holds."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    saved = Saved.of(tensor)
    begin, end = saved.rows(*((mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)))
    first, last = max(begin, stored[0]), min(end, stored[1])
    if first < last:
        file.seek(at + (first - stored[0]) * saved.row_bytes)
        content = bytearray(file.read((last - first) * saved.row_bytes))
        rows = part_of(tensor).view(end - begin, *tensor.shape[1:])[first - begin : last - begin]
        rows.copy_(torch.frombuffer(content, dtype=tensor.dtype).view(rows.shape))


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_state(path: Path, state: dict[str, Any]) -> None:
    """state.json, after all other files: a checkpoint without it is not complete."""
    with durable(path / "state.json") as file:
        file.write(json.dumps({**state, "crc32": crc32_of(state)}, indent=1).encode())


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, with the number of sequences of a step. Its parts are not checked."""
    try:
        with opened(path / "state.json") as file:
            state = json.load(file)
        saved = state.pop("crc32", None)
        if saved is None or "tensors" not in state:
            raise ValueError("an older version of ringattn saved it, and this one cannot read it")
        if saved != crc32_of(state):
            raise ValueError(f"it was saved with CRC-32 {saved} and has {crc32_of(state)}")
        step, sequences, parts = state["step"], state["sequences"], state["parts"]
        if step != step_of(path) or type(step) is not int or not 1 <= step <= state.get("steps", step):
            raise ValueError(f"step={step!r} of {state.get('steps')} cannot be in {path.name}")
        if type(sequences) is not int or sequences < step or sequences % step:
            raise ValueError(f"sequences={sequences!r} cannot be of {step} steps")
        if type(parts) is not list or not parts:
            raise ValueError(f"parts={parts!r} is no list of files")
        _ = {**state["model"], **state.get("data", {})}
        return {**state, "tensors": read_index(state["tensors"]), A_STEP: sequences // step}
    except UNREADABLE as error:
        raise Damaged(f"state.json: {reason(error)}") from None


def read_index(tensors: dict[str, Any]) -> dict[str, Saved]:
    index = {name: Saved(*about) for name, about in tensors.items()}
    for name, (dtype, size, spread) in index.items():
        sizes = type(size) is list and all(type(n) is int and n >= 0 for n in size)
        if dtype not in DTYPES or not sizes or type(spread) is not bool:
            raise ValueError(f"{name}: {dtype!r}, {size!r}, {spread!r} is no tensor")
    return index


def opened(file: Path) -> BinaryIO:
    """A file of a checkpoint. A pipe or a device would block or never end, and a link leads out of the folder."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise ValueError("it is not a regular file")
    return file.open("rb")


def damage(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is not as it was saved in a checkpoint, if anything; each of some ranks reads its share of the parts."""
    try:
        state = read_state(path)
    except Damaged as error:
        return str(error)
    index, parts = state["tensors"], state["parts"]
    for number in range(rank, len(parts), ranks):
        file = path / name_of_part(number)
        try:
            check(file, parts[number], *header_of(index, number, len(parts)))
        except UNREADABLE as error:
            return f"{file.name}: {reason(error)}"
    return None


def check(file: Path, saved: dict[str, Any], header: Header, content: int) -> None:
    """An error if a part is not as it was saved, or does not hold just these rows."""
    with opened(file) as start:
        size = os.fstat(start.fileno()).st_size
        now = checksum(file) if size == saved["bytes"] else {"bytes": size}
        if now != saved:
            raise ValueError(f"it was saved with {saved} and has {now}: damaged, or of another checkpoint")
        length = int.from_bytes(start.read(8), "little")
        if size != 8 + length + content or json.loads(start.read(length)) != header:
            raise ValueError("it does not hold the tensors that state.json lists")


def reason(error: Exception) -> str:
    """An error in one line; one that is not ours with its kind, as a KeyError only gives the key."""
    return str(error) if type(error) in (ValueError, OSError) else f"{type(error).__name__} {error}"


def checksum(file: Path) -> dict[str, Any]:
    """The size and the CRC-32 of a file."""
    crc, size, block = 0, 0, memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            crc, size = zlib.crc32(block[:count], crc), size + count
    return {"bytes": size, "crc32": f"{crc:08x}"}


def crc32_of(state: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """A new file that is still there after the machine has failed."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def durable_names(folder: Path) -> None:
    """The same for a folder's names: what was created and renamed in it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it for a folder
            raise
    finally:
        os.close(opened)
