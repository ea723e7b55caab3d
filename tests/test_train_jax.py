"""The JAX training example makes the losses of `ringattn train`, from the same words."""

import dataclasses
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("hydra")

from ringattn.conf.schema import Strategy
from ringattn.launch.train import configured
from tests.launched import xla_flags
from tests.training import over

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "train_jax.py"
WORDS = ["data.path=" + str(ROOT / "LICENSE"), "seq_len=250", "picture=false"]


def documented():
    """What the example and docs/tutorials/jax.md say to type."""
    (line,) = re.findall(r"^python examples/train_jax.py (.*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert f"python examples/train_jax.py {line}\n" in (ROOT / "docs" / "tutorials" / "jax.md").read_text()
    return line.split()


def start(command, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = xla_flags()
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )


def run(command, folder):
    done = start(command, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_twenty_losses_equal_torchs(tmp_path):
    words = [*documented(), *WORDS]
    text = run([str(EXAMPLE), *words], tmp_path)
    results = [float(x) for x in re.findall(r"loss (\S+)", text)]
    given = []
    assert configured.run(words, lambda config: given.append(config) or 0) == 0
    expected = over(1, {"torch": dataclasses.replace(given[0], strategy=Strategy())}, tmp_path)["torch"]
    assert len(results) == len(expected) == 20
    assert expected[-1] < expected[0] - 0.5
    assert max(abs(a - b) for a, b in zip(results, expected, strict=True)) <= 1e-4


@pytest.mark.slow
def test_an_impossible_setting_is_an_error_of_one_sentence(tmp_path, monkeypatch):
    done = start([str(EXAMPLE), "experiment=smoke", "strategy=hybrid", "nproc=3"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "train_jax.py: strategy.data=1 x ring=None x ulysses=2 does not make 3 ranks" in done.stderr.splitlines()[-1]
    example = runpy.run_path(str(EXAMPLE))
    monkeypatch.setattr(example["jax"].config, "update", lambda name, value: None)
    monkeypatch.setattr(example["jax"], "devices", lambda: ["GPU 0", "GPU 1"])
    assert example["devices_for"](1) == ["GPU 0"] and example["devices_for"](None) == ["GPU 0", "GPU 1"]
    with pytest.raises(ValueError, match="nproc=3 ranks need a device each, and JAX has 2; use nproc=2"):
        example["devices_for"](3)
