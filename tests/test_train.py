"""Training: the loss does not depend on the ranks, a checkpoint goes on anywhere, and nothing half-written is read."""

import dataclasses
import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from ringattn.conf.schema import Cluster, Data, Model, Optimizer, Strategy, Train
from ringattn.launch import checkpoint, data, metrics, torchrun, train
from ringattn.launch.processes import RankError
from ringattn.launch.trainer import learning_rate, work

SOURCES = str(Path(json.__file__).parent)
TINY = Train(
    model=Model(dim=32, layers=2, heads=4, kv_heads=2, hidden=48),
    data=Data(path=SOURCES, suffix=".py", held_out=1),
    optimizer=Optimizer(warmup=2),
    seq_len=96,
    steps=5,
    reference=False,
)


def over(ranks: int, jobs: dict[str, Train], folder: Path) -> dict[str, list[float]]:
    """The losses of each job, one after the other on the same ranks."""
    configs = {name: train.resolved(config, ranks)[0] for name, config in jobs.items()}
    torchrun.local(several, ranks, "cpu", configs, str(folder))
    return {name: losses(folder / name) for name in jobs}


def several(configs: dict[str, Train], folder: str) -> None:
    for name, config in configs.items():
        work(config, f"{folder}/{name}", time.time())


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "step"]


def where(**choices) -> Train:
    return dataclasses.replace(TINY, strategy=Strategy(**choices))


def test_the_loss_is_that_of_one_rank_whatever_the_strategy(tmp_path):
    batch = dataclasses.replace(TINY, batch=2)
    one = over(1, {"one": TINY, "two_sequences": batch}, tmp_path / "1")
    four = over(
        4,
        {
            "zigzag": where(layout="zigzag", keys="ring"),
            "striped": where(layout="striped", keys="ring"),
            "contiguous": where(layout="contiguous", keys="ring"),
            "gather": where(keys="gather"),
            "ulysses": where(ulysses=4, keys="ulysses"),
            "hybrid": where(ulysses=2, keys="ring"),
            "recomputed": where(recompute="block"),
            "cheap": where(recompute="cheap", ulysses=2),
            "uneven": dataclasses.replace(TINY, seq_len=97),
            "data": where(data=2),
            "accumulated": dataclasses.replace(TINY, accumulate=2),
        },
        tmp_path / "4",
    )
    uneven = over(1, {"uneven": dataclasses.replace(TINY, seq_len=97)}, tmp_path / "u")["uneven"]
    for name, found in four.items():
        expected = {"uneven": uneven}.get(name, one["two_sequences" if name in ("data", "accumulated") else "one"])
        gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        assert gap <= 1e-5, f"{name}: the loss differs from one rank's by {gap:.1e}: {found} and {expected}"


def test_it_learns(tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    config = dataclasses.replace(TINY, data=Data(path=str(tmp_path / "text")), steps=25, optimizer=Optimizer(lr=1e-2))
    found = over(1, {"learns": config}, tmp_path)["learns"]
    assert found[-1] < 0.5 * found[0], found


def test_bfloat16_keeps_float32_master_weights(tmp_path):
    low = dataclasses.replace(TINY, precision="bfloat16")
    found = over(2, {"low": low, "full": TINY}, tmp_path)
    assert found["low"] != found["full"]
    assert max(abs(a - b) for a, b in zip(found["low"], found["full"], strict=True)) < 0.05


def test_a_checkpoint_goes_on_on_any_number_of_ranks(tmp_path):
    whole = over(2, {"whole": TINY}, tmp_path)["whole"]
    saved = over(4, {"saved": dataclasses.replace(TINY, save_every=1, keep=3)}, tmp_path)["saved"]
    folder = tmp_path / "saved" / "checkpoints"
    assert [p.name for p in checkpoint.complete(folder)] == ["step-00000003", "step-00000004", "step-00000005"]
    assert not list(folder.glob("*.part"))
    later = dataclasses.replace(TINY, resume=str(folder / "step-00000003"))
    for ranks in (1, 2, 4):
        rest = over(ranks, {f"on{ranks}": later}, tmp_path)[f"on{ranks}"]
        np.testing.assert_allclose(rest, whole[3:], atol=1e-5)
    assert rest == saved[3:]  # the same ranks: the same bits


def test_a_checkpoint_that_cannot_be_used_is_refused(tmp_path):
    over(1, {"saved": dataclasses.replace(TINY, save_every=5)}, tmp_path)
    path = tmp_path / "saved" / "checkpoints" / "step-00000005"

    def message(config: Train) -> str:
        with pytest.raises(RankError) as raised:
            over(1, {"again": dataclasses.replace(config, resume=str(path))}, tmp_path)
        return raised.value.summary

    assert "dim is 32 there and 64 here" in message(dataclasses.replace(TINY, model=Model(dim=64)))
    assert "no whole number of steps of 3" in message(dataclasses.replace(TINY, batch=3))
    index = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(print))
    assert "asks for builtins.print, which no index needs" in message(TINY)
    (path / ".metadata").unlink()
    assert "is not a complete checkpoint; complete there: none" in message(TINY)
    (path / ".metadata").write_bytes(index)
    half = path.with_name("step-00000009.part")
    path.rename(half)
    assert checkpoint.complete(half.parent) == []
    assert losses_after_auto(tmp_path) == 5  # nothing to go on from: a new start


