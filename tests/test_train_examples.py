"""The examples run, at a small size, as they say they are run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import launched

ROOT = Path(__file__).parent.parent
NEEDS = {"finetune_hf": "transformers", "trainer_hf": "accelerate"}
WORDS = {
    "finetune_hf": ["", str(ROOT / "LICENSE"), "256", "4"],
    "long_layer": ["512"],
    "trainer_hf": [],  # from any folder: its own text
}


def test_every_example_is_run_here():
    elsewhere = [  # in tests of their own
        "equinox_layer", "generate", "long_trl", "needle", "ring_in_one_file", "train_flax", "who_holds_what",
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


def calls(*words, more=None):
    """What examples print when they are called with these words, and their exit statuses: one process for all calls."""
    asked = json.dumps([
        [[str(ROOT / "examples" / f"{name}.py"), *rest], (more or {}).get((name, *rest), {})] for name, *rest in words
    ])  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, asked], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=600,
    )  # fmt: skip
    assert "Traceback" not in done.stdout, done.stdout
    return [
        (printed, int(status))
        for printed, status in re.findall(r"(.*?)^status (\d+)$", done.stdout, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.slow
def test_examples_explain_themselves(tmp_path, monkeypatch):
    """Asked to, called with wrong words, without torchrun, and of a text that is not there."""
    monkeypatch.chdir(tmp_path)
    expected = {
        ("generate", "--help"): "make train ARGS=",
        ("generate", "run", "prompt", "20", "warm"): "'warm' is no number that can be here: generate.py RUN PROMPT",
        ("generate", "run", "prompt", "many"): "'many' is no number that can be here",
        ("generate", "run", "prompt", "20", "nan"): "'nan' is no number that can be here",
        ("generate", "runs/none", "x", "5", "0.7"): "runs/none holds no checkpoint yet; make one: make train ARGS=",
        ("generate", "run", "prompt", "20", "0.7"): 'make one: make train ARGS="run=run save_every=40"',
    }
    for name in WORDS:
        expected |= {(name, "--help"): f"examples/{name}.py", (name, ""): "ranks are started by torchrun"}
    texts = [(name, "", "nowhere") for name in NEEDS]  # which read one
    expected |= dict.fromkeys(texts, "nowhere is no file: ")
    results = calls(*expected, more={text: {"RANK": "0"} for text in texts})
    for words, (printed, status) in zip(expected, results, strict=True):
        assert expected[words] in printed and status == (words[1] != "--help"), (words, printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long_layer", "finetune_hf", "trainer_hf"])
def test_the_loss_falls(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    script = ROOT / "examples" / f"{name}.py"
    # its DistributedDataParallel crashes under DETAIL, in torch 2.13 with any model
    printed = launched(script, WORDS[name], 2, tmp_path, debug=name != "trainer_hf")
    losses = [float(x) for x in re.findall(r": loss ([\d.]+)", printed)]
    assert len(losses) >= 4 and losses[-1] < losses[0], printed
