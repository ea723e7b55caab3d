"""Prefill in chunks and decode over devices equal attention over everything at once, at every position."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402

LIMIT = 2e-6


def draw(B=2, T=61, H=4, G=2, D=8, V=8):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, h, d, generator=g) for h, d in ((H, D), (G, D), (G, V))]


def cache_of(k, v, ring=1, ulysses=1, layout="auto", block=4, chunk=8):
    mesh = rj.init_mesh(ring=ring, ulysses=ulysses, devices=jax.devices()[: ring * ulysses])
    plan = ra.plan(mesh, seq_len=chunk, layout=layout)
    sizes = {"batch": k.shape[0], "kv_heads": k.shape[2], "head_dim": k.shape[3], "value_dim": v.shape[3]}
    return ra.KVCache.allocate(plan, **sizes, max_len=k.shape[1], dtype=jnp.float32, block=block)


def generate(tensors, chunk, steps, move="auto", form="lse", spec=None, **how):
    """Prefill in chunks, then decode the last `steps` tokens in one loop; everything of every position."""
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    T, cache, outs = q.shape[1], cache_of(k, v, **how), []
    for at in range(0, T - steps, chunk):
        plan = cache.plan.for_length(min(chunk, T - steps - at))
        mine = [plan.shard(x[:, at : at + plan.seq_len]) for x in (q, k, v)]
        out, cache = ra.prefill(*mine, plan, cache, start=at, move=move, spec=spec)
        outs.append(plan.unshard(out))

    def step(cache, token):
        out, cache = ra.decode(*token, cache, form=form, spec=spec)
        return cache, out

    tokens = [jnp.moveaxis(x[:, T - steps :, None], 1, 0) for x in (q, k, v)]
    cache, last = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens), donate_argnums=0)(cache, tokens)
    assert cache.lengths.tolist() == [T] * len(q)
    return np.concatenate([*outs, jnp.moveaxis(last[:, :, 0], 0, 1)], 1)


def check(found, tensors, spec=None):
    expected = ra.attention(*(x.double() for x in tensors), spec=spec)
    assert float((torch.from_numpy(np.array(found)).double() - expected).norm() / expected.norm()) <= LIMIT


PLACES = [
    ({}, 17, "auto", "lse"),
    ({"ring": 2, "layout": "zigzag"}, 512, "keys", "streams"),
    ({"ring": 2, "ulysses": 2}, 17, "queries", "lse"),
    ({"ring": 4, "layout": "striped"}, 30, "keys", "streams"),
]


@pytest.mark.parametrize(("place", "chunk", "move", "form"), PLACES)
def test_chunks_then_tokens_are_the_whole(place, chunk, move, form):
    tensors = draw()
    check(generate(tensors, chunk, 6, move, form, **place), tensors)


def test_few_tokens_over_many_devices():
    tensors = draw(T=9, D=64, V=64)
    check(generate(tensors, 3, 1, ring=8, block=64), tensors)
    tensors = draw(T=5)
    check(generate(tensors, 1, 2), tensors)


def test_windows_and_softcap():
    tensors, spec = draw(T=40), ra.AttentionSpec(window=11, softcap=3.0)
    check(generate(tensors, 20, 3, "keys", spec=spec, ring=2), tensors, spec)


def test_rows_of_different_lengths_forks_and_what_was_saved():
    q, k, v = tensors = draw(T=40)
    expected = ra.attention(*(x.double() for x in tensors))
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    cache = cache_of(k, v, ring=4)
    cache = cache.append(k[:, :30], v[:, :30]).truncate([17, 26])  # rejected: each row goes on from its own length
    cache = cache_of(k, v, ring=4).load_state_dict(cache.state_dict())
    at = np.array([[17], [26]])
    rows = np.arange(2)[:, None]
    fork = cache.fork(3)
    out, longer = ra.decode(*(jnp.repeat(x[rows, at], 3, axis=0) for x in (q, k, v)), fork)
    assert longer.lengths.tolist() == [18] * 3 + [27] * 3 and cache.lengths.tolist() == [17, 26]
    assert np.allclose(out, expected[rows, at].repeat_interleave(3, 0), atol=1e-5)


def test_sinks_take_part():
    tensors, sinks = draw(T=12), torch.linspace(-1, 1, 4)
    expected = ra.attention(*(x.double() for x in tensors), sinks=sinks.double())
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors)
    cache = cache_of(k, v, ring=2, chunk=11)
    mine = [cache.plan.shard(x[:, :11]) for x in (q, k, v)]
    out, cache = ra.prefill(*mine, cache.plan, cache, sinks=jnp.asarray(sinks.numpy()))
    last, _ = ra.decode(*(x[:, 11:] for x in (q, k, v)), cache, sinks=jnp.asarray(sinks.numpy()))
    found = np.concatenate([cache.plan.unshard(out), last], 1)
    assert np.allclose(found, expected, atol=1e-5)


def test_what_is_wrong_is_said():
    q, k, v = (jnp.asarray(x.numpy()) for x in draw(T=8))
    cache = cache_of(k, v, ring=2)
    plan = cache.plan
    mine = [plan.shard(x) for x in (q, k, v)]
    with pytest.raises(ValueError, match="decode before prefill: the cache holds"):
        ra.decode(q, k, v, cache)
    with pytest.raises(ValueError, match="a chunk at 3 skips positions: the rows of the cache end at"):
        ra.prefill(*mine, plan, cache, start=3)
    with pytest.raises(ValueError, match="move='values': choose one of auto, queries, keys"):
        ra.prefill(*mine, plan, cache, move="values")
    with pytest.raises(ValueError, match="the cache was allocated for another plan"):
        ra.prefill(*mine, cache_of(k, v, ring=4).plan, cache)
    with pytest.raises(ValueError, match="9 more tokens do not fit: rows hold up to 0 of max_len=8"):
        cache.append(*(jnp.repeat(x[:, :1], 9, axis=1) for x in (k, v)))
    with pytest.raises(ValueError, match="k is bfloat16, the cache float32"):
        cache.append(k.astype(jnp.bfloat16), v)
    with pytest.raises(ValueError, match="the rows can go back from"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="of 4 devices, in blocks of 4; this cache is of 2 devices"):
        cache.load_state_dict(cache_of(k, v, ring=4).state_dict())
