"""A wrong call of a cache is a named error on all ranks, and leaves the cache as it was."""

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.cache import KVCache
from ringattn.torch.inference import decode, prefill
from tests.test_cache import draw


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
