"""Any mask as bands: exactly what the words say, in families that kernels can take, counted, dealt and sent as seen."""

import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.bands import Work, bounds_at, families, joined
from ringattn.masks.slices import Mask as Slices
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.mask import Mask, reads_of
from ringattn.plans.plan import Plan
from ringattn.torch.handles import docs_of, starts_of
from tests.cases import FEATURES

KINDS = "full", "causal", "inverse", "both"


@st.composite
def specs(draw: Any) -> AttentionSpec:
    causal, small = draw(st.booleans()), st.integers(0, 8)
    window = draw(st.none() | (small.map(lambda n: n + 1) if causal else st.tuples(small, small)))
    chunk = draw(st.none() | st.integers(1, 9))
    return AttentionSpec(causal, window, chunk, draw(st.integers(0, 5)) if window or chunk else 0)


@st.composite
def cases(draw: Any) -> Case:
    """Documents with spans, or segments of trees, in one or two rows."""
    rows = draw(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=2))
    case = Case(
        "drawn", spec=draw(specs()), lengths=rows, batch=2, seq_len=max(map(sum, rows)) + draw(st.integers(1, 3))
    )
    if draw(st.booleans()):
        return replace(case, parents=[[draw(st.integers(-1, i - 1)) for i in range(len(row))] for row in rows])
    spans: list[list[tuple[int, int]]] = []
    for row in rows:
        edges, results = [0, *np.cumsum(row).tolist()], []
        for low, high in pairwise(edges):
            bounds = sorted(draw(st.sets(st.integers(low, high), max_size=4)))
            results += [pair for pair in pairwise(bounds) if draw(st.booleans())]
        spans.append(results)
    return replace(case, spans=spans)


@st.composite
def sliced(draw: Any) -> Case:
    ends = st.tuples(st.integers(0, 24), st.integers(0, 24)).map(lambda pair: tuple(sorted(pair)))
    slices = draw(st.lists(st.tuples(ends, ends, st.sampled_from(KINDS)), min_size=1, max_size=5))
    return Case("slices", seq_len=24, slices=slices, batch=1, spec=draw(specs()))


def dense(results: Any, T: int, S: int, row: int) -> np.ndarray:
    """[T, S]: in how many families a query sees a key; each must never decrease."""
    seen = np.zeros((T, S), int)
    for family in results:
        begin, end = (side[row] for side in bounds_at(family[row : row + 1] if row else family, np.arange(T)))
        assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all()
        assert all((bands.last_begin < bands.last_end).all() for bands in family)  # every query of a band sees a key
        seen += (begin[:, None] <= np.arange(S)) & (np.arange(S) < end[:, None])
    return seen


def rows_of(results: Any, T: int, rows: int) -> np.ndarray:
    return np.stack([dense([(family[row],) for family in results], T, T, 0) for row in range(rows)])


BESIDE_FIRST = Case(
    "tree", spec=AttentionSpec(window=3, first=4), lengths=[[2, 7, 6]], parents=[[-1, -1, 0]], batch=2, seq_len=16
)
NEAR_SPANS = [
    Case("spans", spec=spec, lengths=[[18, 11]], spans=[[(10, 15), (20, 27)]], batch=1, seq_len=31)
    for spec in (AttentionSpec(False, (4, 1), None, 8), AttentionSpec(window=3, first=6))
]


@settings(max_examples=150)
@example(BESIDE_FIRST, "zigzag", 2)
@example(NEAR_SPANS[0], "contiguous", 2)
@example(NEAR_SPANS[1], "striped", 3)
@given(cases(), st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 5))
def test_bands_are_the_mask_and_so_are_the_schedule_and_the_work(case, layout, ring):
    T, rows = case.seq_len, len(case.lengths)
    results = families(case.spec, T, docs=case.docs)
    seen = rows_of(results, T + 2, rows)
    words = np.stack([oracle.visible(case, row).numpy() for row in range(rows)])
    np.testing.assert_array_equal(seen[:, :T, :T], words)  # so no key is seen twice
    assert not seen[:, T:].any()
    for row in range(rows):
        work = Work.of(joined([family[row] for family in results]))
        np.testing.assert_array_equal(work.below(np.arange(T + 1)), np.append(0, words[row].sum(1).cumsum()))
    plan = Plan(T, ring, layout=layout)
    check_counted(plan, case.spec, case.docs, words)


