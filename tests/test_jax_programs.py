"""The JAX backend under JAX's transformations, and what it refuses."""

from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from ringattn.jax.attention.function import LSE, OUT  # noqa: E402
from ringattn.jax.attention.steps import global_bounds  # noqa: E402
from ringattn.masks.bands import bounds_at, families  # noqa: E402
from ringattn.plans.mask import Mask  # noqa: E402
from ringattn.plans.spmd import route_of  # noqa: E402
from tests.cases import FEATURES  # noqa: E402

LIMIT = 5e-6


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 30, h, 8)), jnp.float32) for h in (4, 2, 2)]


@pytest.fixture(scope="module")
def plan():
    return ra.plan(rj.init_mesh(data=2, ring=2, ulysses=2), seq_len=30, heads=(4, 2), head_dim=8, strategy="ring")


def through(plan, **given):
    return lambda q, k, v: plan.unshard(ra.attention(*map(plan.shard, (q, k, v)), plan, **given))


def gradients(f):
    """Of the sum of f's squares, by all its arguments."""
    return lambda *given: jax.grad(lambda x: (f(*x) ** 2).sum())(given)


def close(found, expected, limit=LIMIT):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.linalg.norm(a - b)) <= limit * float(jnp.linalg.norm(b))


def test_runs_without_jit_and_over_a_data_axis(small, plan):
    close(through(plan)(*small), ra.attention(*small))
    assert plan.positions().sharding.spec == P(("ring", "ulysses"))


@pytest.mark.parametrize("attention", [ra.attention, ra.linear_attention])
def test_without_a_plan_a_call_is_one_program_and_an_equal_call_compiles_nothing(attention, caplog):
    x = jnp.ones((1, 77, 2, 8))
    with jax.log_compiles():
        for compiled in (1, 0):
            caplog.clear()
            attention(x, x, x, docs=ra.Docs.from_lengths([7, 70]))
            assert caplog.text.count("Finished XLA compilation") == compiled


def test_a_batch_that_the_data_axis_does_not_divide_lies_whole_on_it(small, plan):
    three = [jnp.concatenate([x, x[:1]]) for x in small]
    found, expected = through(plan), ra.attention(*three)
    close((found(*three), jax.jit(found)(*three)), (expected, expected))


def test_nothing_is_sent_to_a_device_unasked(small, plan):
    q, docs = small[0], ra.Docs.from_lengths([11, 19])
    zigzag = plan.replace(layout="zigzag", heads=None)
    with jax.transfer_guard("disallow"):
        ra.attention(q, q, q, docs=docs)
        ra.linear_attention(q, q, q, -q * q, docs=docs, check=False)
        zigzag.positions()
        through(zigzag)(q, q, q)


@pytest.mark.slow
def test_a_program_for_any_batch_may_be_exported(small):
    """By jax.export, with a symbol for its size."""
    q = small[0]
    shape = jax.export.symbolic_shape("b, 30, 4, 8")
    for attention in (ra.attention, lambda q, *kv: ra.linear_attention(q, *kv, -q * q)):
        program = jax.jit(jax.value_and_grad(lambda q, f=attention: (f(q, q, q) ** 2).sum()))
        exported = jax.export.export(program)(jax.ShapeDtypeStruct(shape, jnp.float32))
        close(exported.call(q), program(q))


