"""bench ring: what it counts, and the timeline it draws."""

import json

import pytest

from ringattn.launch.bench import ring, timeline
from ringattn.launch.bench.timeline import Span

SPANS = [
    Span("forward_kernel", "attention", 0.0, 10.0),
    Span("Memcpy PtoP", "hops", 2.0, 6.0),  # hidden
    Span("Memcpy PtoP", "hops", 8.0, 6.0),  # 4 of its 6 show
    Span("forward_kernel", "attention", 15.0, 5.0),
]


def test_exposed_is_what_moves_while_nothing_computes():
    assert timeline.covered(SPANS) == [(0.0, 14.0), (15.0, 20.0)]
    assert timeline.exposed(SPANS) == pytest.approx(4 / 20)
    assert timeline.idle(SPANS) == pytest.approx(5 / 20)


def test_a_trace_and_a_picture_of_all_ranks(tmp_path):
    said = timeline.save([SPANS, SPANS], tmp_path / "ring.json", "ours 64 forward+backward")
    assert "exposed communication 20.0%" in said
    (picture,) = tmp_path.glob("*.svg")
    assert picture.read_text().count("rank 1") == 1
    (trace,) = tmp_path.glob("*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    moving = [e for e in events if e["ph"] == "X" and e["cat"] == "hops"]
    assert len(moving) == 4 and {e["pid"] for e in moving} == {0, 1} and {e["dur"] for e in moving} == {6.0}


@pytest.mark.parametrize("mask", ["causal", "long", "short", "7"])
def test_pairs_are_counted_right(mask):
    case = ring.Case.of(mask, 64)
    if mask == "causal":
        assert case.pairs == 64 * 65 / 2
    elif mask == "7":
        assert case.pairs == sum(min(t + 1, 7) for t in range(64)) and case.spec.window == 7
    else:
        assert case.docs.length == 131072 and case.pairs == sum(n * (n + 1) / 2 for n in ring.MIXES[mask])


def test_it_runs_on_the_cpu_and_says_how_far_from_the_floor():
    options = ring.Options(
        ranks=2, tokens=[64], heads=2, kv_heads=1, head_dim=8, device="cpu", repeats=1, warmup=0, route="direct",
        strategy="ring", mask=["causal", "20"],
    )  # fmt: skip
    rows = ring.run(options)
    assert [(r["mask"], r["mode"]) for r in rows] == [(m, x) for m in ("causal", "20") for x in options.modes]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["floor_ms"] / row["ms"]) and row["route"] == "direct"
