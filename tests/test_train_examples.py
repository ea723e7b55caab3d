"""The examples run, at a small size, as they say they are run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS = {"finetune_hf": "transformers", "trainer_hf": "accelerate"}
WORDS = {
    "finetune_hf": ["", str(ROOT / "LICENSE"), "256", "4"],
    "long_layer": ["512"],
    "trainer_hf": [],  # from any folder: its own text
}


def test_every_example_is_run_here():
    elsewhere = [  # in tests of their own
        "equinox_layer", "generate", "needle", "ring_in_one_file", "train_flax", "train_jax", "trl_dpo", "trl_grpo",
        "trl_sft", "who_holds_what",
    ]  # fmt: skip
    assert sorted(p.stem for p in (ROOT / "examples").glob("*.py")) == sorted([*WORDS, *elsewhere])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_without_transformers_an_example_says_what_to_install(name, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr == "transformers is not installed; pip install 'ringattn[hf]'\n"


CALLS = """
import json, os, runpy, sys
for words, more in json.loads(sys.argv[1]):
    sys.argv[1:], status = words[1:], 0
    sys.argv[0] = words[0]
    os.environ.update(more)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = 1 if isinstance(end.code, str) else end.code or 0
        print(end.code if isinstance(end.code, str) else "")
    print(f"status {status}", flush=True)
"""


def calls(name, *words, more=None):
    """What an example prints when it is called with these words, and its exit status: one process for all calls."""
    script = str(ROOT / "examples" / f"{name}.py")
    asked = json.dumps([[[script, *one], (more or {}).get(" ".join(one), {})] for one in words])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, asked], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=600,
    )  # fmt: skip
    assert "Traceback" not in done.stdout, done.stdout
    return [
        (said, int(status))
        for said, status in re.findall(r"(.*?)^status (\d+)$", done.stdout, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.slow
def test_generate_explains_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = {
        ("--help",): "make train ARGS=",
        ("run", "prompt", "20", "warm"): "'warm' is no number that can be here: generate.py RUN PROMPT",
        ("run", "prompt", "many"): "'many' is no number that can be here",
        ("run", "prompt", "20", "nan"): "'nan' is no number that can be here",
        ("runs/none", "x", "5", "0.7"): "runs/none holds no checkpoint yet",
        ("run", "prompt", "20", "0.7"): "run holds no checkpoint yet",
    }
    for words, (said, status) in zip(expected, calls("generate", *expected), strict=True):
        assert expected[words] in said and status == (words[0] != "--help"), (words, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_an_example_explains_itself(name):
    """Asked to, without torchrun, and of a text that is not there."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    expected = {("--help",): f"examples/{name}.py", ("",): "ranks are started by torchrun"}
    if name in NEEDS:  # it reads a text
        expected["", "nowhere"] = "nowhere is no file: "
    found = calls(name, *expected, more={" nowhere": {"RANK": "0"}})
    for words, (said, status) in zip(expected, found, strict=True):
        assert expected[words] in said and status == (words[0] != "--help"), (words, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long_layer", "finetune_hf", "trainer_hf"])
def test_the_loss_falls(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    script = ROOT / "examples" / f"{name}.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        *WORDS[name],
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if name == "trainer_hf":  # its DistributedDataParallel crashes under DETAIL, in torch 2.13 with any model
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r": loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 4 and losses[-1] < losses[0], done.stdout
