"""Prefill in chunks and decode over ranks equal attention over everything at once, at every position."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.processes import run as run_processes
from ringattn.torch.cache import KVCache
from ringattn.torch.inference import decode, prefill

LIMIT = 2e-6


def draw(B=2, T=61, H=4, G=2, D=8, V=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, h, d, generator=g) for h, d in ((H, D), (G, D), (G, V))]


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def generate(
    mesh, q, k, v, chunk, steps, new=1, block=4, move="auto", form="lse", kernel="auto", keys=None,
    transport="auto", **given,
):  # fmt: skip
    """Prefill in chunks, then decode `new` tokens at a time for the last `steps`; everything of every position."""
    T = q.shape[1]
    base = ra.plan(mesh, seq_len=chunk, kernel=kernel, transport=transport)
    cache = KVCache.allocate(
        base, batch=q.shape[0], max_len=T, kv_heads=k.shape[2], head_dim=k.shape[3], value_dim=v.shape[3],
        dtype=q.dtype, block=block, window=given.get("spec", ra.AttentionSpec()).window, room=max(chunk, new),
    )  # fmt: skip
    outs = []
    for at in range(0, T - steps, chunk):
        n = min(chunk, T - steps - at)
        plan = base.for_length(n)
        mine = [plan.shard(x[:, at : at + n]) for x in (q, k, v)]
        outs.append(plan.unshard(prefill(*mine, plan, cache, start=at, move=move, keys=keys, **given)))
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
@pytest.mark.parametrize("keys", [1, 3, 7])
def test_cut_by_queries_by_keys_and_by_both(move, keys):
    q, k, v = draw(T=40)
    for spec in (ra.AttentionSpec(), ra.AttentionSpec(window=9)):
        expected = ra.attention(q.double(), k.double(), v.double(), spec=spec)
        for chunk in (6, 512):
            call = partial(generate, q=q, k=k, v=v, chunk=chunk, steps=5, move=move, keys=keys, spec=spec)
            for out in run(call, ring=2, ulysses=2):
                assert off(out, expected) <= LIMIT


def with_the_decode_kernel(sizes, q, k, v, sinks, given):
    """What a GPU runs, in the interpreter, which takes a process a rank: threads share its state."""
    mesh = ra.init_mesh(**sizes, device_type="cpu")
    call = partial(generate, mesh, q, k, v, 15, 8, kernel="decode", sinks=sinks, **given)
    return [call(new=new, form=form) for new, form in ((1, "lse"), (4, "streams"))]


@pytest.mark.parametrize(
    "sizes, given", [({"ring": 2}, {}), ({"ring": 1}, {"spec": ra.AttentionSpec(window=7, softcap=3.0)})], ids=str
)
def test_the_decode_kernel_reads_lengths_on_the_device(sizes, given):
    pytest.importorskip("triton")
    q, k, v = draw(T=23, D=16, V=16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    expected = ra.attention(q.double(), k.double(), v.double(), sinks=sinks, **given)
    for outs in run_processes(with_the_decode_kernel, np.prod([*sizes.values()]), sizes, q, k, v, sinks, given):
        assert max(off(out, expected) for out in outs) <= LIMIT


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
    ulysses = 1 if size == 1 else 2
    mesh = ra.init_mesh(ring=size // ulysses, ulysses=ulysses, device_type="cpu")
    lengths = ((1, 9), (3, 61), (512, 540), (540, 540))  # of a chunk, and of the prompt with the tokens after it
    return [generate(mesh, q[:, :T], k[:, :T], v[:, :T], chunk, 3) for chunk, T in lengths]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_gloo_processes(ranks):
    q, k, v = draw(T=540)
    expected = ra.attention(q.double(), k.double(), v.double())
    results = run_processes(over_gloo, ranks, q, k, v)
    assert max(off(out, expected[:, : out.shape[1]]) for outs in results for out in outs) <= LIMIT
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


def test_a_window_cannot_be_taken_back_past_what_it_kept():
    q, k, v = draw(B=1, T=100)
    spec, plan = ra.AttentionSpec(window=16), ra.plan(seq_len=10)
    cache = KVCache.allocate(
        plan, batch=1, max_len=100, kv_heads=2, head_dim=8, dtype=q.dtype, window=16, room=10, block=2
    )
    for at in range(0, 90, 10):
        prefill(*(x[:, at : at + 10] for x in (q, k, v)), plan, cache, spec=spec)
    first = cache.stripes.origin + 15
    cache.truncate(first)
    expected = ra.attention(q.double(), k.double(), v.double(), spec=spec)
    out = decode(*(x[:, first : first + 1] for x in (q, k, v)), cache, spec=spec)
    assert off(out, expected[:, first : first + 1]) <= LIMIT
    with pytest.raises(ValueError, match=rf"truncate to \[20\]: .* back from \[{first + 1}\] to \[{first}\]"):
        cache.truncate(20)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_with_nothing_cached_are_harmless(sizes):
    q, k, v = draw(B=1, T=4)
    expected = ra.attention(q.double(), k.double(), v.double())
    for move in ("queries", "keys"):
        for out in run(lambda mesh: generate(mesh, q, k, v, 1, 3, move=move), **sizes):  # noqa: B023
            assert off(out, expected) <= LIMIT


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


def prompts_of_different_lengths(mesh):
    q, k, v = draw(T=20)
    plan = ra.plan(mesh, seq_len=20)
    for move in ("queries", "keys"):
        cache = KVCache.allocate(plan, batch=2, max_len=32, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
        prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
        cache.truncate([7, 16])
        more, chunk = draw(T=11, seed=1), plan.for_length(11)
        out = prefill(*(chunk.shard(x) for x in more), chunk, cache, start=[7, 16], move=move)
        out = chunk.unshard(out)
        for row, kept in enumerate((7, 16)):
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


@pytest.mark.parametrize(
    "test", [rows_of_different_lengths, prompts_of_different_lengths, forks, saved], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("sizes", MESHES[:4], ids=str)
def test_caches(test, sizes):
    run(test, **sizes)


@pytest.mark.parametrize("size", [1.0, 10.0, 50.0])
def test_large_scores_merge_over_ranks_without_nan(size):
    q, k, v = (
        torch.empty(1, 33, 2, 8).uniform_(-size, size, generator=torch.Generator().manual_seed(0)) for _ in range(3)
    )
    expected = ra.attention(q.double(), k.double(), v.double())
    for form in ("lse", "streams"):
        for out in run(partial(generate, q=q, k=k, v=v, chunk=16, steps=17, form=form), ring=4):
            assert off(out, expected) <= 1e-5 and out.isfinite().all()


def halved(state):
    return {name: x.half() if name in ("k", "v") else x for name, x in state.items()}


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
        (lambda: decode(*new, cache, tree_mask=1), r"tree_mask: decode has no such argument .*on cache.fork\(\)"),
        (
            lambda: decode(*new, cache, parents=[0]),
            r"parents\[0\]=0 makes a tree, not a chain; a query sees one interval",
        ),
        (lambda: decode(*new, cache, parents=[-1, 0]), "parents has 2 entries for 1 new tokens"),
        (lambda: decode(q[:, :1, :3], *new[1:], cache), "2 key heads do not divide 3 query heads"),
        (lambda: decode(new[0], *(x[:, :, :1] for x in new[1:]), cache), r"k has shape .*; this cache takes \[2, tok"),
        (lambda: decode(q[:, :2], *new[1:], cache), "q has 2 tokens, k and v 1"),
        (lambda: decode(*new, cache, sinks=torch.zeros(3)), r"sinks has shape \(3,\)"),
        (
            lambda: decode(*(x[:, :9] for x in (q, k, v)), cache),
            "9 more tokens do not fit: rows hold up to 16 of max_len",
        ),
        (
            lambda: prefill(*(x.double() for x in mine), plan, cache),
            "k is torch.float64 on cpu, the cache torch.float32",
        ),
        (lambda: prefill(q, k, v, plan, cache), "q has 16 tokens, a rank of this plan holds 8"),
        (lambda: prefill(*mine, plan, cache, keys=0), "keys=0: the most keys at once, at least 1"),
        (lambda: cache.truncate(-1), r"truncate to \[-1, -1\]"),
        (lambda: cache.append(k[:, :9], v[:, :9]), "9 more tokens do not fit"),
        (lambda: decode(*new, cache, form="oml"), "form='oml': choose one of lse, streams"),
        (lambda: prefill(*mine, plan, cache, move="all"), "move='all': choose one of auto, queries, keys"),
        (lambda: cache.truncate(17), r"truncate to \[17, 17\]: .* back from \[16, 16\] to \[0, 0\]"),
        (lambda: prefill(*mine, ra.plan(mesh, seq_len=16), cache), "the cache was allocated for another plan"),
        (lambda: KVCache.allocate(plan, **{**allocate, "max_len": 0}), "max_len=0: at least 1"),
        (lambda: decode(*new, cache, sinks=torch.zeros(4, device="meta")), "sinks is on meta, q on cpu"),
        (lambda: decode(*new, cache, sinks=torch.zeros(4).int()), "sinks has shape .* and dtype torch.int32"),
        (lambda: prefill(*mine, plan, cache, sinks=torch.zeros(4, device="meta")), "sinks is on meta, q on cpu"),
        (lambda: prefill(*mine, plan, cache, keys=1.5), "keys=1.5: the most keys at once, at least 1"),
        (lambda: prefill(*mine, plan, cache, start=[0, 0, 0]), r"start=\[0, 0, 0\]: .* one for each of 2 rows"),
        (lambda: prefill(*mine, plan, cache, start="0"), "start='0': where the chunk begins, one whole number"),
        (lambda: decode(*new, cache, parents=3), "parents=3: a list of 1, the token that each new one follows"),
        (lambda: decode(*(x[:, :0] for x in new), cache), "k has 0 tokens, v 0; .* there must be at least one"),
        (lambda: cache.append(k[:, :2], v[:, :3]), "k has 2 tokens, v 3; every new token has both"),
        (lambda: cache.append(k[0], v[0]), r"k has shape \(16, 2, 8\); expected 4 dims"),
        (lambda: cache.truncate(2.7), "truncate to 2.7: one whole number, or one for each of 2 rows"),
        (lambda: cache.truncate("3"), "truncate to '3'"),
        (lambda: cache.truncate(True), "truncate to True"),
        (lambda: cache.truncate([3, 3, 3]), r"truncate to \[3, 3, 3\]"),
        (lambda: cache.fork("2"), "copies='2': at least 1, a whole number"),
        (lambda: cache.fork(2.0), "copies=2.0"),
        (lambda: cache.fork(0), "copies=0"),
        (lambda: cache.fork(2, max_len=10), "max_len=10: the rows hold up to 16 tokens already"),
        (
            lambda: cache.load_state_dict({"k": 1}),
            "the state has no v, lengths, origin, place, window; pass what",
        ),
        (lambda: cache.load_state_dict(halved(cache.state_dict())), "the state is of torch.float16, this cache of"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
        assert torch.equal(cache.k[:, :4], state[0][:, :4]) and (cache.lengths == state[1]).all()
    decode(*new, cache, parents=[-1])  # a chain may be said
    other = KVCache.allocate(plan, **allocate, block=4)
    with pytest.raises(
        ValueError, match=r"the state is of rank \d, of 2 ranks, in blocks of 64; this cache is of rank"
    ):
        other.load_state_dict(cache.state_dict())
    small = KVCache.allocate(plan, **{**allocate, "max_len": 99}, window=4, room=4)
    with pytest.raises(ValueError, match="the cache keeps a window of 4 keys, the spec sees window=None"):
        prefill(*mine, plan, small)


def test_bad_input_leaves_the_cache_as_it_was():
    run(bad, ring=2)


def cache_of(n: int = 0, max_len: int = 128, **given) -> KVCache:
    """On one rank, with n tokens."""
    plan = ra.plan(seq_len=8)
    cache = KVCache.allocate(plan, batch=1, max_len=max_len, kv_heads=2, head_dim=8, dtype=torch.float32, **given)
    for _ in range(n // 8):
        cache.append(*(torch.randn(1, 8, 2, 8) for _ in range(2)))
    return cache


@pytest.mark.parametrize(
    ("state", "cache", "says"),
    [
        ({"window": 64, "room": 64}, {"window": 120, "room": 8}, "with window=64, this one's is 120"),
        ({"window": 64, "room": 64}, {"max_len": 192}, "with window=64, this one's is None"),
        ({}, {"max_len": 100}, "the state's rows hold up to 120 tokens, this cache max_len=100"),
    ],
)
def test_a_state_of_another_cache_is_not_loaded(state, cache, says):
    full, other = cache_of(120, **{"max_len": 192, **state} if state else state), cache_of(**cache)
    assert full.k.shape == other.k.shape  # that alone would let it pass
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(full.state_dict())
    assert other.lengths.tolist() == [0]


@pytest.mark.parametrize("name", ["attention", "linear_attention", "prefill", "decode"])
def test_every_function_refuses_unknown_words_alike(name):
    cache, x = cache_of(8), torch.zeros(1, 8, 2, 8)
    where = {"prefill": (cache.plan, cache), "decode": (cache,)}.get(name, ())
    spec = f"{name} has no such argument" if name == "linear_attention" else r"say spec=AttentionSpec\(causal=...\)"
    for word, says in [
        ("dropout", "dropout: attention dropout is not supported: it has no exact form over ranks"),
        ("bias", "bias: an additive bias is not supported: masks are intervals"),
        ("temprature", f"temprature: {name} has no such argument"),
        ("is_causal", f"is_causal: {spec}"),
    ]:
        with pytest.raises(ValueError, match=says):
            getattr(ra, name)(x, x, x, *where, **{word: 0.1})
    assert cache.lengths.tolist() == [8]


HALF_IMPORTED = """
import sys, threading, torch
from ringattn import api

