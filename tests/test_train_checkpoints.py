"""A checkpoint is checked before it is loaded: no code in it runs, and damage to it is found and passed by."""

import dataclasses
import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ringattn.conf.schema import Train
from ringattn.launch.train import checkpoint, metrics, stored, torchrun
from ringattn.launch.train import start as train
from ringattn.launch.train.trainer import work
from tests.training import TINY, alone, made, over

ROOT = Path(__file__).parent.parent


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
    return run / "checkpoints" / checkpoint.name_of(number)


def flip(file: Path, at: int) -> None:
    """Another bit in a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x40
    file.write_bytes(content)


def resealed(path: Path, **state) -> None:
    """Another state.json whose checksums are right, as somebody would make it on purpose."""
    saved = json.loads((path / "state.json").read_text())
    saved.pop("crc32")
    parts = state.pop("parts", {name: stored.checksum(path / name) for name in saved["parts"]})
    stored.write_state(path, {**saved, **state}, parts)


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def crafted(path: Path, marker: Path, name: str) -> None:
    """A checkpoint whose indexes name an object beside its tensors: torch's loader would unpickle it."""
    held = io.BytesIO()
    torch.save(Runs(marker), held)
    (path / "evil.distcp").write_bytes(held.getvalue())
    index = pickle.loads((path / ".metadata").read_bytes())
    index.state_dict_metadata[name] = dcp_metadata.BytesStorageMetadata()
    index.storage_data[dcp_metadata.MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, len(held.getvalue()))
    (path / ".metadata").write_bytes(pickle.dumps(index))
    own = json.loads((path / "index.json").read_text())
    size = own[name]["size"]
    piece = {"offsets": [0] * len(size), "size": size, "file": "evil.distcp", "first": 0}
    own[name]["pieces"] = [piece | {"bytes": len(held.getvalue())}]
    (path / "index.json").write_text(json.dumps(own))
    parts = {file.name: stored.checksum(file) for file in path.iterdir() if file.name != "state.json"}
    resealed(path, parts=parts)


def test_an_object_in_a_checkpoint_is_never_unpickled(run, tmp_path):
    """Not by a training that goes on, nor by the example that generates text; no index that is a pickle is read."""
    path, marker = step(run, 5), tmp_path / "ran"
    crafted(path, marker, "embed.weight")
    config = train.resolved(dataclasses.replace(TINY, resume=str(path)), 2)
    first, second = torchrun.local(refused, 2, "cpu", config, str(run))
    assert first == second and f"{path} cannot be read" in first and "weights_only" in first
    done = generate(run)
    assert done.returncode == 1 and "weights_only" in done.stderr and not marker.exists()
    (path / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    resealed(path)
    assert checkpoint.newest([path]) == path and not marker.exists()
    torch.load(path / "evil.distcp", weights_only=False)
    assert marker.exists()  # what the object does where it is unpickled


@pytest.mark.parametrize(
    "where", ["../step-00000004/__0_0.distcp", "{root}/__0_0.distcp", "", "..", "elsewhere.distcp"]
)
def test_a_part_lies_in_the_folder_of_its_checkpoint(where, run):
    path = step(run, 5)
    name = where.format(root=step(run, 4))
    index = json.loads((path / "index.json").read_text())
    index["norm.weight"]["pieces"][0]["file"] = name
    (path / "index.json").write_text(json.dumps(index))
    resealed(path)
    assert f"norm.weight lies in {name!r}" in checkpoint.damage(path, 0, 1)
    parts = json.loads((path / "state.json").read_text())["parts"]
    resealed(path, parts=parts | {name: stored.checksum(step(run, 4) / "__0_0.distcp")})
    found = checkpoint.damage(path, 0, 1)
    assert found == f"{name}: no such file" if name == "elsewhere.distcp" else repr(name) in found


def test_damage_is_found_on_all_ranks_and_the_run_goes_on_from_the_newest_that_is_whole(run, saved, tmp_path, capsys):
    """A flipped bit, and a part of another step, of the same size."""
    flip(step(run, 5) / "__1_0.distcp", 5000)
    shutil.copy(step(run, 3) / "__0_0.distcp", step(run, 4) / "__0_0.distcp")
    assert checkpoint.newest(checkpoint.begin_of("auto", run / "checkpoints", 0.0)) == step(run, 3)
    said = capsys.readouterr().err
    for number, name in ((5, "__1_0.distcp"), (4, "__0_0.distcp")):
        assert f"{step(run, number)} cannot be read ({name}: " in said
    whole = shutil.copytree(saved, tmp_path / "whole")
    for number in (4, 5):
        shutil.rmtree(step(whole, number))
    losses = over(2, dict.fromkeys(("run", "whole"), dataclasses.replace(TINY, resume="auto", steps=5)), tmp_path)
    assert losses["run"] == losses["whole"] and len(losses["run"]) == 5
    names = [f"step-0000000{end}" for end in ("3", "4.aside", "5.aside")]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == names


def test_a_broken_checkpoint_that_was_named_is_refused_with_the_older_ones_on_every_rank(run):
    newest, older = step(run, 5), step(run, 4)
    config = train.resolved(dataclasses.replace(TINY, resume=str(newest)), 2)
    (newest / "__1_0.distcp").write_bytes((newest / "__1_0.distcp").read_bytes()[:1000])
    first, second = torchrun.local(refused, 2, "cpu", config, str(run))
    assert first == second and "\n" not in first and str(older) in first
    assert f"{newest} cannot be read (__1_0.distcp: " in first and "'bytes': 1000" in first


def test_every_byte_that_is_changed_is_noticed(run):
    path = step(run, 5)
    names = sorted(p.name for p in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "index.json", "state.json"]
    for name in names:
        content = (path / name).read_bytes()
        for at in np.linspace(0, len(content) - 1, 12).astype(int):
            flip(path / name, at)
            assert name in (checkpoint.damage(path, 0, 1) or ""), f"{name}, byte {at} of {len(content)}"
            assert [checkpoint.damage(path, rank, 3) for rank in range(3)] != [None] * 3
            (path / name).write_bytes(content)
        (path / name).unlink()
        assert name in checkpoint.damage(path, 0, 1)
        (path / name).write_bytes(content)
    assert checkpoint.damage(path, 0, 1) is None


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew(tmp_path):
    for number in (1, 2):
        (made(tmp_path, number) / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"no checkpoint can be read: .*step-00000002 .*step-00000001 .*run=NAME"):
        checkpoint.newest(checkpoint.begin_of("auto", tmp_path, 0.0))
    assert checkpoint.newest([]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -5), ("step", 3.5), ("step", 1.0), ("step", 1e9), ("step", True), ("step", "1"), ("step", None),
     ("step", 2), ("steps", 0), ("sequences", -3), ("sequences", 0), ("sequences", 1.5), ("sequences", "abc"),
     ("data", 3), ("model", 3), ("parts", {"/etc/passwd": {}}), ("parts", {"a/b": {}}), ("parts", 3),
     ("parts", {"": {}})],
)  # fmt: skip
def test_an_impossible_state_is_refused(field, value, tmp_path):
    path = made(tmp_path, 1)
    resealed(path, **{field: value})
    with pytest.raises(ValueError, match=r"step-00000001 cannot be read \(state\.json: .*there is no older one"):
        checkpoint.matching(path, {"data": {"documents": ""}})


