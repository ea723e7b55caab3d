"""Training: the loss does not depend on the ranks, and what a run reports is right."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run as run_ranks
from ringattn.conf.schema import Cluster, Data, Model, Strategy, Train
from ringattn.launch.train import data, estimate, parallelize
from ringattn.launch.train import start as train
from ringattn.launch.train.trainer import batch_loss, learning_rate
from ringattn.masks.bands import bounds_at, families
from ringattn.plans.machine import of_device
from tests.training import TINY, over, where

ROWS = Path(__file__).parent.parent / "benchmarks" / "train-h200.jsonl"
MEASURED = [json.loads(line) for line in ROWS.read_text().splitlines()]


SHORT = dataclasses.replace(TINY, steps=3)
GATED, KIMI = (dataclasses.replace(TINY.model, softmax_every=2, convolution=3, rule=rule) for rule in ("gated", "kimi"))
WAYS = {
    "zigzag": where(layout="zigzag", keys="ring"),
    "gather, recomputed cheap": where(keys="gather", layout="striped", recompute="cheap"),
    "ulysses, accumulated": dataclasses.replace(where(ulysses=4, keys="ulysses"), accumulate=2),
    "hybrid, recomputed pointwise": where(ulysses=2, keys="ring", recompute="pointwise"),
    "recomputed from the host": where(recompute="cheap", offload=True),
    "uneven, recomputed": dataclasses.replace(where(recompute="block"), seq_len=97),
    "data": where(data=2),
    "gated and softmax layers": dataclasses.replace(where(layout="zigzag", keys="ring"), model=GATED),
    "kimi and softmax layers, recomputed": dataclasses.replace(
        where(recompute="pointwise", ulysses=2, keys="ring", layout="contiguous"), model=KIMI
    ),
}


@pytest.mark.slow
def test_the_loss_is_that_of_one_rank_whatever_the_strategy(tmp_path):
    others = {"two sequences": {"batch": 2}, "uneven": {"seq_len": 97}}
    others |= {"gated": {"model": GATED}, "kimi": {"model": KIMI}}
    on_one_rank = {"one": SHORT, **{name: dataclasses.replace(SHORT, **change) for name, change in others.items()}}
    losses = over(1, on_one_rank, tmp_path / "1")
    same = {"uneven, recomputed": "uneven", "data": "two sequences", "ulysses, accumulated": "two sequences"}
    same |= {"gated and softmax layers": "gated", "kimi and softmax layers, recomputed": "kimi"}
    jobs = {name: dataclasses.replace(config, steps=SHORT.steps) for name, config in WAYS.items()}
    for name, results in over(4, jobs, tmp_path / "4").items():
        expected = losses[same.get(name, "one")]
        gap = max(abs(a - b) for a, b in zip(results, expected, strict=True))
        limit = 1e-5 if jobs[name].model == TINY.model else 2e-5  # Adam divides small gradients by their size
        assert gap <= limit, f"{name}: the loss differs from one rank's by {gap:.1e}: {results} and {expected}"
        assert expected[-1] < expected[0]


def test_bfloat16_keeps_float32_master_weights(tmp_path):
    low = dataclasses.replace(TINY, precision="bfloat16")
    results = over(2, {"low": low, "full": TINY}, tmp_path)
    assert results["low"] != results["full"]
    assert max(abs(a - b) for a, b in zip(results["low"], results["full"], strict=True)) < 0.05


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['layers']} blocks, {row['tokens']} tokens")
def test_a_dry_run_foresees_the_memory_that_was_measured(row):
    m = Model(head_dim=128, **{k: row[k] for k in ("dim", "layers", "heads", "kv_heads", "hidden", "vocab")})
    config = Train(model=m, precision="bfloat16", strategy=Strategy(kernel=row["kernel"], recompute=row["recompute"]))
    decoder = parallelize.build(config, torch.device("meta"))
    result = estimate.peak_memory(config, decoder, row["tokens"] // row["ranks"], row["ranks"])
    assert result / 2**20 == pytest.approx(row["memory_mib"], rel=0.2)


def test_the_picture_has_both_runs_and_a_panel_for_memory_only_where_it_was_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    steps = [{"kind": "step", "step": i, "loss": 3.0 - i} for i in range(3)]
    memory = [{"kind": "memory", "step": -1, "seq_len": 64, "memory_mib": 3.0}]
    alone, both = (train.figure_of({"2 ranks": rows, "1 rank": steps}) for rows in (steps, [*steps, *memory]))
    titles = [[axes.get_title() for axes in figure.axes] for figure in (alone, both)]
    assert titles == [["loss"], ["loss", "memory that one pass adds"]]
    assert [len(axes.lines) for axes in both.axes] == [2, 1] and both.axes[1].get_legend() is None
    assert all(tick == round(tick) for tick in both.axes[0].get_xticks())
    assert train.picture(tmp_path, {"2 ranks": steps}) == f", picture {tmp_path}/picture.svg"
    assert (tmp_path / "picture.svg").stat().st_size
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train.picture(tmp_path, {}).startswith("; no picture: matplotlib cannot be imported")


def test_flops_count_the_pairs_that_the_mask_leaves(tmp_path):
    for i, size in enumerate((40, 33, 24)):
        (tmp_path / f"{i}").write_bytes(bytes(size))
    decoder = parallelize.build(TINY, torch.device("meta"))
    for documents, lengths in (("", [[48], [48]]), ("files", [[40, 8], [25, 23]])):
        for window in (None, 4, 40):
            m = dataclasses.replace(TINY.model, window=window)
            config = Train(model=m, data=Data(path=str(tmp_path), held_out=0, documents=documents), seq_len=48, batch=2)
            spec, docs = ra.AttentionSpec(window=window), ra.Docs.from_lengths(lengths)
            pairs = sum(int((e - b).sum()) for b, e in [bounds_at(*families(spec, 48, docs=docs), np.arange(48))])
            itself = dataclasses.replace(config, model=dataclasses.replace(m, window=1))  # every token sees itself
            flops = [estimate.step_flops(c, decoder, data.of(c), step=3) for c in (itself, config)]
            assert flops[1] == pytest.approx(flops[0] + 12 * (pairs - 96) * m.layers * m.dim)


def test_packed_documents_are_as_if_each_were_alone(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    rng = np.random.default_rng(0)
    for i, size in enumerate((40, 33, 24)):
        (files / f"{i}").write_bytes(rng.integers(0, 256, size, np.uint8).tobytes())
    packed = Data(path=str(files), documents="files", held_out=0)
    jobs = {"packed": dataclasses.replace(TINY, data=packed, seq_len=96, steps=1)}
    jobs["dealt"] = dataclasses.replace(TINY, data=packed, seq_len=24, batch=2, steps=3)
    jobs["zigzag"] = dataclasses.replace(jobs["dealt"], strategy=Strategy(layout="zigzag"))
    runs = over(2, jobs, tmp_path / "runs")
    assert runs["dealt"] == pytest.approx(runs["zigzag"], abs=1e-5)
    result = runs["packed"]
    decoder = parallelize.build(TINY, torch.device("cpu"))
    documents = [torch.tensor(list((files / f"{i}").read_bytes()))[None] for i in range(3)]
    losses = [decoder(x[:, :-1], labels_BT=x[:, 1:]) for x in documents]
    assert result == pytest.approx([torch.cat(losses, 1).mean().item()], abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "layout"), [(Strategy(), "balanced"), (Strategy(layout="zigzag"), "zigzag")], ids=["auto", "zigzag"]
)
def test_the_documents_of_a_batch_are_dealt_out_unless_a_layout_is_named(strategy, layout, tmp_path):
    for i, size in enumerate((40, 33, 24)):
        (tmp_path / f"{i}").write_bytes(bytes(range(size)))
    config = dataclasses.replace(TINY, data=Data(path=str(tmp_path), documents="files", held_out=0), seq_len=48,
                                 batch=2, strategy=strategy)  # fmt: skip
    samples = data.of(config)
    batch = [samples.train(0), samples.train(1)]

    def one_rank(mesh):
        plan, plans = ra.plan(mesh, seq_len=48, heads=(4, 2), head_dim=8, layout=strategy.layout), []

        def decoder(inputs, plan, docs, labels_BT):
            plans.append(plan)
            return (1000 * inputs + labels_BT).float()

        job = SimpleNamespace(plan=plan, config=config, samples=samples, axis=plan.ulysses_axis, decoder=decoder,
                              device=torch.device("cpu"))  # fmt: skip
        loss = batch_loss(job, batch)
        return float(loss), plans[0].layout, plans[0].seq_len

    counted = np.concatenate([np.delete(1000 * w.tokens[:-1] + w.tokens[1:], w.starts - 1) for w in batch])
    expected = pytest.approx(float(counted.mean()), rel=1e-6), layout, 96 if layout == "balanced" else 48
    assert run_ranks(one_rank, ring=2) == [expected] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": Data(path="/nowhere")}, "data.path=/nowhere does not exist"),
        ({"cluster": Cluster(kind="torchrun")}, "no ranks were started; run torchrun"),
        ({"cluster": Cluster(kind="ray", address="127.0.0.1:1")}, "cluster.address=127.0.0.1:1: "),
        ({"cluster": Cluster(kind="ray", address="ray://127.0.0.1:1")}, "refused; is the cluster up"),
        ({"seq_len": 10**9}, "one sequence takes seq_len + 1 = 1000000001"),
        ({"strategy": Strategy(ring=3)}, "does not make 2 ranks; change these, or start 3\n"),
        ({"device": "cuda"}, "torch sees no GPU"),
        ({"resume": "auto"}, "none was given; use run=NAME\n"),
        ({"dry_run": True, "strategy": Strategy(keys="ulysses")}, "strategy='ulysses' means a ring axis of size 1"),
        ({"dry_run": True, "machine": "h10"}, "no such description or file; did you mean 'h100'?"),
        ({"dry_run": True, "machine": "h100"}, "it describes cuda, and device=cpu"),
        ({"dry_run": True, "nproc": 1, "resume": "nowhere"}, "nowhere cannot be read"),
    ],
)
def test_what_needs_no_rank_is_refused_in_a_sentence_before_one_is_started(change, message, tmp_path, capsys):
    """What is begun is announced in a line of its own, so that one line says that nothing was."""
    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if "cluster" in change and change["cluster"].kind == "ray":
        pytest.importorskip("ray")
    config = dataclasses.replace(TINY, nproc=2, device="cpu", folder=str(tmp_path))
    assert train.local(dataclasses.replace(config, **change)) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringattn train: ") and message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_the_rate_warms_up_and_falls_to_its_end():
    rates = [learning_rate(TINY, step) for step in range(TINY.steps)]
    assert rates[0] == pytest.approx(TINY.optimizer.lr / 2) and max(rates) == TINY.optimizer.lr
    assert rates[-1] == pytest.approx(TINY.optimizer.lr * TINY.optimizer.final)


@pytest.mark.parametrize(("machine", "ranks"), [("h100", 1024), ("a100", 2)])
def test_a_dry_run_starts_no_rank_and_says_how_long_and_whether_it_fits(machine, ranks, capsys, tmp_path):
    big = Model(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256)
    config = dataclasses.replace(TINY, model=big, seq_len=2**20, folder=str(tmp_path), device="cuda", nproc=ranks)
    config = dataclasses.replace(config, data=Data())  # all of the standard library
    assert train.local(dataclasses.replace(config, machine=machine, dry_run=True)) == 0
    output = capsys.readouterr().out
    assert f"ranks              {ranks} on cuda" in output and re.search(r"speed  +[\d,]+ tokens/s, \d+% of", output)
    assert re.search(r"fits  +yes, " if ranks > 2 else r"fits  +no: more ranks", output) and not list(
        tmp_path.iterdir()
    )


@pytest.mark.parametrize("row", MEASURED[:2], ids=lambda row: f"{row['layers']} blocks, {row['tokens']} tokens")
def test_a_dry_run_foresees_the_time_of_a_step_that_was_measured(row):
    m = Model(head_dim=128, **{k: row[k] for k in ("dim", "layers", "heads", "kv_heads", "hidden", "vocab")})
    config = Train(model=m, precision="bfloat16", seq_len=row["tokens"], device="cuda", nproc=row["ranks"],
                   strategy=Strategy(kernel=row["kernel"], recompute=row["recompute"], graphs="off"),
                   dry_run=True)  # fmt: skip
    config = train.resolved(config, row["ranks"])
    flops = estimate.step_flops(config, parallelize.build(config, torch.device("meta")), data.of(config))
    assert parallelize.plan_of(config).graphs == "off"
    result = estimate.step_seconds(config, parallelize.plan_of(config), of_device("cuda"), flops)
    assert result == pytest.approx(row["step_s"], rel=0.2)
