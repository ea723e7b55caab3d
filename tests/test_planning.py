"""A plan is chosen honestly, says why, and every explicit choice is kept."""

import copy
import dataclasses
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import choosing
from ringattn.choosing import elsewhere
from ringattn.comms.local import run
from ringattn.layouts.layout import Layout
from ringattn.plans.cost import Shape, seen_pairs
from ringattn.plans.machine import Link, load
from ringattn.plans.plan import Plan


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


def test_every_rank_makes_the_same_plan_and_equal_plans_are_equal():
    a, b = on({"ring": 2}, seq_len=100, heads=4, head_dim=8)
    assert a == b and hash(a) == hash(b) and str(a) == str(b)
    assert a != a.for_length(101) and a.for_length(101).for_length(100) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.seq_len = 3


def test_explain_opens_with_a_sentence_and_shows_the_best_candidates_and_the_kernels_reasons():
    plan = on({"sequence": 4}, seq_len=8192, heads=(8, 2), head_dim=64)[0]
    first, second, *lines = plan.explain().splitlines()
    assert "layout: equal work, " in first and second == str(plan)
    data = json.loads(plan.explain(json=True))
    times = [candidate["seconds"] for candidate in data["candidates"]]
    assert len(times) >= 6 and times == sorted(times) and data["plan"] == str(plan)
    rows = [line for line in lines if line.startswith(("  ring ", "  gather ", "  ulysses "))]
    assert len(rows) == min(10, len(times)) and max(map(len, rows)) <= 100
    assert any("kernel auto -> " in line for line in lines) and any("triton: " in line for line in lines)
    assert "give heads=" in on({"ring": 2}, seq_len=64)[0].explain()


def test_work_is_counted_exactly_and_zigzag_balances_it():
    for name, worst in (("zigzag", 1.0), ("contiguous", 1.75), ("striped", 1.01)):
        layout = Layout(name, 1024, 4)
        counts = seen_pairs(layout, layout, ra.AttentionSpec())
        assert counts.sum() == 1024 * 1025 / 2
        assert counts.sum(1).max() / counts.sum(1).mean() == pytest.approx(worst, abs=0.01)


@pytest.mark.parametrize(("ranks", "lengths", "layout"), [
    (8, [26000, *[1500] * 40, *[4000] * 10, 5072], "balanced"),  # striped would bring all keys to all ranks
    (2, [16384, 16384], "contiguous"),
    (8, [131072], "zigzag"),
    (4, 16 * [256], "zigzag"),  # nothing needs to travel
    (8, [[26000, 105072], [131072, 0]], "striped"),  # rows that differ cannot be dealt out
])  # fmt: skip
def test_the_layout_is_chosen_for_the_documents(ranks, lengths, layout):
    docs = ra.Docs.from_lengths(lengths)
    plan = choosing.plan(elsewhere("cuda", [(ranks, 1)]), seq_len=docs.length, heads=(32, 8), head_dim=128, docs=docs)
    assert plan.layout == layout, plan.explain()
    assert (plan.docs is not None) == (layout == "balanced")


def test_gathered_bytes_are_those_of_the_other_ranks_keys():
    shape = Shape(64, 64, heads=8, kv_heads=2, head_dim=16, value_dim=8)
    assert Plan(64, 4, strategy="gather").exchanged(shape) == 3 * 16 * 2 * (16 + 8) * 2
    assert Plan(64, 4).exchanged(shape) == 0  # its steps hide them


def test_keys_of_another_length_are_planned_alike():
    plan = on({"ring": 4}, seq_len=100, key_len=37, layout="zigzag")[0]
    assert plan.keys.seq_len == 37 and plan.keys.layout == "zigzag" and plan.keys.local_len == 10


@pytest.mark.parametrize(("kv_heads", "groups", "far"), [(8, 2, 2), (16, 2, 4), (12, 3, 3), (4, 2, 4), (2, 2, 4)])
def test_heads_are_exchanged_in_as_many_groups_as_save_time(kv_heads, groups, far):
    def chosen(seq_len, machine="h200"):
        target = elsewhere("cuda", [(1, 4)])
        plan = ra.plan(target, seq_len=seq_len, heads=(48, kv_heads), head_dim=128, machine=machine)
        return plan.groups_for(plan.shape(2))

    slow = load("h200").replace(inside=Link(25e9, 25e-6))
    assert [chosen(131072), chosen(16384), chosen(131072, slow), chosen(1024, slow)] == [groups, 1, far, 1]


@pytest.mark.parametrize(("hosts", "route"), [(0, "relay"), (1, "direct"), (2, "levels"), (4, "relay")])
def test_the_route_goes_by_the_hosts(hosts, route):
    assert run(lambda mesh: ra.plan(mesh, seq_len=64), ring=4, hosts=hosts)[0].transport.route == route


@pytest.mark.parametrize("dtype", ["float64", torch.float64, np.float64, np.dtype("float64"), jnp.float64])
def test_dtypes_of_every_framework_are_recognised_by_their_names(dtype):
    assert "(cpu, float64, head dim 8)" in ra.plan(seq_len=64, heads=4, head_dim=8, dtype=dtype).explain()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copied_plan_is_the_same_value(copied):
    plan = ra.plan(seq_len=16)
    other = copied(plan)
    assert other == plan and hash(other) == hash(plan)
    x = torch.randn(1, 16, 2, 8)
    del plan
    assert torch.equal(ra.attention(x, x, x, other), ra.attention(x, x, x))


def test_a_plan_on_ranks_is_copied_with_its_axes_and_pickled_without():
    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=16)
        assert copy.deepcopy(plan).axes is plan.axes
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert not again.axes.here

    run(one_rank, ring=2)


def test_ulysses_may_lie_on_several_hosts():
    plan = on(
        {"ulysses": 4}, seq_len=64, heads=(4, 4), head_dim=8, strategy="ulysses", transport=ra.Transport(hosts=2)
    )[0]
    assert (plan.strategy, plan.transport.route, plan.transport.hosts) == ("ulysses", "direct", 1)


def test_plans_of_one_mesh_share_what_is_cached():
    """A training loop that plans each batch anew keeps at most 64 calls, not the calls of every plan it made."""

    def work(mesh):
        axes, kept = set(), 0
        for n in range(8, 90):
            plan = ra.plan(mesh, seq_len=n)
            q, k, v = (torch.randn(1, plan.local_len, h, 4) for h in (2, 1, 1))
            ra.attention(q, k, v, plan)
            axes.add(id(plan.axes))
            kept = max(kept, len(plan.calls))
        return len(axes), kept

    assert run(work, ring=2) == [(1, 64)] * 2
    assert run(work, sequence=2) == [(1, 64)] * 2
