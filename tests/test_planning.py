"""A plan is chosen honestly, says why, and every explicit choice is kept."""

import dataclasses
import re

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


@pytest.mark.parametrize(("kv_heads", "travels"), [(2, "keys"), (8, "queries")])
def test_backward_sends_what_is_fewer_bytes_and_says_so(kv_heads, travels):
    def one(mesh):
        return ra.plan(mesh, seq_len=4096, heads=(8, kv_heads), head_dim=64)

    for plan in run(one, ring=4):
        assert plan.backward == travels and f"in backward {travels} (" in plan.explain()


@pytest.mark.parametrize(("kv_heads", "groups", "far"), [(8, 2, 2), (16, 2, 4), (12, 3, 3), (4, 1, 1), (2, 1, 1)])
def test_heads_are_exchanged_in_as_many_groups_as_save_time(kv_heads, groups, far, monkeypatch):
    def one(mesh, seq_len):
        mesh.device_type = "cuda"
        return ra.plan(mesh, seq_len=seq_len, heads=(48, kv_heads), head_dim=128).explain()

    def explained(seq_len):
        return run(lambda mesh: one(mesh, seq_len), ulysses=4)[0]

    assert f"heads exchanged in {groups} group" in explained(131072)
    assert "heads exchanged in 1 group (" in explained(16384)
    slow = dataclasses.replace(HARDWARE["h200"], link=25e9)
    monkeypatch.setitem(HARDWARE, "h200", slow)
    assert f"heads exchanged in {far} group" in explained(131072)
    assert "heads exchanged in 1 group (" in explained(1024)


def test_groups_that_cannot_be_are_refused():
    def one(mesh, **choices):
        return ra.plan(mesh, seq_len=64, heads=(8, 4), head_dim=8, **choices)

    with pytest.raises(ValueError, match="groups=3 does not divide the 2 key heads that a rank attends to; leave it"):
        run(lambda mesh: one(mesh, groups=3), ulysses=2)
    with pytest.raises(ValueError, match="groups=2 cuts what Ulysses and gather exchange"):
        run(lambda mesh: one(mesh, groups=2, strategy="ring"), ring=2)


@pytest.mark.parametrize(("hosts", "route"), [(0, "relay"), (1, "direct"), (2, "levels"), (4, "relay")])
def test_the_route_goes_by_the_hosts(hosts, route):
    assert run(lambda mesh: ra.plan(mesh, seq_len=64), ring=4, hosts=hosts)[0].route == route


def test_documents_that_are_known_choose_the_layout():
    def one(mesh, lengths):
        return ra.plan(
            mesh, seq_len=4096, heads=(8, 2), head_dim=64, docs=ra.Docs.from_lengths(lengths), strategy="ring"
        ).layout

    assert set(run(lambda mesh: one(mesh, [3000, 500, 596]), ring=4)) == {"striped"}  # balanced for any documents
    inside = run(lambda mesh: one(mesh, 16 * [256]), ring=4)  # nothing needs to travel in one of these
    assert set(inside) <= {"zigzag", "contiguous"}


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"route": "around"}, "route='around': choose one of auto, direct, relay, levels"),
        ({"together": 0}, "together=0: how many blocks a step may bring, at least 1"),
        ({"backward": "values"}, "backward='values': choose one of auto, keys, queries"),
        ({"backward": "queries", "route": "relay"}, "backward='queries' goes with route='direct'"),
        ({"route": "levels", "hosts": 3}, "ring=2 lies on hosts=3"),
        ({"transport": "pigeon"}, "transport='pigeon': choose one of auto, symmetric, group"),
    ],
)
def test_an_unknown_way_is_refused(choice, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        run(lambda mesh: ra.plan(mesh, seq_len=64, **choice), ring=2)
