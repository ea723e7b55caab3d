"""Plans whose documents are each cut over all ranks: the same promises as of every other layout, or a refusal."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import LIMIT, check
from test_roll import expected

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.verify.cases import Case
from ringattn.layouts.layout import Layout, count_below, positions_of
from ringattn.masks.bands import bounds_at, families
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.mask import Mask, reads_of
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import Recipe

parts = st.lists(st.integers(0, 3), min_size=1, max_size=9).filter(any)
names = st.sampled_from(["contiguous", "zigzag"])


def layout_of(name, ring, ulysses, lengths, tail=0):
    unit = 2 * ring * ulysses
    docs = Docs.from_lengths([unit * n for n in lengths], pad_to=unit * (sum(lengths) + tail))
    return Layout(name, docs.length, ring, ulysses, docs)


layouts = st.builds(layout_of, names, st.integers(1, 4), st.integers(1, 3), parts, st.integers(0, 1))


@given(layouts)
def test_every_rank_holds_its_part_of_every_document(layout):
    """By the definitions of ring-flash-attn's varlen functions and of Transformer Engine's THD format."""
    n, edges = layout.ring * layout.ulysses, [*layout.docs.starts[0].tolist(), layout.length]
    for rank in range(n):
        mine: list[int] = []
        for start, stop in pairwise(edges):
            blocks = np.arange(start, stop).reshape(n if layout.name == "contiguous" else 2 * n, -1)
            both = blocks[[rank]] if layout.name == "contiguous" else blocks[[rank, 2 * n - 1 - rank]]
            mine += both.ravel().tolist()
        held = positions_of(layout.held(*divmod(rank, layout.ulysses)))
        assert held.tolist() == mine and sorted(mine) == mine
    assert sorted(layout.order()) == list(range(layout.length))
    for ring_rank in range(layout.ring):
        shard, order = layout.positions(ring_rank), layout.swapped(ring_rank)
        every = np.concatenate([positions_of(layout.held(ring_rank, u)) for u in range(layout.ulysses)])
        assert (shard == (every if order is None else every[order])).all()
        at = np.arange(-2, layout.length + 3)
        np.testing.assert_array_equal(count_below(layout.shard(ring_rank), at), np.searchsorted(shard, at))


@given(layouts, st.booleans(), st.sampled_from([None, 1, 5, 40]), st.booleans())
def test_blocks_meet_exactly_where_something_is_seen(layout, causal, window, packed):
    spec, docs = AttentionSpec(causal, window if causal else None), layout.docs if packed else None
    plan = ra.Plan(layout.length, layout.ring, layout.ulysses, layout=layout.name, docs=layout.docs)
    begin, end = (x[0] for x in bounds_at(*families(spec, layout.length, docs=docs), np.arange(layout.length)))
    owner = np.argsort(np.concatenate([layout.positions(r) for r in range(layout.ring)])) // layout.shard_len
    expected = np.zeros((layout.ring, layout.ring), bool)
    for q, (first, last) in enumerate(zip(begin, end, strict=True)):
        expected[owner[q], owner[first:last]] = True
    np.testing.assert_array_equal(reads_of(Mask(plan, spec, docs)).tokens > 0, expected)


@st.composite
def rings(draw):
    """A case whose plan cuts each document over a ring: of these documents or others, with a window, chunks or none."""
    ring, mask = draw(st.integers(2, 8)), draw(st.sampled_from(["window", "chunk", "none"]))
    spec = AttentionSpec() if mask == "none" else AttentionSpec(**{mask: draw(st.integers(1, 40))})
    dealt = [2 * ring * n for n in draw(parts)]
    return Case("drawn", ring=ring, layout=draw(names), seq_len=sum(dealt), dealt=dealt, spec=spec, heads=2, kv_heads=1,
                lengths=draw(st.sampled_from([dealt, None])))  # fmt: skip


@given(rings(), st.sampled_from([None, 2, 8]))
def test_keys_of_every_step_increase(case, together):
    """Blocks that come in one step interleave, as does what queries take of their own rank's keys beside them."""
    kernel = SimpleNamespace(load=lambda: SimpleNamespace(disjoint=True))
    how = ra.Transport("direct", 1, together=together)
    plan = Plan(case.seq_len, case.ring, 1, "ring", case.layout, transport=how, docs=case.laid_out)
    mask, shape = Mask(plan, case.spec, case.docs), Shape(case.seq_len, case.seq_len, 2, 1, 8, 8)
    for rank in range(case.ring):
        recipe = Recipe(mask, shape, "cpu", "float32", rank=rank)
        steps = recipe.steps()
        for each in (steps, recipe.disjoint(steps, kernel, work=1, sent=0, visits=9)):
            for step in each:
                assert not step.keys or (np.diff(positions_of(step.keys)) > 0).all()


