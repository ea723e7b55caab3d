"""The schedule: every needed meeting happens once, nothing travels that nobody needs, and bytes are what it says."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.comms.local import run
from ringattn.cost import HARDWARE, Shape, seen_pairs
from ringattn.launch import oracle
from ringattn.launch.cases import CASES, FEATURES, Case
from ringattn.layout import LAYOUTS, Layout
from ringattn.mask import Mask, schedule_of
from ringattn.schedule import Schedule, needed
from ringattn.spec import AttentionSpec, Docs, bounds
from ringattn.torch import attention as torch_attention
from ringattn.torch.steps import score_of


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


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    st.integers(1, 8),
)
def test_visits_meet_exactly_what_is_needed_and_both_sides_know(rows, together):
    schedule = Schedule(np.array(rows))
    runs = [schedule.visits(r, together) for r in range(schedule.ring)]
    assert len({len(run) for run in runs}) == 1
    met = [(rank, source) for rank, run in enumerate(runs) for visit in run for source in visit.sources]
    assert sorted(met) == sorted((i, j) for i, j in np.argwhere(schedule.needed))
    for step in zip(*runs, strict=True):
        assert all(len(visit.sources) <= together for visit in step)
        brought = {(source, r) for r, visit in enumerate(step) for source in visit.sources if source != r}
        assert brought == {(r, reader) for r, visit in enumerate(step) for reader in visit.readers}


@given(
    st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (3, 2)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape[0]), st.lists(st.booleans(), min_size=(n := shape[0] * shape[1]) * n, max_size=n * n)
        )
    ),
    st.integers(1, 3),
)
def test_rounds_meet_exactly_what_is_needed_and_cross_hosts_once(given, together):
    hosts, cells = given
    ring = round(len(cells) ** 0.5)
    schedule, size = Schedule(np.array(cells).reshape(ring, ring)), ring // hosts
    runs = [schedule.rounds(r, hosts, together) for r in range(ring)]
    met, here = [], {(r, r) for r in range(ring)}  # (rank, the block that it holds)
    for step in zip(*runs, strict=True):
        for rank, one in enumerate(step):
            first, *others = one.visits
            met += [(rank, block) for visit in one.visits for block in visit.sources]
            assert all((rank, block) in here for block in first.sources)
            for i, visit in enumerate(others):
                for block in visit.sources:  # who holds it now has this rank among its readers at the same visit
                    holder = rank // size * size + block % size
                    assert (holder, block) in here and rank in step[holder].visits[i + 1].readers
        hops = [one.hop for one in step]
        if hops[0]:
            assert all(hop.recv == hops[(r - size) % ring].send for r, hop in enumerate(hops))
            assert all((r, step[r].held) in here for r, hop in enumerate(hops) if hop.send)
            here = {((r + size) % ring, step[r].held) for r, hop in enumerate(hops) if hop.send}
    assert sorted(met) == sorted((i, j) for i, j in np.argwhere(schedule.needed))


masks = st.tuples(
    st.sampled_from(LAYOUTS), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 20),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
)  # fmt: skip


@given(masks)
def test_needed_blocks_and_seen_pairs_are_what_the_dense_mask_says(given):
    name, T, ring, window, lengths = given
    spec, layout = AttentionSpec(window=window), Layout(name, T, ring)
    lengths = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) <= T]
    docs = Docs.from_lengths(lengths or [T], pad_to=T)
    begin, end = bounds(spec, np.arange(layout.padded_length), T, docs=docs)
    j = np.arange(layout.padded_length)
    dense = (begin[0][:, None] <= j) & (j < end[0][:, None])
    shards = [layout.shard(r) for r in range(ring)]
    found, pairs = needed(begin, end, shards, shards), seen_pairs(layout, layout, spec, docs)
    for a in range(ring):
        for b in range(ring):
            block = dense[np.ix_(layout.positions(a), layout.positions(b))]
            assert found[a, b] == block.any() and pairs[a, b] == block.sum()


def sent(case: Case, route: str = "relay", backward: str = "keys") -> list[tuple[int, int, tuple[int, int]]]:
    """Of each ring rank: bytes sent in forward, in backward, and the schedule's count of blocks."""
    given = oracle.inputs(case, torch.float32)

    def one(mesh):
        import ringattn as ra

        choices = {
            "strategy": case.strategy,
            "layout": case.layout,
            "route": route,
            "together": 2,
            "backward": backward,
        }
        plan = ra.plan(mesh, seq_len=case.seq_len, spec=case.spec, **choices)
        q, k, v = (plan.shard(given[n]).requires_grad_() for n in "qkv")
        axis = plan.ring_axis
        out = ra.attention(q, k, v, plan, spec=case.spec, docs=case.docs)
        forward = axis.sent
        out.sum().backward()
        mask = Mask(plan, case.spec, case.docs)
        return forward, axis.sent - forward, schedule_of(mask).blocks_sent(axis.rank, route)

    return run(one, ring=case.ring)


