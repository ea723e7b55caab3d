"""A mask is an interval: bounds say exactly what the words of the spec say, and both ends never decrease."""

import pickle
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringattn.jax.attention.steps import global_bounds
from ringattn.layouts.layout import LAYOUTS, to_local
from ringattn.masks.bands import bounds_at, families, intervals, work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.mask import Mask, reads_of
from ringattn.plans.plan import Plan
from ringattn.plans.sizes import Transport
from ringattn.torch.attention.steps import below, bounds_on, local, on_device, spread_on
from tests.cases import FEATURES

CPU = torch.device("cpu")


NUMBERS = st.integers(0, 12) | st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63 - 1]).map(lambda n: n - n % 7 % 3)
LARGE = NUMBERS.map(lambda n: max(n, 1))


@st.composite
def specs(draw, chunks):
    causal, chunk = draw(st.booleans()), draw(st.none() | LARGE) if chunks else None
    window = draw(st.none() | (LARGE if causal else st.tuples(NUMBERS, NUMBERS)))
    return AttentionSpec(causal, window, chunk, draw(NUMBERS) if window or chunk else 0)


def sees(spec, i, j):
    """Whether the query at position i of a document sees its key j: straight from the words, in Python's integers."""
    left, right = spec.window if isinstance(spec.window, tuple) else (spec.window and spec.window - 1, None)
    near = (left is None or i - j <= left) and (right is None or j - i <= right)
    near = near and (spec.chunk is None or i // spec.chunk == j // spec.chunk)
    return (near or j < spec.first) and (j <= i or not spec.causal)


@settings(max_examples=100)
@example(rows=[[(9, 9), (0, 0), (0, 0)]], case=(True, AttentionSpec(True, 3)))  # chance may leave these out
@example(rows=[[(6, 9), (9, 6), (0, 0)]], case=(False, AttentionSpec(False, (2, 3), None, 1)))
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3), min_size=1, max_size=2
    ),
    case=st.booleans().flatmap(lambda same: st.tuples(st.just(same), specs(chunks=same))),
)
def test_bounds_are_the_mask_and_never_decrease(rows, case):
    """Of documents whose keys are their queries, or as many others as the last of which is at the last query."""
    same, spec = case
    rows = [[(n, n if same else m) for n, m in row] for row in rows]
    T, S = 28, 28 if same else 31  # the same shapes for all: JAX compiles what it has not seen
    docs, key_docs = (Docs.from_lengths([[pair[i] for pair in row] for row in rows], pad_to=(T, S)[i]) for i in (0, 1))
    key_docs = None if same else key_docs
    words = np.zeros((len(rows), T, S), int)
    for b, row in enumerate(rows):
        q0 = k0 = 0
        for n, m in row:
            for i, j in np.ndindex(n, m):
                words[b, q0 + i, k0 + j] = sees(spec, i + m - n, j)
            q0, k0 = q0 + n, k0 + m
    host = [bounds_at(family, np.arange(T)) for family in families(spec, T, S, docs, key_docs)]
    mask, at = Mask(Plan(T, key_len=S), spec, docs, key_docs), jnp.arange(T, dtype=jnp.int32)
    traced = global_bounds(mask, at, docs.starts, key_docs and key_docs.starts)
    for results in (host, [tuple(map(np.asarray, sides)) for sides in traced]):
        seen = np.zeros_like(words)
        for begin, end in results:
            assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all()
            seen += (begin[..., None] <= np.arange(S)) & (np.arange(S) < end[..., None])
        np.testing.assert_array_equal(seen, words)


def test_an_offset_places_queries_behind_cached_keys():
    begin, end = bounds_at(*families(AttentionSpec(window=4), 3, key_len=10, offset=7), np.arange(3))
    assert begin.tolist() == [[4, 5, 6]] and end.tolist() == [[8, 9, 10]]


def test_docs_from_lengths_and_cu_seqlens_are_equal_and_hash_alike():
    a, b = Docs.from_lengths([3, 0, 5]), Docs.from_cu_seqlens(np.array([0, 3, 3, 8]))
    assert a == b and hash(a) == hash(b) and a != Docs.from_lengths([3, 5, 0]) and "3 documents" in repr(a)
    assert not a.padded and Docs.from_lengths([3], pad_to=4).padded


def test_docs_stay_what_they_were_when_the_callers_array_is_filled_again():
    buffer = np.array([[0, 3, 8]], np.int32)
    docs = Docs.from_cu_seqlens(buffer)
    buffer[0, 1] = 5
    assert docs == Docs.from_lengths([3, 5]) and docs.starts.dtype == np.int64
    again = pickle.loads(pickle.dumps(docs))
    assert again == docs
    for mine in (docs, again, Docs.from_lengths([3, 5])):
        assert not mine.starts.flags.writeable
        assert mine.encoded.flags.writeable  # as torch.compile wants the arrays that it guards, and else it warns


