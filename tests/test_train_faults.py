"""What interrupts a training run: a SIGTERM, a killed rank, a full disk. It goes on as if not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="hydra-core is not installed (pip install '.[train]')")

from ringattn.launch.train import checkpoint, metrics
from ringattn.launch.train.start import main
from tests.launched import launched

ROOT = Path(__file__).parent.parent
WORDS = ("experiment=smoke", "model.dim=16", "model.hidden=16", "model.layers=1", "seq_len=64", "data=files",
         f"data.path={Path(json.__file__).parent}", "data.suffix=.py", "picture=false", "device=cpu",
         "steps=20")  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
ENVIRONMENT["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # as users have it: a third less work
TRAIN = (sys.executable, "-m", "ringattn.launch.train")
pytestmark = pytest.mark.slow
PATIENCE = 600.0  # seconds: a busy machine is no fault of ours


def begin(*command: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command, env=ENVIRONMENT | environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "step"]


def wait_for(condition, process: subprocess.Popen, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended too early: {process.communicate()[0]}"
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def torchrun(*words: str, restarts: int = 0) -> tuple[str, ...]:
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return (*agent, f"--max-restarts={restarts}", "-m", "ringattn.launch.train", "cluster=torchrun", *words)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    assert main([*WORDS, f"folder={folder}", "run=whole", "nproc=2"]) == 0
    return losses(folder / "whole")


def test_sigterm_saves_and_ends_cleanly(tmp_path, undisturbed):
    words = (*WORDS, f"folder={tmp_path}", "run=run", "nproc=2")
    process = begin(*TRAIN, *words)
    wait_for(lambda: steps_done(tmp_path / "run") >= 2, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, output
    done = steps_done(tmp_path / "run")
    assert 2 <= done < 20 and f"stopped after step {done} of 20" in output
    assert [p.name for p in checkpoint.numbered(tmp_path / "run" / "checkpoints")] == [f"step-{done:08d}"]
    again = begin(*TRAIN, *words, "resume=auto")
    output = again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 0 and f"goes on after step {done}" in output
    assert losses(tmp_path / "run") == undisturbed


def test_a_killed_rank_under_torchrun_costs_nothing_but_time(tmp_path, undisturbed):
    """Once before anything was saved, when it begins again in its own folder, and once after that."""
    dies = """import os
if os.environ.get("RANK") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import ringattn.launch.train.trainer as trainer
    step = trainer.train_step
    trainer.train_step = lambda job: step(job) if job.step < 2 else os._exit(9)
"""
    (tmp_path / "sitecustomize.py").write_text(dies)
    words = (*WORDS, f"folder={tmp_path}", "run=run", "save_every=3")
    process = begin(*torchrun(*words, restarts=2), PYTHONPATH=f"{ROOT}:{tmp_path}")
    wait_for(lambda: checkpoint.numbered(tmp_path / "run" / "checkpoints"), process)  # a busy machine writes late
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, output
    assert "goes on after step" in output
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_torchrun_has_its_ranks_save(tmp_path, number):
    """Ctrl-C, which torchrun passes on, and torchrun's own death, which its ranks have to notice."""
    process = begin(*torchrun(*WORDS, "steps=3000", f"folder={tmp_path}", "run=run"))
    wait_for(lambda: steps_done(tmp_path / "run") >= 3, process)
    process.send_signal(number)
    output = process.communicate(timeout=PATIENCE)[0]  # returns once the ranks, which hold this pipe too, have ended
    assert process.returncode == (-number if number == signal.SIGKILL else 1)  # torchrun's own way to end
    done = steps_done(tmp_path / "run")
    assert f"stopped after step {done} of 3000, saved" in output and "KeyboardInterrupt" not in output, output
    assert [p.name for p in checkpoint.numbered(tmp_path / "run" / "checkpoints")] == [f"step-{done:08d}"]


def test_a_killed_rank_here_says_how_to_go_on(tmp_path):
    words = (*WORDS, f"folder={tmp_path}", "run=run", "nproc=2", "save_every=3")
    process = begin(*TRAIN, *words)
    wait_for(lambda: steps_done(tmp_path / "run") >= 4, process)
    ranks = [rank for server in children(process.pid) for rank in children(server)]
    os.kill(ranks[-1], signal.SIGKILL)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1
    assert output.endswith(f"\ngo on with the same words and folder={tmp_path} run=run resume=auto\n"), output
    assert "rank 1: ended without a word: killed by signal 9 (SIGKILL)" in output and "Traceback" not in output


def test_a_rank_that_hangs_becomes_an_error(tmp_path):
    process = begin(*torchrun(*WORDS, f"folder={tmp_path}", "run=run", "cluster.timeout=5"))
    wait_for(lambda: steps_done(tmp_path / "run") >= 3, process)
    stopped = children(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    output = ""
    while "ringattn train: rank 0:" not in output:
        output += process.stdout.readline() or pytest.fail(output)
    os.kill(stopped, signal.SIGKILL)  # torchrun itself takes half a minute to end a stopped process
    output += process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    # a collective's own time-out, or under TORCH_DISTRIBUTED_DEBUG=DETAIL the barrier before it, which names the rank
    assert "Timed out waiting 5000ms" in output or "Ranks 1 failed to pass monitoredBarrier in 5000 ms" in output


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_wrong_call_under_torchrun_is_reported_once(tmp_path):
    late = "import os, time\nif os.environ.get('RANK') == '0': time.sleep(3)\n"  # rank 1 finds out first
    (tmp_path / "sitecustomize.py").write_text(late)
    process = begin(*torchrun(*WORDS, f"folder={tmp_path}", "strategy.data=3"), PYTHONPATH=f"{ROOT}:{tmp_path}")
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    assert output.count("strategy.data=3 x ring=None x ulysses=1 does not make 2 ranks") == 1
    assert "Traceback" not in output.split("ChildFailedError")[0].split("torch/distributed")[0]


def test_two_nodes_of_torchrun_train_as_one(tmp_path, undisturbed):
    """One rank each, a shared folder, one rendezvous, whose name the run has."""
    words = [*WORDS, "cluster=torchrun", f"folder={tmp_path}"]
    of_a_node = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "two"}
    launched(ROOT / "launch" / "train" / "__main__.py", words, 2, tmp_path, debug=False, **of_a_node)
    assert losses(tmp_path / "two") == undisturbed
