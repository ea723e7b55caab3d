"""A checkpoint is checked before it is loaded: damage to it is found and passed by, and so is what was made up."""

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ringattn.conf.schema import Train
from ringattn.launch.train import checkpoint, metrics, stored, torchrun
from ringattn.launch.train import start as train
from ringattn.launch.train.trainer import work
from tests.training import TINY, made, one_process, over


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
    count = len(saved["parts"])
    parts = [stored.checksum(path / stored.name_of_part(rank)) for rank in range(count)]
    stored.write_state(path, {**saved, "parts": parts, **state})


def another_header(change) -> Callable[[Path], None]:
    """The attack that changes the header of the first part: the pieces by the names of their tensors."""

    def attack(path: Path) -> None:
        file = path / stored.name_of_part(0)
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:end])
        change(entries)
        header = json.dumps(entries).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        resealed(path)

    return attack


def another_index(change) -> Callable[[Path], None]:
    """The attack that changes what state.json says of the tensors."""

    def attack(path: Path) -> None:
        tensors = json.loads((path / "state.json").read_text())["tensors"]
        change(tensors)
        resealed(path, tensors=tensors)

    return attack


def swapped(values: dict, first: str = "norm.weight", other: str = "norm.weight@exp_avg") -> None:
    values[first], values[other] = values[other], values[first]


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """The attack that puts something else in the place of a file."""

    def attack(path: Path) -> None:
        (path / name).rename(path.parent / "elsewhere")
        make(path / name)

    return attack


def a_pickle(path: Path) -> None:
    torch.save({"norm.weight": torch.ones(32)}, path / stored.name_of_part(0))
    resealed(path)


