"""The examples run, at a small size, as they say they are run."""

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
    elsewhere = ["generate", "train_jax"]  # in tests of their own
    assert sorted(p.stem for p in (ROOT / "examples").glob("*.py")) == sorted([*WORDS, *elsewhere])


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_without_transformers_an_example_says_what_to_install(name, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr == "transformers is not installed; in the checkout: pip install '.[hf]'\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "make train ARGS="),
        (["run", "prompt", "20", "warm"], "'warm' is no number that can be here: generate.py RUN PROMPT"),
        (["run", "prompt", "many"], "'many' is no number that can be here"),
        (["run", "prompt", "20", "nan"], "'nan' is no number that can be here"),
        (["runs/none", "x", "5", "0.7"], "runs/none holds no checkpoint yet"),
        (["run", "prompt", "20", "0.7"], "run holds no checkpoint yet"),
    ],
)
def test_generate_explains_itself(words, said, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / "generate.py"), *words]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (words[0] != "--help")


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("word", ["--help", "", "nowhere"])
def test_an_example_explains_itself(name, word, tmp_path):
    """Asked to, without torchrun, and of a text that is not there."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    elif word == "nowhere":
        pytest.skip("reads no text")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({"RANK": "0"} if word == "nowhere" else {})}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *(["", word] if word == "nowhere" else [word])]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    said = {"--help": f"examples/{name}.py", "": "ranks are started by torchrun", "nowhere": "nowhere is no file: "}
    assert said[word] in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (word != "--help")


@pytest.mark.parametrize("name", WORDS)
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
