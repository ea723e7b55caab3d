"""`ringattn bench kernels` on a CPU, at sizes that take a moment: every case, its rows and its wrong calls."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ringattn.launch.bench import linear, main
from ringattn.launch.bench.kernels import CASES, Options, chosen, doc_lengths, inputs, useful_flops
from ringattn.launch.bench.peers import CONTESTANTS

SMALL = ["tokens=96", "heads=4", "kv_heads=2", "device=cpu", "rounds=1"]


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_a_line_for_each_contestant(case: str, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert main(["kernels", f"cases={case}", "impls=tiled", f"out={out}", *SMALL]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    name = re.sub(r"\d+k", "96", case)  # by the length that it has here
    assert {row["case"] for row in rows} >= {name}
    others = {"torch", "no plan", "a plan", "documents"} if case == "host" else set()
    assert {row["impl"] for row in rows} == {"tiled", *others}
    assert all(row["tokens"] == 96 for row in rows)
    if CASES[case].kind == "attention":
        of_case = [row for row in rows if row["case"] == name]
        assert [row["pass"] for row in of_case] == ["forward", "backward", "both"]
        assert all(row["tflops"] > 0 for row in of_case)
    if CASES[case].kind == "errors":
        assert all(rows[0][f"error_{name}"] < 2e-6 for name in ("out", "dq", "dk", "dv", "lse"))


def test_linear_has_a_line_for_each_pass_and_each_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kda_32k_30docs", "errors_kda"):
        monkeypatch.setitem(linear.CASES, name, replace(linear.CASES[name], heads=2, key_dim=16, value_dim=16))
    out = tmp_path / "lines.jsonl"
    words = ["cases=kda_32k_30docs,errors_kda", f"out={out}", "tokens=64", "device=cpu", "rounds=1"]
    assert main(["linear", *words, "impls=chunkwise,op,states"]) == 0
    times, errors = [], []
    for row in map(json.loads, out.read_text().splitlines()):
        (errors if row["case"] == "errors_kda" else times).append(row)
    passes = ("forward", "backward", "both")
    assert [(row["impl"], row["pass"]) for row in times] == [(n, p) for n in ("op", "states") for p in passes]
    assert all(row["over_states"] > 0 and row["tokens_per_us"] > 0 for row in times[:3])
    assert [row["impl"] for row in errors] == ["chunkwise", "op"]
    assert all(row[f"error_{n}"] < 2e-6 for row in errors for n in ("out", "dq", "dk", "dv", "dg", "dbeta"))


@pytest.mark.parametrize("case", ["causal_8k_d64", "docs_64k_d64", "square_16k"])
def test_auto_is_beside_each_kernel_in_turns(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    assert main(["kernels", f"cases={case}", f"out={out}", "rounds=3", *SMALL[:-1]]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"auto", "tiled"} <= {row["impl"] for row in rows} and "auto: " in capsys.readouterr().out
    assert all(row["over_tiled"] > 0 for row in rows if row["impl"] == "auto")


def test_what_a_kernel_and_attention_compute_of_a_case_is_the_same() -> None:
    for case in ("causal_8k", "window_64k", "docs_64k"):
        given = inputs(replace(CASES[case], tokens=96), Options(device="cpu", heads=4, kv_heads=2))
        passes = [CONTESTANTS[name](given) for name in ("auto", "tiled")]
        (out, (partial, _)), grads = (call["forward"]() for call in passes), [call["backward"]() for call in passes]
        for x, y in zip((out, *grads[0]), (partial, *grads[1]), strict=True):
            torch.testing.assert_close(x.detach(), y)


def test_a_case_is_called_by_the_length_that_it_has() -> None:
    assert chosen(Options(device="cpu")) == CASES
    longer = chosen(Options(device="cpu", tokens=2048))
    assert list(longer) == [
        "causal_2k", "causal_2k_d64", "causal_2k_d256", "full_2k", "full_2k_d64", "window_2k", "docs_2k",
        "docs_2k_d64", "docs_2k_mix", "square_2k", "decode_2k", "decode_8x2k", "errors_2k", "host",
    ]  # fmt: skip
    assert {case.tokens for case in longer.values()} == {2048} and longer["causal_2k_d64"].dim == 64
    assert longer["decode_8x2k"].batch == 8


def test_contestants_of_one_case_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    main(["kernels", "cases=full_16k", "impls=sdpa_cpu,tiled", "backward=false", f"out={out}", *SMALL])
    sdpa, tiled = (json.loads(line) for line in out.read_text().splitlines())
    assert tiled["over_sdpa_cpu"] == pytest.approx(sdpa["ms"] / tiled["ms"])  # of one round


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