@pytest.mark.parametrize(
    ("spec", "docs"),
    [
        (ra.AttentionSpec(), ra.Docs.from_lengths([[10, 5, 15], [3, 20, 7]])),
        (ra.AttentionSpec(chunk=6, first=2), ra.Docs.from_lengths([[10, 5, 15], [3, 20, 7]])),
        (ra.AttentionSpec(window=4), ra.Docs.from_lengths([10, 20], prefix=[3, 0], spans=[(4, 9), (12, 29)])),
        (ra.AttentionSpec(), ra.Docs.tree([10, 5, 15], [-1, 0, 0])),
    ],
    ids=["plain", "chunks", "spans", "tree"],
)
def test_masks_of_documents_that_are_arguments_of_a_program(small, plan, spec, docs):
    """Starts and spans may be traced, and then every hop that some documents may need is there."""
    found = jax.jit(lambda docs, *x: through(plan, docs=docs, spec=spec)(*x))(docs, *small)
    q, k, v = (torch.from_numpy(np.array(x)) for x in small)
    expected = ra.attention(q, k, v, docs=docs, spec=spec)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_sink_that_nobody_sees_has_no_gradient_beside_padding(small, plan):
    docs = ra.Docs.from_lengths([10, 15], pad_to=30)

    def loss(attention, sinks):
        return (attention(sinks)(*small) ** 2).sum()

    sinks = jnp.asarray([-jnp.inf, -1.0, 0.0, 1.0])
    found = jax.grad(partial(loss, lambda s: through(plan, docs=docs, sinks=s)))(sinks)
    assert found[0] == 0
    close(found, jax.grad(partial(loss, lambda s: partial(ra.attention, docs=docs, sinks=s)))(sinks))


@pytest.mark.slow
def test_vmap_over_a_batch_of_batches_with_gradients(small, plan):
    more = [jnp.stack([x, 2 * x, x + 1]) for x in small]
    ours, expected = (jax.jit(jax.vmap(gradients(f))) for f in (through(plan), ra.attention))
    close(ours(*more), expected(*more))


@pytest.mark.slow
def test_second_derivatives_equal_those_of_dense_float64():
    """A gradient penalty's, of every argument: the Hessian times the gradient. Padding, which sees no key, has none."""
    docs = ra.Docs.from_lengths([4, 5], pad_to=10)
    plan = ra.plan(rj.init_mesh(ring=2, devices=jax.devices()[:2]), seq_len=10)

    def dense(q, k, v, sinks):
        of = np.repeat([0, 1, 2], [4, 5, 1])
        seen = np.tril(of[:, None] == of) & (of[:, None] < 2)
        scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, 2)) * 8**-0.5, -1e30)
        weight = jax.nn.softmax(jnp.concatenate([scores, jnp.zeros((2, 4, 10, 1)) + sinks[:, None, None]], -1), -1)
        return jnp.einsum("bhts,bshd->bthd", weight[..., :-1] * seen, jnp.repeat(v, 2, 2))

    def found(attention, *given):
        grads = jax.grad(lambda x: (attention(*x) ** 2).sum())
        penalty = jax.grad(lambda x: sum((g**2).sum() for g in grads(x)))
        return jax.jit(penalty, compiler_options={"xla_backend_optimization_level": 0})(given)

    def ours(attention):
        return lambda q, k, v, sinks: attention(docs=docs, sinks=sinks)(q, k, v)

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        given = [jnp.asarray(rng.normal(size=shape)) for shape in (*((2, 10, h, 8) for h in (4, 2, 2)), (4,))]
        given[3] = given[3].at[0].set(-jnp.inf)
        expected = found(dense, *given)
        for attention in (partial(partial, ra.attention), partial(through, plan)):
            close(found(ours(attention), *given), expected, 1e-11)


@pytest.mark.slow
def test_a_kernel_that_has_no_second_derivatives_refuses_them():
    plan = ra.plan(rj.init_mesh(devices=jax.devices()[:1]), seq_len=8, kernel="splash")
    x = jnp.ones((1, 8, 1, 8))
    grad = jax.grad(lambda x: ra.attention(x, x, x, plan).sum())
    why = ["kernel='splash' has first derivatives only", "kernel='reference'"]
    expect(why, lambda: jax.eval_shape(jax.grad(lambda x: grad(x).sum()), x), NotImplementedError)


