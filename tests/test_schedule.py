"""The schedule: every needed meeting happens once, nothing travels that nobody needs, and bytes are what it says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.comms.local import run
from ringattn.launch import oracle
from ringattn.launch.cases import CASES, Case
from ringattn.layout import LAYOUTS, Layout
from ringattn.schedule import Schedule, needed, work
from ringattn.spec import AttentionSpec, Docs, bounds
from ringattn.torch.steps import Mask, schedule_of


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_a_run_of_all_ranks_meets_exactly_what_is_needed(rows):
    schedule = Schedule(np.array(rows))
    runs = [schedule.steps(r) for r in range(schedule.ring)]
    held = list(range(schedule.ring))  # which block each rank holds, None for nothing
    met = set()
    for steps in zip(*runs, strict=True):
        for rank, step in enumerate(steps):
            assert step.here == (held[rank] == step.source)
            if step.work:
                assert step.here
                met.add((rank, step.source))
        if steps[0].hop:
            shift = steps[0].hop.shift
            arriving = {(r + shift) % schedule.ring: held[r] for r, s in enumerate(steps) if s.hop.send}
            assert set(arriving) == {r for r, s in enumerate(steps) if s.hop.recv}
            assert all(steps[r].here for r, s in enumerate(steps) if s.hop.send)
            held = [arriving.get(r) for r in range(schedule.ring)]
        homes = [s.home for s in steps]
        assert all((h is None) == (homes[0] is None) for h in homes)
        if homes[0]:
            home = homes[0].shift
            assert {(r + home) % schedule.ring for r, h in enumerate(homes) if h.send} == {
                r for r, h in enumerate(homes) if h.recv
            }
    assert met == {(i, j) for i, j in np.argwhere(schedule.needed)}


masks = st.tuples(
    st.sampled_from(LAYOUTS), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 20),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
)  # fmt: skip


@given(masks)
def test_needed_and_work_are_what_the_dense_mask_says(given):
    name, T, ring, window, lengths = given
    spec, layout = AttentionSpec(window=window), Layout(name, T, ring)
    lengths = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) <= T]
    docs = Docs.from_lengths(lengths or [T], pad_to=T)
    begin, end = bounds(spec, np.arange(layout.padded_length), T, docs=docs)
    j = np.arange(layout.padded_length)
    dense = (begin[0][:, None] <= j) & (j < end[0][:, None])
    shards = [layout.shard(r) for r in range(ring)]
    found = needed(begin, end, shards, shards)
    for a in range(ring):
        for b in range(ring):
            block = dense[np.ix_(layout.positions(a), layout.positions(b))]
            assert found[a, b] == block.any() and work(begin, end, shards[a], shards[b]) == block.sum()


def sent(case: Case) -> list[tuple[int, int, tuple[int, int]]]:
    """Of each ring rank: bytes sent in forward, in backward, and the schedule's count of blocks."""
    given = oracle.inputs(case, torch.float32)

    def one(mesh):
        import ringattn as ra

        plan = ra.plan(mesh, seq_len=case.seq_len, spec=case.spec, strategy=case.strategy, layout=case.layout)
        q, k, v = (plan.shard(given[n]).requires_grad_() for n in "qkv")
        axis = plan.ring_axis
        out = ra.attention(q, k, v, plan, spec=case.spec, docs=case.docs)
        forward = axis.sent
        out.sum().backward()
        mask = Mask(plan, case.spec, case.docs)
        return forward, axis.sent - forward, schedule_of(mask).blocks_sent(axis.rank)

    return run(one, ring=case.ring)


@pytest.mark.parametrize(
    "case",
    [replace(c, key_len=None) for c in CASES if c.ulysses == 1 and c.strategy == "ring" and "cross" not in c.name],
    ids=str,
)
def test_bytes_sent_are_the_schedules_figure(case):
    shard = Layout(case.layout, case.seq_len, case.ring).shard_len
    block = case.batch * shard * case.kv_heads * (case.head_dim + case.value_dim) * 4
    for forward, backward, (keys, grads) in sent(case):
        assert forward == keys * block
        assert backward == (keys + grads) * block


@pytest.mark.parametrize("window", [1, 2, 8, 9, 16, 17, 30, 64])
def test_a_window_sends_only_the_hops_it_reaches(window):
    """Contiguous shards of 8: the first query of a shard sees window - 1 keys back, ceil((window - 1) / 8) shards."""
    case = Case("window", ring=8, layout="contiguous", seq_len=64, spec=AttentionSpec(window=window))
    hops = min(-(-(window - 1) // 8), 7)
    assert max(keys for _, _, (keys, _) in sent(case)) == hops
    assert hops <= -(-window // 8)


def test_causal_contiguous_blocks_stop_at_the_last_rank():
    case = Case("causal", ring=4, layout="contiguous", seq_len=64)
    assert [keys for _, _, (keys, _) in sent(case)] == [1, 2, 3, 0]


def test_documents_inside_shards_send_nothing():
    case = Case("docs", ring=4, layout="contiguous", seq_len=64, lengths=[16, 8, 8, 16, 16])
    assert all(forward == backward == 0 for forward, backward, _ in sent(case))