@settings(max_examples=10)
@given(rings())
def test_a_ring_of_cut_documents_equals_dense_float64(case):
    check(case, torch.float32, dict.fromkeys(("out", "lse", "dq", "dk", "dv"), LIMIT))


LENGTHS = [16, 0, 48, 8, 16]
CUT = Case("cut", seq_len=96, lengths=LENGTHS, dealt=LENGTHS)
WINDOW = AttentionSpec(window=13, softcap=3.0)
CASES = [
    (CUT, {}),
    (replace(CUT, spec=WINDOW, sinks=True, strategy="gather"), {}),
    (Case("interleaved", seq_len=56, lengths=[24, 24, 8], dealt=[24, 24, 8], spec=AttentionSpec(window=5)), {}),
    (replace(CUT, spec=WINDOW, kv_heads=4), {"route": "relay", "hosts": 4}),
    (replace(CUT, ring=1, ulysses=4, strategy="ulysses", sinks=True), {}),
    (replace(CUT, ring=1, ulysses=4, strategy="ulysses", heads=8, kv_heads=8), {"groups": 2}),
    (replace(CUT, ring=2, ulysses=2, spec=WINDOW, sinks=True), {}),
    (replace(CUT, ring=2, ulysses=2, strategy="gather", layout="contiguous"), {}),
    (
        replace(CUT, ring=2, ulysses=2, lengths=[50, 30], dealt=[16, 64]),
        {},
    ),  # other documents than are cut, and padding
    (replace(CUT, ring=2, ulysses=2, lengths=[[50, 46], [3, 93]], dealt=[96]), {}),  # and other ones in every row
]


@pytest.mark.parametrize(("case", "choices"), CASES, ids=lambda x: str(x))
def test_equals_dense_float64(case, choices):
    check(case, torch.float32, dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dsinks"), LIMIT), **choices)


@settings(max_examples=12)
@given(layouts, st.integers(-9, 9), st.booleans())
def test_unshard_inverts_shard_and_roll_rolls(layout, shift, packed):
    x = torch.randint(0, 99, (2, layout.length, 3))
    docs = layout.docs if packed else None

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=1, layout=layout.name).for_docs(layout.docs)
        mine = plan.shard(x)
        assert torch.equal(mine, x[:, plan.positions()]) and plan.real_tokens().all()
        return plan.unshard(mine), plan.unshard(plan.roll(mine, shift, docs=docs))

    rolled = expected(x, shift, 1, docs, -100)
    assert all(torch.equal(whole, x) and torch.equal(moved, rolled)
               for whole, moved in run(one_rank, ring=layout.ring, ulysses=layout.ulysses))  # fmt: skip


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_a_plan_for_documents_is_the_one_made_with_them(layout):
    docs = Docs.from_lengths([8, 24])
    plan = ra.Plan(32, 2, 2, layout=layout)
    assert plan.for_docs(docs) == ra.Plan(32, 2, 2, layout=layout, docs=docs) != plan