def test_lengths_come_as_lists_arrays_and_tensors():
    expected = Docs.from_lengths([3, 5])
    for array in (np.array, torch.tensor, jnp.array):
        assert Docs.from_lengths(array([3, 5])) == Docs.from_lengths([array(3), array(5)]) == expected
        assert Docs.from_lengths(array([[3, 5], [4, 4]])) == Docs.from_lengths([[3, 5], [4, 4]])
        assert Docs.from_cu_seqlens(array([0, 3, 8])) == expected


def test_numpys_numbers_become_pythons():
    """They are equal, and so would share what is kept by a spec, but make arrays of their own dtype."""
    given = {"causal": np.bool_(True), "window": np.int64(5), "softcap": np.float64(2), "scale": 1}
    spec = AttentionSpec(**given)
    assert repr(spec) == "AttentionSpec(causal=True, window=5, chunk=None, first=0, softcap=2.0, scale=1.0)"
    assert spec == AttentionSpec(True, 5, softcap=2, scale=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_intervals_of_a_rank_follow_from_the_bounds_on_the_host_and_by_torch(layout):
    for case in FEATURES:
        plan = Plan(case.seq_len, 4, key_len=case.key_len, layout=layout)
        mask = Mask(plan, case.spec, case.docs, case.key_docs)
        keys = plan.keys.tokens.shard(1)
        for rank in range(4):
            expected = [to_local(keys, *sides) for sides in mask.bounds(plan.tokens.shard(rank))]
            spread = [spread_on(runs, CPU) for runs in mask.runs(plan.tokens.shard(rank))]
            for results in (bounds_on(mask, plan.tokens.shard(rank), CPU), spread):
                for sides, there in zip(results, expected, strict=True):
                    mine = on_device(tuple(below(keys, side) for side in sides), CPU)[:2]
                    for side, its in zip(mine, there, strict=True):
                        assert str(side.dtype).endswith("int32"), case.name
                        np.testing.assert_array_equal(side, its, err_msg=case.name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_packed_differently_cost_the_host_little(layout):
    """Of 262,144 tokens in 16 rows: nothing token by token of every row, which a GPU computes from the runs."""
    T, rng = 16384, np.random.default_rng(0)
    rows = [np.diff(np.sort(rng.choice(T, 8)), prepend=0, append=T).tolist() for _ in range(16)]
    plan, docs = Plan(T, 8, layout=layout, transport=Transport("relay", 1)), Docs.from_lengths(rows)
    mask = Mask(plan, AttentionSpec(), docs)

    def peak(make):
        tracemalloc.start()
        try:
            return make(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    schedule, room = peak(lambda: reads_of.__wrapped__(mask))
    assert schedule.tokens.any() and room < 16 * T
    (runs,), room = peak(lambda: mask.runs(plan.tokens.shard(0)))
    assert len(runs.counts) == 16 and len(runs.positions) == T // 8 and room < 8 * T


def test_intervals_are_the_same_in_every_array_library():
    own, begin, end = np.array([[0, 3, 6, 9, 9]]), np.array([[0, 2, 2, 9, 12]]), np.array([[1, 7, 7, 9, 14]])
    for spec in (
        AttentionSpec(),
        AttentionSpec(window=2),
        AttentionSpec(window=2**63 - 1),
        AttentionSpec(causal=False),
        AttentionSpec(chunk=3, first=2),
        AttentionSpec(causal=False, window=(2**63 - 1, 2**62), chunk=2**63 - 1),
        AttentionSpec(causal=False, window=(1, 2), first=2**63 - 1),
    ):
        expected = intervals(spec, own, begin, end)
        for make in (torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32), jnp.array):
            for sides, there in zip(intervals(spec, *map(make, (own, begin, end))), expected, strict=True):
                for side, its in zip(sides, there, strict=True):
                    np.testing.assert_array_equal(side, its)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_million_ranks_have_positions_beyond_32_bits(layout):
    """The last ranks of 2**34 tokens: their local indices are small, and their windows are not cut by an integer."""
    assert work_of(AttentionSpec(), 2**34).below(2**34) == pytest.approx(2**67 + 2**33)
    plan = Plan(2**34, 2**20, layout=layout)
    queries, keys = (plan.tokens.shard(rank) for rank in (2**20 - 1, 2**20 - 2))
    for window in (None, 2**33, 2**63 - 1):
        mask = Mask(plan, AttentionSpec(window=window))
        where = local(bounds_on(mask, queries, CPU), keys, CPU)
        at, others = (np.concatenate([np.array(r) for r in shard]) for shard in (queries, keys))
        for i in (0, 1, len(at) // 2, len(at) - 1):
            seen = (others <= at[i]) & (at[i] - others < (window or 2**63 - 1))
            assert where.begin.dtype == torch.int32 and where.end[0, i] - where.begin[0, i] == seen.sum()
