"""The JAX training example makes the losses of `ringattn train`, from the same words."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("hydra")

ROOT = Path(__file__).parent.parent
WORDS = [
    "experiment=smoke",
    "steps=20",
    "nproc=2",
    "data.path=" + str(ROOT / "LICENSE"),
    "seq_len=250",
    "picture=false",
]


def run(command, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_twenty_losses_equal_torchs(tmp_path):
    said = run([str(ROOT / "examples" / "train_jax.py"), *WORDS], tmp_path)
    found = [float(x) for x in re.findall(r"loss (\S+)", said)]
    run(["-m", "ringattn", "train", *WORDS, f"folder={tmp_path}", "run=torch"], tmp_path)
    (log,) = (tmp_path / "torch").rglob("*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [row["loss"] for row in rows if row["kind"] == "step"]
    assert len(found) == len(expected) == 20
    assert expected[-1] < expected[0] - 0.5
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-4
