"""Training under Ray: a rank dies, a node dies, nodes run short; the losses are as if nothing had been."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.conf.schema import Train
from ringattn.launch.processes import RankError
from ringattn.launch.train import checkpoint, metrics
from ringattn.launch.train import ray as on_ray

ROOT = Path(__file__).parent.parent
WORDS = ("experiment=smoke", "model.dim=16", "model.hidden=16", "seq_len=64", "data=files", "device=cpu",
         f"data.path={Path(json.__file__).parent}", "data.suffix=.py", "picture=false", "steps=60",
         "save_every=5", "nproc=2", "run=run")  # fmt: skip
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
               "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3"}  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed (pip install '.[ray]')"),
    pytest.mark.skipif(not find_spec("hydra"), reason="hydra-core is not installed (pip install '.[train]')"),
]


class Run:
    """`ringattn train cluster=ray` in a process of its own, whose output is read as it comes."""

    def __init__(self, folder: Path, *words: str):
        self.folder, self.output = folder, folder / "output"
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            (sys.executable, "-m", "ringattn.launch.train", *WORDS, "cluster=ray", f"folder={folder}", *words),
            env={**os.environ, **ENVIRONMENT}, cwd=folder, stdout=self.output.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ended(self, seconds: float = 900.0) -> str:
        self.process.wait(timeout=seconds)
        return self.output.read_text()

    def steps(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    def after(self, steps: int, seconds: float = 900.0) -> None:
        """Wait until so many steps were done since the last attempt began, counting those done twice."""
        end, goal = time.monotonic() + seconds, self.steps() + steps
        while self.steps() < goal:
            assert self.process.poll() is None, f"ended too early: {self.output.read_text()}"
            assert time.monotonic() < end, f"nothing happened in time: {self.output.read_text()}"
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        """The process of a rank in the newest attempt."""
        return int(re.findall(rf"pid=(\d+)\) world_rank={rank},", self.output.read_text())[-1])

    def losses(self) -> list[float]:
        return [r["loss"] for r in metrics.read(self.folder / "run" / "metrics.jsonl") if r["kind"] == "step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    run = Run(tmp_path_factory.mktemp("whole"), "cluster=local", "save_every=0")
    output = run.ended()
    assert run.process.returncode == 0, output
    return run.losses()


@pytest.fixture(scope="module")
def nodes() -> Iterator:
    """A cluster that asks everybody for its token."""
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()
    del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]


@pytest.fixture
def cluster(nodes):
    """Four nodes on this machine: one where the driver is, three with a CPU each."""
    while len(nodes.worker_nodes) < 3:
        nodes.add_node(num_cpus=1)
    return nodes


def node_of(cluster, pid: int):
    """The node whose raylet started a process."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return next(n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid == parent)


def reachable() -> set[str]:
    """The sockets that listen here beyond the loopback, as the kernel writes their addresses."""
    rows = [line.split() for f in ("tcp", "tcp6") for line in Path("/proc/net", f).read_text().splitlines()[1:]]
    loopback = "0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:"
    return {row[1] for row in rows if row[3] == "0A" and not row[1].startswith(loopback)}


def test_a_cluster_of_one_run_listens_on_the_loopback_alone(tmp_path, undisturbed, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = reachable()
    run = Run(tmp_path)
    run.after(steps=7)
    assert reachable() <= before
    output = run.ended()
    assert run.process.returncode == 0, output
    assert output.count(" 60/60  loss") == 1, output
    assert run.losses() == undisturbed and (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_a_killed_rank_and_a_killed_node_cost_nothing_but_time(cluster, tmp_path, undisturbed):
    run = Run(tmp_path, f"cluster.address={cluster.address}", "cluster.placement=SPREAD")
    run.after(steps=7)
    os.kill(run.pid(1), signal.SIGKILL)
    run.after(steps=7)
    cluster.remove_node(node_of(cluster, run.pid(1)), allow_graceful=False)
    output = run.ended()
    assert run.process.returncode == 0, output
    assert len(set(re.findall(r"goes on after step (\d+)", output))) == 2, output
    assert run.losses() == undisturbed


def test_a_sigterm_to_the_driver_saves(cluster, tmp_path, undisturbed):
    run = Run(tmp_path, f"cluster.address={cluster.address}")
    run.after(steps=7)
    run.process.send_signal(signal.SIGTERM)
    output = run.ended()
    assert run.process.returncode == 0, output
    done = int(re.search(r"stopped after step (\d+) of 60, saved", output)[1])
    assert checkpoint.numbered(tmp_path / "run" / "checkpoints")[-1].name == f"step-{done:08d}"
    assert run.losses() == undisturbed[:done]


def test_an_impossible_run_is_one_error_and_not_tried_again(cluster, tmp_path):
    run = Run(tmp_path, f"cluster.address={cluster.address}", "data.path=/nowhere", "nproc=1")
    output = run.ended()
    assert run.process.returncode == 2, output
    assert output.splitlines()[-1].startswith("ringattn train: data.path=/nowhere does not exist")
    assert output.count("does not exist") == 1 and not re.search(r"RayTrainWorker.*Traceback", output), output
    with pytest.raises(ValueError, match="nproc=99 ranks need a CPU each, and Ray has"):
        on_ray.sized(Train(nproc=99, device="cpu"), {"CPU": 3.0})
    os.environ["RAY_AUTH_TOKEN"], token = "0" * 64, os.environ["RAY_AUTH_TOKEN"]
    stranger = Run(tmp_path / "stranger", f"cluster.address={cluster.address}")
    os.environ["RAY_AUTH_TOKEN"] = token
    output = stranger.ended()
    assert stranger.process.returncode == 2 and "is the token" in output and "Traceback" not in output, output


def jax_part(tokens: int) -> tuple[int, int, np.ndarray]:
    """One process of a JAX program: attention over the processes of all."""
    import jax

    import ringattn as ra
    import ringattn.jax

    if tokens < 1:
        raise ValueError(f"tokens={tokens}")
    mesh = ringattn.jax.init_mesh(ring=len(jax.devices()))
    plan = ra.plan(mesh, seq_len=tokens, heads=(4, 2), head_dim=16)
    whole = jax.jit(lambda q, k, v: plan.unshard(ra.attention(plan.shard(q), plan.shard(k), plan.shard(v), plan)))
    return jax.process_count(), jax.device_count(), np.asarray(whole(*qkv(tokens)).addressable_data(0))


def qkv(tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, tokens, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]


def test_processes_of_one_jax_program(cluster, monkeypatch):
    pytest.importorskip("jax", reason="jax is not installed")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    expected = ra.attention(*map(torch.from_numpy, qkv(101))).numpy()
    for processes, devices, result in on_ray.jax_run(jax_part, 2, 101, address=cluster.address):
        assert (processes, devices) == (2, 2)
        np.testing.assert_allclose(result, expected, atol=2e-6)
    with pytest.raises(RankError, match="ValueError: tokens=0"):
        on_ray.jax_run(jax_part, 2, 0, address=cluster.address)
