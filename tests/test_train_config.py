"""The configuration of a training run: every key, and the error for one that does not exist."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="hydra-core is not installed (pip install '.[train]')")

from ringattn.conf import schema
from ringattn.conf.schema import Data, Model, Strategy, Train
from ringattn.launch.train import configured

ROOT = Path(__file__).parent.parent
FILES = Data(path=str(ROOT / "conf"))


def composed(*words: str) -> Train:
    results = []
    assert configured.run(list(words), lambda config: results.append(config) or 0) == 0
    return results[0]


def test_the_files_choose_values_and_words_change_them():
    config = composed("model=small", "strategy=hybrid", "model.layers=2", "optimizer.lr=1e-4")
    assert (config.model.dim, config.model.layers, config.strategy.ulysses) == (512, 2, 2)
    assert config.optimizer.lr == 1e-4


def test_lengths_end_with_k_and_m():
    config = composed("seq_len=4k", "steps=2K", "run=2K")
    assert (config.seq_len, config.steps, config.run) == (4096, 2048, "2K")


def test_every_file_of_every_group_composes():
    for path in (path for group in schema.GROUPS for path in (ROOT / "conf" / group).glob("*.yaml")):
        assert isinstance(composed(f"{path.parent.name}={path.stem}"), Train)


def test_without_arguments_the_configuration_is_the_schema():
    config = composed()
    assert config == dataclasses.replace(Train(), data=config.data, strategy=config.strategy)
    assert config.model == Model()


WORDS = [
    (["strategy.rnig=2"], "no key 'strategy.rnig'; did you mean 'strategy.ring'?"),
    (["model=tinny"], "model=tinny: choose one of block8b, hybrid, small, tiny; did you mean 'tiny'?"),
    (["seq_len=0"], "seq_len=0: must be above 0"),
    (["model.heads=3"], "model.heads=3 does not divide model.dim=128"),
    (["run=../x"], "is a name inside folder=runs"),
    (["seq_len=abc"], "seq_len: expected a whole number; Value 'abc'"),
    (["run='a\x1b[31m'"], r"run='a\x1b[31m': text must be without control characters"),
    (["data.held_out=-1"], "data.held_out=-1: must be 0 or above"),
    (["optimizer.lr=inf"], "optimizer.lr=inf: must be a number, and finite"),
    (["optimizer.beta1=1"], "optimizer.beta1=1.0: must be below 1"),
    (["data.documents=300"], "data.documents=300 ends no document: tokens are 0 to 255"),
    (["run=ä"], """run=ä: this value cannot be read; quotes within quotes may help"""),
    (["+model.foo=3"], "no key 'model.foo'"),
    (["optimizer=adam"], "str is not a subclass of Optimizer"),
    (["optimizer={lrr:3}"], "no key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
    (["seq_len"], "seq_len: give seq_len=VALUE"),
    (["model=tiny,small"], "Ambiguous value for argument 'model=tiny,small'"),
    (["seq_len=${nowhere}"], "Interpolation key 'nowhere' not found"),
    (["--config-dir", "/nope"], "--config-dir /nope: there is no such folder"),
    (["--cfgg", "job"], "no option --cfgg (there are --cfg job"),
    (["run=x${oc.env:HOME}"], "${oc.env:HOME} is refused"),
    (["+hydra.callbacks.x._target_=m.C"], "no key 'hydra.callbacks.x._target_'"),
    (["hydra.searchpath=[pkg://m]"], "no key 'hydra.searchpath'"),
]
FILES_OF_MINE = [
    ("optimizer: {lrr: 3}", "experiment/mine.yaml: no key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
    ("seq_len: abc", "experiment/mine.yaml: seq_len: expected a whole number; Value 'abc'"),
    ("seq_len: [1", "experiment/mine.yaml, line 3: expected ',' or ']'"),
    ("defaults: [override /model: tinny]", "model=tinny: choose one of block8b, "),
    ("model: {_target_: os.system}", "experiment/mine.yaml: no key 'model._target_'"),
    ("run: '${oc.decode:${oc.env:HOME}}'", "${oc.env:HOME} is refused"),
    ("run: '${oc.select:nothing,${oc.env:HOME}}'", "${oc.env:HOME} is refused"),
    ("defaults: [override /model: '${oc.env:HOME}']", "${oc.env:HOME} is refused"),
    (r'run: "a\0b\n"', r"run='a\x00b\n': text must be without control characters"),
    ("a: &a [1]\nb: [" + "*a, " * 17 + "]", "mine.yaml has 17 YAML aliases"),
]
NEAR = "choose one of h200_long, million, mine, smoke; did you mean 'mine'?\n"


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        *((words, "", message) for words, message in WORDS),
        *((["experiment=mine"], text, message) for text, message in FILES_OF_MINE),
        (["experiment=min"], "seq_len: 1", NEAR),
    ],
)
def test_an_impossible_setting_is_an_error_of_one_sentence(words, text, message, tmp_path, capsys):
    """In the words or in experiment/mine.yaml, a file of the user."""
    if text:
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
        words = ["--config-dir", str(tmp_path), *words]
    assert configured.run(words, lambda config: 0) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and os.environ["HOME"] not in error


def test_a_file_of_your_own_is_taken(tmp_path):
    folder = tmp_path / "it's mine, all"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "wide.yaml").write_text("dim: 64\n")
    assert composed("--config-dir", str(folder), "model=wide").model.dim == 64
    assert composed(f"--config-dir={folder}", "model=tiny").model.dim == 128


@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\nhydra: {callbacks: {x: {_target_: this.Cb}}}\n",
        '# @package _global_\nhydra: {job_logging: {formatters: {f: {"()": this.boom}}}}\n',
        "# @package hydra.callbacks\nx: {_target_: this.Cb}\n",
    ],
)
def test_a_configuration_runs_no_code(text, tmp_path):
    """What Hydra would call by name has no effect: the module that holds it (one of Python's) is never imported."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "evil2.yaml").write_text(text)
    configured.run(["--config-dir", str(tmp_path), "experiment=evil2", "dry_run=true"], lambda config: 0)
    assert "this" not in sys.modules


def test_the_resulting_configuration_is_printed_and_nothing_run(capsys):
    assert configured.run(["--cfg", "job", "seq_len=4K"], lambda config: pytest.fail("it ran")) == 0
    assert "\nseq_len: 4096\n" in capsys.readouterr().out


def test_as_many_ranks_start_as_the_strategy_says():
    def ranks(**strategy):
        return configured.resolved(Train(device="cpu", strategy=Strategy(**strategy)), None).nproc

    assert [ranks(), ranks(ulysses=3), ranks(ring=1, ulysses=3), ranks(ring=1)] == [2, 6, 3, 1]
    assert [ranks(ring=1, ulysses=None), ranks(data=3, ulysses=None)] == [2, 6]
    for words, size in {(): 2, ("nproc=4",): 4, ("nproc=4", "strategy.data=2"): 2, ("strategy.ulysses=4",): 4}.items():
        strategy = configured.resolved(composed("strategy=ulysses", "device=cpu", *words), None).strategy
        assert (strategy.keys, strategy.ring, strategy.ulysses) == ("ulysses", 1, size)
