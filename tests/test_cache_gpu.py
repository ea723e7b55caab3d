"""Prefill and decode on GPUs: their kernels, transports and captured calls."""

from functools import partial

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.processes import run as run_processes
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.function import decode, prefill
from tests.test_cache import LIMIT, draw, generate, off
from tests.test_gpu import backend_for

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("given", [{}, {"spec": ra.AttentionSpec(window=70, softcap=5.0)}], ids=["causal", "window"])
def test_chunks_then_tokens_on_a_gpu(move, given):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for dtype, limit in ((torch.float32, LIMIT), (torch.bfloat16, 1e-2)):
        low = [x.to(dtype) for x in draw(T=300, D=64, V=64)]
        expected = ra.attention(*(x.double() for x in low), sinks=sinks, **given)
        q, k, v = (x.cuda() for x in low)
        call = partial(generate, q=q, k=k, v=v, chunk=130, steps=40, new=2, block=16, move=move)
        for out in run(partial(call, sinks=sinks.cuda(), keys=50, **given), device="cuda", ring=2, ulysses=2):
            assert off(out.cpu(), expected) <= limit, f"{dtype}: {off(out.cpu(), expected)}"


def over_gpus(transport, move):
    """One rank: chunks whose queries come block by block, and tokens; how far off everything is."""
    ranks = torch.distributed.get_world_size()
    low = [x.bfloat16() for x in draw(B=1, T=17300, H=8, G=2, D=64, V=64)]
    q, k, v = (x.cuda() for x in low)
    mesh = ra.init_mesh(ring=ranks, device_type="cuda")
    with torch.no_grad():
        result = generate(mesh, q, k, v, 8192, 20, 2, 64, move, transport=transport)
        return off(result, ra.attention(*(x.float() for x in (q, k, v))).double())


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("transport", ["group", "symmetric"])
def test_chunks_then_tokens_over_gpus(transport, move):
    ranks = min(4, torch.cuda.device_count()) if transport == "group" else 4
    backend = backend_for(max(2, ranks), transport)
    assert max(run_processes(over_gpus, ranks, transport, move, backend=backend, timeout=120)) <= 1e-2


def a_captured_decode(transport, new):
    """One rank: the worst difference between a decode that is called and one that is replayed, and the lengths."""
    ranks = torch.distributed.get_world_size()
    q, k, v = (x.cuda() for x in draw(B=2, T=220, H=8, G=2, D=64, V=64))
    plan = ra.plan(ra.init_mesh(ring=ranks, device_type="cuda"), seq_len=160, transport=ra.Transport(by=transport))
    allocate = {"batch": 2, "max_len": 220, "kv_heads": 2, "head_dim": 64, "dtype": q.dtype, "block": 16}
    caches = [KVCache.allocate(plan, **allocate) for _ in "ab"]
    for cache in caches:
        prefill(*(plan.shard(x[:, :160]) for x in (q, k, v)), plan, cache)
        cache.truncate([160, 101])
    at = [x[:, 160 : 160 + new].clone() for x in (q, k, v)]
    with pytest.raises(ValueError, match="call decode once like this before it is captured"):
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


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("ranks, transport", [(1, "auto"), (2, "auto"), (2, "group"), (4, "auto")])
def test_a_captured_decode_decodes_the_next_token_at_every_replay(ranks, transport, new):
    backend = backend_for(ranks, transport)
    results = run_processes(a_captured_decode, ranks, transport, new, backend=backend, timeout=90)
    given = [x.double() for x in draw(B=2, T=220, H=8, G=2, D=64, V=64)]
    for gap, same, out in results:
        assert gap <= 2e-6 and same and torch.equal(out, results[0][2])
        for row, kept in enumerate((160, 101)):  # what each row held before the tokens from 160 on came
            whole = [torch.cat([x[row : row + 1, :kept], x[row : row + 1, 160 : 160 + out.shape[1]]], 1) for x in given]
            assert off(out[row : row + 1], ra.attention(*whole)[:, kept:]) <= LIMIT


@pytest.mark.parametrize("move", ["queries", "keys"])
def test_no_call_waits_for_the_device(move):
    """Once kernels are there, the host plans the next chunk while this one computes."""
    q, k, v = (x.cuda() for x in draw(B=2, T=400, H=8, G=2, D=64, V=64))

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=100)
        cache = KVCache.allocate(plan, batch=2, max_len=400, kv_heads=2, head_dim=64, dtype=q.dtype)
        for at in range(0, 300, 101):
            prefill(*(plan.shard(x[:, at : at + 100]) for x in (q, k, v)), plan, cache, move=move)
            decode(*(x[:, at + 100 : at + 101] for x in (q, k, v)), cache)
        return cache.lengths.tolist()

    first = run(one_rank, device="cuda", ring=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run(one_rank, device="cuda", ring=2) == first == [[303, 303]] * 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
