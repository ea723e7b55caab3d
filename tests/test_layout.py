"""Layouts: every token on exactly one rank, sorted, any length; shard and unshard are exact inverses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.comms.local import run
from ringattn.layouts.layout import LAYOUTS, Layout, count_below

layouts = st.builds(Layout, st.sampled_from(LAYOUTS), st.integers(1, 200), st.integers(1, 8), st.integers(1, 4))


@given(layouts)
def test_every_position_is_on_exactly_one_rank_and_shards_are_sorted_and_equal(layout):
    assert sorted(layout.order()) == list(range(layout.padded_length))
    for rank in range(layout.ring):
        positions = layout.positions(rank)
        assert (np.diff(positions) > 0).all() and len(positions) == layout.shard_len
    assert layout.shard_len % layout.ulysses == 0
    assert layout.padded_length - layout.length < 2 * layout.ring * layout.ulysses


@given(layouts, st.lists(st.integers(-5, 260), min_size=1))
def test_count_below_is_searchsorted(layout, queries):
    for rank in range(layout.ring):
        expected = np.searchsorted(layout.positions(rank), queries)
        np.testing.assert_array_equal(count_below(layout.shard(rank), np.array(queries)), expected)
        np.testing.assert_array_equal(count_below(layout.shard(rank), torch.tensor(queries)), expected)


@given(st.sampled_from(LAYOUTS), st.integers(1, 70), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2))
def test_unshard_inverts_shard_at_any_length_and_dim(layout, seq_len, ring, ulysses, dim):
    shape = [2, 3, 2]
    shape[dim] = seq_len
    x = torch.randn(shape)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=seq_len, layout=layout)
        mine = plan.shard(x, dim=dim)
        at, real = plan.positions(), plan.real_tokens()
        assert at.diff().ge(0).all() and at.max() < seq_len and real.sum() == len(at[real].unique())
        torch.testing.assert_close(mine.movedim(dim, 0)[real], x.movedim(dim, 0)[at[real]], rtol=0, atol=0)
        assert mine.movedim(dim, 0)[~real].eq(0).all()
        return plan.unshard(mine, dim=dim)

    assert all(torch.equal(whole, x) for whole in run(one_rank, ring=ring, ulysses=ulysses))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_unshard_add_up_over_ranks(layout):
    x, w = torch.randn(1, 13, 2), torch.randn(4, 1, 13, 2)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=13, layout=layout)
        leaf = x.clone().requires_grad_()
        (plan.unshard(plan.shard(leaf)) * w[plan.ring_axis.rank]).sum().backward()
        return leaf.grad

    torch.testing.assert_close(sum(run(one_rank, ring=4)), w.sum(0))