def late():
    while "ringattn.torch.inference" not in sys.modules:
        pass
    assert hasattr(api.part("inference", torch.zeros(1)), "prefill")
    print("whole")

sys.setswitchinterval(1e-6)
second = threading.Thread(target=late)
second.start()
api.part("inference", torch.zeros(1))
second.join()
"""


def test_a_thread_waits_for_what_another_one_is_importing():
    done = subprocess.run([sys.executable, "-c", HALF_IMPORTED], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "whole", done.stderr


def test_nothing_is_loaded_over_keys_that_forks_share():
    state, cache = cache_of(16).state_dict(), cache_of(16)
    kept, fork = cache.k.clone(), cache.fork(2)
    for shared in (cache, fork):
        with pytest.raises(ValueError, match="this cache and a fork share keys"):
            shared.load_state_dict(state)
    assert torch.equal(cache.k, kept)


def test_sinks_of_another_kind_are_refused_after_a_good_call_of_that_shape():
    q, k, v = draw(T=16)
    plan = ra.plan(seq_len=16)
    cache = KVCache.allocate(plan, batch=2, max_len=24, kv_heads=2, head_dim=8, dtype=q.dtype)
    prefill(q, k, v, plan, cache, sinks=torch.zeros(4))
    new = [x[:, :1] for x in (q, k, v)]
    decode(*new, cache, sinks=torch.zeros(4))
    for sinks in (torch.zeros(4, device="meta"), torch.zeros(4).int()):
        with pytest.raises(ValueError, match="sinks "):
            decode(*new, cache, sinks=sinks)
    assert cache.lengths.tolist() == [17, 17]


def test_a_kernel_that_cannot_is_refused_before_the_cache_grows():
    q, k, v = draw(T=16)
    plan = ra.plan(seq_len=16, kernel="sdpa_cpu")
    cache = KVCache.allocate(plan, batch=2, max_len=24, kv_heads=2, head_dim=8, dtype=q.dtype)
    with pytest.raises(NotImplementedError, match="no kernel serves"):
        prefill(q, k, v, plan, cache, spec=ra.AttentionSpec(softcap=3.0))
    assert cache.lengths.tolist() == [0, 0]


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
        held = cache.k.clone()
        with pytest.raises(ValueError, match="how: ring rank 0 has form=lse, ring rank 1 has form=streams"):
            cache.truncate(15)
            decode(*(x[:, :1] for x in (q, k, v)), cache, form=("lse", "streams")[mesh.rank])
        assert torch.equal(held, cache.k) and cache.lengths.tolist() == [15, 15]

    run(one, ring=2)


@pytest.mark.gpu
@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("given", [{}, {"spec": ra.AttentionSpec(window=70, softcap=5.0)}], ids=["causal", "window"])
def test_chunks_then_tokens_on_a_gpu(move, given):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for dtype, limit in ((torch.float32, LIMIT), (torch.bfloat16, 1e-2)):
        low = [x.to(dtype) for x in draw(T=300, D=64, V=64)]
        expected = ra.attention(*(x.double() for x in low), sinks=sinks, **given)
        q, k, v = (x.cuda() for x in low)
        for form in ("lse", "streams"):
            call = partial(generate, q=q, k=k, v=v, chunk=130, steps=40, new=2, block=16, move=move, form=form)
            for out in run(partial(call, sinks=sinks.cuda(), keys=50, **given), device="cuda", ring=2, ulysses=2):
                assert off(out.cpu(), expected) <= limit, f"{dtype} {form}: {off(out.cpu(), expected)}"


def over_gpus(transport, move):
    """One rank: chunks whose queries come block by block, and tokens; how far off everything is."""
    ranks = torch.distributed.get_world_size()
    low = [x.bfloat16() for x in draw(B=1, T=17300, H=8, G=2, D=64, V=64)]
    q, k, v = (x.cuda() for x in low)
    mesh = ra.init_mesh(ring=ranks, device_type="cuda")
    with torch.no_grad():
        found = generate(mesh, q, k, v, 8192, 20, 2, 64, move, transport=transport)
        return off(found, ra.attention(*(x.float() for x in (q, k, v))).double())


@pytest.mark.gpu
@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("transport", ["group", "symmetric"])
def test_chunks_then_tokens_over_gpus(transport, move):
    ranks = min(4, torch.cuda.device_count())
    if ranks < 2:
        pytest.skip("needs 2 GPUs")
    assert max(run_processes(over_gpus, ranks, transport, move, backend="nccl", timeout=120)) <= 1e-2


def a_captured_decode(transport, new):
    """One rank: the worst difference between a decode that is called and one that is replayed, and the lengths."""
    ranks = torch.distributed.get_world_size()
    q, k, v = (x.cuda() for x in draw(B=2, T=220, H=8, G=2, D=64, V=64))
    plan = ra.plan(ra.init_mesh(ring=ranks, device_type="cuda"), seq_len=160, transport=transport)
    allocate = {"batch": 2, "max_len": 220, "kv_heads": 2, "head_dim": 64, "dtype": q.dtype, "block": 16}
    caches = [KVCache.allocate(plan, **allocate) for _ in "ab"]
    for cache in caches:
        prefill(*(plan.shard(x[:, :160]) for x in (q, k, v)), plan, cache)
        cache.truncate([160, 101])
    at = [x[:, 160 : 160 + new].clone() for x in (q, k, v)]
    with pytest.raises(ValueError, match="call decode once, like this, before it is captured"):
        captured(caches[0], at)
    eager = [decode(*(x[:, i : i + new] for x in (q, k, v)), caches[0]) for i in range(160, 205, new)]
    replayed = [decode(*at, caches[1])]
    graph, out = captured(caches[1], at)
    for i in range(160 + new, 205, new):
        for x, whole in zip(at, (q, k, v), strict=True):
            x.copy_(whole[:, i : i + new])
        graph.replay()
        replayed.append(out.clone())
    same = caches[0].lengths.tolist() == caches[1].lengths.tolist()
    more = [x[:, 205 : 205 + new] for x in (q, k, v)]
    eager, replayed = (
        torch.cat([*outs, decode(*more, c)], 1) for outs, c in zip((eager, replayed), caches, strict=True)
    )
    return float((eager - replayed).abs().max()), same, eager.cpu()


def captured(cache, new):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = decode(*new, cache)
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("ranks, transport", [(1, "auto"), (2, "auto"), (2, "group"), (4, "auto")])
def test_a_captured_decode_decodes_the_next_token_at_every_replay(ranks, transport, new):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    results = run_processes(a_captured_decode, ranks, transport, new, backend="nccl", timeout=90)
    given = [x.double() for x in draw(B=2, T=220, H=8, G=2, D=64, V=64)]
    for gap, same, out in results:
        assert gap <= 2e-6 and same and torch.equal(out, results[0][2])
        for row, kept in enumerate((160, 101)):  # what each row held before the tokens from 160 on came
            whole = [torch.cat([x[row : row + 1, :kept], x[row : row + 1, 160 : 160 + out.shape[1]]], 1) for x in given]
            assert off(out[row : row + 1], ra.attention(*whole)[:, kept:]) <= LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("move", ["queries", "keys"])
def test_no_call_waits_for_the_device(move):
    """Once kernels are there, the host plans the next chunk while this one computes."""
    q, k, v = (x.cuda() for x in draw(B=2, T=400, H=8, G=2, D=64, V=64))

    def one(mesh):
        plan = ra.plan(mesh, seq_len=100)
        cache = KVCache.allocate(plan, batch=2, max_len=400, kv_heads=2, head_dim=64, dtype=q.dtype)
        for at in range(0, 300, 101):
            prefill(*(plan.shard(x[:, at : at + 100]) for x in (q, k, v)), plan, cache, move=move)
            decode(*(x[:, at + 100 : at + 101] for x in (q, k, v)), cache)
        return cache.lengths.tolist()

    first = run(one, device="cuda", ring=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run(one, device="cuda", ring=2) == first == [[303, 303]] * 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