def check_counted(plan: Plan, spec: AttentionSpec, docs: Any, words: np.ndarray) -> None:
    """Which rank needs which block, and how many pairs of it are seen."""
    needed = reads_of.__wrapped__(Mask(plan, spec, docs)).tokens > 0
    pairs = seen_pairs(plan.tokens, plan.tokens, spec, docs)
    for a, b in np.ndindex(plan.ring, plan.ring):
        q, k = (at[at < plan.seq_len] for at in (plan.tokens.positions(a), plan.tokens.positions(b)))
        assert pairs[a, b] == words[:, q][:, :, k].sum() and needed[a, b] == (pairs[a, b] > 0)


@settings(max_examples=60)
@example(Case("slices", seq_len=24, batch=1, slices=[((0, 10), (0, 10), "causal"), ((0, 20), (10, 20), "full")]))
@given(sliced())
def test_slices_mask_by_their_kinds_within_the_window_and_overlapping_ones_are_refused(case):
    every = replace(case, spec=AttentionSpec())
    masks = [oracle.visible(replace(every, slices=[single]), 0).int() for single in case.slices]
    if (sum(masks) > 1).any():
        with pytest.raises(ValueError):
            _ = case.docs
        return
    words = rows_of(families(case.spec, 24, docs=case.docs), 24, 1)
    np.testing.assert_array_equal(words[0], oracle.visible(case, 0))
    for layout in ("zigzag", "striped", "balanced"):
        dealt = {"docs": case.docs} if layout == "balanced" else {}
        check_counted(Plan(24, 3, layout=layout, **dealt), case.spec, case.docs, words)


def test_families_are_hardly_more_than_the_intervals_of_a_query():
    """Of keys that leave at random, each a slice of its own, as FlashMask's random eviction."""
    random, T = np.random.default_rng(0), 512
    stops = np.where(random.random(T) < 0.5, T, random.integers(np.arange(T), T) + 1)
    keys = np.stack([np.arange(T), np.arange(T) + 1], 1)
    mask = Slices.from_slices(np.stack([np.arange(T), stops], 1), keys, "full", T)
    results = families(AttentionSpec(), T, docs=mask)
    seen = dense(results, T, T, 0)
    at = np.arange(T)
    np.testing.assert_array_equal(seen, (at <= at[:, None]) & (at[:, None] < stops))
    intervals = (np.diff(seen, prepend=0, axis=1) > 0).sum(1).max()
    assert intervals <= len(results) < 1.1 * intervals


@pytest.mark.parametrize("case", [case for case in FEATURES if case.docs is not None], ids=lambda case: case.name)
def test_masks_are_values_that_travel_whole(case):
    """Pickled, and as a tensor for an op."""
    docs = case.docs
    again = docs_of(starts_of(docs), docs.length)
    assert pickle.loads(pickle.dumps(docs)) == docs == again
    assert hash(again) == hash(docs) and repr(again) == repr(docs)
    assert docs != Docs(docs.starts, docs.length) or docs.plain


