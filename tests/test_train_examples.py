"""The examples run, at a small size, as they say they are run."""

import re
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
        "generate", "long_trl", "needle", "ring_in_one_file", "train_flax", "who_holds_what",
    ]  # fmt: skip
    assert sorted(p.stem for p in (ROOT / "examples").glob("*.py")) == sorted([*WORDS, *elsewhere])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_the_loss_falls(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "torch"))
    script = ROOT / "examples" / f"{name}.py"
    # its DistributedDataParallel crashes under DETAIL, in torch 2.13 with any model
    printed = launched(script, WORDS[name], 2, tmp_path, debug=name != "trainer_hf")
    losses = [float(x) for x in re.findall(r"\bloss'?:? '?([\d.]+)", printed)]
    assert len(losses) >= 4 and losses[-1] < losses[0], printed
