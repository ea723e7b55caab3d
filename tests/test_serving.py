"""What prefill and decode decide without a device: where tokens lie, which way a chunk moves, how partials meet."""

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import LocalAxis, run
from ringattn.plans.machine import load
from ringattn.serving import Heads, Stripes, exchange_over, exchange_way, prefill_way
from ringattn.torch.inference import call as calls
from ringattn.torch.inference import function
from ringattn.torch.inference.cache import KVCache

H200, CPU = load("h200"), load("cpu")
NVLINK, GLOO = (H200, H200.inside), (CPU, CPU.inside)
LLAMA = Heads(heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)


def test_positions_are_balanced_at_any_length_and_below_counts_them():
    stripes = Stripes(4, 8)
    for length in range(200):
        held = [int(stripes.below(length, r)) for r in range(4)]
        assert sum(held) == length and max(held) - min(held) <= 8
        assert held == [int(stripes.owned(np.arange(length), r).sum()) for r in range(4)]


def test_keys_travel_while_they_are_few_and_queries_once_there_are_many():
    """A piece of keys has all partials read and written once more; of queries only the first are waited for."""
    assert prefill_way(4, 2048, 16384, LLAMA, *NVLINK) == "keys"
    assert prefill_way(4, 2048, 2**20, LLAMA, *NVLINK) == "queries"
    assert prefill_way(4, 4, 131072, LLAMA, *NVLINK) == "queries"


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("sizes", [{"ring": 4}, {"ulysses": 3}, {"ring": 3, "ulysses": 2}], ids=str)
def test_queries_come_one_by_one_or_together_with_the_same_result(sizes, together, layout, monkeypatch):
    """Rows of different lengths, padded chunks, a window; a rank's queries are a step of their own, or several are."""
    monkeypatch.setattr(function, "queries_at_once", lambda rows: together)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 41, h, d, generator=g) for h, d in ((6, 8), (6, 8), (6, 12)))
    spec = ra.AttentionSpec(window=19)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=10, layout=layout)
        cache = KVCache.allocate(
            plan, batch=2, max_len=50, kv_heads=6, head_dim=8, value_dim=12, dtype=q.dtype, block=2
        )
        outs = []
        for at in range(0, 41, 10):
            chunk = plan.for_length(min(10, 41 - at))
            mine = [chunk.shard(x[:, at : at + 10]) for x in (q, k, v)]
            outs.append(chunk.unshard(ra.prefill(*mine, chunk, cache, spec=spec, move="queries")))
        return torch.cat(outs, 1)

    expected = ra.attention(*(x.double() for x in (q, k, v)), spec=spec)
    for out in run(one_rank, **sizes):
        assert (out - expected).norm() <= 2e-6 * expected.norm()


def test_where_nothing_is_hidden_fewer_bytes_win():
    """Of the queries 19 MB; of the keys none, 19 less and 19 more, and many."""
    ways = [prefill_way(4, 256, cached, LLAMA, *GLOO, hides=False) for cached in (1024, 6000, 8000, 65536)]
    assert ways == ["keys", "keys", "queries", "queries"]


def test_how_partials_are_exchanged_goes_by_their_size():
    assert exchange_way(32 * 129 * 4, 4, H200.inside) == "gather"  # a token
    assert exchange_way(64 * 32 * 129 * 4 * 16, 8, H200.inside) == "scatter"  # 64 tokens of 16 rows
    assert exchange_way(10**9, 2, H200.inside) == "gather"  # of two ranks both send the same bytes
    assert exchange_over(32 * 129 * 4, 4, H200) == "group"  # 264 us beside 289, as measured
    assert exchange_over(2**24, 4, H200) == "symmetric"
    assert exchange_over(2**24, 4, CPU) == "group"  # there is no other


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_either_exchange_gives_every_rank_the_same_bits(dtype, limit, monkeypatch):
    """Of (out, max, sum), which float32 inputs have, and of (out, lse)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, h, d, generator=g).to(dtype) for h, d in ((3, 8), (1, 8), (1, 12)))

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=7)
        cache = KVCache.allocate(
            plan, batch=2, max_len=14, kv_heads=1, head_dim=8, value_dim=12, dtype=q.dtype, block=2
        )
        ra.prefill(*(plan.shard(x) for x in (q, k, v)), plan, cache)
        return ra.decode(q, k, v, cache)

    expected = ra.attention(*(torch.cat([x, x], 1).double() for x in (q, k, v)))[:, 7:]
    for way in ("gather", "scatter"):
        monkeypatch.setattr(calls, "exchange_way", lambda *args, way=way: way)
        for sizes in ({"ring": 4}, {"ring": 2, "ulysses": 3}):
            outs = run(one_rank, **sizes)
            assert all(torch.equal(out, outs[0]) for out in outs)
            assert (outs[0] - expected).norm() <= limit * expected.norm()


def test_a_cache_is_of_its_framework_and_in_bfloat16_unless_another_dtype_is_asked_for():
    cache = KVCache.allocate(ra.plan(seq_len=8), batch=1, max_len=64, kv_heads=2, head_dim=16)
    assert isinstance(cache, ra.KVCache) and cache.k.dtype == torch.bfloat16


def test_what_travels_is_as_long_as_the_chunk_however_long_the_prompt(monkeypatch):
    hops, move = [], LocalAxis.move

    def counted(self, out, into, *args, **given):
        if given.get("what") != "all_gather":  # of the chunk's own
            hops.append(max((x.numel() // 8 for tensors in out.values() for x in tensors), default=0))
        return move(self, out, into, *args, **given)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64)
        cache = KVCache.allocate(plan, batch=1, max_len=512, kv_heads=1, head_dim=8, dtype=torch.float32, block=4)
        x = torch.randn(1, 32, 1, 8)
        for _ in range(8):
            ra.prefill(x, x, x, plan, cache, move="keys", keys=40)

    monkeypatch.setattr(LocalAxis, "move", counted)
    run(one_rank, ring=2)
    assert max(hops) == 40 and hops.count(40) >= 2 * 6  # 256 keys a rank at the end
