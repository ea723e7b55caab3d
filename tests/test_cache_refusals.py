"""A wrong call of a cache is a named error on all ranks, and leaves the cache as it was."""

from contextlib import nullcontext

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.function import decode, prefill
from tests.test_cache import draw


class Filled:
    """A cache with 16 tokens in each of two rows, room for 8 more, and the pieces that calls are made of."""

    def __init__(self, mesh):
        self.mesh, self.plan = mesh, ra.plan(mesh, seq_len=16)
        self.qkv = self.q, self.k, self.v = draw(T=16)
        self.mine = [self.plan.shard(x) for x in self.qkv]
        self.new = [x[:, :1] for x in self.qkv]
        self.cache = self.allocate()
        prefill(*self.mine, self.plan, self.cache)

    def allocate(self, **given) -> KVCache:
        sizes = {"batch": 2, "max_len": 24, "kv_heads": 2, "head_dim": 8, "dtype": self.q.dtype, **given}
        return KVCache.allocate(self.plan, **sizes)

    def prefill(self, *qkv, plan=None, **more):
        return prefill(*(qkv or self.mine), plan or self.plan, self.cache, **more)

    def decode(self, *qkv, **more):
        return decode(*(qkv or self.new), self.cache, **more)

    def halved(self) -> dict:
        state = self.cache.state_dict()
        return {**state, "k": state["k"].half(), "v": state["v"].half()}

    def load(self, lengths: list) -> None:
        self.cache.load_state_dict({**self.cache.state_dict(), "lengths": torch.tensor(lengths)})


REFUSED = [
    ("prefill: no room", lambda x: x.prefill(), "16 more tokens do not fit: rows hold up to 16 of max_len=24"),
    (
        "prefill: another dtype",
        lambda x: x.prefill(*(y.double() for y in x.mine)),
        "k is torch.float64 on cpu, the cache torch.float32",
    ),
    ("prefill: not sharded", lambda x: x.prefill(*x.qkv), "q has 16 tokens, a rank of this plan holds 8"),
    ("prefill: no keys at once", lambda x: x.prefill(keys=0), "keys=0: at least 1, a whole number"),
    ("prefill: move", lambda x: x.prefill(move="all"), "move='all': choose one of auto, queries, keys"),
    (
        "prefill: another plan",
        lambda x: x.prefill(plan=ra.plan(x.mesh, seq_len=16, axes={"ulysses": "ring"})),
        "the cache was allocated for another plan",
    ),
    (
        "decode: one row",
        lambda x: x.decode(*(y[:1] for y in x.new)),
        r"k has shape .*this cache takes \[2, tokens, 2, 8\]",
    ),
    (
        "decode: 3 query heads",
        lambda x: x.decode(x.q[:, :1, :3], *x.new[1:]),
        "2 key heads do not divide 3 query heads",
    ),
    (
        "decode: no room",
        lambda x: x.decode(*(y[:, :9] for y in x.qkv)),
        "9 more tokens do not fit: rows hold up to 16 of max_len",
    ),
    ("decode: docs", lambda x: x.decode(docs=1), "docs: decode has no such argument$"),
    ("decode: 3 sinks", lambda x: x.decode(sinks=torch.zeros(3)), r"sinks has shape \(3,\)"),
    (
        "append: more values",
        lambda x: x.cache.append(x.k[:, :2], x.v[:, :3]),
        "k has 2 tokens, v 3; every new token has both",
    ),
    (
        "truncate: forwards",
        lambda x: x.cache.truncate(17),
        r"truncate to \[17, 17\]: .* back from \[16, 16\] to \[0, 0\]",
    ),
    (
        "truncate: a part",
        lambda x: x.cache.truncate(2.7),
        "truncate to 2.7: one whole number, or one for each of 2 rows",
    ),
    ("fork: none", lambda x: x.cache.fork(0), "copies=0"),
    ("fork: no room", lambda x: x.cache.fork(2, max_len=10), "max_len=10: the rows hold up to 16 tokens already"),
    (
        "load: no state",
        lambda x: x.cache.load_state_dict({"k": 1}),
        "the state has no v, lengths, origin, place, window; pass what",
    ),
    (
        "load: another dtype",
        lambda x: x.cache.load_state_dict(x.halved()),
        "the state is of .* of torch.float16 and torch.float16, this one's is .* of torch.float32",
    ),
    (
        "load: a length below 0",
        lambda x: x.load([16, -1]),
        r"the state's lengths are \[16, -1\]; expected a whole number",
    ),
    (
        "load: other blocks",
        lambda x: x.cache.load_state_dict(x.allocate(block=4).state_dict()),
        r"the state is of rank \d, of 2 ranks, in blocks of 4; this cache is of rank \d, of 2 ranks, in blocks of 64",
    ),
    ("allocate: no room", lambda x: x.allocate(max_len=0), "max_len=0: at least 1"),
]


