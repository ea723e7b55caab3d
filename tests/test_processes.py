"""Attention over real processes: gloo collectives, forward and backward, on 2, 4 and 8 ranks."""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.launch.processes import RankError, run
from ringattn.launch.verify.cases import Case
from tests.cases import FEATURES, FEW, attention, check_processes
from tests.launched import as_users_have_it

KINDS = {c.name: c for c in FEATURES}
GROUPS = {
    2: [
        replace(KINDS["all_at_once"], ring=2, layout="striped"),
        replace(KINDS["cross_docs"], ring=2, layout="contiguous"),
        replace(KINDS["docs_rows"], ring=1, ulysses=2, strategy="ulysses", layout="contiguous"),
        replace(KINDS["window"], ring=2, strategy="gather"),
    ],
    4: [c for c in FEW if c.ring * c.ulysses == 4],
    8: [
        replace(KINDS["all_at_once"], ring=2, ulysses=4, layout="zigzag"),
        replace(KINDS["docs"], ring=8, layout="striped"),
        replace(KINDS["multi_query"], ring=1, ulysses=8, strategy="ulysses", layout="contiguous"),
        replace(KINDS["window"], ring=8, layout="contiguous"),
    ],
}


def check(ranks: int, cases: list[Case], through: Any = None) -> None:
    check_processes(ranks, [partial(attention, case) for case in cases], 2e-6, through)


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_equals_dense_float64(ranks):
    check(ranks, GROUPS[ranks])


def test_equals_dense_float64_over_the_groups_that_users_have():
    check(4, GROUPS[4], through=as_users_have_it)


def test_other_ways_to_bring_keys_and_heads_in_groups_equal_it_too():
    rings = [c for c in FEW if c.ring == 4 and c.strategy == "ring"]
    assert len(rings) > 2
    grouped = [replace(KINDS["all_at_once"], ring=2, ulysses=2, strategy=strategy) for strategy in ("ring", "gather")]
    grouped += [replace(KINDS["all_at_once"], ring=1, ulysses=4, strategy="ulysses")]  # sharing a rank's only key head
    calls = product(rings, ({}, {"route": "direct", "together": 3}, {"route": "levels", "hosts": 2}))
    calls = [partial(attention, case, **way) for case, way in (*calls, *product(grouped, [{"groups": 2}]))]
    check_processes(4, calls, 2e-6)


def one_rank_has_a_longer_q() -> None:
    mesh = ra.init_mesh(ring=4, device_type="cpu")
    plan = ra.plan(mesh, seq_len=64)
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    ra.attention(q, k, v, plan)
    q = torch.randn(1, 17, 2, 8) if dist.get_rank() == 2 else q
    ra.attention(q, k, v, plan)


def plans_differ() -> None:
    mesh = ra.init_mesh(ring=4, device_type="cpu")
    plan = ra.plan(mesh, seq_len=64, layout="zigzag" if dist.get_rank() % 2 else "contiguous")
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    ra.attention(q, k, v, plan)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (one_rank_has_a_longer_q, r"q has 17 tokens, a rank of this plan holds 16 .*\(on ring rank 2\)"),
        (plans_differ, r"do not make the same call: plan: ring rank 0 has .*contiguous.*ring rank 1, ring rank 3 has"),
    ],
)
def test_ranks_that_disagree_all_raise_and_none_hangs(function, says):
    start = time.monotonic()
    with pytest.raises(RankError, match=says):
        run(function, 4)
    assert time.monotonic() - start < 30
