"""What a run leaves in its folder: a checkpoint goes on anywhere; nothing half-written or of another run is read."""

import dataclasses
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ringattn.conf.schema import Model, Train
from ringattn.launch.processes import RankError
from ringattn.launch.train import checkpoint, metrics
from ringattn.launch.train import start as train
from tests.training import SOURCES, TINY, losses, one_process, over


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_any_number_of_ranks(tmp_path):
    folder = tmp_path / "saved" / "checkpoints"
    later = dataclasses.replace(TINY, resume=str(folder / "step-00000003"))
    on4 = over(4, {"saved": dataclasses.replace(TINY, save_every=1, keep=3), "rest": later}, tmp_path)
    assert [p.name for p in checkpoint.numbered(folder)] == ["step-00000003", "step-00000004", "step-00000005"]
    assert not list(folder.glob("*.part"))
    on1 = over(1, {"on1": later, "whole": TINY}, tmp_path)
    for rest in (on1["on1"], over(2, {"on2": later}, tmp_path)["on2"], on4["rest"]):
        np.testing.assert_allclose(rest, on1["whole"][3:], atol=1e-5)
    assert on4["rest"] == on4["saved"][3:]  # the same ranks: the same bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_checkpoint_of_a_gpu_is_of_its_step_and_goes_on(tmp_path):
    """Copied while the next step runs: no later step may be in it."""
    config = dataclasses.replace(
        TINY, device="cuda", nproc=1, folder=str(tmp_path), picture=False, save_every=1, keep=9
    )
    assert train.local(dataclasses.replace(config, run="whole")) == 0
    whole = losses(tmp_path / "whole")
    for step in (1, 2, 4):
        path = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        assert train.local(dataclasses.replace(config, run=f"from{step}", resume=str(path))) == 0
        np.testing.assert_allclose(losses(tmp_path / f"from{step}"), whole[step:], atol=1e-3)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_used_is_refused(tmp_path):
    over(1, {"saved": dataclasses.replace(TINY, save_every=5)}, tmp_path)
    path = tmp_path / "saved" / "checkpoints" / "step-00000005"

    def message(config: Train) -> str:
        with pytest.raises(RankError) as raised:
            over(1, {"again": dataclasses.replace(config, resume=str(path))}, tmp_path)
        return raised.value.summary

    other = {"model": Model(dim=64), "data": dataclasses.replace(TINY.data, suffix="r.py")}
    refused = message(dataclasses.replace(TINY, seed=7, seq_len=48, batch=3, **other))
    for text in (
        "model.dim is 32 there and 64 here", "; seed is 0 there and 7 here; seq_len is 96 there and 48 here",
        r"data.tokens is '\d+ with checksum \w+' there and '\d+ with",
        "batch x accumulate x strategy.data is 1 there and 3 here",
    ):  # fmt: skip
        assert re.search(text, refused), refused
    state = (path / "state.json").rename(path / "elsewhere")
    assert "state.json is no regular file); name an older one" in message(TINY)
    state.rename(path / "state.json")
    half = path.with_name("step-00000009.part")
    path.rename(half)
    assert checkpoint.numbered(half.parent) == []
    assert len(over(1, {"saved": dataclasses.replace(TINY, resume="auto")}, tmp_path)["saved"]) == 5  # a new start


def test_a_log_is_cut_where_a_run_goes_on_and_kept_where_it_begins_again(tmp_path):
    """A line that was torn, as by a full disk, is left out, and no later one is written behind it."""
    log, rows = tmp_path / "metrics.jsonl", [{"kind": "step", "step": step, "loss": 0.1} for step in (1, 2, 3)]
    log.write_text("\n".join([*map(json.dumps, rows[:2]), "\xff", '{"kind": "st']), encoding="latin-1")
    assert metrics.read(log) == rows[:2]
    metrics.forget_after(log, 1)
    metrics.append(log, rows[2])
    assert metrics.read(log) == [rows[0], rows[2]]
    for _ in range(2):
        metrics.forget_after(log, 0)
        assert metrics.read(log) == [] and metrics.read(tmp_path / "metrics.jsonl.before") == [rows[0], rows[2]]


@pytest.mark.parametrize("live", [False, True])
def test_a_line_that_nobody_reads_any_more_is_no_error(live):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        bar = metrics.Progress(0, 3, stream=stream)
        bar.live = live
        for step in (1, 2, 3):
            bar.show({"step": step, "loss": 1.0, "tokens_per_second": 1e5, "mfu": 0.5, "memory_mib": 1.0})
        bar.close()
        metrics.echo("the end", stream)