@pytest.mark.parametrize(("call", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_bad_input_leaves_the_cache_as_it_was(call, says):
    def one_rank(mesh):
        given = Filled(mesh)
        cache, before = given.cache, given.cache.state_dict()
        with pytest.raises(ValueError, match=says):
            call(given)
        assert torch.equal(cache.k, before["k"]) and torch.equal(cache.v, before["v"])
        assert cache.lengths.tolist() == before["lengths"].tolist() == [16, 16]

    run(one_rank, ring=2)


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
        ({"window": 64, "room": 64}, {"window": 120, "room": 8}, "with window=64, .*, this one's is window=120"),
        ({"window": 64, "room": 64}, {"max_len": 192}, "with window=64, .*, this one's is window=None"),
        ({}, {"max_len": 100}, "the state's rows hold up to 120 tokens, this cache max_len=100"),
    ],
)
def test_a_state_of_another_cache_is_not_loaded(state, cache, says):
    full, other = cache_of(120, **{"max_len": 192, **state} if state else state), cache_of(**cache)
    assert full.k.shape == other.k.shape  # that alone would let it pass
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(full.state_dict())
    assert other.lengths.tolist() == [0]


SMALL = {"window": 16, "room": 8, "block": 4}


@pytest.mark.parametrize(
    ("given", "origin"), [*(({}, x) for x in (256, -64, 1.5, None)), *((SMALL, x) for x in (0, 7, 108))], ids=str
)
def test_a_state_whose_memory_begins_elsewhere_is_not_loaded(given, origin):
    cache = cache_of(120, **given)
    state = cache.state_dict()
    cache.truncate(112)
    with pytest.raises(ValueError, match=rf"the state has origin={origin}, with which no .* \[120\] tokens; pass what"):
        cache.load_state_dict({**state, "origin": origin})
    cache.load_state_dict({**state, "origin": torch.tensor(state["origin"])})
    assert cache.lengths.tolist() == [120] and cache.stripes.origin == state["origin"]


def test_what_does_not_fit_beside_a_window_fits_with_the_room_that_is_named():
    """Memory reaches from what the shortest row still sees to the end of the longest one."""
    says = r"8 tokens at once .* window of 16 in rows whose lengths differ by 6; allocate\(room=14\)"
    for room, expected in ((8, pytest.raises(ValueError, match=says)), (14, nullcontext())):
        cache = KVCache.allocate(
            ra.plan(seq_len=8), batch=2, max_len=64, kv_heads=2, head_dim=8, dtype=torch.float32, window=16, room=room,
            block=4,
        )  # fmt: skip
        new = torch.zeros(2, 8, 2, 8)
        for _ in range(3):
            cache.append(new, new)
        cache.truncate([24, 18])
        with expected:
            cache.append(new, new)


