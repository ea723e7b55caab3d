"""Training: the loss does not depend on the ranks, a checkpoint goes on anywhere, and nothing half-written is read."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ringattn as ra
from ringattn.conf.schema import Cluster, Data, Model, Optimizer, Strategy, Train
from ringattn.launch import checkpoint, data, metrics, model, torchrun, train
from ringattn.launch import ray as on_ray
from ringattn.launch.bench import step as bench_step
from ringattn.launch.processes import RankError
from ringattn.launch.trainer import learning_rate, step_flops, work
from ringattn.spec import bounds

SOURCES = str(Path(json.__file__).parent)
TINY = Train(
    model=Model(dim=32, layers=2, heads=4, kv_heads=2, hidden=48),
    data=Data(path=SOURCES, suffix=".py", held_out=1),
    optimizer=Optimizer(warmup=2),
    seq_len=96,
    steps=5,
    reference=False,
)


def over(ranks: int, jobs: dict[str, Train], folder: Path) -> dict[str, list[float]]:
    """The losses of each job, one after the other on the same ranks."""
    configs = {name: train.resolved(config, ranks)[0] for name, config in jobs.items()}
    torchrun.local(several, ranks, "cpu", configs, str(folder))
    return {name: losses(folder / name) for name in jobs}


def several(configs: dict[str, Train], folder: str) -> None:
    for name, config in configs.items():
        work(config, f"{folder}/{name}", time.time())


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "step"]


def where(**choices) -> Train:
    return dataclasses.replace(TINY, strategy=Strategy(**choices))


def test_the_loss_is_that_of_one_rank_whatever_the_strategy(tmp_path):
    batch = dataclasses.replace(TINY, batch=2)
    one = over(1, {"one": TINY, "two_sequences": batch}, tmp_path / "1")
    four = over(
        4,
        {
            "pointwise": where(recompute="pointwise", ulysses=2),
            "cheap": where(recompute="cheap", ulysses=2),
            "zigzag": where(layout="zigzag", keys="ring"),
            "striped": where(layout="striped", keys="ring"),
            "contiguous": where(layout="contiguous", keys="ring"),
            "gather": where(keys="gather"),
            "ulysses": where(ulysses=4, keys="ulysses"),
            "hybrid": where(ulysses=2, keys="ring"),
            "recomputed": where(recompute="block"),
            "uneven": dataclasses.replace(TINY, seq_len=97),
            "data": where(data=2),
            "accumulated": dataclasses.replace(TINY, accumulate=2),
        },
        tmp_path / "4",
    )
    uneven = over(1, {"uneven": dataclasses.replace(TINY, seq_len=97)}, tmp_path / "u")["uneven"]
    for name, found in four.items():
        expected = {"uneven": uneven}.get(name, one["two_sequences" if name in ("data", "accumulated") else "one"])
        gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        assert gap <= 1e-5, f"{name}: the loss differs from one rank's by {gap:.1e}: {found} and {expected}"


def test_a_long_sequence_passes_the_mlp_in_pieces(monkeypatch):
    torch.manual_seed(0)
    whole, cut = model.SwiGLU(8, 24), model.SwiGLU(8, 24, at_once=2 * 5 * 24)
    cut.load_state_dict(whole.state_dict())
    lengths, of = [], model.SwiGLU.of
    monkeypatch.setattr(model.SwiGLU, "of", lambda self, x: lengths.append(x.shape[1]) or of(self, x))
    x = torch.randn(2, 17, 8, requires_grad=True)
    (expected, *grads), (found, *others) = (
        (out, *torch.autograd.grad(out.pow(2).sum(), (x, *mlp.parameters())))
        for mlp in (whole, cut)
        for out in [mlp(x)]
    )
    assert torch.allclose(found, expected, atol=1e-6) and lengths == [17, 5, 5, 5, 2, 2, 5, 5, 5]
    for a, b in zip(grads, others, strict=True):
        assert (a - b).norm() <= 2e-6 * a.norm()


def test_a_hybrid_of_linear_and_softmax_attention_trains_as_on_one_rank(tmp_path):
    mixed = dataclasses.replace(TINY.model, softmax_every=2, convolution=3)
    jobs = {
        "zigzag": dataclasses.replace(where(layout="zigzag", keys="ring"), model=mixed),
        "contiguous": dataclasses.replace(where(ulysses=2, keys="ring", layout="contiguous"), model=mixed),
        "recomputed": dataclasses.replace(where(recompute="pointwise", ulysses=2), model=mixed),
    }
    expected = over(1, {"one": dataclasses.replace(TINY, model=mixed)}, tmp_path / "1")["one"]
    assert expected[-1] < expected[0]
    for name, found in over(4, jobs, tmp_path / "4").items():
        assert np.abs(np.subtract(found, expected)).max() <= 1e-5, f"{name}: {found} and {expected}"


@pytest.mark.slow
def test_fifty_steps_on_2_4_and_8_ranks_are_those_of_one(tmp_path):
    long = dataclasses.replace(TINY, steps=50, model=dataclasses.replace(TINY.model, layers=1))
    one = over(1, {"one": long}, tmp_path)["one"]
    for ranks in (2, 4, 8):
        spread = {
            "ring": {"keys": "ring", "layout": "zigzag"},
            "gather": {"keys": "gather", "layout": "striped"},
            "ulysses": {"keys": "ulysses", "ulysses": ranks, "layout": "contiguous"},
            "hybrid": {"keys": "ring", "ulysses": 2, "layout": "contiguous"},
        }
        impossible = {2: "hybrid", 8: "ulysses"}.get(ranks)  # one rank a ring; more ranks than heads
        jobs = {
            f"{name}{ranks}": dataclasses.replace(long, strategy=Strategy(**s))
            for name, s in spread.items()
            if name != impossible
        }
        for name, found in over(ranks, jobs, tmp_path).items():
            np.testing.assert_allclose(found, one, rtol=0, atol=1e-5, err_msg=name)


def test_it_learns(tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    config = dataclasses.replace(TINY, data=Data(path=str(tmp_path / "text")), steps=25, optimizer=Optimizer(lr=1e-2))
    found = over(1, {"learns": config}, tmp_path)["learns"]
    assert found[-1] < 0.5 * found[0], found


def test_a_deep_model_learns_from_its_first_steps(tmp_path):
    """As many blocks as the experiment for GPUs, narrow, at its schedule: the rate grows as the width shrinks."""
    pytest.importorskip("hydra", reason="hydra-core is not installed (pip install '.[train]')")
    from ringattn.conf import compose

    told = []
    compose.run(["experiment=h200_long", "model.layers=28"], lambda config: told.append(config) or 0)
    rate = told[0].optimizer.lr * told[0].model.dim / 64
    deep = dataclasses.replace(
        TINY, model=Model(dim=64, layers=28, heads=4, kv_heads=2, hidden=160), seq_len=64, steps=8,
        optimizer=dataclasses.replace(told[0].optimizer, lr=rate),
    )  # fmt: skip
    found = over(1, {"deep": deep}, tmp_path)["deep"]
    assert found[0] == pytest.approx(np.log(256), abs=0.1)
    assert max(found[1:]) < found[0] and found[-1] < found[0] - 0.7, found


def test_bfloat16_keeps_float32_master_weights(tmp_path):
    low = dataclasses.replace(TINY, precision="bfloat16")
    found = over(2, {"low": low, "full": TINY}, tmp_path)
    assert found["low"] != found["full"]
    assert max(abs(a - b) for a, b in zip(found["low"], found["full"], strict=True)) < 0.05


def test_a_checkpoint_goes_on_on_any_number_of_ranks(tmp_path):
    whole = over(2, {"whole": TINY}, tmp_path)["whole"]
    saved = over(4, {"saved": dataclasses.replace(TINY, save_every=1, keep=3)}, tmp_path)["saved"]
    folder = tmp_path / "saved" / "checkpoints"
    assert [p.name for p in checkpoint.complete(folder)] == ["step-00000003", "step-00000004", "step-00000005"]
    assert not list(folder.glob("*.part"))
    later = dataclasses.replace(TINY, resume=str(folder / "step-00000003"))
    for ranks in (1, 2, 4):
        rest = over(ranks, {f"on{ranks}": later}, tmp_path)[f"on{ranks}"]
        np.testing.assert_allclose(rest, whole[3:], atol=1e-5)
    assert rest == saved[3:]  # the same ranks: the same bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_checkpoint_of_a_gpu_is_of_its_step_and_goes_on(tmp_path):
    """Copied while the next step runs: no later step may be in it."""
    config = dataclasses.replace(
        TINY, device="cuda", nproc=1, folder=str(tmp_path), picture=False, save_every=1, keep=9
    )
    assert train.here(dataclasses.replace(config, run="whole")) == 0
    whole = losses(tmp_path / "whole")
    for step in (1, 2, 4):
        path = tmp_path / "whole" / "checkpoints" / checkpoint.name_of(step)
        assert train.here(dataclasses.replace(config, run=f"from{step}", resume=str(path))) == 0
        np.testing.assert_allclose(losses(tmp_path / f"from{step}"), whole[step:], atol=1e-3)


def test_a_checkpoint_that_cannot_be_used_is_refused(tmp_path):
    over(1, {"saved": dataclasses.replace(TINY, save_every=5)}, tmp_path)
    path = tmp_path / "saved" / "checkpoints" / "step-00000005"

    def message(config: Train) -> str:
        with pytest.raises(RankError) as raised:
            over(1, {"again": dataclasses.replace(config, resume=str(path))}, tmp_path)
        return raised.value.summary

    assert "model.dim is 32 there and 64 here" in message(dataclasses.replace(TINY, model=Model(dim=64)))
    assert "seed is 0 there and 7 here; say the same" in message(dataclasses.replace(TINY, seed=7))
    assert "seq_len is 96 there and 48 here" in message(dataclasses.replace(TINY, seq_len=48))
    assert "data.held_out is 1 there and 2 here" in message(with_data(held_out=2))
    assert "data.documents is '' there and 'files' here" in message(with_data(documents="files"))
    assert re.search(r"data.tokens is '\d+ with checksum \w+' there and '\d+ with", message(with_data(suffix="r.py")))
    assert "no whole number of steps of 3" in message(dataclasses.replace(TINY, batch=3))
    index = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(print))
    assert "asks for builtins.print, which no index needs" in message(TINY)
    (path / ".metadata").unlink()
    assert "is not a complete checkpoint; complete there: none" in message(TINY)
    (path / ".metadata").write_bytes(index)
    half = path.with_name("step-00000009.part")
    path.rename(half)
    assert checkpoint.complete(half.parent) == []
    assert losses_after_auto(tmp_path) == 5  # nothing to go on from: a new start


def with_data(**choices) -> Train:
    return dataclasses.replace(TINY, data=dataclasses.replace(TINY.data, **choices))


def test_a_broken_checkpoint_is_named_with_the_older_ones_on_every_rank(tmp_path):
    over(2, {"saved": dataclasses.replace(TINY, save_every=1, keep=3)}, tmp_path)
    older, newest = (tmp_path / "saved" / "checkpoints" / f"step-0000000{i}" for i in (4, 5))
    again = train.resolved(dataclasses.replace(TINY, resume="auto"), 2)[0]

    def said() -> str:
        first, second = torchrun.local(refused, 2, "cpu", again, str(tmp_path / "saved"))
        assert first == second and "\n" not in first and str(older) in first
        return first

    part = newest / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:1000])
    assert f"{newest} cannot be read (" in said()
    part.unlink()
    assert "No such file or directory" in said()
    part.write_bytes(whole)
    (newest / "state.json").write_text('{"step": 5}')
    assert "state.json: KeyError 'model'" in said()
    (newest / "state.json").write_text("{")
    assert "state.json: JSONDecodeError" in said()
    with pytest.raises(ValueError, match=f"say resume={newest}"):
        checkpoint.read_state(tmp_path / "saved")


def refused(config: Train, folder: str) -> str:
    """What a rank says that cannot go on."""
    try:
        work(config, folder, time.time())
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_checkpoint_from_before_it_knew_its_data_goes_on(tmp_path):
    over(1, {"saved": dataclasses.replace(TINY, save_every=3, steps=3)}, tmp_path)
    path = tmp_path / "saved" / "checkpoints" / "step-00000003" / "state.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({name: saved[name] for name in ("step", "model", "sequences", "seed")}))
    assert len(over(1, {"saved": dataclasses.replace(TINY, resume="auto")}, tmp_path)["saved"]) == 5


def test_a_finished_run_has_nothing_left_to_do(tmp_path, capsys):
    """Also one that a longer run of before left rows behind; and the last step is in the log, however few are."""
    config = dataclasses.replace(
        TINY, device="cpu", nproc=1, folder=str(tmp_path), run="run", save_every=2, log_every=9, steps=4, picture=False
    )
    assert train.here(config) == 0
    assert "in 1 steps" in capsys.readouterr().out
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in rows if r["kind"] == "step"] == [4]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 8, "loss": 77.0}) + "\n")
    for more in ({}, {"run": "other", "resume": str(tmp_path / "run" / "checkpoints" / "step-00000004")}):
        assert train.here(dataclasses.replace(config, **{"resume": "auto", **more})) == 0
        said = capsys.readouterr().out
        assert "77.0" not in said and ("nothing was left to train" in said or "already at step 4 of 4" in said)


def losses_after_auto(folder: Path) -> int:
    return len(over(1, {"saved": dataclasses.replace(TINY, resume="auto")}, folder)["saved"])


def test_training_waits_for_a_copy_and_nothing_else(tmp_path, monkeypatch):
    """What torch does to save takes as long as it likes beside the training; the copies lie in memory that is kept."""
    one = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(one.parameters())
    checkpoint.start_moments(optimizer)
    may, saved = threading.Event(), checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *args, **more: may.wait() and saved(*args, **more))
    with alone():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(1, one, optimizer, {"model": {}})
        where = {name: copy.data_ptr() for name, copy in checkpoints.copies.items()}
        assert checkpoint.complete(checkpoints.folder) == []
        before = one.weight.detach().clone()
        with torch.no_grad():
            one.weight.zero_()  # the training goes on
        may.set()
        checkpoints.save(2, one, optimizer, {"model": {}})
        assert where == {name: copy.data_ptr() for name, copy in checkpoints.copies.items()}
        checkpoints.finish()
        for step, expected in ((1, before), (2, torch.zeros(64, 64))):
            found = {"weight": torch.empty(64, 64)}
            checkpoint.dcp.load(found, checkpoint_id=str(checkpoints.folder / checkpoint.name_of(step)))
            assert torch.equal(found["weight"], expected)


def test_a_disk_without_room_is_said_with_what_to_do_and_nothing_half_written_stays(tmp_path, monkeypatch):
    one = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(one.parameters())

    def full(*args, checkpoint_id, **more):
        (Path(checkpoint_id) / "__0_0.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with alone():
        checkpoints = checkpoint.Checkpoints(tmp_path, 2, None)
        checkpoints.save(7, one, optimizer, {})
        with pytest.raises(OSError, match=r"save step 7 in .*, where .* MB are free \(free space, or say folder"):
            checkpoints.finish()
        assert list(checkpoints.folder.iterdir()) == []


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_never_writes_into_anothers_folder(tmp_path, capsys):
    config = dataclasses.replace(TINY, device="cpu", nproc=1, folder=str(tmp_path), run="run", steps=2, picture=False)
    assert train.here(config) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    elsewhere = {"resume": str(tmp_path / "other" / "checkpoints" / "step-00000001")}
    for more in ({}, elsewhere, {"cluster": Cluster(kind="ray")}):
        if "cluster" in more:  # whose driver asks the same function
            with pytest.raises(ValueError, match="holds a run"):
                train.new_folder(dataclasses.replace(config, **more))
            continue
        assert train.here(dataclasses.replace(config, **more)) == 2
        said = f"ringattn train: {tmp_path}/run holds a run; say resume=auto to go on, or another run=NAME\n"
        assert capsys.readouterr().err == said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert train.here(dataclasses.replace(config, resume="auto")) == 0


@pytest.mark.slow
def test_restarts_of_torchrun_refuse_what_the_first_attempt_did_and_go_on_with_their_own(tmp_path):
    """A refusal is a failure for torchrun, which starts the ranks again: they must not take it for their own run."""
    words = ("model.dim=32", "seq_len=96", f"folder={tmp_path}", "device=cpu", "picture=false", "steps=3",
             "data=files", "data.suffix=.py", f"data.path={SOURCES}", "data.held_out=1", "run=run")  # fmt: skip
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    where = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent.parent}:{tmp_path}", "OMP_NUM_THREADS": "1"}

    def run() -> tuple[int, str]:
        command = (*agent, "-m", "ringattn.launch.train", "cluster=torchrun", *words)
        done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout + done.stderr

    killed = "import os, ringattn.launch.trainer as t\nof = t.train_step\ndef once(job):\n    if job.step == 2 and "
    killed += "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(9)\n    return of(job)\nt.train_step = once\n"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'RANK' in os.environ:\n{textwrap.indent(killed, '    ')}"
    )
    status, said = run()  # dies before anything was saved, and starts again in its own folder
    assert status == 0 and "in 3 steps" in said, said
    (tmp_path / "sitecustomize.py").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    status, said = run()
    assert status != 0 and said.count("holds a run; say resume=auto") == 2, said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_each_run_of_a_sweep_has_a_folder_of_its_own_and_says_which_it_is(capsys):
    pytest.importorskip("hydra", reason="hydra-core is not installed (pip install '.[train]')")
    from ringattn.conf import compose

    def names(*words: str) -> list[str | None]:
        found: list[str | None] = []
        assert compose.run(["--multirun", *words], lambda config: found.append(config.run) or 0) == 0
        return found

    assert names("run=sw", "optimizer.lr=1e-3,3e-3") == ["sw-0", "sw-1"]
    assert capsys.readouterr().err == "optimizer.lr=0.001:\noptimizer.lr=0.003:\n"
    assert names("run=a,b") == ["a", "b"] and names("run=a", "steps=3") == ["a"] and names("steps=3,4") == [None] * 2


def test_a_run_says_what_it_was(tmp_path):
    over(2, {"run": TINY}, tmp_path)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["ranks"] == 2 and about["config"]["seq_len"] == 96 and about["torch"]
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert {"loss", "lr", "tokens_per_second", "mfu", "memory_mib"} <= set(rows[0])
    assert [np.isfinite(r["loss"]) for r in rows if r["kind"] == "eval"] == [True]
    (row,) = bench_step.run(bench_step.Options(str(tmp_path / "run"), repeats=1))
    assert row["ranks"] == 2 and 0 < row["ratio"] < 1 and row["loss"] == losses(tmp_path / "run")[-1]


def test_the_first_step_waits_for_no_measurement_of_memory(tmp_path):
    over(1, {"run": dataclasses.replace(TINY, reference=True, steps=2)}, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in rows] == ["step", "step", "eval", *["memory"] * 4]
    assert [r["seq_len"] for r in rows[3:]] == [12, 24, 48, 96]


def test_a_dry_run_plans_for_gpus_that_are_not_here(tmp_path):
    """In their type and with their speeds, as `ringattn plan` does; more weights than this machine could hold."""
    big = Model(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672, vocab=128256)
    config = dataclasses.replace(TINY, model=big, seq_len=32768, folder=str(tmp_path), device="cuda", nproc=4)
    config = dataclasses.replace(config, strategy=Strategy(kernel="cudnn", recompute="block"), dry_run=True)
    assert train.here(config) == 0
    said = torchrun.local(printed, 4, "cpu", train.resolved(config, None)[0], str(tmp_path))[0]
    assert "4 on cuda, bfloat16" in said and "predicted forward on H200" in said and "kernel cudnn -> cudnn" in said
    assert "route direct" in said and list(tmp_path.iterdir()) == []
    assert f"logits at work     about {2092 * 128256 * 12 / 2**20:.1f} MiB" in said  # of 2092 tokens at once


def printed(config: Train, folder: str) -> str:
    """What a rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        work(config, folder, time.time())
    return said.getvalue()


