"""`ringattn bench kernels` and `inference` on a CPU, at sizes that take a moment: their rows."""

from pathlib import Path

import pytest

from ringattn.launch.bench import kernels, main
from ringattn.launch.rows import Row, read

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