PART = stored.name_of_part(0)
ATTACKS = {
    "a pipe as state": ("state.json", instead("state.json", os.mkfifo)),
    "a pipe as part": (PART, instead(PART, os.mkfifo)),
    "a device": ("state.json", instead("state.json", lambda file: file.symlink_to("/dev/zero"))),
    "a link out of the folder": (PART, instead(PART, lambda file: file.symlink_to("../elsewhere"))),
    "a folder": (PART, instead(PART, Path.mkdir)),
    "no part": (PART, instead(PART, str)),
    "a pickle": (PART, a_pickle),
    "no piece": (PART, another_header(lambda pieces: pieces.pop("norm.weight"))),
    "swapped pieces": (PART, another_header(swapped)),
    "a piece of another tensor": (PART, another_header(lambda p: p["norm.weight"].update(p["norm.weight@exp_avg"]))),
    "a piece beyond the file": (PART, another_header(lambda p: p["norm.weight"].update(data_offsets=[0, 2**40]))),
    "a header beyond the file": (PART, lambda path: flip(path / PART, 6) or resealed(path)),
    "a tensor less": (PART, another_index(lambda tensors: tensors.pop("norm.weight"))),
    "a tensor more": (PART, another_index(lambda tensors: tensors.update(more=["float32", [4], True]))),
    "a huge tensor": (PART, another_index(lambda t: t.update({"norm.weight": ["float32", [2**50, 2**50], True]}))),
    "a negative size": ("state.json", another_index(lambda t: t.update({"norm.weight": ["float32", [-1], True]}))),
    "no dtype": ("state.json", another_index(lambda t: t.update({"norm.weight": ["save", [32], True]}))),
    "no bool": ("state.json", another_index(lambda t: t.update({"norm.weight": ["float32", [32], 2]}))),
    "not a tensor": ("state.json", another_index(lambda t: t.update({"norm.weight": 5}))),
    "no parts": ("state.json", lambda path: resealed(path, parts=[])),
    "a part more": (stored.name_of_part(2), lambda path: resealed(path, parts=[{"bytes": 8, "crc32": "0"}] * 3)),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_not_saved_so_is_never_loaded(attack, run, capsys):
    """Though all checksums are right: the run goes on from the checkpoint before."""
    name, make = ATTACKS[attack]
    make(step(run, 5))
    assert name in " ".join(filter(None, (checkpoint.damage(step(run, 5), rank, 3) for rank in range(3))))
    assert checkpoint.newest(checkpoint.begin_of("auto", run / "checkpoints", 0.0)) == step(run, 4)
    assert f"{step(run, 5)} cannot be read" in capsys.readouterr().err


def test_a_tensor_of_another_size_or_dtype_is_refused(run):
    for other in (torch.zeros(31), torch.zeros(32, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"norm\.weight is \('float32', \[32\]\) there and \('float"):
            stored.load(step(run, 5), {"norm.weight": other})
    with pytest.raises(ValueError, match="none is None there"):
        stored.load(step(run, 5), {"none": torch.zeros(31)})


def test_torchs_and_safetensors_tools_read_a_checkpoint(run):
    """A copy without files whose names begin with a dot is whole, too."""
    safetensors = pytest.importorskip("safetensors.torch")
    path = step(run, 5)
    index = stored.read_state(path)["tensors"]
    whole = {name: torch.empty(saved.size, dtype=getattr(torch, saved.dtype)) for name, saved in index.items()}
    stored.load(path, whole)
    theirs = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    files = [safetensors.load_file(path / stored.name_of_part(rank)) for rank in range(2)]
    assert {f"{t.dtype}" for t in whole.values()} == {"torch.float32", "torch.uint8"} and "norm.weight@step" in index
    for name in index:
        rows = [file[name] for file in files if name in file]
        assert torch.equal(theirs[name], whole[name]), name
        assert torch.equal(rows[0] if len(rows) == 1 else torch.cat(rows), whole[name]), name
    assert not [file for file in path.iterdir() if file.name.startswith(".")]


def test_damage_is_found_on_all_ranks_and_the_run_goes_on_from_the_newest_that_is_whole(run, saved, tmp_path, capsys):
    """A flipped bit, and a part of another step, of the same size."""
    flip(step(run, 5) / "rank-00001.safetensors", 5000)
    shutil.copy(step(run, 3) / "rank-00000.safetensors", step(run, 4) / "rank-00000.safetensors")
    assert checkpoint.newest(checkpoint.begin_of("auto", run / "checkpoints", 0.0)) == step(run, 3)
    output = capsys.readouterr().err
    for number, name in ((5, "rank-00001.safetensors"), (4, "rank-00000.safetensors")):
        assert f"{step(run, number)} cannot be read ({name}: " in output
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
    (newest / "rank-00001.safetensors").write_bytes((newest / "rank-00001.safetensors").read_bytes()[:1000])
    first, second = torchrun.local(refused, 2, "cpu", config, str(run))
    assert first == second and "\n" not in first and str(older) in first
    assert f"{newest} cannot be read (rank-00001.safetensors: " in first and "'bytes': 1000" in first


def test_every_byte_that_is_changed_is_noticed(run):
    path = step(run, 5)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["rank-00000.safetensors", "rank-00001.safetensors", "state.json"]
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
        (made(tmp_path, number) / stored.name_of_part(0)).write_text("{")
    with pytest.raises(ValueError, match=r"no checkpoint can be read: .*step-00000002 .*step-00000001 .*run=NAME"):
        checkpoint.newest(checkpoint.begin_of("auto", tmp_path, 0.0))
    assert checkpoint.newest([]) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -5), ("step", 3.5), ("step", 1.0), ("step", 1e9), ("step", True), ("step", "1"), ("step", None),
     ("step", 2), ("steps", 0), ("sequences", -3), ("sequences", 0), ("sequences", 1.5), ("sequences", "abc"),
     ("data", 3), ("model", 3), ("parts", {"/etc/passwd": {}}), ("parts", 3)],
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
        ValueError,
        match=r"step-00000001 cannot be read \(state\.json: " + "an older version of ringattn" * ("1" in text),
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
    layer, optimizer = small()
    with one_process():
        checkpoints = checkpoint.Checkpoints(run, 2, None)
        shutil.rmtree(run)
        with pytest.raises(OSError, match=r"run/metrics\.jsonl was deleted or moved"):
            log.write({"kind": "step", "step": 2})
        checkpoints.save(7, layer, optimizer, {})
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
    layer, optimizer = small()
    with one_process():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        log = metrics.Log(tmp_path, TINY)
        with at_most(room):
            checkpoints.save(7, layer, optimizer, {"notes": "x" * 10**5})
            with pytest.raises(OSError, match=r"save step 7 in .*, where .* MB are free \(free space, or use folder"):
                checkpoints.finish()
            with pytest.raises(OSError, match=r"could not write .*metrics\.jsonl"):
                log.write({"kind": "step", "step": 1, "more": "x" * 10**5})
        assert list(checkpoints.folder.iterdir()) == []
        checkpoints.save(8, layer, optimizer, {"model": {}, "sequences": 8})  # there is room again
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
    layer, optimizer = small()
    with one_process():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(1, layer, optimizer, {"model": {}, "sequences": 1})
        checkpoints.finish()
    unfinished = f"{checkpoints.folder}/step-00000001.part"
    files = [f"{unfinished}/{name}" for name in (stored.name_of_part(0), "state.json")]
    assert did == [*files, unfinished, "step-00000001.part -> step-00000001", str(checkpoints.folder)]


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


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    layer = nn.Linear(4, 4)
    return layer, torch.optim.AdamW(layer.parameters())


def refused(config: Train, folder: str) -> str:
    """What a rank says that cannot go on."""
    try:
        work(config, folder, time.time())
    except ValueError as error:
        return str(error)
    return "nothing"
