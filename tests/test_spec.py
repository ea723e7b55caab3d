"""A mask is an interval: bounds say exactly what the words of the spec say, and both ends never decrease."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.spec import AttentionSpec, Docs, bounds


def allowed(spec, row, T):
    """[T, T] straight from the words."""
    i, j = np.mgrid[:T, :T]
    doc = np.repeat(np.arange(len(row)), row)
    doc = np.pad(doc, (0, T - len(doc)), constant_values=-1)
    seen = (doc[:, None] == doc) & (doc[:, None] >= 0)
    seen &= (j <= i) if spec.causal else True
    return seen & (i - j < spec.window) if spec.window else seen


@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    pad=st.integers(0, 5),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12),
)
def test_bounds_are_the_mask_and_never_decrease(rows, pad, causal, window):
    T = max(sum(r) for r in rows) + pad
    if T == 0:
        return
    spec = AttentionSpec(causal, window if causal else None)
    begin, end = bounds(spec, np.arange(T), T, docs=Docs.from_lengths(rows, pad_to=T))
    assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all() and (begin <= end).all()
    j = np.arange(T)
    for row, b, e in zip(rows, begin, end, strict=True):
        np.testing.assert_array_equal((b[:, None] <= j) & (j < e[:, None]), allowed(spec, row, T))


def test_padding_past_the_sequence_sees_nothing():
    begin, end = bounds(AttentionSpec(), np.arange(12), 9)
    assert (begin[0, 9:] == end[0, 9:]).all() and (np.diff(end[0]) >= 0).all()


def test_an_offset_places_queries_behind_cached_keys():
    begin, end = bounds(AttentionSpec(window=4), np.arange(3), 3, key_len=10, offset=7)
    assert begin.tolist() == [[4, 5, 6]] and end.tolist() == [[8, 9, 10]]


def test_docs_from_lengths_and_cu_seqlens_are_equal_and_hash_alike():
    a, b = Docs.from_lengths([3, 0, 5]), Docs.from_cu_seqlens(np.array([0, 3, 3, 8]))
    assert a == b and hash(a) == hash(b) and a != Docs.from_lengths([3, 5, 0]) and "3 documents" in repr(a)
    assert not a.padded and Docs.from_lengths([3], pad_to=4).padded


def test_docs_stay_what_they_were_when_the_callers_array_is_filled_again():
    buffer = np.array([[0, 3, 8]], np.int32)
    docs = Docs(buffer, 8)
    buffer[0, 1] = 5
    assert docs == Docs.from_lengths([3, 5]) and docs.starts.dtype == np.int64
    again = pickle.loads(pickle.dumps(docs))
    assert again == docs
    for mine in (docs, again, Docs.from_lengths([3, 5])):
        with pytest.raises(ValueError, match="read-only"):
            mine.starts[0, 1] = 5


@given(
    rows=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=3),
    positions=st.lists(st.integers(0, 15)),
)
def test_every_position_lies_in_its_document(rows, positions):
    """Also where positions take turns, as those of several shards do."""
    docs = Docs.from_lengths(rows, pad_to=13)
    expected = [[sum(p >= end for end in np.cumsum(row)) for p in positions] for row in rows]
    assert docs.index(np.array(positions, int)).tolist() == expected
    assert docs.index(np.array(sorted(positions), int)).tolist() == [sorted(row) for row in expected]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AttentionSpec(window=0), "window=0: the number of keys a query sees, at least 1"),
        (lambda: AttentionSpec(window=-3), "window=-3"),
        (lambda: AttentionSpec(window=2.5), "window=2.5"),
        (lambda: AttentionSpec(window=10**30), "positions are counted in 64 bits; say None for all keys"),
        (lambda: AttentionSpec(causal="no"), "causal='no': say True or False"),
        (lambda: AttentionSpec(causal=None), "causal=None: say True or False"),
        (lambda: AttentionSpec(causal=False, window=4), "use causal=True, or window=None"),
        (lambda: AttentionSpec(scale=float("nan")), "scale=nan: must be a finite number above 0"),
        (lambda: AttentionSpec(scale=-1.0), "scale=-1.0"),
        (lambda: AttentionSpec(scale=True), "scale=True: must be a finite number above 0"),
        (lambda: Docs(np.array([[2, 10]]), 10), r"each row from 0 on.*got array\(\[\[ 2, 10\]\]\)"),
        (lambda: Docs(np.array([[0, 30]]), 10), r"length=10\): .* up to the length; got array\(\[\[ 0, 30\]\]\)"),
        (lambda: Docs(np.array([[0, 7, 3]]), 10), "never decreasing"),
        (lambda: Docs(np.array([[0.0, 10.0]]), 10), r"whole numbers \[rows, n \+ 1\]"),
        (lambda: Docs(np.array([0, 10]), 10), r"got array\(\[ 0, 10\]\)"),
        (lambda: Docs(np.array([[0]]), 10), r"got array\(\[\[0\]\]\) \(Docs.from_lengths makes them\)"),
        (lambda: Docs([0, 10], 10), r"whole numbers \[rows, n \+ 1\]"),
        (lambda: Docs(np.array([[0, 10]]), None), "length=None"),
        (lambda: AttentionSpec(softcap=0.0), "softcap=0.0"),
        (lambda: AttentionSpec(softcap=1e39), "softcap=1e\\+39: scores .* in float32; say a number from 1e-18 to 1e18"),
        (lambda: AttentionSpec(scale=1e-46), "scale=1e-46: scores are worked out in float32"),
        (
            lambda: AttentionSpec(scale=np.array(0.5)),
            r"scale=array\(0.5\): must be a finite number above 0 \(no array\)",
        ),
        (lambda: AttentionSpec(window=np.array(5)), r"window=array\(5\)"),
        (lambda: Docs.from_lengths([3, -1]), r"at least 0, got \[3, -1\]"),
        (lambda: Docs.from_lengths([9], pad_to=8), "9 tokens do not fit in pad_to=8"),
        (lambda: Docs.from_lengths([[3], [4]]), r"add up to \[3, 4\].*say pad_to=4"),
        (lambda: Docs.from_lengths([]), "no documents"),
        (lambda: Docs.from_lengths(None), "must be a list, array or tensor of whole numbers, got None"),
        (lambda: Docs.from_lengths(16), "must be a list, array or tensor of whole numbers, got 16"),
        (lambda: Docs.from_lengths("88"), "got '88'"),
        (lambda: Docs.from_lengths([8, [8]]), r"at least 0, got \[8, \[8\]\]"),
        (lambda: Docs.from_lengths([float("inf"), 1]), r"at least 0, got \[inf, 1\]"),
        (
            lambda: Docs.from_lengths([2**62, 2**62]),
            "documents of 9223372036854775808 tokens: positions are counted in",
        ),
        (lambda: Docs.from_lengths([8, 8], pad_to=16.7), "pad_to=16.7: the length with padding, a whole number"),
        (lambda: Docs.from_lengths([8, 8], pad_to="16"), "pad_to='16'"),
        (lambda: Docs.from_cu_seqlens([0, 7.9, 16]), r"in whole numbers, got \[0, 7.9, 16\]"),
        (lambda: Docs.from_cu_seqlens([1, 4]), "must begin with 0"),
        (lambda: Docs.from_cu_seqlens([0, 4, 3]), "never decrease"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_lengths_come_as_lists_arrays_and_tensors():
    expected = Docs.from_lengths([3, 5])
    for array in (np.array, torch.tensor, jnp.array):
        assert Docs.from_lengths(array([3, 5])) == Docs.from_lengths([array(3), array(5)]) == expected
        assert Docs.from_lengths(array([[3, 5], [4, 4]])) == Docs.from_lengths([[3, 5], [4, 4]])
        assert Docs.from_cu_seqlens(array([0, 3, 8])) == expected


def test_a_spec_is_frozen_and_hashable():
    assert {AttentionSpec(): 1}[AttentionSpec()] == 1
    with pytest.raises(AttributeError):
        AttentionSpec().window = 3


def test_numpys_numbers_become_pythons():
    """They are equal, and so would share what is kept by a spec, but make arrays of their own dtype."""
    given = {"causal": np.bool_(True), "window": np.int64(5), "softcap": np.float64(2), "scale": 1}
    spec = AttentionSpec(**given)
    assert repr(spec) == "AttentionSpec(causal=True, window=5, softcap=2.0, scale=1.0)"
    assert spec == AttentionSpec(True, 5, 2, 1)
