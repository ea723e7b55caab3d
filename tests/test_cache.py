"""Prefill in chunks and decode over ranks equal attention over everything at once, at every position."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.launch.processes import run as run_processes
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.torch.inference import function as inference
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.function import decode, prefill
from tests.cases import large_scores

LIMIT = 2e-6


def draw(B=2, T=61, H=4, G=2, D=8, V=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, h, d, generator=g) for h, d in ((H, D), (G, D), (G, V))]


def off(result, expected):
    return float((result.double() - expected).norm() / expected.norm())


def generate(
    mesh, q, k, v, chunk, steps, new=1, block=4, move="auto", kernel="auto", keys=None,
    transport="auto", **given,
):  # fmt: skip
    """Prefill in chunks, then decode `new` tokens at a time for the last `steps`; everything of every position."""
    T = q.shape[1]
    base = ra.plan(mesh, seq_len=chunk, kernel=kernel, transport=ra.Transport(by=transport))
    cache = KVCache.allocate(
        base, batch=q.shape[0], max_len=T, kv_heads=k.shape[2], head_dim=k.shape[3], value_dim=v.shape[3],
        dtype=q.dtype, block=block, window=given.get("spec", ra.AttentionSpec()).window, room=max(chunk, new),
    )  # fmt: skip
    outs = []
    for at in range(0, T - steps, chunk):
        n = min(chunk, T - steps - at)
        plan = base.for_length(n)
        mine = [plan.shard(x[:, at : at + n]) for x in (q, k, v)]
        outs.append(plan.unshard(prefill(*mine, plan, cache, move=move, keys=keys, **given)))
    for at in range(T - steps, T, new):
        outs.append(decode(*(x[:, at : at + new] for x in (q, k, v)), cache, **given))
    assert cache.lengths.tolist() == [T] * len(q)
    return torch.cat(outs, 1)


MESHES = [{"ring": 1}, {"ring": 2}, {"ring": 4}, {"ring": 2, "ulysses": 2}, {"ulysses": 4}, {"ring": 8}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("chunk", [1, 3, 17, 512])
def test_chunks_then_tokens_are_the_whole(sizes, move, chunk):
    q, k, v = draw(T=30 if chunk == 1 else 61)
    expected = ra.attention(q.double(), k.double(), v.double())
    for out in run(partial(generate, q=q, k=k, v=v, chunk=chunk, steps=6, move=move), **sizes):
        assert off(out, expected) <= LIMIT


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("keys", [1, 3, 7])
def test_steps_split_by_queries_by_keys_and_by_both(move, keys):
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
    return [call(new=new) for new in (1, 4)]


@pytest.mark.parametrize(
    "sizes, given",
    [
        pytest.param({"ring": 2}, {}, marks=pytest.mark.slow),
        ({"ring": 1}, {"spec": ra.AttentionSpec(window=7, softcap=3.0)}),
    ],
    ids=str,
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


def over_gloo(q, k, v):
    mesh = ra.init_mesh(ring=torch.distributed.get_world_size() // 2, ulysses=2, device_type="cpu")
    lengths = ((1, 9), (3, 61), (512, 540), (540, 540))  # of a chunk, and of the prompt with the tokens after it
    return [generate(mesh, q[:, :T], k[:, :T], v[:, :T], chunk, 3) for chunk, T in lengths]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_gloo_processes(ranks):
    q, k, v = draw(T=540)
    expected = ra.attention(q.double(), k.double(), v.double())
    results = run_processes(over_gloo, ranks, q, k, v)
    assert max(off(out, expected[:, : out.shape[1]]) for outs in results for out in outs) <= LIMIT
    assert all(torch.equal(outs[0][:, -3:], results[0][0][:, -3:]) for outs in results), "decode differs between ranks"


def test_a_window_keeps_only_what_can_still_be_seen():
    q, k, v = draw(B=1, T=400)
    spec = ra.AttentionSpec(window=16)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=8)
        cache = KVCache.allocate(
            plan, batch=1, max_len=400, kv_heads=2, head_dim=8, dtype=q.dtype, window=16, room=8, block=2
        )
        for at in range(0, 400, 8):
            prefill(*(plan.shard(x[:, at : at + 8]) for x in (q, k, v)), plan, cache, spec=spec)
        return cache.k.shape[1]

    assert max(run(one_rank, ring=2)) <= (16 + 8) // 2 + 2 * 2


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
    with pytest.raises(ValueError):
        cache.truncate(20)


def test_keys_are_free_again_once_the_forks_that_share_them_are_gone():
    _, k, v = draw(T=20)
    cache = KVCache.allocate(ra.plan(seq_len=20), batch=2, max_len=40, kv_heads=2, head_dim=8, dtype=k.dtype)
    cache.append(k, v)
    cache.truncate([7, 16])
    first = cache.fork(3)
    cache.append(k[:, :4], v[:, :4])
    second = cache.fork()
    assert cache.shared.tolist() == [11, 20]
    del second
    assert cache.shared.tolist() == first.lengths[::3].tolist() == [7, 16]
    cache.truncate([7, 18])
    with pytest.raises(ValueError):
        cache.truncate(6)
    beyond = first.fork()
    del first  # another fork goes on from it
    assert cache.shared.tolist() == [7, 16]
    del beyond
    cache.truncate(6)
    assert cache.lengths.tolist() == [6, 6]


@pytest.mark.parametrize("sizes", [{"ring": 8}, {"ring": 2, "ulysses": 2}], ids=str)
@pytest.mark.parametrize("move", ["queries", "keys"])
def test_scores_of_ten_thousand_lose_no_digits(sizes, move):
    """Neither in a partial on its way to another rank, nor merged there."""
    given = large_scores(oracle.inputs(Case("", seq_len=61, heads=2, kv_heads=2, batch=1), torch.float32))
    q, k, v, sinks = (given[n] for n in ("q", "k", "v", "sinks"))
    spec = ra.AttentionSpec(scale=1.0)
    expected = ra.attention(q.double(), k.double(), v.double(), spec=spec, sinks=sinks.double())
    call = partial(generate, q=q, k=k, v=v, chunk=25, steps=11, move=move, spec=spec, sinks=sinks)
    for out in run(call, **sizes):
        assert off(out, expected) <= LIMIT


def test_a_cache_serves_in_inference_mode_and_outside_of_it_in_any_order():
    q, k, v = draw(T=24)
    expected, modes = ra.attention(*(x.double() for x in (q, k, v))), [torch.inference_mode, nullcontext]
    for first, then in (modes, modes[::-1]):
        plan, outs = ra.plan(seq_len=8), []
        with first():
            cache = KVCache.allocate(plan, batch=2, max_len=40, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
            outs.append(prefill(*(x[:, :8] for x in (q, k, v)), plan, cache))
            fork = cache.fork()
        for each in (fork, cache):
            with then():
                outs.append(prefill(*(x[:, 8:16] for x in (q, k, v)), plan, each))
                outs.append(decode(*(x[:, 16:20] for x in (q, k, v)), each))
            with first():
                each.truncate(18)
                outs.append(decode(*(x[:, 18:] for x in (q, k, v)), each))
                each.truncate(16)
            result = torch.cat([outs[0], *outs[-3:-1], outs[-1][:, 2:]], 1)
            assert off(result, expected) <= LIMIT


@pytest.mark.parametrize("move", ["queries", "keys"])
@pytest.mark.parametrize("sizes", [{"ring": 1}, {"ring": 2}], ids=str)
def test_a_call_that_fails_leaves_the_cache_as_it_was(sizes, move, monkeypatch):
    """On all ranks alike, as memory that runs out does: where sinks are added, when all tokens are in the cache."""
    (q, k, v), sinks = draw(B=1, T=20), torch.zeros(4)

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("out of memory")

    def one_rank(mesh, fails):
        plan = ra.plan(mesh, seq_len=16)
        cache = KVCache.allocate(plan, batch=1, max_len=20, kv_heads=2, head_dim=8, dtype=q.dtype, block=4)
        chunk, rest = [plan.shard(x[:, :16]) for x in (q, k, v)], [x[:, 16:] for x in (q, k, v)]
        for call in (partial(prefill, *chunk, plan, cache, move=move), partial(decode, *rest, cache)):
            if fails:
                before = cache.lengths.tolist()
                with pytest.raises(torch.OutOfMemoryError):
                    call(sinks=sinks)
                assert cache.lengths.tolist() == before
            result = call()
        return result

    def merged(rows, call, sinks, dtype):
        return real(rows, call, sinks, dtype) if sinks is None else out_of_memory()

    expected, real = run(partial(one_rank, fails=False), **sizes), inference.merged_everywhere
    monkeypatch.setattr(inference, "add_sinks", out_of_memory)
    monkeypatch.setattr(inference, "merged_everywhere", merged)
    for result, whole in zip(run(partial(one_rank, fails=True), **sizes), expected, strict=True):
        assert torch.equal(result, whole)


def test_a_fork_copies_what_it_shares_and_nothing_that_came_later():
    plan = ra.plan(seq_len=8)
    cache = KVCache.allocate(plan, batch=2, max_len=64, kv_heads=2, head_dim=8, dtype=torch.float32, block=4)
    q, k, v = draw(T=40)
    cache.append(k[:, :10], v[:, :10])
    fork, alike = cache.fork(3), cache.fork(3)
    new = [x[:, 10:12].repeat_interleave(3, 0) for x in (q, k, v)]
    expected = decode(*new, alike)
    cache.append(k[:, 10:], v[:, 10:])
    assert [len(k[0]) for k, _ in fork.memory()] == [12, 4]  # in whole blocks
    assert torch.equal(decode(*new, fork), expected)


def test_a_cache_keeps_no_graph_and_what_attends_to_it_has_none():
    plan, sinks = ra.plan(seq_len=16), torch.zeros(4, requires_grad=True)
    q, k, v = (x.requires_grad_() for x in draw(T=16))
    cache = KVCache.allocate(plan, batch=2, max_len=64, kv_heads=2, head_dim=8, dtype=q.dtype)
    cache.append(k, v)
    assert not cache.k.requires_grad and not cache.v.requires_grad
    assert not prefill(q, k, v, plan, cache, sinks=sinks).requires_grad
    assert not decode(*(x[:, :1] for x in (q, k, v)), cache, sinks=sinks).requires_grad
