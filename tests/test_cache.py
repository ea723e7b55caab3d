"""Prefill in chunks and decode over ranks equal attention over everything at once, at every position."""

from functools import partial

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.processes import run as run_processes
from ringattn.torch.cache import KVCache, Stripes, decode, prefill

LIMIT = 2e-6


def draw(B=2, T=61, H=4, G=2, D=8, V=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, h, d, generator=g) for h, d in ((H, D), (G, D), (G, V))]


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def generate(mesh, q, k, v, chunk, steps, new=1, block=4, move="auto", form="lse", **given):
    """Prefill in chunks, then decode `new` tokens at a time for the last `steps`; everything of every position."""
    T = q.shape[1]
    base = ra.plan(mesh, seq_len=chunk)
    cache = KVCache.allocate(
        base, batch=q.shape[0], max_len=T, kv_heads=k.shape[2], head_dim=k.shape[3], value_dim=v.shape[3],
        dtype=q.dtype, block=block, window=given.get("spec", ra.AttentionSpec()).window, room=max(chunk, new),
    )  # fmt: skip
    outs = []
    for at in range(0, T - steps, chunk):
        n = min(chunk, T - steps - at)
        plan = base.for_length(n)
        mine = [plan.shard(x[:, at : at + n]) for x in (q, k, v)]
        outs.append(plan.unshard(prefill(*mine, plan, cache, start=at, move=move, **given)))
    for at in range(T - steps, T, new):
        outs.append(decode(*(x[:, at : at + new] for x in (q, k, v)), cache, form=form, **given))
    assert cache.lengths.tolist() == [T] * len(q)
    return torch.cat(outs, 1)