@pytest.mark.parametrize("text", ["[]", "", "{", "[" * 10**5, '{"step": 1, "model": {}, "sequences": 1}'])
def test_a_state_of_another_shape_cannot_be_read(text, tmp_path):
    """The last one is of an older version, without checksums."""
    path = made(tmp_path, 1)
    (path / "state.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"step-00000001 cannot be read \(state\.json: " + "it has no checksums" * ("1" in text)
    ):
        checkpoint.matching(path, {})


def test_only_the_name_that_a_step_gives_is_a_checkpoint(tmp_path):
    names = [
        "step-00000002",
        "step-00000010",
        "step-1000000000",
        "step-5",
        "step--0000005",
        "step-000003.5",
        "step-1e9",
    ]
    for name in [*names, "step-00000003.part", "step-0000000\u0664", "step-000000002"]:
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.numbered(tmp_path)] == names[:3]


def test_a_run_folder_that_is_deleted_while_it_trains_is_noticed(tmp_path):
    run = tmp_path / "run"
    log = metrics.Log(run, TINY)
    log.write({"kind": "step", "step": 1})
    one, optimizer = small()
    with alone():
        checkpoints = checkpoint.Checkpoints(run, 2, None)
        shutil.rmtree(run)
        with pytest.raises(OSError, match=r"run/metrics\.jsonl was deleted or moved"):
            log.write({"kind": "step", "step": 2})
        checkpoints.save(7, one, optimizer, {})
        with pytest.raises(OSError, match=r"save step 7 in .*run was deleted or moved"):
            checkpoints.finish()
    log.close()
    assert not run.exists()
    run.mkdir()
    (run / "metrics.jsonl").touch()  # another run's, under the same name
    with pytest.raises(OSError, match="deleted or moved"):
        again = metrics.Log(run, TINY)
        (run / "metrics.jsonl").rename(run / "old")
        (run / "metrics.jsonl").touch()
        again.write({"kind": "step", "step": 1})


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_disk_without_room_is_an_error_of_its_file_and_nothing_half_written_stays(room, tmp_path):
    """A limit on the size of files stands for the disk: of the pieces, of the index, or of all."""
    one, optimizer = small()
    with alone():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        log = metrics.Log(tmp_path, TINY)
        with at_most(room):
            checkpoints.save(7, one, optimizer, {"notes": "x" * 10**5})
            with pytest.raises(OSError, match=r"save step 7 in .*, where .* MB are free \(free space, or use folder"):
                checkpoints.finish()
            with pytest.raises(OSError, match=r"could not write .*metrics\.jsonl"):
                log.write({"kind": "step", "step": 1, "more": "x" * 10**5})
        assert list(checkpoints.folder.iterdir()) == []
        checkpoints.save(8, one, optimizer, {"model": {}, "sequences": 8})  # there is room again
        checkpoints.finish()
    assert checkpoint.damage(checkpoints.folder / "step-00000008", 0, 1) is None


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
    one, optimizer = small()
    with alone():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(1, one, optimizer, {"model": {}, "sequences": 1})
        checkpoints.finish()
    part = f"{checkpoints.folder}/step-00000001.part"
    files = {f"{part}/{name}" for name in ("__0_0.distcp", "index.json")}
    assert files < set(did)
    assert did[-4:] == [f"{part}/state.json", part, "step-00000001.part -> step-00000001", str(checkpoints.folder)]


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_disk_that_fails_is(tmp_path, monkeypatch):
    def failing(number: int):
        def fsync(file: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    stored.durable_names(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        stored.durable_names(tmp_path)


def generate(run: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / "generate.py"), str(run), "def main(", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    one = nn.Linear(4, 4)
    return one, torch.optim.AdamW(one.parameters())


def refused(config: Train, folder: str) -> str:
    """What a rank says that cannot go on."""
    try:
        work(config, folder, time.time())
    except ValueError as error:
        return str(error)
    return "nothing"
