"""Prefill in chunks and decode over devices equal attention over everything at once, at every position."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from tests.test_cache import draw  # noqa: E402

LIMIT = 2e-6


def cache_of(k, v, ring=1, ulysses=1, layout="auto", block=4, chunk=8, **given):
    mesh = rj.init_mesh(ring=ring, ulysses=ulysses, devices=jax.devices()[: ring * ulysses])
    plan = ra.plan(mesh, seq_len=chunk, layout=layout)
    sizes = {"batch": k.shape[0], "kv_heads": k.shape[2], "head_dim": k.shape[3], "value_dim": v.shape[3]}
    return ra.KVCache.allocate(plan, **{"max_len": k.shape[1], **sizes, **given}, dtype=jnp.float32, block=block)


def generate(tensors, chunk, steps, move="auto", spec=None, keys=None, **how):
    """Prefill in chunks, then decode the last `steps` tokens in one loop; everything of every position."""
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    T, cache, outs = q.shape[1], cache_of(k, v, **how), []
    for at in range(0, T - steps, chunk):
        plan = cache.plan.for_length(min(chunk, T - steps - at))
        mine = [plan.shard(x[:, at : at + plan.seq_len]) for x in (q, k, v)]
        out, cache = ra.prefill(*mine, plan, cache, move=move, spec=spec, keys=keys)
        outs.append(plan.unshard(out))

    def step(cache, token):
        out, cache = ra.decode(*token, cache, spec=spec)
        return cache, out

    tokens = [jnp.moveaxis(x[:, T - steps :, None], 1, 0) for x in (q, k, v)]
    slots = cache.k.shape[1]
    cache, last = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens), donate_argnums=0)(cache, tokens)
    assert cache.window is None or slots <= cache.window + chunk + cache.stripes.round
    assert cache.lengths.tolist() == [T] * len(q)
    return np.concatenate([*outs, jnp.moveaxis(last[:, :, 0], 0, 1)], 1)


def check(found, tensors, spec=None):
    expected = ra.attention(*(x.double() for x in tensors), spec=spec)
    assert float((torch.from_numpy(np.array(found)).double() - expected).norm() / expected.norm()) <= LIMIT


PLACES = [
    ({}, 17, "auto"),
    pytest.param({"ring": 2, "layout": "zigzag"}, 512, "keys", marks=pytest.mark.slow),
    pytest.param({"ring": 2, "ulysses": 2}, 17, "queries", marks=pytest.mark.slow),
    ({"ring": 4, "layout": "striped"}, 30, "keys"),
]


@pytest.mark.parametrize(("place", "chunk", "move"), PLACES)
def test_chunks_then_tokens_are_the_whole(place, chunk, move):
    tensors = draw()
    check(generate(tensors, chunk, 6, move, **place), tensors)


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        pytest.param(ra.AttentionSpec(chunk=9), {"ring": 2, "move": "queries"}, marks=pytest.mark.slow),
        (ra.AttentionSpec(window=7, first=4), {"ring": 4, "layout": "striped", "move": "keys"}),
        pytest.param(ra.AttentionSpec(window=5, chunk=12, first=2), {"ulysses": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_cache_takes_chunks_and_first_keys(spec, place):
    tensors = draw(T=33)
    check(generate(tensors, 14, 4, spec=spec, **place), tensors, spec)


@pytest.mark.slow
def test_few_tokens_over_many_devices():
    tensors = draw(T=9, D=64, V=64)
    check(generate(tensors, 3, 1, ring=8, block=64), tensors)
    tensors = draw(T=5)
    check(generate(tensors, 1, 2), tensors)


def test_windows_and_softcap():
    tensors, spec = draw(T=40), ra.AttentionSpec(window=11, softcap=3.0)
    check(generate(tensors, 20, 3, "keys", spec=spec, ring=2), tensors, spec)


@pytest.mark.parametrize("place", [{"ring": 2, "move": "keys", "keys": 5}, {"ulysses": 2, "move": "queries"}], ids=str)
def test_a_window_keeps_only_what_can_still_be_seen(place):
    tensors, spec = draw(T=61), ra.AttentionSpec(window=9)
    check(generate(tensors, 8, 21, spec=spec, window=9, room=8, block=2, **place), tensors, spec)


def test_rows_of_different_lengths_keep_their_own_windows_and_go_back_as_far_as_they_are_kept():
    q, k, v = tensors = draw(T=60)
    spec = ra.AttentionSpec(window=6)
    expected = ra.attention(*(x.double() for x in tensors), spec=spec)
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    cache = cache_of(k, v, window=6, room=10, block=2)
    for at in range(0, 50, 10):
        cache = cache.append(k[:, at : at + 10], v[:, at : at + 10])
    assert cache.k.shape[1] == 16 and cache.first.tolist() == [34, 34]
    for lengths in ([47, 50], [39, 49]):
        cache = cache.truncate(lengths)
        at, rows = np.array(lengths)[:, None] + np.arange(3), np.arange(2)[:, None]
        out, longer = ra.decode(*(x[rows, at] for x in (q, k, v)), cache, spec=spec)
        assert np.allclose(out, expected[rows, at], atol=1e-5)
        assert longer.first.tolist() == [34, at[1, 2] + 1 - 16]
    with pytest.raises(ValueError):
        cache.truncate(38)


@pytest.mark.parametrize("move", ["keys", "queries"])
def test_keys_bound_what_a_chunk_needs_at_once(move):
    q, k, v = (jnp.zeros((1, 2048, 1, 8)) for _ in range(3))
    cache = cache_of(k, v, ring=2, chunk=128)

    def needed(keys):
        call = jax.jit(lambda *new: ra.prefill(*new, cache.plan, cache, move=move, keys=keys)[0])
        return call.lower(*(x[:, :128] for x in (q, k, v))).compile().memory_analysis().temp_size_in_bytes

    assert needed(100) < needed(1024) / 4


@pytest.mark.parametrize("kind", [pytest.param("Auto", marks=pytest.mark.slow), "Explicit"])
def test_a_batch_and_heads_may_be_cut_too(kind):
    tensors, sinks = draw(T=14), torch.linspace(-1, 1, 4)
    expected = ra.attention(*(x.double() for x in tensors), sinks=sinks.double())
    q, k, v, sinks = (jnp.asarray(x.numpy()) for x in (*tensors, sinks))
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "tensor"), axis_types=(jax.sharding.AxisType[kind],) * 3)
    sizes = {"batch": 2, "max_len": 14, "kv_heads": 2, "head_dim": 8, "dtype": jnp.float32, "block": 4}
    plan = ra.plan(mesh, seq_len=12, axes={"batch": "data", "heads": "tensor"})
    cache = ra.KVCache.allocate(plan, **sizes)
    mine = [jax.device_put(plan.shard(x[:, :12]), cache.k.sharding) for x in (q, k, v)]
    out, cache = ra.prefill(*mine, plan, cache, sinks=sinks)
    last, cache = ra.decode(*(x[:, 12:] for x in (q, k, v)), cache, sinks=sinks)
    assert cache.k.sharding.shard_shape(cache.k.shape) == (1, 8, 1, 8)
    assert np.allclose(np.concatenate([plan.unshard(out), last], 1), expected, atol=1e-5)
    with pytest.raises(ValueError):
        ra.KVCache.allocate(plan, **{**sizes, "kv_heads": 3})  # two devices cut the heads


def test_rows_of_different_lengths_and_forks():
    q, k, v = tensors = draw(T=40)
    expected = ra.attention(*(x.double() for x in tensors))
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    cache = cache_of(k, v, ring=4)
    cache = cache.append(k[:, :30], v[:, :30]).truncate([17, 26])  # rejected: each row goes on from its own length
    at = np.array([[17], [26]])
    rows = np.arange(2)[:, None]
    fork = cache.fork(3, max_len=50)
    assert fork.room() == 24 and cache.room() == 14
    out, longer = ra.decode(*(jnp.repeat(x[rows, at], 3, axis=0) for x in (q, k, v)), fork)
    assert longer.lengths.tolist() == [18] * 3 + [27] * 3 and cache.lengths.tolist() == [17, 26]
    assert np.allclose(out, expected[rows, at].repeat_interleave(3, 0), atol=1e-5)


def test_traced_lengths_never_show_a_token_what_is_not_there():
    """What does not fit attends to nothing, and to take back makes no row longer."""
    tensors, spec = draw(T=10), ra.AttentionSpec(window=2**40)
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    cache = cache_of(k, v, max_len=9, window=2**40).append(k[:, :8], v[:, :8])
    out, full = jax.jit(lambda cache, *x: ra.decode(*x, cache, spec=spec))(cache, *(x[:, 8:] for x in (q, k, v)))
    assert full.lengths.tolist() == [9, 9] and (out[:, 1] == 0).all()
    assert np.allclose(out[:, 0], ra.attention(*tensors)[:, 8], atol=1e-5)
    assert jax.jit(full.truncate)(jnp.array([5, 50])).lengths.tolist() == [5, 9]


def test_a_cache_may_be_made_under_jit():
    """Spread as it is outside, and printed also where it holds shapes only."""
    k = jnp.zeros((2, 61, 2, 8))
    made, sizes = cache_of(k, k, ring=2), {"max_len": np.int64(61), "window": np.int64(9)}
    assert jax.jit(lambda: cache_of(k, k, ring=2))().k.sharding.is_equivalent_to(made.k.sharding, 4)
    assert repr(jax.eval_shape(lambda: made)) == "KVCache(lengths traced of 61, over 2 ranks)"
    small = cache_of(k, k, **sizes)
    assert [type(x) for x in (small.max_len, small.window, small.most)] == [int, int, int]


THREE = {"batch": 1, "max_len": 8, "kv_heads": 3, "head_dim": 8}


def test_wrong_arguments_and_gradients_are_errors_with_a_remedy():
    """The others are those of torch, in tests/test_cache_refusals.py."""
    q, k, v = (jnp.asarray(x.numpy()) for x in draw(T=8))
    cache = cache_of(k, v, ring=2)
    mine = [cache.plan.shard(x) for x in (q, k, v)]
    small = cache_of(k, v, ring=2, window=2, room=1, max_len=99, block=1)
    cut = jax.sharding.Mesh(np.array(jax.devices()[:2])[None], ("ring", "tensor"))

    def prefill(scale):
        return ra.prefill(*(x * scale for x in mine), cache.plan, cache)[0]

    def decode(scale):
        full = ra.prefill(*mine, cache.plan, cache)[1].truncate(7)
        return ra.decode(*(x[:, :1] * scale for x in (q, k, v)), full)[0]

    gradient = "nothing of a cache is differentiable .*stop_gradient"
    for call, says in [
        (lambda: ra.decode(q, k, v, cache), "decode before prefill: the cache holds"),
        (lambda: ra.prefill(*mine, cache_of(k, v, ring=4).plan, cache), "was allocated for another plan"),
        (lambda: ra.prefill(*mine, small.plan, small), "keeps a window of 2 keys, the spec sees window=None"),
        (lambda: cache.append(k.astype(jnp.bfloat16), v), "k is bfloat16, the cache float32"),
        (lambda: cache.append(*(jnp.repeat(x[:, :1], 9, axis=1) for x in (k, v))), "9 tokens do not fit"),
        (lambda: small.append(k, v), r"8 tokens at once do not fit beside a window of 2; allocate\(room=8\)"),
        (lambda: cache.truncate(3), "the rows can go back from"),
        (lambda: cache.append(k[:, :7], v[:, :7]).fork(2, max_len=3), "the rows hold up to 7 tokens already"),
        (lambda: cache_of(k, v, max_len=2**31, window=4), "max_len=2147483648: JAX counts positions in 32 bits"),
        (lambda: ra.KVCache.allocate(ra.plan(cut, seq_len=8, axes={"heads": "tensor"}), **THREE), "cut the heads"),
        (lambda: jax.eval_shape(jax.grad(lambda x: prefill(x).sum()), 1.0), gradient),
        (lambda: jax.eval_shape(jax.grad(lambda x: decode(x).sum()), 1.0), gradient),
    ]:
        with pytest.raises(NotImplementedError if says == gradient else ValueError, match=says):
            call()
    for call in (prefill, decode):  # what needs no gradient of a cache is not refused
        assert jax.eval_shape(jax.grad(lambda x, call=call: x * call(x).argmax()), 1.0).shape == ()
    full = cache_of(k, v, max_len=1000).append(k, v)
    assert jax.jit(full.truncate)(jnp.array([5, 6], jnp.int8)).lengths.tolist() == [5, 6]
    assert len(cache.fork(jnp.array(2)).lengths) == 4