def losses_after_auto(folder: Path) -> int:
    return len(over(1, {"saved": dataclasses.replace(TINY, resume="auto")}, folder)["saved"])


def test_a_run_says_what_it_was(tmp_path):
    over(2, {"run": TINY}, tmp_path)
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["ranks"] == 2 and about["config"]["seq_len"] == 96 and about["torch"]
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert {"loss", "lr", "tokens_per_second", "mfu", "memory_mib"} <= set(rows[0])
    assert [np.isfinite(r["loss"]) for r in rows if r["kind"] == "eval"] == [True]


def test_picture_shows_both_runs(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [{"kind": "step", "step": i, "loss": 3.0 - i} for i in range(3)]
    rows += [{"kind": "memory", "step": -1, "seq_len": 64, "memory_mib": 3.0}]
    drawn = metrics.picture(tmp_path, {"2 ranks": rows, "1 rank": rows}, 3.2)
    assert drawn is not None and drawn.read_bytes()[:4] == b"\x89PNG"


def test_data_is_read_across_files_and_in_an_order_of_its_own(tmp_path):
    for i, text in enumerate((b"abc", b"", b"defgh", b"ij")):
        (tmp_path / f"{i}.txt").write_bytes(text)
    corpus = data.open_corpus(Data(path=str(tmp_path), suffix=".txt"), 256)
    assert len(corpus) == 10
    for start in range(10):
        for count in range(1, 11 - start):
            assert bytes(corpus.read(start, count).astype(np.uint8)) == b"abcdefghij"[start : start + count]
    cut = data.windows(corpus, Data(held_out=1), seq_len=2, seed=0)
    assert (cut.total, len(cut)) == (4, 3)
    epoch = [tuple(cut.train(i)) for i in range(3)]
    assert len(set(epoch)) == 3 and tuple(cut.evaluation(0)) not in epoch
    assert sorted(epoch) == sorted(tuple(cut.train(3 + i)) for i in range(3))


def test_a_file_of_tokens(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens")
    corpus = data.open_corpus(Data(path=str(tmp_path / "tokens"), tokens="uint16"), 1000)
    assert corpus.read(997, 3).tolist() == [997, 998, 999]
    with pytest.raises(ValueError, match=r"use model\.vocab=1000"):
        data.check_vocabulary(corpus.read(0, 1000), 500)
    assert data.unigram_entropy(corpus) == pytest.approx(np.log(992), abs=1e-6)  # 16 pieces of 62 tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": Data(path="/nowhere")}, "does not exist"),
        ({"data": Data(path="")}, "say data.path=PATH"),
        ({"data": Data(path=SOURCES, suffix=".none")}, "holds no file ending in '.none'"),
        ({"cluster": Cluster(kind="torchrun")}, "torchrun started nothing"),
        ({"seq_len": 10**9}, "one sequence takes seq_len + 1 = 1000000001"),
        ({"model": Model(vocab=100)}, "use model.vocab=256"),
        ({"strategy": Strategy(data=3)}, "strategy.data=3 x ulysses=1 does not divide 2 ranks"),
        ({"strategy": Strategy(ring=3)}, "make the product 2, or start 3 ranks"),
        ({"strategy": Strategy(keys="ulysses")}, "strategy='ulysses' means a ring axis of size 1"),
        ({"model": Model(heads=2, kv_heads=1, dim=32), "strategy": Strategy(kernel="cudnn")}, "cuDNN"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(change, said, tmp_path, capsys):
    import torch

    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert train.here(dataclasses.replace(TINY, nproc=2, folder=str(tmp_path), **change)) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_the_rate_warms_up_and_falls_to_its_end():
    rates = [learning_rate(TINY, step) for step in range(TINY.steps)]
    assert rates[0] == pytest.approx(TINY.optimizer.lr / 2) and max(rates) == TINY.optimizer.lr
    assert rates[-1] == pytest.approx(TINY.optimizer.lr * TINY.optimizer.final)
