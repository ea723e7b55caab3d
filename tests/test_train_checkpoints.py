"""A checkpoint is checked before it is loaded: damage to it is found and passed by."""

import contextlib
import dataclasses
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ringattn.launch.train import checkpoint, metrics
from tests.training import TINY, one_process, over


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoints of steps 3, 4 and 5 of a run over two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    over(2, {"run": dataclasses.replace(TINY, save_every=1, keep=3)}, folder)
    return folder / "run"


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def flip(file: Path, at: int) -> None:
    """Another bit in a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x40
    file.write_bytes(content)


INSTEAD = {
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a link out of the folder": lambda file: file.symlink_to("../elsewhere"),
    "a folder": Path.mkdir,
    "nothing": str,
    "a pickle": lambda file: torch.save({"norm.weight": torch.ones(32)}, file),
}


@pytest.mark.parametrize("name", ["state.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("kind", INSTEAD)
def test_only_files_that_were_saved_are_read(kind, name, run):
    """The run goes on from the checkpoint before."""
    (step(run, 5) / name).rename(run / "checkpoints" / "elsewhere")
    INSTEAD[kind](step(run, 5) / name)
    assert checkpoint.newest(checkpoint.numbered(run / "checkpoints")) == step(run, 4)


def test_tools_read_a_checkpoint_and_nothing_unpickles(run, monkeypatch):
    """safetensors' rows, one file after the other, are torch's whole tensors. There is no file with a dot before it."""
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    files = [load_file(step(run, 5) / f"rank-0000{rank}.safetensors") for rank in range(2)]
    whole = {}
    for name in files[0]:
        rows = [file[name] for file in files if name in file]
        whole[name] = rows[0] if rows[0].dim() == 0 else torch.cat(rows)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    checkpoint.load_tensors(step(run, 5), loaded)
    assert "norm.weight@step" in loaded and whole["norm.weight"].shape == (32,)
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    assert not [file for file in step(run, 5).iterdir() if file.name.startswith(".")]


def test_damage_is_found_on_all_ranks_and_the_run_goes_on_from_the_newest_that_is_whole(run, saved, tmp_path, capsys):
    """A flipped bit, and a part of another step, of the same size."""
    flip(step(run, 5) / "rank-00001.safetensors", 5000)
    shutil.copy(step(run, 3) / "rank-00000.safetensors", step(run, 4) / "rank-00000.safetensors")
    assert checkpoint.newest(checkpoint.numbered(run / "checkpoints")) == step(run, 3)
    output = capsys.readouterr().err
    for number, name in ((5, "rank-00001.safetensors"), (4, "rank-00000.safetensors")):
        assert f"{step(run, number)} cannot be read ({name} is not as it was saved)" in output
    whole = shutil.copytree(saved, tmp_path / "whole")
    for number in (4, 5):
        shutil.rmtree(step(whole, number))
    losses = over(2, dict.fromkeys(("run", "whole"), dataclasses.replace(TINY, resume="auto", steps=5)), tmp_path)
    assert losses["run"] == losses["whole"] and len(losses["run"]) == 5


def test_a_run_goes_on_from_what_was_named_until_it_has_saved(saved, tmp_path):
    config = dataclasses.replace(TINY, resume=str(step(saved, 3)), save_every=1, keep=1)
    for steps, expected in ((5, 2), (6, 3)):  # steps 4 and 5, then from its own checkpoint step 6
        assert len(over(2, {"other": dataclasses.replace(config, steps=steps)}, tmp_path)["other"]) == expected


def test_every_byte_that_is_changed_is_noticed(run):
    path = step(run, 5)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
    for name in names:
        content = (path / name).read_bytes()
        for at in np.linspace(0, len(content) - 1, 12).astype(int):
            flip(path / name, at)
            assert checkpoint.damage(path, 0, 1), f"{name}, byte {at} of {len(content)}"
            assert [checkpoint.damage(path, rank, 3) for rank in range(3)] != [None] * 3
            (path / name).write_bytes(content)
        (path / name).unlink()
        assert checkpoint.damage(path, 0, 1)
        (path / name).write_bytes(content)
    assert checkpoint.damage(path, 0, 1) is None


def no_longer_whole(run: Path) -> None:
    """All checkpoints of a run are broken: it does not begin anew."""
    for number in (3, 4, 5):
        (step(run, number) / "rank-00001.safetensors").write_bytes(b"0")
    checkpoint.newest(checkpoint.numbered(run / "checkpoints"))


def of_another_state(text: str, run: Path) -> None:
    (step(run, 5) / "state.json").write_text(text)
    checkpoint.read_state(step(run, 5))


def of_other_tensors(name: str, run: Path) -> None:
    checkpoint.load_tensors(step(run, 5), {name: torch.zeros(31)})


BROKEN = r"step-0000000{} cannot be read \(rank-00001.safetensors is not as it was saved\)"
TEXTS = "[]", "", "{", "[" * 10**5, '{"step": 5, "model": {}, "crc32": 1}'


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (no_longer_whole, "; .*".join(map(BROKEN.format, (5, 4, 3))) + "; name an older one .*run=NAME"),
        *((partial(of_another_state, text), "step-00000005 cannot be read") for text in TEXTS),
        (partial(of_other_tensors, "norm.weight"), "step-00000005 cannot be read .*norm.weight"),
        (partial(of_other_tensors, "none"), "step-00000005 cannot be read .*none"),
    ],
    ids=["none whole", *(f"state {i}" for i in range(len(TEXTS))), "another shape", "no tensor of that name"],
)
def test_what_cannot_be_read_is_named(read, message, run):
    with pytest.raises(ValueError, match=message):
        read(run)


@pytest.mark.parametrize("room", [None, 0, 100, 3000])
def test_a_disk_without_room_is_an_error_of_its_file_and_nothing_half_written_stays(room, tmp_path):
    """A limit on the size of files stands for the disk: of the pieces, of the index, or of all. None: no folder."""
    layer, optimizer = small()
    run = tmp_path / "run"
    run.mkdir()
    with one_process():
        checkpoints = checkpoint.Checkpoints(run, 2, None)
        with at_most(room) if room is not None else deleted(run):
            checkpoints.save(7, layer, optimizer, {"notes": "x" * 10**5})
            with pytest.raises(OSError, match=r"save .*step-00000007 .*; free space, or use folder"):
                checkpoints.finish()
            with pytest.raises(OSError, match=r"could not write .*run/metrics\.jsonl"):
                metrics.append(run / "metrics.jsonl", {"more": "x" * 10**5})
        assert not checkpoints.folder.exists() or list(checkpoints.folder.iterdir()) == []
        checkpoints.save(8, layer, optimizer, {})  # there is room again
        checkpoints.finish()
    assert checkpoint.damage(checkpoints.folder / "step-00000008", 0, 1) is None


@contextlib.contextmanager
def deleted(run: Path) -> Iterator[None]:
    """The folder of a run is gone, and is not made again by what is written there."""
    run.rmdir()
    yield
    assert not run.exists()
    run.mkdir()


class at_most:
    """Files may have so many bytes; a write beyond fails with an error of the system."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> None:
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *error) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file and its folder are synced, then it is renamed, then the folder above is synced."""
    did: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: did.append(os.readlink(f"/proc/self/fd/{file}")) or sync(file))
    monkeypatch.setattr(Path, "rename", lambda self, to: did.append(f"{self.name} -> {to.name}") or rename(self, to))
    layer, optimizer = small()
    with one_process():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(1, layer, optimizer, {})
        checkpoints.finish()
    unfinished = f"{checkpoints.folder}/step-00000001.part"
    files = [f"{unfinished}/{name}" for name in ("rank-00000.safetensors", "state.json")]
    assert did == [*files, unfinished, "step-00000001.part -> step-00000001", str(checkpoints.folder)]


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    layer = nn.Linear(4, 4)
    return layer, torch.optim.AdamW(layer.parameters())