@pytest.mark.parametrize("docs", [Docs.tree([3000] + [400] * 10, [-1] + [0] * 10), Docs.from_lengths([7000])], ids=str)
@pytest.mark.parametrize(
    "spec", [AttentionSpec(), AttentionSpec(chunk=900), AttentionSpec(window=500, first=30)], ids=str
)
def test_work_of_any_mask_is_dealt_out_equally(spec, docs):
    plan = Plan(docs.length, 5, layout="balanced", docs=docs, work=spec)
    work = Work.of(joined([band for family in families(spec, docs.length, docs=docs) for band in family]))
    shards = [plan.tokens.shard(rank) for rank in range(5)]
    loads = [sum(work.below(r.stop) - work.below(r.start) for r in shard) for shard in shards]
    assert {sum(map(len, shard)) for shard in shards} == {docs.length // 5} and max(loads) <= 1.03 * sum(loads) / 5


def test_shared_prefixes_are_two_families_and_a_third_of_the_work():
    tree = Docs.tree([32768] + [2048] * 16, [-1] + [0] * 16)
    results = families(AttentionSpec(), 65536, docs=tree)
    assert len(results) == 2 and [len(bands.start) for (bands,) in results] == [16, 1]
    apart = Docs.from_lengths([32768 + 2048] * 16)
    pairs = [sum(Work.of(family).below(docs.length) for (family,) in families(AttentionSpec(), docs.length, docs=docs))
             for docs in (tree, apart)]  # fmt: skip
    assert pairs[1] > 5.8 * pairs[0]


def test_positions_in_a_tree_are_depths_along_the_branch():
    docs = Docs.tree([4, 2, 3, 2], [-1, 0, 0, 2], pad_to=12)
    expected = [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 11]

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=12, layout="zigzag")
        dealt = ra.plan(mesh, seq_len=12, layout="balanced", docs=docs)
        assert plan.positions(Docs.from_lengths([12])).tolist() == plan.positions().tolist()
        return [p.unshard(x, dim=0).tolist() for p, x in ((plan, plan.positions(docs)), (dealt, dealt.positions()))]

    assert run(one_rank, ring=2) == [[expected, expected]] * 2
    both = Docs.tree([[4, 2], [3, 3]], [[-1, 0], [-1, -1]])
    assert ra.plan(seq_len=6).positions(both).tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]


INFERENCE = [
    AttentionSpec(chunk=9),
    AttentionSpec(window=7, first=4),
    AttentionSpec(window=5, chunk=12, first=2, softcap=3.0),
]


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("spec", INFERENCE, ids=str)
def test_a_cache_takes_chunks_and_first_keys(spec, move):
    """A prompt in two parts over three ranks, then tokens: as the whole sequence at once."""
    T, (q, k, v) = 46, (torch.randn(2, 46, h, 8) for h in (4, 2, 2))
    expected = ra.attention(q, k, v, spec=spec)

    def one_rank(mesh):
        plan, at, outs = ra.plan(mesh, seq_len=25, layout="zigzag"), 0, []
        cache = ra.KVCache.allocate(plan, batch=2, max_len=T, kv_heads=2, head_dim=8, dtype=torch.float32, block=4)
        for n in (25, 13):
            chunk = plan.for_length(n)
            mine = (chunk.shard(x[:, at : at + n]) for x in (q, k, v))
            outs.append(chunk.unshard(ra.prefill(*mine, chunk, cache, spec=spec, move=move, keys=8)))
            at += n
        for n in (1, 5, 2):
            outs.append(ra.decode(*(x[:, at : at + n] for x in (q, k, v)), cache, spec=spec))
            at += n
        return torch.cat(outs, 1)

    for out in run(one_rank, ring=3):
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


PARENTS = [-1, 0, 0, 1, -1, 2, 4]


@pytest.mark.parametrize("spec", [AttentionSpec(), *INFERENCE], ids=str)
def test_a_tree_of_drafts_is_verified_in_one_decode(spec):
    """Rows of different lengths: as the tree of the cached tokens and the drafts. Then one branch goes on."""
    before, n = (23, 20), len(PARENTS)
    q, k, v = (torch.randn(2, max(before) + n, h, 8) for h in (4, 2, 2))
    expected = []
    for row, length in enumerate(before):
        docs = Docs.tree([length] + [1] * n, [-1] + [p + 1 for p in PARENTS])
        at = [*range(length), *range(max(before), max(before) + n)]
        expected.append(ra.attention(*(x[row : row + 1, at] for x in (q, k, v)), spec=spec, docs=docs)[:, length:])

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=max(before))
        cache = ra.KVCache.allocate(plan, batch=2, max_len=40, kv_heads=2, head_dim=8, dtype=torch.float32, block=2)
        ra.prefill(*(plan.shard(x[:, : max(before)]) for x in (q, k, v)), plan, cache, spec=spec)
        cache.truncate(before)
        new = [x[:, max(before) :] for x in (q, k, v)]
        out = ra.decode(*new, cache, spec=spec, parents=PARENTS)
        cache.truncate(before)
        cache.append(*(x[:, [0, 2, 5]] for x in new[1:]))
        return out, cache.lengths.tolist()

    for out, lengths in run(one_rank, ring=2):
        torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=2e-6)
        assert lengths == [26, 23]
