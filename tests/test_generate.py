"""The example that generates text with what `ringattn train` has saved: the same text on any number of ranks."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run as run_ranks
from ringattn.conf.schema import Model
from tests.launched import launched
from tests.training import TINY, over

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "generate.py"
PROMPT, COUNT = "def main(", 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return a_run_of(Model(), tmp_path_factory.mktemp("runs"))


def a_run_of(model, folder):
    """Three steps of training."""
    over(2, {"small": replace(TINY, model=model, steps=3, save_every=3, seq_len=256)}, folder)
    return folder / "small"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_that_of_the_whole_model(trained, example):
    """Greedy: every byte is the likeliest after all before it, as one pass over the finished text says it."""
    prompt, cpu = torch.tensor([list(PROMPT.encode())]), torch.device("cpu")

    def one_rank(mesh):
        decoder = example.load(trained, cpu, max_len=len(PROMPT) + COUNT)
        plan = ra.plan(mesh, seq_len=prompt.shape[1])
        return list(example.generate(decoder, plan, prompt, COUNT, warmth=0, chunk=3))

    texts = run_ranks(one_rank, ring=2, ulysses=2)
    assert all(text == texts[0] for text in texts)
    decoder = example.load(trained, cpu, max_len=1)
    whole = torch.cat([prompt, torch.tensor([texts[0]])], 1)
    with torch.no_grad():
        scores = decoder(whole)[0, prompt.shape[1] - 1 : -1]
    ahead = scores.max(-1).values - scores.gather(1, torch.tensor(texts[0])[:, None])[:, 0]
    assert ahead.max() <= 1e-4, f"byte {ahead.argmax()} is {ahead.max()} less likely than another"


@pytest.mark.slow
def test_two_ranks_generate_what_one_generates(trained, example, tmp_path, capfdbinary):
    arguments = [str(trained), PROMPT, str(COUNT), "1.0"]
    example.main(*arguments)
    alone = capfdbinary.readouterr().out
    assert alone.startswith(PROMPT.encode()) and len(alone) == len(PROMPT) + COUNT
    assert alone in launched(SCRIPT, arguments, 2, tmp_path).encode(errors="surrogateescape")
