"""The schedule: every needed meeting happens once, nothing travels that nobody needs, and bytes are what it says."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.layouts.layout import LAYOUTS, Layout
from ringattn.masks.bands import all_bands, bounds_at, families
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.course import Ring, course
from ringattn.plans.machine import load
from ringattn.plans.mask import Mask, reads_of, table_of
from ringattn.steps.rank import steps_of
from ringattn.steps.reads import GRAINS, Reads, seen
from ringattn.steps.table import build, grouped
from tests.cases import BALANCED, CASES, FEATURES, FULL

LENGTH = 8  # of a block
seen_of = st.sets(st.integers(0, LENGTH - 1)) | st.just(set()) | st.just(set(range(LENGTH)))


def tokens_in(ranges):
    return [t for r in ranges for t in r]


def reads_from(ring, cells):
    """Rank i sees the tokens `cells[i * ring + j]` of block j; each is a range by itself."""
    rows = [(*divmod(cell, ring), t, t + 1) for cell, tokens in enumerate(cells) for t in sorted(tokens)]
    shards = [(range(r * LENGTH, (r + 1) * LENGTH),) for r in range(ring)]
    return Reads(ring, LENGTH, *np.array(rows, int).reshape(-1, 4).T, shards)


@given(
    st.sampled_from([(1, 1), (1, 3), (1, 6), (2, 1), (5, 1), (7, 1), (2, 2), (2, 3), (3, 2)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape[0]), st.lists(seen_of, min_size=(n := shape[0] * shape[1]) * n, max_size=n * n)
        )
    ),
    st.integers(1, 8),
)
def test_steps_meet_exactly_what_is_needed_and_gradients_come_home(given, together):
    """Tokens are where they are read, both sides of every transfer know of it, and all gradients reach home."""
    hosts, cells = given
    ring = round(len(cells) ** 0.5)
    reads, size = reads_from(ring, cells), ring // hosts
    table = build(reads, hosts, together)
    runs = [[list(of_phase) for _, of_phase in groupby(steps_of(table, reads.shards, r), key=lambda s: id(s.phase))]
            for r in range(ring)]  # fmt: skip
    met, home = [], []  # (reader, block, token): what is read, and whose gradients have come home
    here = {r: [(r, t) for t in range(LENGTH)] for r in range(ring)}  # the (block, token) that a rank holds, in order
    arrived: dict[int, dict] = {}  # readers whose gradients came with the tokens
    for i, everyone in enumerate(zip(*runs, strict=True)):
        sums = {r: {token: arrived.get(r, {}).get(token, set()) for token in here[r]} for r in range(ring)}
        phases = [own[0].phase for own in everyone]
        for rank, own in enumerate(everyone):
            phase = phases[rank]
            assert here[rank] == [(phase.block, t) for t in tokens_in(phase.held)]
            assert len(own) == len(everyone[rank // size * size])  # the same on all ranks of a host
            for j, step in enumerate(own):
                assert [p for r in step.keys for p in r] == sorted({p for r in step.keys for p in r})
                for block in step.blocks:  # who holds it now has this rank among its readers at the same step
                    holder = rank // size * size + block % size
                    at = everyone[holder][j].send[rank] if j else [range(len(here[holder]))]
                    assert (holder == rank) == (j == 0)
                    for token in [here[holder][t] for t in tokens_in(at)]:
                        assert token[0] == block
                        if holder != rank or token[1] in cells[rank * ring + block]:
                            met.append((rank, *token))
                            sums[holder][token] = sums[holder][token] | {rank}
                for source, where in step.receive.items():
                    sent = [phases[source].block * LENGTH + here[source][t][1]
                            for t in tokens_in(everyone[source][j].send[rank])]  # fmt: skip
                    assert [[p for r in step.keys for p in r][t] for t in tokens_in(where.at)] == sent
            assert sum(len(step.send) for step in own) == sum(
                rank in step.receive for other in everyone for step in other
            )
        here, arrived, before = {r: [] for r in range(ring)}, {}, here
        for r, phase in enumerate(phases):
            if i == 0:
                home += [(reader, *token) for token, readers in sums[r].items() for reader in readers]
            for hop, is_home in ((phase.onward, False), (phase.home, True)):
                assert (hop is None) == ((phases[0].home if is_home else phases[0].onward) is None)
                if hop is None or not hop.send:
                    continue
                to = (r + hop.shift) % ring
                theirs = (phases[to].home if is_home else phases[to].onward).receive
                sent = [before[r][t] for t in tokens_in(hop.send)]
                assert len(sent) == len(tokens_in(theirs))
                if is_home:
                    assert sent == [(to, t) for t in tokens_in(theirs)]
                    home += [(reader, *token) for token in sent for reader in sums[r][token]]
                else:
                    here[to], arrived[to] = sent, {t: sums[r][t] for t in sent} if i else {}
            if i:  # each token's gradients go on, or home
                sent = [t for hop in (phase.onward, phase.home) if hop for t in tokens_in(hop.send)]
                assert sorted(sent) == list(range(len(before[r])))
        for r, phase in enumerate(phases):  # nobody waits for what is not sent
            for hop, name in ((phase.onward, "onward"), (phase.home, "home")):
                assert not hop or bool(hop.receive) == bool(getattr(phases[(r - hop.shift) % ring], name).send)
    expected = sorted((i, j, t) for i, j in np.ndindex(ring, ring) for t in cells[i * ring + j])
    assert sorted(met) == sorted(home) == expected


def reads_ranges(reads, reader, block):
    some = (reads.reader == reader) & (reads.block == block)
    return [range(a, b) for a, b in zip(reads.begin[some].tolist(), reads.end[some].tolist(), strict=True)]


masks = st.tuples(
    st.sampled_from(LAYOUTS), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 20),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
)  # fmt: skip


@given(masks)
def test_needed_blocks_and_seen_pairs_are_those_of_the_dense_mask(given):
    name, T, ring, window, lengths = given
    spec, layout = AttentionSpec(window=window), Layout(name, T, ring)
    lengths = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) <= T]
    docs = Docs.from_lengths(lengths or [T], pad_to=T)
    begin, end = bounds_at(*families(spec, T, docs=docs), np.arange(layout.padded_length))
    j = np.arange(layout.padded_length)
    dense = (begin[0][:, None] <= j) & (j < end[0][:, None])
    shards = [layout.shard(r) for r in range(ring)]
    bands = all_bands(spec, T, docs=docs)
    results, pairs = seen(bands, shards, shards).tokens > 0, seen_pairs(layout, layout, spec, docs)
    for a in range(ring):
        for b in range(ring):
            block = dense[np.ix_(layout.positions(a), layout.positions(b))]
            assert results[a, b] == block.any() and pairs[a, b] == block.sum()


specs = st.sampled_from([AttentionSpec(), FULL]) | st.builds(AttentionSpec, window=st.integers(1, 300))


@settings(max_examples=60)
@given(
    st.sampled_from(["contiguous", "zigzag", "balanced", "striped"]), st.integers(1, 8), specs,
    st.lists(st.integers(0, 90), min_size=1, max_size=9), st.sampled_from([1, 1, 30]),
)  # fmt: skip
def test_what_travels_is_what_is_seen(name, ring, spec, lengths, times):
    """Of every block every rank reads all that it sees, and nothing that is a grain or more from it."""
    docs = Docs.from_lengths([times * n for n in lengths], pad_to=times * sum(lengths) + 3)
    plan = ra.Plan(docs.length, ring, layout=name, docs=docs if name == "balanced" else None)
    reads, layout = reads_of.__wrapped__(Mask(plan, spec, docs)), plan.tokens
    begin, end = bounds_at(*families(spec, docs.length, docs=docs), np.arange(layout.padded_length))
    for a, b in np.ndindex(ring, ring):
        q, k = layout.positions(a), layout.positions(b)
        dense = (begin[0][q, None] <= k) & (k < end[0][q, None])
        expected = dense.any(0)
        assert (reads.tokens[a, b] > 0) == expected.any()
        if expected.any() and name != "striped":
            read = np.zeros(layout.shard_len, bool)
            for r in reads_ranges(reads, a, b):
                read[r] = True
            grain = max(1, layout.shard_len // GRAINS)
            near = np.convolve(expected, np.ones(2 * grain - 1), "same") > 0
            assert (read >= expected).all() and (read <= near).all()
            ranges = reads_ranges(reads, a, b)
            assert sum(map(len, ranges)) == read.sum() and len(ranges) <= GRAINS + len(layout.shard(b)) + 1


@settings(max_examples=60)
@given(
    st.sampled_from([(1, 2), (1, 5), (1, 64), (2, 1), (2, 6), (2, 32), (4, 3), (4, 16), (8, 1), (8, 4), (8, 8)]),
    st.sampled_from(["contiguous", "zigzag", "balanced", "striped"]), specs,
    st.lists(st.integers(0, 900), min_size=1, max_size=9), st.integers(1, 5),
)  # fmt: skip
def test_predicted_steps_and_tokens_are_those_that_run(shape, name, spec, lengths, together):
    """Of every rank: which of its host's steps have work, and how many tokens it receives and sends for each."""
    (hosts, size), docs = shape, Docs.from_lengths(lengths, pad_to=sum(lengths) + 300)
    plan = ra.Plan(docs.length, hosts * size, layout=name, docs=docs if name == "balanced" else None)
    mask = Mask(plan, spec, docs)
    table, predicted = (
        table_of(mask, hosts, together),
        course(Ring(plan.tokens, plan.tokens, spec, docs, hosts, size), together),
    )
    for rank in range(plan.ring):
        run, coming, phase = [], 0, None
        for step in steps_of(table, reads_of(mask).shards, rank):
            begins, sent = step.phase is not phase, sum(len(r) for ranges in step.send.values() for r in ranges)
            received = coming if begins else step.length if step.receive else 0
            run.append((bool(step.blocks), received, sent))
            phase = step.phase
            coming = sum(map(len, phase.onward.receive)) if phase.onward else 0
        busy = [f + i for f, n in zip(table.first, table.busy[rank // size], strict=True) for i in range(n)]
        columns = (x[rank][busy] for x in (predicted.pairs > 0, predicted.received, predicted.sent))
        assert run == list(zip(*(x.tolist() for x in columns), strict=True))


def count(*ranges) -> int:
    return sum(len(r) for each in ranges for r in each)


def sent(case: Case, route: str = "relay") -> list[tuple[int, int, tuple[int, int]]]:
    """Of each ring rank: bytes sent in forward, in backward, and the schedule's count of tokens."""
    given = oracle.inputs(case, torch.float32)

    def one_rank(mesh):
        import ringattn as ra

        choices = {"route": route, "together": 2, "hosts": 2 if route == "levels" else None}
        plan = replace(case, plan=choices).plan_on(mesh)
        q, k, v = (plan.shard(given[n]).requires_grad_() for n in "qkv")
        axis = plan.ring_axis
        out = ra.attention(q, k, v, plan, spec=case.spec, docs=case.docs)
        forward = axis.sent
        out.sum().backward()
        mask = Mask(plan, case.spec, case.docs)
        steps = steps_of(table_of(mask, plan.hosts), reads_of(mask).shards, axis.rank)
        phases = list({id(step.phase): step.phase for step in steps}.values())
        keys = sum(count(*step.send.values()) for step in steps)
        returned = sum(count(*(places.at for places in step.receive.values())) for step in steps)
        hops = [count(phase.onward.send) for phase in phases if phase.onward]
        home = sum(count(phase.home.send) for phase in phases if phase.home)
        return forward, axis.sent - forward, (keys + sum(hops), returned + sum(hops[1:]) + home)

    return run(one_rank, ring=case.ring)


RINGS = [c for c in (*CASES, *BALANCED) if c.ulysses == 1 and c.strategy == "ring" and "cross" not in c.name]


def place_of(case):
    return case.ring, case.ulysses, case.strategy, case.layout


NAMES, AT = list(dict.fromkeys(c.name for c in RINGS)), list(dict.fromkeys(map(place_of, RINGS)))


@pytest.mark.parametrize(
    ("case", "route"),  # a third: every case goes by each route, and at every place some do
    [(c, route) for c in RINGS for i, route in enumerate(("direct", "relay", "levels"))
     if (NAMES.index(c.name) + AT.index(place_of(c)) + i) % 3 == 0
     and (route != "levels" or c.layout in ("zigzag", "balanced"))],
    ids=str,
)  # fmt: skip
def test_bytes_sent_are_the_schedules_figure(case, route):
    token = case.batch * case.kv_heads * (case.head_dim + case.value_dim) * 4
    for forward, backward, (keys, grads) in sent(case, route):
        assert forward == keys * token
        assert backward == (keys + grads) * token


def test_a_causal_zigzag_step_brings_half_a_block_where_only_that_is_seen():
    case = Case("causal", ring=4, layout="zigzag", seq_len=64)
    assert [tokens for _, _, tokens in sent(case, "direct")] == [(24, 48), (32, 40), (40, 32), (48, 24)]


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_only_the_last_partial_is_rounded(sinks):
    """So inputs of 16 bits are as far from the same numbers in float32 as one rounding."""
    qkv = torch.randn(3, 1, 256, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=256, kernel="tiled", strategy="ring")
        short, exact = (ra.attention(*(plan.shard(x) for x in xs), plan, sinks=sinks) for xs in (qkv, qkv.float()))
        assert short.dtype == torch.bfloat16
        assert (short.float() - exact).norm() <= 1.01 * (exact.bfloat16().float() - exact).norm()

    run(one_rank, ring=4)


@pytest.mark.parametrize(("grads", "backward"), [("float32", 4), ("input", 2)])
def test_steps_bring_as_many_blocks_in_backward_as_in_forward_unless_gradients_are_wide(grads, backward):
    """A vendor's kernel pays for each call; gradients in float32 need the room."""
    block = 2 * 4 * 16 * 2 * 8  # bytes: keys and values of 16 tokens
    machine = load("cpu").replace(room=3 * block)

    def one_rank(mesh):
        how = ra.Transport(grads=grads)
        plan = ra.plan(mesh, seq_len=64, heads=(8, 2), head_dim=8, strategy="ring", transport=how,
                       machine=machine)  # fmt: skip
        q, k, v = (torch.ones(1, 16, h, 8, requires_grad=True) for h in (8, 2, 2))
        ra.attention(q, k, v, plan).sum().backward()
        (call,) = plan.calls.values()
        return [len(way.steps) for way in (call.forward, call.backward)]

    assert run(one_rank, ring=4) == [[2, backward]] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reads_of_every_case_follows_from_its_bounds(layout):
    """Found from documents alone: rows that differ, other documents of keys, windows less than the ring."""
    windows = [replace(c, name=f"{c.name} {w}", spec=c.spec.replace(window=w))
               for c in FEATURES if c.spec.causal and c.slices is None for w in (1, 2, 3, 6)]  # fmt: skip
    for case in (*FEATURES, *windows):
        plan = ra.Plan(case.seq_len, 4, 2, key_len=case.key_len, layout=layout)
        mask = Mask(plan, case.spec, case.docs, case.key_docs)
        results = reads_of.__wrapped__(mask).tokens > 0
        j = np.arange(plan.keys.tokens.padded_length)
        for a, b in np.ndindex(4, 4):
            sides = [(low[..., None], high[..., None]) for low, high in mask.bounds(plan.tokens.shard(a))]
            seen = any(((low <= j) & (j < high))[..., plan.keys.tokens.positions(b)].any() for low, high in sides)
            assert results[a, b] == seen, (case.name, a, b)


def test_a_step_brings_what_can_hide_behind_the_work_before_it():
    def sizes(length: int, together: int) -> list[int]:
        """How many blocks each step brings, of each of which one token is read."""
        within = grouped(lambda distance: np.ones((1, 1, 31), int), 31, length, together)[0, 0]
        assert within.tolist() == sorted(within)
        return np.bincount(within)[1:].tolist()

    assert sizes(1, 64) == [3, 12, 15]
    assert sizes(1, 8) == [3, 8, 8, 8, 3]
    assert sizes(2, 8) == [6, 16, 8]
