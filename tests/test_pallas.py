"""The TPU kernel equals the reference in interpret mode, and its work lists hold exactly the blocks with work."""

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ringattn.kernels.attention import reference  # noqa: E402
from ringattn.kernels.attention.pallas import splash  # noqa: E402
from ringattn.kernels.attention.pallas.blocks import Blocks, Shape, blocks_for  # noqa: E402
from ringattn.kernels.attention.pallas.worklist import (  # noqa: E402
    ANY_KEYS,
    ENDS,
    FIRST,
    LAST,
    NO_WORK,
    STAIRS,
    WHOLE,
    Ranges,
    kind_of,
    listed,
    passing,
    staying,
)
from ringattn.kernels.intervals import Intervals  # noqa: E402
from ringattn.kernels.partial import NEVER, Partial  # noqa: E402

SMALL = Blocks(128, 128)


def intervals(rng, rows, queries, keys):
    """Random monotone intervals, with runs of empty rows at the front and of full ones at the back."""
    end = np.sort(rng.integers(0, keys + 1, (rows, queries)), 1)
    begin = np.minimum(np.sort(rng.integers(0, keys, (rows, queries)), 1), end)
    front, back = queries // 5, queries // 3
    begin[:, :front], end[:, :front], end[:, -back:] = 0, 0, keys
    begin[:, -back:] = begin[:, -back:].min(1, keepdims=True)
    return Intervals(jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32))


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def worst(found, expected):
    """The largest relative error (norm) of several arrays; infinities must be in the same places."""
    errors = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and (np.isfinite(a) == np.isfinite(b)).all() and not np.isnan(a).any()
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        errors.append(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
    return max(errors)


@pytest.mark.parametrize("seed", range(6))
def test_work_lists_hold_every_seen_pair_of_blocks_once_and_no_other(seed):
    rng = np.random.default_rng(seed)
    rows, queries, keys, block = int(rng.integers(1, 3)), 32, 40, 8
    where = intervals(rng, rows, queries, keys)
    ranges = Ranges.of(where, block, block)
    index = np.arange(keys)
    visible = (np.asarray(where.begin)[..., None] <= index) & (index < np.asarray(where.end)[..., None])
    tiles = visible.reshape(rows, queries // block, block, keys // block, block)
    for stays, (entries, steps) in enumerate(listed(ranges, keys // block, first) for first in (True, False)):
        entries = np.asarray(entries)[:, : int(steps)]
        for row in range(rows):
            pairs = [(int(staying(e)), int(passing(e)), (int(kind_of(e)), int(e))) for e in entries[row]]
            if stays == 1:
                pairs = [(k, q, more) for q, k, more in pairs]
            some = {(q, k) for q, k in np.argwhere(tiles[row].any((1, 3)))}
            every = {(q, k) for q, k in np.argwhere(tiles[row].all((1, 3)))}
            working = [(q, k) for q, k, (kind, _) in pairs if kind != NO_WORK]
            assert len(working) == len(set(working))
            assert some <= set(working)  # an interval between two seen blocks may be walked, never one outside
            assert {(q, k) for q, k, (kind, _) in pairs if kind == WHOLE} == every
            begun = np.asarray(where.begin)[row].reshape(-1, block).max(-1)
            assert all((kind > ANY_KEYS) == (begun[q] <= k * block) for q, k, (kind, _) in pairs if kind != NO_WORK)
            for flag in (FIRST, LAST):
                marked = [pair[stays] for pair in pairs if pair[2][1] & flag]
                assert sorted(marked) == list(range(queries // block if stays == 0 else keys // block))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "rows", "softcap", "carried"),
    [
        pytest.param(2, 2, 64, 64, 1, None, False, marks=pytest.mark.slow),
        (4, 1, 64, 32, 2, 2.0, True),
        pytest.param(2, 1, 128, 128, 1, None, True, marks=pytest.mark.slow),
    ],
)
def test_equals_the_reference(heads, kv_heads, dim, value_dim, rows, softcap, carried):
    rng, B, T, S = np.random.default_rng(1), 2, 200, 300
    q, k, v = normal(rng, B, T, heads, dim), normal(rng, B, S, kv_heads, dim), normal(rng, B, S, kv_heads, value_dim)
    where = intervals(rng, rows, T, S)
    lse = jnp.where(normal(rng, B, T, heads) > 0, normal(rng, B, T, heads), NEVER)
    carry = Partial(jnp.where(lse[..., None] > NEVER, normal(rng, B, T, heads, value_dim), 0), lse) if carried else None
    dout, delta = normal(rng, B, T, heads, value_dim), normal(rng, B, T, heads)
    given = {"scale": dim**-0.5, "softcap": softcap}

    def both(module, backward, **more):
        def run(q, k, v):
            part = module.attend(q, k, v, where, carry=carry, **given, **more)
            rows, dq = (dout, part.lse, delta), q if carried else None
            return part, backward(q, k, v, where, *rows, dq=dq, **given, **more)

        return jax.jit(run)(q, k, v)

    expected = both(reference, reference.attend_backward)
    for backward in (splash.attend_backward, partial(splash.attend_backward, apart=True)):
        assert worst(both(splash, backward, blocks=SMALL, interpret=True), expected) < 1e-6


def test_halves_of_a_block_of_queries_meet_all_of_its_keys():
    """Blocks of more than 512 queries are computed in pieces: whole, cut by ends, and cut by begins too."""
    rng, T = np.random.default_rng(3), 1024
    q, k, v = (normal(rng, 1, T, 1, 64) for _ in range(3))
    t = np.arange(T)
    begin = np.where(t < 700, 0, 300)[None], np.minimum(t + 1, 800)[None]
    where = Intervals(*(jnp.asarray(x, jnp.int32) for x in begin))
    kinds = kind_of(listed(Ranges.of(where, T, 256), 4, queries_stay=True)[0])
    assert set(kinds.flatten().tolist()) == {ENDS, ANY_KEYS}
    found, expected = (
        jax.jit(lambda q, k, v, f=f, how=how: f(q, k, v, where, scale=0.1, **how))(q, k, v)
        for f, how in ((splash.attend, {"blocks": Blocks(T, 256), "interpret": True}), (reference.attend, {}))
    )
    assert worst(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("block", "function"),
    [
        (1024, splash.attend),
        (1024, splash.attend_backward),
        (512, splash.attend),
        (512, partial(splash.attend_backward, apart=True)),
    ],
)
def test_a_tile_on_the_diagonal_leaves_out_keys_that_no_query_sees(block, function):
    """Blocks of 512 and 1024: forward in halves, backward in quarters; off the diagonal all pieces run."""
    rng, T, S = np.random.default_rng(4), 1024, 2048
    q, k, v = (normal(rng, 1, n, 1, 64) for n in (T, S, S))
    dout, delta = normal(rng, 1, T, 1, 64), normal(rng, 1, T, 1)
    is_forward, how = function is splash.attend, {"blocks": Blocks(block, block, 2**26), "interpret": True}
    expected_by = reference.attend if is_forward else reference.attend_backward
    ours, theirs = (
        jax.jit(partial(f, scale=0.1, **given), compiler_options={"xla_backend_optimization_level": 0})
        for f, given in ((function, how), (expected_by, {}))
    )
    for shift in (0, -1, -300):  # causal, strict, off the diagonal
        end = jnp.asarray(S - T + np.arange(1, T + 1) + shift, jnp.int32)[None]
        where = Intervals(jnp.where(end > 1700, 400, 0), end)
        kinds = kind_of(listed(Ranges.of(where, block, block), S // block, queries_stay=True)[0])
        assert (STAIRS in kinds.flatten().tolist()) == (shift > -300)
        rows = () if is_forward else (dout, reference.attend(q, k, v, where, scale=0.1)[1], delta)
        assert worst(ours(q, k, v, where, *rows), theirs(q, k, v, where, *rows)) < 1e-6


def test_bfloat16_rounds_no_more_than_its_inputs_do():
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, 1, 256, h, 64, dtype=jnp.bfloat16) for h in (2, 1, 1))
    where = Intervals(jnp.zeros((1, 256), jnp.int32), jnp.arange(1, 257, dtype=jnp.int32)[None])
    found = splash.attend(q, k, v, where, scale=0.125, blocks=SMALL, interpret=True)
    assert worst(found, reference.attend(q, k, v, where, scale=0.125)) < 4e-3


def test_blocks_cover_a_length_with_little_padding_and_fit_the_memory():
    shape = Shape(128, 128, 2)
    assert blocks_for(2300, 5, shape, (6, 0), None)[:2] == (768, 128)
    assert blocks_for(8192, 8192, shape, (6, 0), None)[:2] == (1024, 1024)
    assert blocks_for(8192, 8192, shape, (4, 0), None)[:2] == (1024, 512)