MESHES = [{"ring": 1}, {"ring": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2}, {"ulysses": 4}, {"ring": 8}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("chunk", [1, 3, 17, 512])
def test_chunks_then_tokens_are_the_whole(sizes, move, chunk):
    q, k, v = draw(T=30 if chunk == 1 else 61)
    expected = ra.attention(q.double(), k.double(), v.double())
    for form in ("lse", "streams"):
        for out in run(partial(generate, q=q, k=k, v=v, chunk=chunk, steps=6, move=move, form=form), **sizes):
            assert off(out, expected) <= LIMIT


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize(
    ("shapes", "given"),
    [
        ({"V": 12, "H": 8, "G": 1}, {"spec": ra.AttentionSpec(softcap=2.0)}),
        ({}, {"spec": ra.AttentionSpec(window=7)}),
        ({}, {"spec": ra.AttentionSpec(window=1)}),
        ({}, {"spec": ra.AttentionSpec(window=23), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
)
def test_windows_softcap_sinks_and_shapes(shapes, given, move):
    q, k, v = draw(**shapes)
    expected = ra.attention(q.double(), k.double(), v.double(), **given)
    for out in run(lambda mesh: generate(mesh, q, k, v, 5, 9, 3, 2, move, **given), ring=2, ulysses=2):
        assert off(out, expected) <= LIMIT


def test_the_case_of_nine_tokens_in_chunks_of_three_and_one_decoded():
    q, k, v = draw(B=2, T=10, H=4, G=4, D=16, V=16)
    expected = ra.attention(q.double(), k.double(), v.double())
    for sizes in MESHES:
        for out in run(lambda mesh: generate(mesh, q, k, v, 3, 1), **sizes):
            assert off(out, expected) <= LIMIT


def over_gloo(q, k, v):
    size = torch.distributed.get_world_size()
    mesh = ra.init_mesh(ring=size // 2, ulysses=2, device_type="cpu")
    return [generate(mesh, q, k, v, chunk, 3) for chunk in (3, 512)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_processes(ranks):
    q, k, v = draw()
    expected = ra.attention(q.double(), k.double(), v.double())
    results = run_processes(over_gloo, ranks, q, k, v)
    assert max(off(out, expected) for outs in results for out in outs) <= LIMIT
    assert all(torch.equal(outs[0][:, -3:], results[0][0][:, -3:]) for outs in results), "decode differs between ranks"


def test_a_window_keeps_only_what_can_still_be_seen():
    q, k, v = draw(B=1, T=400)
    spec = ra.AttentionSpec(window=16)

    def one(mesh):
        plan = ra.plan(mesh, seq_len=8)
        cache = KVCache.allocate(
            plan, batch=1, max_len=400, kv_heads=2, head_dim=8, dtype=q.dtype, window=16, room=8, block=2
        )
        for at in range(0, 400, 8):
            prefill(*(plan.shard(x[:, at : at + 8]) for x in (q, k, v)), plan, cache, spec=spec)
        return cache.k.shape[1]

    assert max(run(one, ring=2)) <= (16 + 8) // 2 + 2 * 2


def rows_of_different_lengths(mesh):
    q, k, v = draw(T=20)
    plan = ra.plan(mesh, seq_len=20)
    cache = KVCache.allocate(plan, batch=2, max_len=32, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
    prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
    cache.truncate([13, 20])
    more = draw(T=5, seed=1)
    out = decode(*more, cache)
    assert cache.lengths.tolist() == [18, 25]
    for row, kept in enumerate((13, 20)):
        whole = [
            torch.cat([x[row : row + 1, :kept], y[row : row + 1]], 1).double()
            for x, y in zip((q, k, v), more, strict=True)
        ]
        assert off(out[row : row + 1], ra.attention(*whole)[:, kept:]) <= LIMIT


def forks(mesh):
    q, k, v = draw(B=1, T=20)
    plan = ra.plan(mesh, seq_len=20)
    cache = KVCache.allocate(plan, batch=1, max_len=40, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
    prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
    fork = cache.fork(3)
    more = draw(B=3, T=7, seed=1)
    first = decode(*(x[:, :4] for x in more), fork)
    again = fork.fork()
    second = decode(*(x[:, 4:] for x in more), again)
    whole = [torch.cat([x.expand(3, -1, -1, -1), y], 1).double() for x, y in zip((q, k, v), more, strict=True)]
    expected = ra.attention(*whole)[:, 20:]
    assert off(torch.cat([first, second], 1), expected) <= LIMIT
    assert cache.lengths.tolist() == [20] and fork.lengths.tolist() == [24] * 3
    alone = decode(*(x[:1] for x in more), cache)  # the shared cache goes on for itself
    assert off(alone, expected[:1]) <= LIMIT
    with pytest.raises(ValueError, match=r"forks share the first \[20\] tokens"):
        cache.truncate(19)


def saved(mesh):
    q, k, v = draw(T=20)
    plan = ra.plan(mesh, seq_len=20)
    caches = [KVCache.allocate(plan, batch=2, max_len=32, kv_heads=2, head_dim=8, dtype=q.dtype) for _ in range(2)]
    prefill(*(plan.shard(x) for x in (q, k, v)), plan, caches[0])
    caches[1].load_state_dict(caches[0].state_dict())
    more = draw(T=1, seed=1)
    assert torch.equal(decode(*more, caches[0]), decode(*more, caches[1]))


@pytest.mark.parametrize("test", [rows_of_different_lengths, forks, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", MESHES[:4], ids=str)
def test_caches(test, sizes):
    run(test, **sizes)


def test_positions_are_balanced_at_any_length_and_below_counts_them():
    stripes = Stripes(4, 8)
    for length in range(200):
        held = [int(stripes.below(length, r)) for r in range(4)]
        assert sum(held) == length and max(held) - min(held) <= 8
        assert held == [int(stripes.owned(np.arange(length), r).sum()) for r in range(4)]


@pytest.mark.parametrize("size", [1.0, 10.0, 50.0])
def test_large_scores_merge_over_ranks_without_nan(size):
    q, k, v = (
        torch.empty(1, 33, 2, 8).uniform_(-size, size, generator=torch.Generator().manual_seed(0)) for _ in range(3)
    )
    expected = ra.attention(q.double(), k.double(), v.double())
    for form in ("lse", "streams"):
        for out in run(partial(generate, q=q, k=k, v=v, chunk=16, steps=17, form=form), ring=4):
            assert off(out, expected) <= 1e-5 and out.isfinite().all()


def bad(mesh):
    q, k, v = draw(T=16)
    plan = ra.plan(mesh, seq_len=16)
    allocate = {"batch": 2, "max_len": 24, "kv_heads": 2, "head_dim": 8, "dtype": q.dtype}
    cache = KVCache.allocate(plan, **allocate)
    new = [x[:, :1] for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"decode before prefill: the cache holds \[0, 0\] tokens"):
        decode(*new, cache)
    mine = [plan.shard(x) for x in (q, k, v)]
    prefill(*mine, plan, cache, start=0)
    state = (cache.k.clone(), cache.lengths.copy())
    for call, says in [
        (lambda: prefill(*mine, plan, cache), "16 more tokens do not fit: rows hold up to 16 of max_len=24"),
        (lambda: prefill(*mine, plan, cache, start=17), r"a chunk at 17 skips positions: .* end at \[16, 16\]"),
        (lambda: prefill(*mine, plan, cache, start=3), "a chunk at 3 overlaps positions"),
        (lambda: decode(*(x[:1] for x in new), cache), r"k has shape .*this cache takes \[2, tokens, 2, 8\]"),
        (lambda: decode(*(x.double() for x in new), cache), "k is torch.float64 on cpu, the cache torch.float32"),
        (lambda: decode(*new, cache, tree_mask=1), "tree_mask: decode has no such argument .*as forks"),
        (lambda: decode(*new, cache, form="oml"), "form='oml': choose one of lse, streams"),
        (lambda: prefill(*mine, plan, cache, move="all"), "move='all': choose one of auto, queries, keys"),
        (lambda: cache.truncate(17), r"truncate to \[17, 17\]: the rows hold tokens \[0, 0\] to \[16, 16\]"),
        (lambda: prefill(*mine, ra.plan(mesh, seq_len=16), cache), "the cache was allocated for another plan"),
        (lambda: KVCache.allocate(plan, **{**allocate, "max_len": 0}), "max_len=0: at least 1"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
        assert torch.equal(cache.k[:, :4], state[0][:, :4]) and (cache.lengths == state[1]).all()
    small = KVCache.allocate(plan, **{**allocate, "max_len": 99}, window=4, room=4)
    with pytest.raises(ValueError, match="the cache keeps a window of 4 keys, the spec sees window=None"):
        prefill(*mine, plan, small)


def test_bad_input_leaves_the_cache_as_it_was():
    run(bad, ring=2)


def test_ranks_that_disagree_about_the_length_are_named():
    def one(mesh):
        q, k, v = draw(T=16)
        plan = ra.plan(mesh, seq_len=16)
        cache = KVCache.allocate(plan, batch=2, max_len=24, kv_heads=2, head_dim=8, dtype=q.dtype)
        prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
        if mesh.rank == 1:
            cache.truncate(15)
        with pytest.raises(ValueError, match=r"cache: ring rank 0 has .*\[16, 16\].*ring rank 1 has .*\[15, 15\]"):
            decode(*(x[:, :1] for x in (q, k, v)), cache)

    run(one, ring=2)