def test_the_clock_starts_with_the_process():
    if not Path("/proc/self/stat").exists():
        pytest.skip("no /proc")
    lived = time.time() - metrics.process_began()
    time.sleep(0.3)
    assert lived > 0.1 and time.time() - metrics.process_began() == pytest.approx(lived + 0.3, abs=0.2)


def test_picture_shows_both_runs(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [{"kind": "step", "step": i, "loss": 3.0 - i} for i in range(3)]
    rows += [{"kind": "memory", "step": -1, "seq_len": 64, "memory_mib": 3.0}]
    drawn = metrics.picture(tmp_path, {"2 ranks": rows, "1 rank": rows}, 3.2)
    assert drawn is not None and drawn.read_bytes()[:4] == b"\x89PNG"


def test_data_is_read_across_files_and_in_an_order_of_its_own(tmp_path):
    for i, text in enumerate((b"abc", b"", b"defgh", b"ij")):
        (tmp_path / f"{i}.txt").write_bytes(text)
    corpus = data.open_corpus(Data(path=str(tmp_path), suffix=".txt"), 256)
    assert len(corpus) == 10
    for start in range(10):
        for count in range(1, 11 - start):
            assert bytes(corpus.read(start, count).astype(np.uint8)) == b"abcdefghij"[start : start + count]
    cut = data.windows(corpus, Data(held_out=1), seq_len=2, seed=0)
    assert (cut.total, len(cut)) == (4, 3)
    epoch = [tuple(cut.train(i).tokens) for i in range(3)]
    assert len(set(epoch)) == 3 and tuple(cut.evaluation(0).tokens) not in epoch
    assert sorted(epoch) == sorted(tuple(cut.train(3 + i).tokens) for i in range(3))


def test_documents_are_files_or_what_a_token_ends(tmp_path):
    for i, text in enumerate((b"abc", b"", b"de_g", b"ij")):
        (tmp_path / f"{i}.txt").write_bytes(text)
    corpus = data.open_corpus(Data(path=str(tmp_path), suffix=".txt"), 256)

    def window(documents: str, index: int) -> data.Window:
        return data.windows(corpus, Data(held_out=0, documents=documents), seq_len=4, seed=0).window(index)

    assert bytes(window("files", 0).tokens.astype(np.uint8)) == b"abcde"
    assert window("files", 0).cuts.tolist() == [3] and window("files", 1).cuts.tolist() == [3]
    assert window("files", 0).lengths(4) == [3, 1] and window("files", 1).lengths(4) == [3, 1]
    assert window("files", 1).predicted(4).tolist() == [True, True, False, True]
    assert window(str(ord("_")), 1).cuts.tolist() == [2] and window("", 1).lengths(4) == [4]


def test_flops_count_the_pairs_that_the_mask_leaves():
    lengths = [5, 1, 9, 33]
    for window in (None, 4, 40):
        m = dataclasses.replace(TINY.model, window=window)
        spec, docs = ra.AttentionSpec(window=window), ra.Docs.from_lengths(lengths)
        begin, end = bounds(spec, np.arange(48), 48, docs=docs)
        alone = model.train_flops(dataclasses.replace(m, window=1), [48])  # every token sees itself
        more = int((end - begin).sum()) - 48
        assert model.train_flops(m, lengths) == pytest.approx(alone + 12 * more * m.layers * m.dim)


def test_a_step_counts_its_documents(tmp_path):
    for i, size in enumerate((40, 33, 24)):
        (tmp_path / f"{i}").write_bytes(bytes(size))
    whole = Train(model=TINY.model, data=Data(path=str(tmp_path), held_out=0), seq_len=48, batch=2)
    for documents, expected in (("", [[48], [48]]), ("files", [[40, 8], [25, 23]])):
        cut = data.windows(data.open_corpus(whole.data, 256), Data(held_out=0, documents=documents), 48, 0)
        job = SimpleNamespace(config=whole, windows=cut, a_step=2)
        assert step_flops(job, 3) == pytest.approx(sum(model.train_flops(TINY.model, x) for x in expected))


def test_curves_elsewhere_have_a_name_a_kind(tmp_path, monkeypatch):
    """A stand-in for W&B, which need not be installed; the real one was tried by hand."""
    seen = []
    told = SimpleNamespace(log=lambda row, step: seen.append((step, row)), finish=lambda: seen.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **about: seen.append(about) or told))
    log = metrics.Log(tmp_path, dataclasses.replace(TINY, wandb="project"))
    log.write({"kind": "memory", "step": -8, "seq_len": 12, "memory_mib": 1.0})
    log.write({"kind": "step", "step": 1, "loss": 3.0})
    log.write({"kind": "eval", "step": 1, "loss": 2.0})
    log.close()
    about, *rows = seen
    assert (about["project"], about["name"], about["config"]["seq_len"]) == ("project", tmp_path.name, 96)
    assert rows == [(1, {"step/loss": 3.0}), (1, {"eval/loss": 2.0}), "end"]
    assert [r["kind"] for r in metrics.read(tmp_path / "metrics.jsonl")] == ["memory", "eval", "step"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_log_that_cannot_be_written_is_said_with_what_to_do(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = metrics.Log(tmp_path, TINY)
    with pytest.raises(OSError, match=r"metrics\.jsonl \(No space left on device\); free space, or say folder=PATH"):
        log.write({"kind": "step", "step": 1})
    log.close()


def test_packed_documents_are_as_if_each_were_alone(tmp_path):
    import torch

    rng = np.random.default_rng(0)
    for i, size in enumerate((40, 33, 24)):
        (tmp_path / f"{i}").write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())
    packed = Data(path=str(tmp_path), documents="files", held_out=0)
    found = over(2, {"packed": dataclasses.replace(TINY, data=packed, seq_len=96, steps=1)}, tmp_path / "runs")[
        "packed"
    ]
    decoder = model.build(TINY.model, TINY.seed, torch.device("cpu"))
    files = [torch.tensor(list((tmp_path / f"{i}").read_bytes()))[None] for i in range(3)]
    losses = [decoder(x[:, :-1], labels_BT=x[:, 1:]) for x in files]
    assert found == pytest.approx([torch.cat(losses, 1).mean().item()], abs=1e-5)


def test_a_file_of_tokens(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens")
    corpus = data.open_corpus(Data(path=str(tmp_path / "tokens"), tokens="uint16"), 1000)
    assert corpus.read(997, 3).tolist() == [997, 998, 999]
    with pytest.raises(ValueError, match=r"use model\.vocab=1000"):
        data.check_vocabulary(corpus.read(0, 1000), 500)
    assert data.unigram_entropy(corpus) == pytest.approx(np.log(992), abs=1e-6)  # 16 pieces of 62 tokens


def test_a_file_that_is_not_flat_tokens_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"a\.npy begins with NumPy's header.*astype\('uint16'\)\.tofile\(OTHER\)"):
        data.open_corpus(Data(path=str(tmp_path / "a.npy"), tokens="uint16"), 1000)
    (tmp_path / "odd").write_bytes(bytes(101))
    with pytest.raises(ValueError, match=r"odd has 101 bytes, which is no whole number of uint16 tokens"):
        data.open_corpus(Data(path=str(tmp_path / "odd"), tokens="uint16"), 1000)
    assert len(data.open_corpus(Data(path=str(tmp_path / "odd")), 256)) == 101


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": Data(path="/nowhere")}, "does not exist"),
        ({"data": Data(path="")}, "say data.path=PATH"),
        ({"data": Data(path=SOURCES, suffix=".none")}, "holds no file ending in '.none'"),
        ({"cluster": Cluster(kind="torchrun")}, "torchrun started nothing"),
        ({"seq_len": 10**9}, "one sequence takes seq_len + 1 = 1000000001"),
        ({"model": Model(vocab=100)}, "use model.vocab=256"),
        ({"strategy": Strategy(data=3)}, "strategy.data=3 x ulysses=1 does not divide 2 ranks"),
        ({"strategy": Strategy(ring=3)}, "make the product 2, or start 3 ranks"),
        ({"strategy": Strategy(keys="ulysses")}, "strategy='ulysses' means a ring axis of size 1"),
        ({"model": Model(heads=2, kv_heads=1, dim=32), "strategy": Strategy(kernel="cudnn")}, "cuDNN"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(change, said, tmp_path, capsys):
    import torch

    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert train.here(dataclasses.replace(TINY, nproc=2, folder=str(tmp_path), **change)) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_an_elastic_run_fits_any_number_of_ranks_or_is_refused_before_it_begins():
    told = Train(nproc=4, device="cpu", strategy=Strategy(ulysses=4), cluster=Cluster(kind="ray", at_least=1))
    have = {"CPU": 4.0}
    config, _ = on_ray.sized(told, have)
    split = {ranks: train.resolved(on_ray.fitted(config, ranks), ranks)[0].strategy for ranks in (1, 2, 3, 4)}
    assert {r: (s.ring, s.ulysses) for r, s in split.items()} == {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (1, 4)}
    for wrong, said in (
        (Strategy(data=2), "accumulate=2 strategy.data=1"),
        (Strategy(ulysses=2, keys="ulysses"), "strategy.keys=ring"),
        (Strategy(ring=2), "leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            on_ray.sized(dataclasses.replace(told, strategy=wrong), have)


def test_the_rate_warms_up_and_falls_to_its_end():
    rates = [learning_rate(TINY, step) for step in range(TINY.steps)]
    assert rates[0] == pytest.approx(TINY.optimizer.lr / 2) and max(rates) == TINY.optimizer.lr
    assert rates[-1] == pytest.approx(TINY.optimizer.lr * TINY.optimizer.final)
