"""`ringattn bench kernels` on a CPU, at sizes that take a moment: every case, its rows and its wrong calls."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ringattn.launch.bench import auto, kernels, linear, main
from ringattn.launch.bench.kernels import CASES, Options, chosen, doc_lengths, inputs, useful_flops

SMALL = ["tokens=96", "heads=4", "kv_heads=2", "device=cpu", "rep=1"]


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_a_line_for_each_contestant(case: str, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert main(["kernels", f"cases={case}", "impls=tiled", f"out={out}", *SMALL]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    name = re.sub(r"\d+k", "96", case)  # by the length that it has here
    assert {row["case"] for row in rows} >= {name} and {row["impl"] for row in rows} == {"tiled"}
    assert all(row["tokens"] == 96 for row in rows)
    if CASES[case].kind == "attention":
        of_case = [row for row in rows if row["case"] == name]
        assert [row["pass"] for row in of_case] == ["forward", "backward"] and all(row["tflops"] > 0 for row in of_case)
    if CASES[case].kind == "errors":
        assert all(rows[0][f"error_{name}"] < 2e-6 for name in ("out", "dq", "dk", "dv", "lse"))


def test_linear_has_a_line_for_each_pass_and_each_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kda_32k_30docs", "errors_kda"):
        monkeypatch.setitem(linear.CASES, name, replace(linear.CASES[name], heads=2, key_dim=16, value_dim=16))
    out = tmp_path / "lines.jsonl"
    words = ["cases=kda_32k_30docs,errors_kda", f"out={out}", "tokens=64", "device=cpu", "rep=1"]
    assert main(["linear", *words, "impls=chunkwise,op,states"]) == 0
    times, errors = [], []
    for row in map(json.loads, out.read_text().splitlines()):
        (errors if row["case"] == "errors_kda" else times).append(row)
    passes = ("forward", "backward", "both")
    assert [(row["impl"], row["pass"]) for row in times] == [(n, p) for n in ("op", "states") for p in passes]
    assert all(row["over_states"] > 0 and row["tokens_per_us"] > 0 for row in times[:3])
    assert [row["impl"] for row in errors] == ["chunkwise", "op"]
    assert all(row[f"error_{n}"] < 2e-6 for row in errors for n in ("out", "dq", "dk", "dv", "dg", "dbeta"))


@pytest.mark.parametrize("case", ["causal_8k_d64", "docs_64k_d64", "square_16k", "host", "ring8_4k"])
def test_auto_is_beside_each_kernel_in_turns(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    words = [f"cases={case}", f"out={out}", "rounds=2", "tokens=96", "heads=4", "kv_heads=2"]
    assert main(["auto", *words, "device=cpu"]) == 0
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if row["case"] == case]
    kind = auto.CASES[case].kind
    if kind == "host":
        assert {row["impl"] for row in rows} >= {"torch", "no plan", "a plan", "documents"}
        assert all(row["us"] > 0 for row in rows)
    elif kind == "ring8":
        assert {row["impl"] for row in rows} == {"auto", "sdpa_cpu", "tiled"}
        assert all(row["error_dq"] < 2e-6 and row["ring_over_one_dq"] < 2 for row in rows)
    else:
        assert {row["pass"] for row in rows} == {"forward", "forward+backward"}
        assert all(row["auto_over"] == 1 for row in rows if row["impl"] == "auto")
    if kind == "attention":
        assert {"auto", "tiled"} <= {row["impl"] for row in rows} and "auto: " in capsys.readouterr().out


def test_a_case_is_called_by_the_length_that_it_has() -> None:
    assert chosen(Options(device="cpu")) == CASES
    longer = chosen(Options(device="cpu", tokens=2048))
    assert list(longer) == [
        "causal_2k", "causal_2k_d64", "full_2k", "window_2k", "docs_2k", "docs_2k_mix", "decode_2k", "decode_8x2k",
        "errors_2k",
    ]  # fmt: skip
    assert {case.tokens for case in longer.values()} == {2048} and longer["causal_2k_d64"].dim == 64
    assert longer["decode_8x2k"].batch == 8


def test_only_cases_of_their_own_lengths_are_held_against_causal_32k(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [{"impl": "triton", "pass": "forward", "tflops": 2.0}]
    monkeypatch.setattr(kernels, "attention", lambda case, options: [dict(row) for row in results])

    def held(**given: int) -> dict[str, float | None]:
        options = Options(cases=["causal_32k", "window", "docs"], device="cpu", **given)
        return {row["case"]: row.get("of_causal_32k") for row in kernels.run(options)}

    assert held() == {
        "causal_32k": None, "window_64k": 1.0, "docs_64k": 1.0, "docs_128k_mix": None
    }  # fmt: skip
    for tokens in (32768, 65536):
        assert set(held(tokens=tokens).values()) == {None}


def test_contestants_of_one_case_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    main(["kernels", "cases=full_16k", "backward=false", f"out={out}", *SMALL])
    sdpa, tiled = (json.loads(line) for line in out.read_text().splitlines())
    assert tiled["over_sdpa_cpu"] == pytest.approx(sdpa["ms"] / tiled["ms"])


def test_useful_work_counts_the_pairs_that_are_seen() -> None:
    options = Options(heads=2, kv_heads=1, device="cpu")
    for name, pairs in (("causal_8k", 8192 * 8193 // 2), ("full_8k", 8192**2)):
        assert useful_flops(inputs(CASES[name], options)) == 4 * 128 * 2 * pairs


def test_documents_are_always_the_same_and_have_the_requested_mean_length() -> None:
    lengths = np.array(doc_lengths(65536))
    assert lengths.sum() == 65536 and lengths.min() >= 100 and lengths.max() <= 16384 and 1700 < lengths.mean() < 2300
    assert (lengths == doc_lengths(65536)).all()


def test_decode_reads_all_keys_with_one_query() -> None:
    given = inputs(CASES["decode_128k"], Options(heads=2, kv_heads=1, device="cpu"), queries=1)
    assert given.q.shape[1] == 1 and given.where.end.tolist() == [[131072]] and given.k.dtype == torch.float32


@pytest.mark.parametrize("word", ["cases=casual_8k", "impls=tilde", "tokens=many"])
def test_a_wrong_word_is_one_sentence(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", word, "device=cpu"]) == 2
    assert word.split("=")[0] in capsys.readouterr().err
