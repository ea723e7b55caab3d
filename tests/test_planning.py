"""A plan is chosen honestly, says why, and every explicit choice is kept."""

import dataclasses

import pytest

import ringattn as ra
from ringattn.comms.local import run
from ringattn.cost import HARDWARE, Shape, pairs, predict
from ringattn.layout import Layout


def on(sizes, **given):
    return run(lambda mesh: ra.plan(mesh, **given), **sizes)


def test_causal_rings_are_balanced_and_others_contiguous():
    assert on({"ring": 4}, seq_len=4096, heads=(8, 2), head_dim=64)[0].layout == "zigzag"
    full = ra.AttentionSpec(causal=False)
    assert on({"ring": 4}, seq_len=4096, heads=(8, 2), head_dim=64, spec=full)[0].layout == "contiguous"
    assert on({"ulysses": 4}, seq_len=4096, heads=(8, 2), head_dim=64)[0].strategy == "ulysses"


@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_an_explicit_choice_is_never_second_guessed(strategy, layout):
    given = {"strategy": strategy, "layout": layout, "kernel": "reference"}
    for plan in on({"ring": 2, "ulysses": 2}, seq_len=640, heads=(4, 2), head_dim=8, **given):
        assert (plan.strategy, plan.layout, plan.kernel) == (strategy, layout, "reference")
        assert (plan.ring, plan.ulysses, plan.local_len) == (2, 2, 160)


def test_a_sequence_axis_is_factored_so_that_heads_divide():
    for plan in on({"sequence": 4}, seq_len=4096, heads=(6, 2), head_dim=64):
        assert plan.ring * plan.ulysses == 4 and 6 % plan.ulysses == 0


def test_every_rank_makes_the_same_plan_and_equal_plans_are_equal():
    a, b = on({"ring": 2}, seq_len=100, heads=4, head_dim=8)
    assert a == b and hash(a) == hash(b) and str(a) == str(b)
    assert a != a.for_length(101) and a.for_length(101).for_length(100) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.seq_len = 3


def test_explain_shows_the_candidates_their_cost_and_the_kernels_reasons():
    text = on({"sequence": 4}, seq_len=8192, heads=(8, 2), head_dim=64)[0].explain()
    rows = [
        line.split()
        for line in text.splitlines()
        if line.split()[2:3] and line.split()[2] in ("ring", "gather", "ulysses")
    ]
    assert len(rows) >= 6 and [float(r[4]) for r in rows] == sorted(float(r[4]) for r in rows)
    assert text.splitlines()[0] == str(on({"sequence": 4}, seq_len=8192, heads=(8, 2), head_dim=64)[0])
    assert "kernel auto -> " in text and "triton: " in text
    assert "say heads=" in on({"ring": 2}, seq_len=64)[0].explain()


def test_predicted_work_is_exact_and_zigzag_balances_it():
    spec = ra.AttentionSpec()
    for name, worst in (("zigzag", 1.0), ("contiguous", 1.75), ("striped", 1.01)):
        layout = Layout(name, 1024, 4)
        counts = pairs(layout, layout, spec)
        assert counts.sum() == 1024 * 1025 / 2
        cost = predict(Shape(1024, 1024, 8, 2, 64, 64), layout, layout, counts, "ring", HARDWARE["h200"])
        assert cost.imbalance == pytest.approx(worst, abs=0.01)


def test_predicted_bytes_are_the_bytes_of_the_blocks():
    layout = Layout("zigzag", 1024, 4)
    shape = Shape(1024, 1024, 8, 2, 64, 32, itemsize=2, batch=3)
    cost = predict(shape, layout, layout, pairs(layout, layout, ra.AttentionSpec()), "ring", HARDWARE["h200"])
    assert cost.sent == 3 * (3 * 256 * 2 * (64 + 32) * 2)


def test_keys_of_another_length_are_planned_alike():
    plan = on({"ring": 4}, seq_len=100, key_len=37, layout="zigzag")[0]
    assert plan.keys.seq_len == 37 and plan.keys.layout == "zigzag" and plan.keys.local_len == 10
    assert "keys 37" in str(plan)
