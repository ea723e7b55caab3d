"""A checkpoint's folder on disk: every file has a checksum, and nothing in it runs code when it is read.

step-00000100/state.json     the state of the training; size and CRC-32 of every other file; its own CRC-32
step-00000100/index.json     each tensor's pieces: the file, the first byte and the bytes of each
step-00000100/__0_0.distcp   the pieces that rank 0 wrote; torch reads them with weights_only=True
step-00000100/.metadata      torch's own index, for torch's tools: a pickle, which is never read here
"""

import errno
import json
import os
import re
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

A_STEP = "batch x accumulate x strategy.data"  # sequences in a step, as a user says how many
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError)  # of a JSON file of any content
PIECE = 1 << 22  # bytes read at once


class Damaged(ValueError):
    """A checkpoint is not as it was saved: which file, and what is wrong with it."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step after which a checkpoint was saved, by its name; None for what has no checkpoint's name."""
    found = re.fullmatch(r"step-([0-9]{8,18})", path.name)
    return int(found[1]) if found and path.name == name_of(int(found[1])) else None


def numbered(folder: Path) -> list[Path]:
    """All that has a checkpoint's name, oldest first."""
    return sorted((p for p in folder.glob("step-*") if step_of(p) is not None), key=lambda p: step_of(p) or 0)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, oldest first; their parts are not checked."""
    return [p for p in numbered(folder) if (p / "state.json").is_file()]


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also writes the index as JSON. `own` are the names of the files that this rank wrote."""

    own: set[str]

    def write_data(self, plan: Any, planner: Any) -> Any:
        done = super().write_data(plan, planner)
        self.own = {result.storage_data.relative_path for result in done.value()}
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)  # some versions of torch note what is where in a copy of `metadata`
        where = {one.index: one.storage_data for each in results for one in each}
        written = json.dumps(
            {name: to_json(name, tensor, where) for name, tensor in metadata.state_dict_metadata.items()}
        )
        durable(Path(self.path) / "index.json", written)
        self.own |= {"index.json", ".metadata"}


def to_json(name: str, tensor: Any, stored: Any) -> dict[str, Any]:
    """A tensor's entry in the index."""
    pieces = [(piece, stored[MetadataIndex(name, piece.offsets)]) for piece in tensor.chunks]
    return {
        "dtype": str(tensor.properties.dtype).removeprefix("torch."),
        "size": list(tensor.size),
        "pieces": [
            {
                "offsets": list(piece.offsets), "size": list(piece.sizes),
                "file": at.relative_path, "first": at.offset, "bytes": at.length,
            }
            for piece, at in pieces
        ],
    }  # fmt: skip


class Reader(dcp.FileSystemReader):
    """torch's reader with the index in JSON, which can name tensors only, in files of the checkpoint only.

    torch's own index is a pickle. It may also name objects, which torch's loader unpickles without any limit.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path)
        return read_index(path, read_state(path)["parts"])


def read_index(path: Path, parts: Collection[str]) -> Metadata:
    """The index as torch's loader takes it."""
    tensors: dict[str, Any] = {}
    stored = {}
    try:
        for name, about in json.loads((path / "index.json").read_text()).items():
            dtype = getattr(torch, about["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{about['dtype']} is no dtype")
            pieces = []
            for piece in about["pieces"]:
                offsets, sizes = torch.Size(piece["offsets"]), torch.Size(piece["size"])
                pieces.append(ChunkStorageMetadata(offsets, sizes))
                if piece["file"] not in parts:
                    raise ValueError(f"{name} lies in {piece['file']!r}, which is no part of this checkpoint")
                stored[MetadataIndex(name, offsets)] = _StorageInfo(piece["file"], piece["first"], piece["bytes"])
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(about["size"]), pieces)
    except UNREADABLE as error:
        raise Damaged(f"index.json: {reason(error)}") from None
    return Metadata(tensors, storage_data=stored)


def write_state(path: Path, state: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
    """state.json, after all other files: a checkpoint without it is not complete."""
    state = {**state, "parts": parts}
    durable(path / "state.json", json.dumps({**state, "crc32": crc32_of(state)}, indent=1))


def read_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, with the number of sequences of a step. Its parts are not checked."""
    try:
        state = json.loads((path / "state.json").read_text())
        saved = state.pop("crc32", None)
        if saved is None:
            raise ValueError("it has no checksums, as an older version of ringattn saved it, and cannot be checked")
        if saved != crc32_of(state):
            raise ValueError(f"it was saved with CRC-32 {saved} and has {crc32_of(state)}")
        step, sequences, parts = state["step"], state["sequences"], state["parts"]
        if step != step_of(path) or type(step) is not int or not 1 <= step <= state.get("steps", step):
            raise ValueError(f"step={step!r} of {state.get('steps')} cannot be in {path.name}")
        if type(sequences) is not int or sequences < step or sequences % step:
            raise ValueError(f"sequences={sequences!r} cannot be of {step} steps")
        for name in parts:
            if name in ("", ".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in this folder")
        _ = {**state["model"], **state.get("data", {})}
        return {**state, A_STEP: sequences // step}
    except UNREADABLE as error:
        raise Damaged(f"state.json: {reason(error)}") from None


def damage(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is not as it was saved in a checkpoint, if anything; each of some ranks reads its share of the parts."""
    try:
        parts = read_state(path)["parts"]
        read_index(path, parts)
    except Damaged as error:
        return str(error)
    for name in sorted(parts)[rank::ranks]:
        file, saved = path / name, parts[name]
        try:
            if not file.is_file():
                raise ValueError("no such file")
            size = file.stat().st_size
            found = checksum(file) if size == saved["bytes"] else {"bytes": size}
            if found != saved:
                raise ValueError(f"it was saved with {saved} and has {found}: damaged, or of another checkpoint")
        except UNREADABLE as error:
            return f"{name}: {reason(error)}"
    return None


def reason(error: Exception) -> str:
    """An error in one line; one that is not ours with its kind, as a KeyError only gives the key."""
    return str(error) if type(error) in (ValueError, OSError) else f"{type(error).__name__} {error}"


def checksum(file: Path) -> dict[str, Any]:
    """The size and the CRC-32 of a file."""
    crc, size, piece = 0, 0, memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            crc, size = zlib.crc32(piece[:count], crc), size + count
    return {"bytes": size, "crc32": f"{crc:08x}"}


def crc32_of(state: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def durable(path: Path, text: str) -> None:
    """Write a file that is still there after the machine has failed."""
    with path.open("w") as file:
        file.write(text)
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
