"""`ringattn bench`: its suites on a CPU, at sizes that take a moment; how their rows are kept and compared."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.choosing import elsewhere, factored
from ringattn.launch import words
from ringattn.launch.bench import kernels, main, masks, over_ranks, plans, ring
from ringattn.launch.bench.timing import FLOPS
from ringattn.launch.rows import Row, read


@pytest.mark.parametrize("mask", ["causal", "full", "7", "first:3:9", "chunk:11", "long", "even:24", "lognormal:9:1.4"])
def test_pairs_are_those_of_the_mask(mask):
    case = masks.case_of(mask, 64)
    q, k, v = (torch.zeros(1, case.tokens, 1, 4, dtype=torch.float64) for _ in range(3))
    _, lse = ra.attention(q, k, v, **case.asked, return_lse=True)  # equal scores: the log of how many keys are seen
    assert case.pairs == pytest.approx(float(lse.exp().sum()), abs=1e-6)


def cut_short(options):
    yield {"ms": float(dist.get_rank())}
    dist.barrier()
    raise ValueError("an hour later")


def test_the_rows_of_a_run_that_fails_are_in_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ring, "run", lambda options: over_ranks(cut_short, options, "ms"))
    out = tmp_path / "rows.jsonl"
    assert words.main(["bench", "ring", "device=cpu", "tokens=64", "ranks=2", f"out={out}"]) == 2
    assert "an hour later" in capsys.readouterr().err
    (row,) = read(out)
    assert row["ms"] == 1.0 and row["ranks"] == 2 and row["commit"]


def test_it_runs_on_the_cpu_and_says_how_far_from_the_floor():
    options = ring.Options(
        ranks=2, tokens=[64], heads=2, kv_heads=1, head_dim=8, device="cpu", repeats=1, route="direct",
        layout=["contiguous"], strategy="ring", mask=["causal", "20", "first:2:9", "lognormal:9:1"],
    )  # fmt: skip
    rows = list(ring.run(options))
    assert [(r["mask"], r["mode"]) for r in rows] == [(m, x) for m in options.mask for x in FLOPS]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["floor_ms"] / row["ms"]) and row["route"] == "direct"
        assert row["MB"] > 0 and row["peak_mib"] >= 0
    causal = [row["MB"] for row in rows if row["mask"] == "causal"]
    block = 64 // 2 * 2 * 8 * 4 / 1e6  # keys and values of a rank; the gradients of those that came go back
    assert causal == [block, 2 * block]


@pytest.mark.parametrize("rule", ["gated", "kimi"])
def test_states_are_as_large_for_any_length(rule):
    options = ring.Options(
        ranks=2, tokens=[64, 256], heads=2, kv_heads=2, head_dim=8, device="cpu", repeats=1, rule=rule,
        layout=["contiguous"], scan=["ring", "gather"],
    )  # fmt: skip
    rows = list(ring.run(options))
    assert [(row["route"], row["mode"]) for row in rows[:4]] == [(s, m) for s in options.scan for m in FLOPS]
    assert [row["MB"] for row in rows[:4]] == [row["MB"] for row in rows[4:]] and all(row["ratio"] > 0 for row in rows)
    assert rule != "gated" or rows[0]["MB"] == 2 * 8 * 8 * 4 / 1e6


@pytest.mark.slow
def test_every_candidate_of_a_plan_is_measured_beside_what_was_predicted(tmp_path):
    out, settings = tmp_path / "rows.jsonl", ["auto/256/4/2/causal", "cudnn/64/2/1/causal", "auto/128/4/2/short"]
    given = ["device=cpu", "head_dim=8", f"settings={','.join(settings)}", "within=9", "machine=cpu", f"out={out}"]
    assert words.main(["bench", "plans", *given]) == 0
    rows = read(out)
    tokens = [int(word.split("/")[1]) for word in plans.SETTINGS]
    assert len(set(plans.SETTINGS)) == 24 and (min(tokens), max(tokens)) == (8192, 524288)
    assert {row["setting"] for row in rows} == {settings[0], settings[2]}  # nothing here runs the second one
    ways = [(row["plan"], row["layout"]) for row in rows if (row["setting"], row["mode"]) == (settings[0], "forward")]
    assert sorted(ways) == [
        ("gather 2", "contiguous"), ("gather 2", "zigzag"), ("ring 2", "contiguous"), ("ring 2", "zigzag"),
        ("ulysses 2", "contiguous"),
    ]  # fmt: skip
    free = ra.plan(elsewhere("cpu", factored(2)), seq_len=256, heads=(4, 2), head_dim=8, machine="cpu")
    both = [row for row in rows if row["setting"] == settings[0] and row["mode"] == "forward+backward"]
    assert [row["pick"] for row in both] == 4 * [False] + [True]
    assert (both[-1]["plan"], both[-1]["layout"]) == (f"{free.strategy} 2", free.layout)
    assert both[-1]["predicted"] == pytest.approx(1e3 * free.report()[1]["candidates"][0]["seconds"])
    assert both[-1]["of_best"] == both[-1]["ms"] / min(row["ms"] for row in both)
    assert all(row["off"] == row["predicted"] / row["ms"] - 1 for row in rows)


SMALL = ["heads=4", "kv_heads=2", "head_dim=16", "device=cpu"]


def rows_of(folder: Path, suite: str, *words: str) -> list[Row]:
    out = folder / "lines.jsonl"
    assert main([suite, f"out={out}", *SMALL, *words]) == 0
    return read(out)


def test_every_contestant_has_a_line_for_each_mask_length_and_mode(tmp_path: Path, capsys) -> None:
    rows = rows_of(tmp_path, "kernels", "tokens=96,128", "mask=causal,even:32", "impls=auto,tiled,fa4", "repeats=2")
    modes = "forward", "forward+backward"
    cases = [(mask, n, mode) for mask in ("causal", "even:32") for n in (96, 128) for mode in modes]
    assert [(r["mask"], r["tokens"], r["mode"]) for r in rows[::2]] == cases
    assert "fa4: " in capsys.readouterr().err
    assert all(r["tflops"] > 0 and r["over_tiled"] > 0 for r in rows if r["impl"] == "auto")
    auto, sdpa = rows_of(tmp_path, "kernels", "tokens=96", "impls=auto,sdpa_cpu", "repeats=1")[-4:-2]
    assert auto["over_sdpa_cpu"] == pytest.approx(sdpa["ms"] / auto["ms"])  # of one round
    assert {name for names in kernels.DEFAULT.values() for name in names} <= {*kernels.NAMES}
    pairs = 96 * 97 / 2
    assert auto["tflops"] == pytest.approx(4 * 16 * 4 * pairs / 1e9 / auto["ms"])


def test_tokens_are_decoded_beside_a_copy_and_prompts_beside_a_ring(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "inference", "tokens=64", "chunk=16", "ranks=2", "repeats=1", "moves=auto,queries")
    assert [r["way"] for r in rows] == ["decode", "ring", "whole", "whole", "chunks", "chunks"]
    assert [r["move"] for r in rows[1:]] == ["keys", *2 * ["auto", "queries"]]
    assert all(r["ratio"] == r["floor_ms"] / r["ms"] for r in rows if r["way"] != "ring")
    assert {r["floor_ms"] for r in rows[2:]} == {rows[1]["ms"]}
