"""What a training run may be told: every key, and what is said about one that does not exist."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="hydra-core is not installed (pip install '.[train]')")

from ringattn.conf import complete, compose, schema
from ringattn.conf.schema import Data, Model, Strategy, Train
from ringattn.launch import train

ROOT = Path(__file__).parent.parent
FILES = Data(path=str(ROOT / "conf"))
RUN = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 60}


def composed(*words: str) -> Train:
    found = []
    assert compose.run(list(words), lambda config: found.append(config) or 0) == 0
    return found[0]


def test_the_files_choose_values_and_words_change_them():
    config = composed("model=small", "strategy=hybrid", "model.layers=2", "optimizer.lr=1e-4")
    assert (config.model.dim, config.model.layers, config.strategy.ulysses) == (512, 2, 2)
    assert config.optimizer.lr == 1e-4


def test_every_file_of_every_group_composes():
    for group in schema.GROUPS:
        for name in compose.files(group):
            assert isinstance(composed(f"{group}={name}"), Train)


def test_nothing_said_is_the_schema_itself():
    config = composed()
    assert config == dataclasses.replace(Train(), data=config.data, strategy=config.strategy)
    assert config.model == Model()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy.rnig=2"], "no key 'strategy.rnig'; did you mean 'strategy.ring'?"),
        (["+sp.rnig=4"], "no key 'sp.rnig'; did you mean 'strategy.ring'?"),
        (["++model.dmi=4"], "no key 'model.dmi'; did you mean 'model.dim'?"),
        (["seqlen=4"], "no key 'seqlen'; did you mean 'seq_len'?"),
        (["modle=tiny"], "no key 'modle'; did you mean 'model'?"),
        (["model=tinny"], "model=tinny: choose one of block8b, hybrid, small, tiny; did you mean 'tiny'?"),
        (["strategy.layout=zigzga"], "did you mean 'zigzag'?"),
        (["seq_len=0"], "seq_len=0: must be above 0"),
        (["model.heads=3"], "model.heads=3 does not divide model.dim=128"),
        (["run=../x"], "is a name inside folder=runs"),
        (["seq_len=abc"], "seq_len=abc: expected int"),
        (["model.window=wide"], "model.window=wide: expected int | None"),
        (["run=a(b"], "run=a(b: "),
        (["nproc=0"], "nproc=0: must be above 0"),
        (["data.held_out=-1"], "data.held_out=-1: must be 0 or above"),
        (["+model._target_=os.system"], "no key 'model._target_'"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, said, capsys):
    assert compose.run(words, lambda config: 0) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_as_many_ranks_start_as_the_strategy_says():
    def ranks(**said):
        return train.resolved(Train(device="cpu", strategy=Strategy(**said)), None)[1]

    assert [ranks(), ranks(ulysses=3), ranks(ring=1, ulysses=3), ranks(ring=1)] == [2, 6, 3, 1]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"nproc": 9999}, "9999 ranks, each a process here"),
        ({"nproc": 1, "resume": "nowhere"}, "nowhere is not a complete checkpoint"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(choices, said, capsys):
    assert train.here(Train(device="cpu", dry_run=True, seq_len=64, data=FILES, **choices)) == 2
    assert said in capsys.readouterr().err


def test_a_sweep_runs_every_value_and_is_refused_among_started_ranks(tmp_path, capsys):
    seen = []
    words = ["--multirun", "seq_len=16,32", f"folder={tmp_path}"]
    assert compose.run(words, lambda config: seen.append(config.seq_len) or 0) == 0
    assert seen == [16, 32]
    assert compose.run(words, lambda config: 0, started=True) == 2
    assert "sweep outside torchrun" in capsys.readouterr().err


def test_a_rank_leaves_rank_0_the_time_to_say_what_is_wrong(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(compose, "leave_to_first", lambda: waited.append(capsys.readouterr().err))
    assert compose.run(["seq_len=-1"], lambda config: 0, rank=1) == 2
    assert waited == [""]
    assert capsys.readouterr().err == "ringattn train: rank 1: seq_len=-1: must be above 0\n"


def test_help_names_every_key_and_every_file(capsys):
    assert compose.run(["--help"], lambda config: 1) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}=" in text for name, _ in schema.every_key())
    assert "experiment=h200_long" in text


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("mod", ["model.", "model="]),
        ("model=t", ["model=tiny"]),
        ("model.l", ["model.layers="]),
        ("cluster.ki", ["cluster.kind="]),
        ("strategy.layout=z", ["strategy.layout=zigzag"]),
        ("++dry_run=", ["++dry_run=true", "++dry_run=false"]),
        ("nowhere", []),
    ],
)
def test_the_shell_completes(word, found):
    assert complete.candidates(word) == found


def test_bash_completes(tmp_path):
    script = subprocess.run([sys.executable, "-m", "ringattn", "train", "--completion"], **RUN).stdout
    asked = "COMP_LINE='ringattn train strategy.layout=z'; COMP_POINT=${#COMP_LINE}; _ringattn; echo ${COMPREPLY[@]}"
    said = subprocess.run(["bash", "-c", f"{script}\n{asked}"], **RUN)
    assert said.stdout == "zigzag\n", said.stderr


def test_a_saved_configuration_is_read_back():
    config = Train(model=Model(dim=64), seq_len=99)
    assert schema.from_dict(dataclasses.asdict(config)) == config
    with pytest.raises(ValueError, match=r"did you mean 'model\.dim'"):
        schema.from_dict({"model": {"dmi": 3}})