def test_nothing_is_loaded_over_keys_that_forks_share():
    state, cache = cache_of(16).state_dict(), cache_of(16)
    kept, fork = cache.k.clone(), cache.fork(2)
    for shared in (cache, fork):
        with pytest.raises(ValueError, match="this cache and a fork share keys"):
            shared.load_state_dict(state)
    assert torch.equal(cache.k, kept)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_forward_mode_is_refused_also_after_a_good_call_of_that_shape(name):
    plan = ra.plan(seq_len=16)
    given = dict(zip("qkv", draw(T=16), strict=True)) | {"sinks": torch.zeros(4)}
    cache = KVCache.allocate(plan, batch=2, max_len=64, kv_heads=2, head_dim=8, dtype=torch.float32)

    def fill(**given):
        return prefill(**given, plan=plan, cache=cache)

    def step(q, k, v, sinks):
        return decode(q[:, :1], k[:, :1], v[:, :1], cache, sinks=sinks)

    for call in (fill, step):
        call(**given)
        lengths = cache.lengths.tolist()
        with pytest.raises(ValueError, match=f"{name} carries a tangent of forward-mode differentiation"):
            torch.func.jvp(lambda x, call=call: call(**{**given, name: x}), (given[name],), (given[name],))
        assert cache.lengths.tolist() == lengths
    with pytest.raises(ValueError, match="v carries a tangent of forward-mode differentiation"):
        torch.func.jvp(lambda v: cache.append(given["k"], v), (given["v"],), (given["v"],))


def test_a_kernel_that_cannot_is_refused_before_the_cache_grows():
    q, k, v = draw(T=16)
    plan = ra.plan(seq_len=16, kernel="sdpa_cpu")
    cache = KVCache.allocate(plan, batch=2, max_len=24, kv_heads=2, head_dim=8, dtype=q.dtype)
    with pytest.raises(NotImplementedError, match="no kernel serves"):
        prefill(q, k, v, plan, cache, spec=ra.AttentionSpec(softcap=3.0))
    assert cache.lengths.tolist() == [0, 0]


def test_ranks_that_disagree_about_the_length_are_named():
    def one_rank(mesh):
        q, k, v = draw(T=16)
        plan = ra.plan(mesh, seq_len=16)
        cache = KVCache.allocate(plan, batch=2, max_len=24, kv_heads=2, head_dim=8, dtype=q.dtype)
        prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
        if mesh.rank == 1:
            cache.truncate(15)
        with pytest.raises(ValueError, match=r"cache: ring rank 0 has .*\[16, 16\].*ring rank 1 has .*\[15, 15\]"):
            decode(*(x[:, :1] for x in (q, k, v)), cache)
        held = cache.k.clone()
        with pytest.raises(ValueError, match=r"spec: ring rank 0 has .*window=None.*, ring rank 1 has .*window=9"):
            cache.truncate(15)
            decode(*(x[:, :1] for x in (q, k, v)), cache, spec=ra.AttentionSpec(window=(None, 9)[mesh.rank]))
        assert torch.equal(held, cache.k) and cache.lengths.tolist() == [15, 15]

    run(one_rank, ring=2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"block": 16}, {"block": 64}], r"cache: ring rank 0 has .*block=16.*ring rank 1 has .*block=64"),
        ([{"window": 20, "room": 16}, {}], r"cache: ring rank 0 has .*window 20.*ring rank 1 has .*window None"),
    ],
)
def test_ranks_whose_caches_are_laid_out_differently_are_named(given, says):
    def one_rank(mesh):
        q, k, v = draw(T=16)
        plan = ra.plan(mesh, seq_len=16)
        sizes = {"batch": 2, "max_len": 256, "kv_heads": 2, "head_dim": 8, "dtype": q.dtype}
        cache = KVCache.allocate(plan, **sizes, **given[mesh.rank])
        with pytest.raises(ValueError, match=says):
            prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache, spec=ra.AttentionSpec(window=8))

    run(one_rank, ring=2)