@pytest.mark.parametrize("kernel", ["reference", "splash"])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(kernel):
    """A query, a key, a value or a gradient of the second document, in the middle of a causal rectangle."""
    plan = ra.plan(rj.init_mesh(devices=jax.devices()[:1]), seq_len=48, kernel=kernel)
    docs, t = ra.Docs.from_lengths([20, 28]), np.arange(48)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def results(q, k, v, dout):
        attend = partial(ra.attention, plan=plan, docs=docs, return_lse=True)
        (out, lse), back = jax.vjp(attend, q, k, v)
        return out, lse, *back((dout, jnp.zeros_like(lse)))

    clean = np.random.default_rng(0).normal(size=(4, 1, 48, 2, 8)).astype(np.float32)
    expected = results(*clean)
    everyone, before, others, first = t >= 0, t < 30, t != 30, t < 20
    outer = first | (t > 30)  # keys that query 30 does not see
    untouched = {  # rows of out, lse, dq, dk, dv
        "q": (others, others, others, outer, outer),
        "k": (before, before, before, first, first),
        "v": (before, before, before, first, first),
        "dout": (everyone, everyone, others, outer, outer),
    }
    for which, (name, rows) in enumerate(untouched.items()):
        for bad in (np.nan, np.inf):
            given = clean.copy()
            given[which, :, 30] = bad
            found = results(*given)
            for result, x, y, at in zip(("out", "lse", "dq", "dk", "dv"), found, expected, rows, strict=True):
                np.testing.assert_allclose(x[:, at], y[:, at], atol=1e-6, err_msg=f"{bad} in {name}: {result}")
            assert not np.isfinite(found[3][:, 30]).any() or name == "v"
            if name == "q":
                assert not np.isfinite(found[0][:, 30]).any()
            elif name != "dout":
                assert not np.isfinite(found[0][:, ~before]).any()


@pytest.mark.slow
def test_checkpointed_layers_in_a_scan(small, plan):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)) * 0.3, jnp.float32)

    def train(f):
        @jax.checkpoint
        def layer(x, w):
            return x + f(x @ w, x[:, :, :2], x[:, :, 2:]), None

        return jax.jit(jax.grad(lambda ws: (jax.lax.scan(layer, small[0], ws)[0] ** 2).sum()))(weights)

    close(train(through(plan)), train(ra.attention))


@pytest.mark.parametrize(("size", "names", "times"), [(1, (), 8), (1, (OUT, LSE), 6), (2, (), 8), (2, (OUT, LSE), 6)])
def test_a_checkpoint_that_keeps_the_results_by_name_does_not_go_round_the_ring_again(size, names, times):
    """Forward two hops are written down, of keys and values; backward the keys' and the gradients', four."""
    mesh = rj.init_mesh(ring=2, ulysses=size, devices=jax.devices()[: 2 * size])
    plan = ra.plan(mesh, seq_len=32, strategy="ring", layout="contiguous")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @partial(jax.checkpoint, policy=policy)
    def layer(q, k, v):
        return ra.attention(2 * q, 2 * k, 2 * v, plan)

    x = jnp.ones((1, 32, 2, 8))
    program = jax.make_jaxpr(jax.grad(lambda *x: (layer(*x) ** 2).sum(), argnums=(0, 1, 2)))(x, x, x)
    assert str(program).count("ppermute[") == times