@pytest.mark.parametrize("route", ["direct", "relay"])
@pytest.mark.parametrize(
    "case",
    [replace(c, key_len=None) for c in CASES if c.ulysses == 1 and c.strategy == "ring" and "cross" not in c.name],
    ids=str,
)
def test_bytes_sent_are_the_schedules_figure(case, route):
    shard = Layout(case.layout, case.seq_len, case.ring).shard_len
    block = case.batch * shard * case.kv_heads * (case.head_dim + case.value_dim) * 4
    for forward, backward, (keys, grads) in sent(case, route):
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
    assert [blocks for _, _, blocks in sent(case, "direct")] == [(3, 0), (2, 1), (1, 2), (0, 3)]


def test_documents_inside_shards_send_nothing():
    case = Case("docs", ring=4, layout="contiguous", seq_len=64, lengths=[16, 8, 8, 16, 16])
    assert all(forward == backward == 0 for forward, backward, _ in sent(case))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_queries_that_travel_in_backward_send_what_the_cost_says(layout):
    case = Case("causal", ring=4, layout=layout, seq_len=64, kv_heads=4)
    shape = Shape(64, 64, 4, 4, case.head_dim, case.value_dim, itemsize=4, batch=case.batch)
    rows = case.batch * 16 * case.heads
    home = 4 * rows * case.head_dim  # dq of one block
    away = shape.backward_bytes(4)["queries"] - home
    assert away == 4 * rows * (case.head_dim + case.value_dim + 2)  # q, dout, lse and delta
    for _, backward, (keys, grads) in sent(case, "direct", "queries"):
        assert backward == grads * away + keys * home  # a rank's queries go where its gradients of keys would


@pytest.mark.parametrize("kv_heads", [2, 8])  # keys travel in backward, or queries
def test_the_last_gradients_fly_beside_work_at_home(kv_heads, monkeypatch):
    """Where one call makes all gradients: the work at home comes last."""
    events = {}

    def noting(what, function):
        def noted(*args, **options):
            events.setdefault(threading.get_ident(), []).append(options.get("what") or what)
            return function(*args, **options)

        return noted

    def watched(*args):
        score = score_of(*args)
        return score._replace(halves=noting("work", score.halves))

    def one(mesh):
        plan = ra.plan(mesh, seq_len=64, heads=(8, kv_heads), head_dim=8, kernel="sdpa_cpu", strategy="ring")
        assert plan.layout == "zigzag" and plan.backward == ("keys" if kv_heads == 2 else "queries")
        plan.ring_axis.move = noting("a move", plan.ring_axis.move)
        q, k, v = (plan.shard(x).requires_grad_() for x in given)
        ra.attention(q, k, v, plan).sum().backward()
        happened = list(events[threading.get_ident()])
        return [plan.unshard(x.grad) for x in (q, k, v)], happened

    monkeypatch.setattr(torch_attention, "score_of", watched)
    given = [torch.randn(1, 64, h, 8) for h in (8, kv_heads, kv_heads)]
    leaves = [x.clone().requires_grad_() for x in given]
    ra.attention(*leaves).sum().backward()
    for grads, (*_, before, last) in run(one, ring=4):
        assert before == "gradients of step 3 of 4" and last == "work"
        for found, leaf in zip(grads, leaves, strict=True):
            torch.testing.assert_close(found, leaf.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "backward"), [("tiled", 4), ("sdpa_cpu", 2)])
def test_a_vendors_kernel_meets_as_many_blocks_in_backward_as_in_forward(kernel, backward, monkeypatch):
    """It pays for each call; with others gradients in float32 need the room."""
    block = 2 * 4 * 16 * 2 * 8  # bytes: keys and values of 16 tokens
    monkeypatch.setitem(HARDWARE, "cpu", replace(HARDWARE["cpu"], room=3 * block))
    runs, run_of = [], torch_attention.run_of
    monkeypatch.setattr(torch_attention, "run_of", lambda *of, **how: runs.append(run_of(*of, **how)) or runs[-1])

    def one(mesh):
        plan = ra.plan(mesh, seq_len=64, heads=(8, 2), head_dim=8, kernel=kernel, strategy="ring")
        q, k, v = (torch.ones(1, 16, h, 8, requires_grad=True) for h in (8, 2, 2))
        ra.attention(q, k, v, plan).sum().backward()

    run(one, ring=4)
    assert sorted(len(steps) for steps, _ in runs) == sorted([2] * 4 + [backward] * 4)


def test_the_schedule_of_a_long_sequence_is_found_piece_by_piece(monkeypatch):
    monkeypatch.setattr("ringattn.mask.AT_ONCE", 7)
    for case in FEATURES:
        for layout in LAYOUTS:
            plan = ra.Plan(case.seq_len, 4, 2, key_len=case.key_len, layout=layout)
            mask = Mask(plan, case.spec, case.docs, case.key_docs)
            begin, end = mask.bounds(np.arange(plan.tokens.padded_length))
            shards = [[layout.shard(r) for r in range(4)] for layout in (plan.tokens, plan.keys.tokens)]
            found = schedule_of.__wrapped__(mask).needed
            assert (found == needed(begin, end, *shards)).all(), (case.name, layout)