def test_a_finished_run_has_nothing_left_to_do(tmp_path, capsys):
    """Also one that a longer run of before left rows behind."""
    config = dataclasses.replace(
        TINY, device="cpu", nproc=1, folder=str(tmp_path), run="run", save_every=3, steps=4, picture=False
    )
    assert train.local(config) == 0
    output = capsys.readouterr()
    assert f"sequences of 96 tokens over 1 rank on cpu; writes to {tmp_path}/run\n" in output.err
    assert [p.name for p in checkpoint.numbered(tmp_path / "run" / "checkpoints")] == ["step-00000003", "step-00000004"]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 8, "loss": 77.0}) + "\n")
    for more in ({}, {"run": "other", "resume": str(tmp_path / "run" / "checkpoints" / "step-00000004")}):
        assert train.local(dataclasses.replace(config, **{"resume": "auto", **more})) == 0
        output = capsys.readouterr().out
        assert "77.0" not in output and ("already at step 4 of 4" in output)


@pytest.mark.slow
def test_a_run_that_goes_on_has_one_line_a_step(tmp_path):
    """Steps after the checkpoint are done again, and so is what was measured at the end."""
    config = dataclasses.replace(TINY, save_every=2, keep=9, reference=True, steps=3)
    over(1, {"run": config}, tmp_path)
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    newest.rename(newest.with_suffix(".part"))
    over(1, {"run": dataclasses.replace(config, resume="auto", steps=4)}, tmp_path)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["ranks"] == 1 and about["config"]["seq_len"] == 96 and about["torch"]
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert {"loss", "lr", "tokens_per_second", "mfu", "memory_mib"} <= set(rows[0])
    for kind, steps in {"step": [1, 2, 3, 4], "save": [2, 4], "eval": [4], "memory": [-8, -4, -2, -1]}.items():
        assert [row["step"] for row in rows if row["kind"] == kind] == steps


@pytest.mark.parametrize("live", [False, True])
def test_every_step_is_a_line_that_fits_the_terminal(live):
    """Which has 80 columns, as without one, unless somebody looks."""
    stream = io.StringIO()
    stream.isatty = lambda: live
    bar = metrics.Progress(0, 100, stream=stream)
    for step in (1, 2, 100):
        bar.show({"step": step, "loss": 12.3456, "tokens_per_second": 1e5 * step, "mfu": 0.5, "memory_mib": 104761.0})
    lines = re.findall(r"[^\r\n]+", stream.getvalue())
    assert [re.findall(r"\d+/100 ", line) for line in lines] == [["1/100 "], ["2/100 "], ["100/100 "]]
    columns = shutil.get_terminal_size().columns
    assert all(len(line) < columns and "s left" in line for line in lines)
    assert lines[0].startswith("  1/100  loss")


def test_training_waits_for_a_copy_and_nothing_else(tmp_path, monkeypatch):
    """Writing takes as long as it likes beside the training; the copies lie in memory that is kept."""
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    may, write = threading.Event(), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda *args: may.wait() and write(*args))
    with one_process():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(1, layer, optimizer, {})
        where = {name: copy.data_ptr() for name, copy in checkpoints.copies.items()}
        assert checkpoint.numbered(checkpoints.folder) == []
        before = layer.weight.detach().clone()
        with torch.no_grad():
            layer.weight.zero_()  # the training goes on
        may.set()
        checkpoints.save(2, layer, optimizer, {})
        assert where == {name: copy.data_ptr() for name, copy in checkpoints.copies.items()}
        checkpoints.finish()
        for step, expected in ((1, before), (2, torch.zeros(64, 64))):
            results = {"weight": torch.empty(64, 64)}
            checkpoint.load_tensors(checkpoints.folder / f"step-{step:08d}", results)
            assert torch.equal(results["weight"], expected)


def test_a_run_never_writes_into_anothers_folder(tmp_path, capsys):
    config = dataclasses.replace(TINY, device="cpu", nproc=1, folder=str(tmp_path), run="run", steps=2, picture=False)
    assert train.local(config) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    for more in ({}, {"resume": str(tmp_path / "other" / "checkpoints" / "step-00000001")}):
        assert train.local(dataclasses.replace(config, **more)) == 2
        expected = f"ringattn train: {tmp_path}/run holds a run; use resume=auto to go on, or another run=NAME\n"
        assert capsys.readouterr().err == expected
    with (tmp_path / "run" / "config.json").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as a run does that still goes on
        assert train.local(dataclasses.replace(config, resume="auto", steps=3)) == 1
        output = capsys.readouterr().err
        assert f"another run is writing to {tmp_path}/run; wait for its end, or use another run=NAME" in output
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert train.local(dataclasses.replace(config, resume="auto", steps=4, eval_every=3)) == 0
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [3, 4]


@pytest.mark.slow
def test_restarts_of_torchrun_refuse_what_the_first_attempt_did(tmp_path):
    """A refusal is a failure for torchrun, which starts the ranks again: they must not take it for their own run."""
    run = {"nproc": 1, "device": "cpu", "folder": str(tmp_path), "run": "run", "steps": 1, "picture": False}
    assert train.local(dataclasses.replace(TINY, **run)) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    words = ("model.dim=32", f"folder={tmp_path}", "device=cpu", f"data.path={SOURCES}", "run=run")
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    command = (*agent, "-m", "ringattn.launch.train", "cluster=torchrun", *words)
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and output.count("holds a run; use resume=auto") == 2, output
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