def test_gradients_are_taken_where_jax_promotes_nothing(small, plan):
    halves = [x.astype(jnp.bfloat16) for x in small]
    for within in (jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")):
        with within:
            grads = jax.grad(lambda *x: through(plan)(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
            assert [x.dtype for x in jax.eval_shape(grads, *halves)] == [jnp.bfloat16] * 3


def test_documents_are_not_made_of_what_is_traced():
    starts = jnp.array([[0, 3]])
    for make in (ra.Docs.from_lengths, ra.Docs.from_cu_seqlens, lambda x: ra.Docs.from_lengths([x[0, 1]])):
        expect(["traced", "outside jit", "as an argument"], lambda make=make: jax.jit(make)(starts))
    docs = ra.Docs.from_lengths([1, 2])
    assert repr(jax.tree.map(jnp.shape, docs)) == "Docs((1, 3), 3 tokens)"
    assert repr(jax.eval_shape(lambda x: x, docs)) == repr(docs) == "Docs(2 documents, 1 row, 3 tokens)"


def test_shard_and_unshard_are_inverse_in_every_layout():
    x = jnp.arange(2 * 30).reshape(2, 30)
    for layout in ("contiguous", "striped", "zigzag"):
        plan = ra.plan(rj.init_mesh(ring=4, ulysses=2), seq_len=30, layout=layout)
        whole = plan.shard(x)
        order = plan.tokens.order()
        assert (np.asarray(plan.positions()) == np.minimum(order, 29)).all()
        assert (np.asarray(plan.real_tokens()) == (order < 30)).all()
        assert (np.asarray(whole)[:, order < 30] == np.asarray(x)[:, order[order < 30]]).all()
        assert (plan.unshard(whole) == x).all()
        keys = jax.random.split(jax.random.key(0), 30)
        assert (plan.unshard(plan.shard(keys, 0), 0) == keys).all()


# Decisions: made in Python, before anything runs.


@pytest.mark.slow
def test_traced_bounds_equal_the_specs_own():
    for case in FEATURES:
        plan = ra.Plan(case.seq_len, key_len=case.key_len)
        at = np.arange(case.seq_len + 3)
        asked, key_docs = case.docs, case.key_docs
        docs = asked if case.slices is None else None
        found = families(case.spec, case.seq_len, case.key_len, asked, key_docs)
        seen = [bounds_at(family, at) for family in found]
        starts = [None if d is None else d.starts for d in (docs, key_docs)]
        mask = Mask(plan, case.spec, asked if case.slices or case.parents else None)
        traced = global_bounds(mask, jnp.asarray(at, jnp.int32), *starts, docs and docs.spans)
        for mine, sides in zip(traced, seen, strict=True):
            begin, end = (np.broadcast_to(x, y.shape) for x, y in zip(mine, sides, strict=True))
            some = sides[0] < sides[1]
            assert (np.diff(begin) >= 0).all() and (np.diff(end) >= 0).all() and ((begin < end) == some).all(), case
            assert (begin == sides[0])[some].all() and (end == sides[1])[some].all(), case.name


def test_a_window_stops_the_ring_early():
    window, causal = ra.AttentionSpec(window=4), ra.AttentionSpec()
    place = ra.Plan(64, ring=8, layout="contiguous")
    assert route_of(Mask(place, window)).distances == (0, 1)
    assert route_of(Mask(place.replace(layout="zigzag"), window)).distances == (0, 1, 7)
    assert route_of(Mask(place, causal)).hops[0].senders == tuple(range(7))  # the last rank's keys are nobody's
    docs = ra.Docs.from_lengths([8] * 8)
    assert route_of(Mask(place, causal, docs)).hops == ()


# Errors.


def expect(words, call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_errors_say_what_to_do(small, plan):
    q, k, v = small
    sharded = [plan.shard(x) for x in small]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    expect(["('x',)", "'ring'"], lambda: ra.plan(mesh, seq_len=30))
    expect(["30 tokens", "32", "plan.shard(x)"], lambda: ra.attention(q, k, v, plan))
    expect(["already sharded"], lambda: plan.shard(sharded[0]))
    for move in (plan.shard, plan.unshard):
        expect(["x is of type NoneType", "jax array"], lambda move=move: move(None))
        for dim in (4, -5, 1.0, None):
            expect([f"dim={dim}", "which of its 4 dims"], lambda move=move, dim=dim: move(q, dim))
    eight = rj.init_mesh(ulysses=8)
    expect(["needs 3 devices", "8"], lambda: rj.init_mesh(ring=3))
    expect(["same dtype"], lambda: ra.attention(sharded[0].astype(jnp.bfloat16), *sharded[1:], plan))
    expect(["torch mesh"], lambda: ra.attention(q, k, v, ra.plan(seq_len=30)))
    expect(["kernel='triton'", "splash"], lambda: ra.plan(eight, seq_len=32, heads=8, head_dim=8, kernel="triton"))
    uneven = [jnp.ones((2, 32, h, 8)) for h in (4, 3, 3)]
    expect(["3 key heads do not divide 4 query heads"], lambda: ra.attention(*uneven))


def test_a_kernel_that_the_platform_lacks_or_that_cannot_do_it_says_why(small, plan):
    for kernel, why in (("cudnn", "CUDA devices, not on cpu"), ("triton", "choose one of auto, splash")):
        kind = NotImplementedError if kernel == "cudnn" else ValueError
        expect([why], lambda kernel=kernel: through(plan.replace(kernel=kernel))(*small), kind)
