"""A wrong call of a cache is a named error on all ranks, and leaves the cache as it was."""

import copy
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
        self.mesh, self.plan = mesh, ra.plan(mesh, seq_len=16, kernel="sdpa_cpu")
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


REFUSED = [
    (lambda x: x.prefill(), "16 tokens do not fit: rows hold up to 16 of max_len=24"),
    (lambda x: x.prefill(*(y.double() for y in x.mine)), "k is torch.float64 on cpu, the cache torch.float32"),
    (lambda x: x.prefill(*x.qkv), "q has 16 tokens, a rank of this plan holds 8"),
    (lambda x: x.prefill(keys=0), "keys=0: at least 1, a whole number"),
    (lambda x: x.prefill(move="all"), "move='all': choose one of auto, queries, keys"),
    (
        lambda x: x.prefill(plan=ra.plan(x.mesh, seq_len=16, axes={"ulysses": "ring"})),
        "the cache was allocated for another plan",
    ),
    (lambda x: x.decode(*(y[:1] for y in x.new)), r"k has shape .*this cache takes \[2, tokens, 2, 8\]"),
    (lambda x: x.decode(x.q[:, :1, :3], *x.new[1:]), "2 key heads do not divide 3 query heads"),
    (lambda x: x.decode(*(y[:, :9] for y in x.qkv)), "9 tokens do not fit: rows hold up to 16 of max_len"),
    (lambda x: x.decode(docs=1), "docs: decode has no such argument$"),
    (lambda x: x.decode(sinks=torch.zeros(3)), r"sinks has shape \(3,\)"),
    (lambda x: x.cache.append(x.k[:, :2], x.v[:, :3]), "k has 2 tokens, v 3; every new token has both"),
    (lambda x: x.cache.truncate(17), r"truncate to \[17, 17\]: .* back from \[16, 16\] to \[0, 0\]"),
    (lambda x: x.cache.truncate(2.7), "truncate to 2.7: one whole number, or one for each of 2 rows"),
    (lambda x: x.cache.fork(0), "copies=0"),
    (lambda x: x.cache.fork(2, max_len=10), "max_len=10: the rows hold up to 16 tokens already"),
    (lambda x: copy.deepcopy(x.cache), r"a cache cannot be pickled or copied: fork\(\) it"),
    (lambda x: x.allocate(max_len=0), "max_len=0: at least 1"),
    (lambda x: [x.cache.fork(), x.cache.truncate(6)], "delete the forks"),
    (
        lambda x: x.prefill(*(y[:, :4] for y in x.mine), plan=x.plan.for_length(8), spec=ra.AttentionSpec(softcap=3.0)),
        "no kernel serves",
    ),
]


@pytest.mark.parametrize(("call", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_bad_input_leaves_the_cache_as_it_was(call, says):
    def one_rank(mesh):
        given = Filled(mesh)
        cache = given.cache
        k, v = cache.k.clone(), cache.v.clone()
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
            call(given)
        assert torch.equal(cache.k, k) and torch.equal(cache.v, v) and cache.lengths.tolist() == [16, 16]

    run(one_rank, ring=2)


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
