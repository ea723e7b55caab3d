"""Segment ids: documents that change with each batch are no new programs, traced or not, in any order of the tokens."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn as ra  # noqa: E402
from ringattn.jax import layers  # noqa: E402
from tests.test_jax_programs import close, expect  # noqa: E402

T = 61


def packing(rng, most=T):
    """Ids of two rows [2, T]: at most `most` documents, each with a new id, and perhaps padding at the end, 0."""
    rows = []
    for _ in range(2):
        end = T - int(rng.integers(0, 9) * rng.integers(0, 2))
        cuts = np.sort(rng.choice(np.arange(1, end), int(rng.integers(0, min(most, end))), replace=False))
        names = rng.permutation(np.arange(1, T + 1))[: len(cuts) + 1]
        rows.append(np.append(np.repeat(names, np.diff([0, *cuts, end])), np.zeros(T - end, int)))
    return np.stack(rows).astype(np.int32)


def dense(q, k, v, ids):
    """Causal attention within equal ids, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    seen = ((ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None] & np.tri(T, dtype=bool))[:, None]
    p = np.exp(np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5) * seen
    return np.einsum("bhts,bshd->bthd", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v)


@pytest.fixture(scope="module", params=["Auto", "Explicit"])
def plan(request):
    return ra.plan(
        jax.make_mesh((2, 2, 2), ("data", "ring", "ulysses"), axis_types=(AxisType[request.param],) * 3),
        seq_len=T, strategy="ring", layout="zigzag",
    )  # fmt: skip


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, T, h, 4)), jnp.float32) for h in (4, 2, 2)]


def programs(caplog, function, packings):
    """How many programs compile while `function(ids)` runs for each packing."""
    caplog.clear()
    with jax.log_compiles():
        for ids in packings:
            function(ids)
    return caplog.text.count("Finished XLA compilation")


@pytest.mark.parametrize("way", ["traced", "traced, in the plan's order", "eager"])
def test_packings_are_few_programs(way, plan, small, caplog):
    """200 in all, each against dense float64: one program with traced ids, one for each size of eager documents."""
    order, padded = plan.tokens.order(), plan.tokens.padded_length - T
    x = [plan.shard(x) for x in small]

    def attend(ids, *x):
        most, own = (None, None) if way == "eager" else (T, plan if "order" in way else None)
        return ra.attention(*x, plan, docs=ra.Docs.from_segment_ids(ids, most, plan=own))

    function = attend if way == "eager" else jax.jit(attend)

    def check(ids):
        given = np.pad(ids, [(0, 0), (0, padded)])[:, order] if "order" in way else ids
        found = np.zeros((2, T + padded, 4, 4))
        found[:, order] = np.asarray(function(given, *x))
        assert np.abs(found[:, :T] - dense(*small, ids)).max() < 5e-6

    rng = np.random.default_rng(1)
    packings = [packing(rng, most) for most in (3, 8, 30, T) for _ in range(10 if way == "eager" else 20)]
    assert programs(caplog, check, packings) == (2 if way == "eager" else 1)


def test_eager_gradients_and_linear_attention_compile_once_a_size_too(plan, small, caplog):
    x = [plan.shard(x) for x in small]

    def both(ids):
        docs = ra.Docs.from_segment_ids(ids)
        with jax.set_mesh(plan.ring_axis.mesh):  # JAX asks for it in an eager grad on explicit axes
            jax.grad(lambda q: ra.attention(q, *x[1:], plan, docs=docs).sum())(x[0])
        ra.linear_attention(x[1], *x[1:], plan=plan, docs=docs)

    rng = np.random.default_rng(2)
    assert programs(caplog, both, [packing(rng, 7)]) > 1
    assert programs(caplog, both, [packing(rng, 7) for _ in range(5)]) == 0


def test_inside_shard_map_ids_are_this_devices(plan, small):
    ids = packing(np.random.default_rng(3))
    cut = P("data", ("ring", "ulysses"))

    @partial(jax.shard_map, mesh=plan.ring_axis.mesh, in_specs=(cut, cut, cut, cut), out_specs=cut)
    def local(ids, *x):
        return ra.attention(*x, plan, docs=ra.Docs.from_segment_ids(ids, T, plan=plan))

    found = jax.jit(lambda *x: plan.unshard(local(*map(plan.shard, x))))(jnp.asarray(ids), *small)
    assert np.abs(np.asarray(found) - dense(*small, ids)).max() < 5e-6


def test_a_row_with_more_documents_than_most_is_nan(plan, small):
    ids = np.repeat([[5, 2, 9], [5, 2, 2]], [20, 21, 20], 1)

    @jax.jit
    def results(ids):
        docs = ra.Docs.from_segment_ids(ids, 2)
        out, lse = ra.attention(*small, docs=docs, return_lse=True)
        queries, spec = ra.Docs.from_lengths([[20, 41]] * 2), ra.AttentionSpec(causal=False)
        keys = ra.attention(*small, spec=spec, docs=queries, key_docs=docs)
        linear, state = ra.linear_attention(small[1], *small[1:], docs=docs, return_state="documents")
        mixed = layers.causal_convolution(small[0][:, :, 0], jnp.ones((4, 2)), docs=docs)
        mean = layers.token_mean(small[0][..., 0, 0], docs=docs)
        return out, lse, keys, linear, state.reshape(2, 2, -1), mixed, mean

    @jax.jit
    def rolled(ids, x):
        return plan.roll(x, docs=ra.Docs.from_segment_ids(ids, 2))

    out, *others, mean = results(ids)
    with jax.set_mesh(plan.ring_axis.mesh):
        others.append(jax.device_get(plan.unshard(rolled(ids, plan.shard(small[0])))))
    for x in (out, *others):
        assert np.isnan(x[0]).all() and np.isfinite(x[1]).all()
    assert np.isnan(mean)
    close(out[1:], dense(*(x[1:] for x in small), ids[1:]).astype(np.float32))


def test_ids_that_are_no_documents_are_refused():
    ids = ra.Docs.from_segment_ids
    for words, call in (
        (["most=2", "row 0", "3 documents"], lambda: ids([[1, 2, 3, 0]], 2)),
        (["id 1", "back", "token 3"], lambda: ids([1, 1, 2, 1])),
        (["most=0"], lambda: ids([1], 0)),
        (["whole numbers"], lambda: ids([1.5, 2])),
        (["whole numbers", "(1, 0)"], lambda: ids(np.zeros((1, 0), int))),
        (["whole numbers", "(1, 1, 2)"], lambda: ids([[[1, 2]]])),
        (["pass most="], lambda: jax.jit(ids)(jnp.ones(4, int))),
    ):
        expect(words, call)
    assert ids([[0, 0, 1, 0]]) == ra.Docs.from_lengths([2, 1], pad_to=4)  # only at the end is 0 padding
    assert ids([3, 0, 0], padding=None) == ra.Docs.from_lengths([1, 2])
    assert ids([[0, 0]]) == ra.Docs.from_lengths([0], pad_to=2)


def test_docs_are_a_pytree_without_the_jax_side():
    code = "import ringattn, jax, sys; docs = ringattn.Docs.from_lengths([2, 3])\n"
    code += "assert jax.tree.leaves(docs)[0] is docs.starts and 'ringattn.jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
