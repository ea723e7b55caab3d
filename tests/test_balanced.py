"""Documents dealt by work: equal tokens, nearly equal work, few ranges, little that is received; and exact results."""

import pickle
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import LIMIT, check
from test_roll import expected

import ringattn as ra
import ringattn.layouts.layout as layout_module
from ringattn.comms.local import run
from ringattn.launch.verify.cases import Case
from ringattn.layouts.dealing import deal
from ringattn.layouts.layout import Layout
from ringattn.masks.bands import Work, families, joined
from ringattn.masks.spec import AttentionSpec, Docs
from tests.cases import FULL

CAUSAL = AttentionSpec()


def mix(tokens, kind, rng):
    """Lengths of packed documents: of real data (a log-normal with a long tail, a Pareto with a longer one), or not."""
    draw = {
        "log-normal": lambda: np.clip(np.exp(rng.normal(np.log(2048), 1.4)), 64, 131072),
        "window": lambda: np.clip(np.exp(rng.normal(np.log(2048), 1.4)), 64, 131072),
        "pareto": lambda: np.clip((rng.pareto(0.9) + 1) * 512, 64, tokens // 2),
        "short": lambda: 1 + rng.exponential(64),
        "middling": lambda: 1 + rng.exponential(256),
        "any scale": lambda: np.exp(rng.uniform(np.log(16), np.log(tokens / 8))),
        "equal": lambda: 3000,
        "a giant": lambda: 1 + rng.exponential(700) if lengths else 0.6 * tokens,
        "few": lambda: tokens * rng.uniform(0.2, 0.4),
        "padded": lambda: rng.integers(3) * rng.exponential(700),  # and some have no token
        "full": lambda: 1 + rng.exponential(1500),
    }[kind]
    lengths, total = [], 0
    while total < tokens:
        lengths.append(min(int(draw()), tokens - total))
        total += lengths[-1]
    return lengths


def tiles(starts, ranges):
    """The tiles of 128 queries and 128 keys that a kernel computes for these tokens, under a causal mask."""
    count = 0
    for first, last in ranges:
        for a, b in pairwise([first, *starts[(first < starts) & (starts < last)], last]):
            ends = np.minimum(np.arange(a + 128, b + 128, 128), b) - starts[np.searchsorted(starts, a, "right") - 1]
            count += -(-ends // 128).sum()
    return count


class Figures(NamedTuple):
    """Of a deal, counted token by token: the less, the better."""

    busiest: float  # rank's work, over the mean
    slowest: float  # rank's work and what takes as long: keys that it receives and waits for, a second pass over some
    tiles: float  # of all ranks, over those that one rank would compute
    ranges: float  # of a rank
    torn: float  # pieces of documents on a rank, beside one of each document
    received: int  # keys, by the rank that receives most


def figures(lengths, ranks, shard, spec=CAUSAL):
    starts, end, total = np.append(0, np.cumsum(lengths)), sum(lengths), ranks * shard
    bands = joined(families(spec, total, docs=Docs.from_lengths(lengths, pad_to=total))[0])
    dealt = [[(r.start, r.stop) for r in ranges] for ranges in deal(starts, total, ranks, Work.of(bands))]
    everything = [np.arange(a, b) for ranges in dealt for a, b in ranges]
    assert (np.sort(np.concatenate(everything)) == np.arange(total)).all()
    assert all(sum(b - a for a, b in ranges) == shard for ranges in dealt)

    document = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(end) - starts[document]
    pairs = np.minimum(at + 1, spec.reach[0] or end) if spec.causal else np.array(lengths)[document]
    below = np.append(0, np.cumsum(pairs))
    work, times, received, pieces, computed = [], [], [], 0, 0
    for ranges in dealt:
        ranges = [(a, min(b, end)) for a, b in ranges if a < end]  # after it is padding
        mine = np.concatenate([np.arange(a, b) for a, b in ranges])
        reach = np.zeros(len(lengths), int)
        np.maximum.at(reach, document[mine], at[mine] + 1)
        keys = reach.sum() - len(mine)
        first, last = document[[a for a, _ in ranges]], document[[b - 1 for _, b in ranges]]
        cut = [i for pair in zip(first.tolist(), last.tolist(), strict=True) for i in {*pair}]
        needs = [min(b, starts[i + 1]) if at[a] else a for (a, b), i in zip(ranges, first, strict=True)]
        local = sum(below[[b for _, b in ranges]] - below[needs])
        wait = max(0, 1e6 + 128 * keys - local / 4) if keys else 0
        work.append(sum(below[b] - below[a] for a, b in ranges))
        times.append(work[-1] + 256 * keys + wait + 2.4e6 * (len({*cut}) < len(cut)))
        received.append(keys)
        pieces += np.count_nonzero(reach)
        computed += tiles(starts, ranges)
    mean, torn = np.mean(work), (pieces - np.count_nonzero(lengths)) / ranks
    whole, count = tiles(starts, [(0, end)]), sum(map(len, dealt)) / ranks
    return Figures(max(work) / mean, max(times) / mean, computed / whole, count, torn, max(received))


@pytest.mark.parametrize("kind", ["log-normal", "pareto"])
@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_work_is_equal_and_little_is_received_in_few_ranges(ranks, kind):
    """In each of 20 mixes work within 2%, and no rank receives more than 1.5 x the longest document and a shard.

    In all of them 12 ranges a rank, and few tiles are cut in two: all ranks together compute hardly more of them than
    one would. The slowest rank takes little more than a share of the work.
    """
    made = []
    for seed in range(20):
        lengths = mix(ranks * 16384, kind, np.random.default_rng(seed))
        made.append(figures(lengths, ranks, 16384))
        assert made[-1].busiest <= 1.02 and made[-1].received <= 1.5 * max(lengths) + 16384
    mean = Figures(*np.mean(made, 0))
    assert mean.slowest <= {8: 1.085, 16: 1.105, 64: 1.15}[ranks] and mean.ranges <= 12 and mean.tiles <= 1.006


SHAPES = [(2, 16384), (4, 4096), (8, 16384), (16, 1000), (64, 4096)]  # ranks, and tokens of each
SPECS = {"window": AttentionSpec(window=2048), "full": FULL}
RECORDED = {
    # busiest, slowest, tiles, ranges, torn
    "log-normal": (1.0093, 1.7563, 1.0921, 5.3316, 2.3724),
    "window": (1.0107, 2.6168, 1.0629, 5.2023, 2.6146),
    "pareto": (1.01, 2.1578, 1.1012, 5.6562, 2.7578),
    "short": (1.0074, 6.6501, 1.0372, 7.8194, 1.7023),
    "middling": (1.0082, 2.9821, 1.068, 7.9167, 2.5842),
    "any scale": (1.0084, 2.4069, 1.0677, 6.4089, 3.1267),
    "equal": (1.0162, 2.1648, 1.1034, 6.5312, 2.4549),
    "a giant": (1.0109, 1.6658, 1.115, 5.7821, 2.0286),
    "few": (1.0192, 1.8524, 1.0971, 5.5069, 2.4427),
    "padded": (1.0099, 2.7281, 1.0799, 6.1406, 2.1085),
    "full": (1.0078, 1.4189, 1.0657, 5.7682, 2.8316),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_deals_are_as_good_as_recorded(kind):
    """The means of some mixes in all shapes, each at most 0.3% worse.

    Any change of dealing moves some of them. One that is better over many more seeds is recorded anew.
    """
    made = []
    for ranks, shard in SHAPES:
        for seed in range(4 if ranks < 64 else 2):
            tokens = ranks * shard * 8 // 9 if kind == "padded" else ranks * shard
            lengths = mix(tokens, kind, np.random.default_rng(seed))
            made.append(figures(lengths, ranks, shard, SPECS.get(kind, CAUSAL))[:5])
    mean = np.mean(made, 0)
    assert (mean <= 1.003 * np.array(RECORDED[kind])).all(), mean.round(4).tolist()


lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)
specs = st.sampled_from([AttentionSpec(), FULL, AttentionSpec(window=5)])
layouts = st.builds(
    lambda lengths, pad, ring, ulysses, spec: Layout(
        "balanced", sum(lengths) + pad, ring, ulysses, Docs.from_lengths(lengths, pad_to=sum(lengths) + pad), spec
    ),
    lengths_of, st.integers(1, 9), st.integers(1, 8), st.integers(1, 3), specs,
)  # fmt: skip


@given(layouts)
def test_every_token_is_on_one_rank_and_ranks_hold_equally_many(layout):
    assert sorted(layout.order()) == list(range(layout.padded_length))
    for rank in range(layout.ring):
        assert len(layout.positions(rank)) == layout.shard_len and (np.diff(layout.positions(rank)) > 0).all()


LENGTHS = [16, 0, 47, 8, 1, 19]
BALANCED = Case("balanced", seq_len=96, lengths=[*LENGTHS, 5], dealt=[*LENGTHS, 5], layout="balanced")
WINDOW = AttentionSpec(window=13, softcap=3.0)
CASES = [
    (BALANCED, {}),
    (replace(BALANCED, sinks=True, lengths=LENGTHS, dealt=LENGTHS), {"kernel": "tiled"}),
    (replace(BALANCED, spec=WINDOW, sinks=True, strategy="gather"), {}),
    (replace(BALANCED, spec=FULL, kv_heads=4), {"together": 2}),
    (replace(BALANCED, spec=WINDOW, kv_heads=4), {"route": "relay", "hosts": 4}),
    (replace(BALANCED, seq_len=97, lengths=[90], dealt=[90]), {"route": "levels", "hosts": 2}),
    (replace(BALANCED, seq_len=3, lengths=[3], dealt=[3]), {}),  # fewer tokens than ranks
    (replace(BALANCED, ring=2, ulysses=2, spec=WINDOW, sinks=True), {}),
    (replace(BALANCED, ring=2, ulysses=2, strategy="gather"), {}),
    (replace(BALANCED, ring=2, ulysses=2, lengths=[[50, 46], [3, 93]]), {}),  # other documents than are dealt
]


@pytest.mark.parametrize(("case", "choices"), CASES, ids=lambda x: str(x))
def test_equals_dense_float64(case, choices):
    check(case, torch.float32, dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dsinks"), LIMIT), **choices)


@settings(max_examples=12)
@given(layouts, st.integers(-9, 9))
def test_unshard_inverts_shard_and_roll_rolls(layout, shift):
    x = torch.randint(0, 99, (2, layout.length, 3))

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=1, layout="balanced", spec=layout.spec).for_docs(layout.docs)
        mine, real = plan.shard(x), plan.real_tokens()
        assert torch.equal(mine[:, real], x[:, plan.positions()[real]])
        return plan.unshard(mine), plan.unshard(plan.roll(mine, shift, docs=layout.docs))

    rolled = expected(x, shift, 1, layout.docs, -100)
    assert all(torch.equal(whole, x) and torch.equal(moved, rolled)
               for whole, moved in run(one_rank, ring=layout.ring, ulysses=layout.ulysses))  # fmt: skip


def test_a_plan_that_a_worker_made_is_bound_to_the_ranks_and_not_dealt_again(monkeypatch):
    docs = Docs.from_lengths([8, 40, 16])
    dealt, deal_once = [], layout_module.deal
    monkeypatch.setattr(layout_module, "deal", lambda *given: dealt.append(1) or deal_once(*given))

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=32, layout="balanced", strategy="ring")
        worker = pickle.loads(pickle.dumps(plan))
        data = pickle.dumps(worker.for_docs(docs))
        bound = plan.for_docs(pickle.loads(data))
        x = torch.randn(1, 64, 2, 4, generator=torch.Generator().manual_seed(0))
        mine = bound.shard(x)
        out = bound.unshard(ra.attention(mine, mine, mine, bound, docs=docs))
        torch.testing.assert_close(out, ra.attention(x, x, x, docs=docs))
        with pytest.raises(ValueError, match="laid out by a plan with other choices"):
            plan.replace(kernel="tiled").for_docs(pickle.loads(data))
        return bound == pickle.loads(pickle.dumps(bound))

    assert all(run(one_rank, ring=2))
    assert len(dealt) == 2  # once by each rank's worker
