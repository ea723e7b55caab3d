"""The JAX backend on every kind of mesh: within shard_map, with axes of JAX's own kinds, and over processes."""

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from tests import test_jax_programs as programs  # noqa: E402
from tests.test_jax_programs import LIMIT, close, expect, gradients, through  # noqa: E402

small, plan = programs.small, programs.plan


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_it_takes_local_arrays(small, plan, check_vma):
    tokens, sinks = P("data", ("ring", "ulysses")), jnp.arange(4.0)
    inside = jax.shard_map(
        lambda q, k, v, s: ra.attention(q, k, v, plan, sinks=s),
        mesh=plan.ring_axis.mesh, in_specs=(tokens, tokens, tokens, P()), out_specs=tokens, check_vma=check_vma,
    )  # fmt: skip

    where = jax.shard_map(plan.positions, mesh=plan.ring_axis.mesh, in_specs=(), out_specs=P(("ring", "ulysses")))
    assert where().tolist() == plan.positions().tolist()
    astray = jax.shard_map(plan.shard, mesh=plan.ring_axis.mesh, in_specs=tokens, out_specs=tokens)
    expect(["already: shard before"], lambda: jax.eval_shape(astray, plan.shard(small[0])))
    gather = jax.shard_map(
        plan.unshard, mesh=plan.ring_axis.mesh, in_specs=tokens, out_specs=P("data"), check_vma=False
    )
    assert (gather(plan.shard(small[0])) == small[0]).all()

    def whole(q, k, v, s):
        return plan.unshard(inside(*map(plan.shard, (q, k, v)), s))

    expected = gradients(lambda q, k, v, s: ra.attention(q, k, v, sinks=s))
    close(jax.jit(gradients(whole))(*small, sinks), jax.jit(expected)(*small, sinks))


@pytest.mark.parametrize("attention", [ra.attention, ra.linear_attention])
def test_inside_a_shard_map_over_other_axes_arrays_are_whole_along_the_plans(small, plan, attention):
    """The batch is cut by hand, and the sequence by the plan."""
    q, mesh = small[0], plan.ring_axis.mesh
    k = q[..., ::-1]

    def whole(q, k):
        assert plan.positions().shape == (32,)
        mine = {"plan": plan.replace(heads=None), "k": plan.shard(k), "v": plan.shard(q)}
        return plan.unshard(attention(plan.shard(q), **mine))

    by_hand = jax.shard_map(whole, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    close(jax.jit(by_hand)(q, k), attention(q, k, q))
    other = jax.make_mesh((2, 4), ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    astray = jax.shard_map(whole, mesh=other, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    expect(["'x': 4", "'ring'", "plan.ring_axis.mesh"], lambda: jax.jit(astray)(q, k))


@pytest.mark.parametrize("attention", [ra.attention, ra.linear_attention])
def test_a_shard_map_over_another_mesh_or_some_axes_of_the_sequence_is_refused(plan, attention):
    x, free = jax.ShapeDtypeStruct((2, 32, 4, 8), jnp.float32), plan.replace(heads=None)
    other, tokens = rj.init_mesh(ring=4, ulysses=2), P(None, ("ring", "ulysses"))
    for mesh, spec, names, words in (
        (other, tokens, {"data", "ring", "ulysses"}, ["'ring': 4", "'ring': 2", "plan.ring_axis.mesh"]),
        (other, P("data"), {"data"}, ["'ring': 4", "'ring': 2", "plan.ring_axis.mesh"]),
        (plan.ring_axis.mesh, P(None, "ring"), {"ring"}, ["['ulysses']", "('ring', 'ulysses')", "axis_names"]),
    ):
        inside = jax.shard_map(
            lambda x: attention(x, x, x, plan=free), mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names
        )
        expect(words, lambda inside=inside: jax.eval_shape(jax.jit(inside), x))


def test_an_explicit_mesh_says_what_cuts_batch_and_heads(small):
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    plan = ra.plan(mesh, seq_len=30, heads=(4, 2), head_dim=8)
    with jax.set_mesh(mesh):

        def whole(*x):
            q, k, v = (jax.reshard(plan.shard(y), P("data", "ring", "tensor")) for y in x)
            out = ra.attention(q, k, v, plan)
            assert jax.typeof(out).sharding.spec == P("data", "ring", "tensor", None)
            return plan.unshard(out)

        close(jax.jit(whole)(*small), ra.attention(*small))


def spread(mesh, small, *spec):
    there = jax.sharding.NamedSharding(mesh, P(*spec))
    return [jax.device_put(x[:, :28], there) for x in small]


@pytest.mark.slow
def test_without_a_plan_explicit_sharding_says_where_everything_lies(small):
    """Two axes cut the tokens, one the heads; under jit and its transformations, with sinks and documents."""
    mesh = jax.make_mesh((2, 2, 2), ("outer", "inner", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    placed, plain = spread(mesh, small, None, ("outer", "inner"), "tensor"), [x[:, :28] for x in small]
    docs, sinks = ra.Docs.from_lengths([10, 18]), jnp.arange(4.0)

    def grads(q, k, v, sinks):
        def loss(*x):
            out, lse = ra.attention(*x[:3], docs=docs, sinks=x[3], return_lse=True)
            return (out**2).sum() + lse.sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks)

    with jax.set_mesh(mesh):
        out = jax.eval_shape(ra.attention, *placed)
        assert out.sharding.spec == P(None, ("outer", "inner"), "tensor", None)
        lowered = jax.jit(grads).lower(*placed, jax.device_put(sinks, P("tensor")))
        found = jax.device_get(lowered.compile()(*placed, jax.device_put(sinks, P("tensor"))))
        assert "collective_permute" in lowered.as_text() and "all_gather" not in lowered.as_text()
        stacked = [jnp.stack([x, 2 * x]) for x in placed]
        several = jax.device_get(jax.jit(jax.vmap(ra.attention))(*stacked))
    close(found, grads(*plain, sinks))
    close(several, jnp.stack([ra.attention(*plain), ra.attention(*(2 * x for x in plain))]))


FOUR = jax.devices()[:4]


@pytest.fixture(scope="module")
def square():
    """A plan on two explicit axes, one of which cuts the batch; q, k and v on them."""
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2, devices=FOUR)
    arrays = [jax.random.normal(jax.random.key(i), (2, 28, 4, 8)) for i in range(3)]
    return ra.plan(mesh, seq_len=28, layout="contiguous"), arrays, spread(mesh, arrays, "data", "ring")


@pytest.mark.slow
def test_on_explicit_axes_what_is_beside_q_may_lie_anywhere(square):
    """Documents a row, gates, a state, sinks; and under a plan k and v, whose heads nothing cuts yet."""
    plan, (q, k, v), placed = square
    docs, sinks = ra.Docs.from_lengths([[4, 24], [9, 19]]), jnp.arange(4.0)
    linear = {"log_decay": -(q[..., 0] ** 2), "initial_state": jnp.ones((2, 4, 8, 8)), "docs": docs}
    close(ra.attention(*placed, plan, docs=docs, sinks=sinks), ra.attention(q, k, v, docs=docs, sinks=sinks))
    close(ra.linear_attention(*placed, plan=plan, **linear), ra.linear_attention(q, k, v, **linear))

    mesh = jax.make_mesh((2, 2), ("ring", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=FOUR)
    plan = ra.plan(mesh, seq_len=28, strategy="ring", layout="contiguous")
    grouped = [*spread(mesh, [q], None, None, "tensor"), *spread(mesh, [x[:, :, :2] for x in (k, v)])]
    out = ra.attention(*grouped, plan, sinks=sinks)
    assert out.sharding.spec == P(None, "ring", "tensor", None)
    close(out, ra.attention(q, k[:, :, :2], v[:, :, :2], sinks=sinks))
    one = [x[:, :, :1] for x in grouped[1:]]
    expect(["tensor=2", "1 key heads", "repeat k and v"], lambda: ra.attention(grouped[0], *one, plan))
    expect(["['ring']", "batch", "reshard"], lambda: ra.attention(*spread(mesh, (q, k, v), "ring"), plan))


@pytest.mark.parametrize("kinds", ["AX", "XA"])
def test_axes_of_both_kinds_may_be_mixed(square, kinds):
    _, (q, k, v), _ = square
    kind = {"A": AxisType.Auto, "X": AxisType.Explicit}
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=tuple(kind[x] for x in kinds), devices=FOUR)
    plan = ra.plan(mesh, seq_len=28, strategy="ring", layout="zigzag")
    with jax.set_mesh(mesh):
        found = jax.jit(through(plan))(q, k, v)
        out = jax.jit(lambda q: ra.attention(q, q, q, plan))(plan.shard(q))
        assert out.sharding.is_equivalent_to(plan.shard(q).sharding, 4)
    close(found, ra.attention(q, k, v))


@pytest.mark.parametrize("attention", [ra.attention, ra.linear_attention])
@pytest.mark.slow
def test_vmap_over_what_an_explicit_axis_cuts(square, attention):
    plan, (q, k, v), placed = square
    with jax.set_mesh(plan.ring_axis.mesh):
        over_rows = jax.vmap(partial(attention, plan=plan), spmd_axis_name="data")
        found = jax.device_get(jax.jit(gradients(over_rows))(*(x[:, None] for x in placed)))
    close([x[:, 0] for x in found], jax.jit(gradients(attention))(q, k, v))


AUTOMATIC = [  # what is computed, by which strategy, beside which other axis that cuts heads
    (lambda *x, **given: gradients(partial(ra.attention, **given))(*x), "ring", "tensor"),
    (ra.attention, "gather", "ulysses"),
    (ra.linear_attention, "ring", "tensor"),
]


@pytest.mark.parametrize(("function", "strategy", "other"), AUTOMATIC, ids=["gradients", "gather", "linear"])
def test_what_automatic_axes_cut_is_not_gathered(function, strategy, other):
    """One cuts the batch, and another the heads: each of eight devices does an eighth of the work."""
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "ring", other), axis_types=(AxisType.Auto,) * 3)
    plan = ra.plan(mesh, seq_len=128, strategy=strategy, layout="contiguous")
    there = P("fsdp", "ring", "tensor") if other == "tensor" else P("fsdp", ("ring", "ulysses"))
    x = [np.random.default_rng(i).normal(size=(4, 128, 4, 8)).astype(np.float32) for i in range(3)]
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, there))

    def compiled(arrays, **given):
        quick = {"xla_backend_optimization_level": 0}
        return jax.jit(lambda *x: function(*x, **given), compiler_options=quick).lower(*arrays).compile()

    found, alone = compiled(placed, plan=plan), compiled(x)
    kinds = set(re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", found.as_text()))
    assert kinds == {"collective-permute"}
    assert 8 * found.cost_analysis()["flops"] < 1.2 * alone.cost_analysis()["flops"]
    results = jax.tree.leaves(found(*placed))
    assert all(y.sharding.is_equivalent_to(placed[0].sharding, 4) for y in results)
    close(jax.device_get(results), alone(*x))


def test_sharding_keeps_what_other_axes_cut(small):
    """Data at hand on automatic axes, and what an explicit axis cuts, whatever is known while it is traced."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "ring"), axis_types=(kind,) * 3)
        plan = ra.plan(mesh, seq_len=30, strategy="ring", layout="zigzag")
        q = jnp.concatenate([small[0]] * 2)
        for spec in (P(("data", "fsdp")), P(None, None, "fsdp"), P("fsdp", None, "data")):
            there = jax.sharding.NamedSharding(mesh, spec)
            lies, batch = jax.device_put(q, there), spec[0] or "data"
            expected = jax.sharding.NamedSharding(mesh, P(batch, "ring", *spec[2:]))
            found = plan.shard(lies)
            assert found.sharding.is_equivalent_to(expected, 4), (kind, spec, found.sharding)
            assert (jax.device_get(plan.unshard(found)) == q).all()
            lowered = jax.jit(plan.shard).lower(lies).compile()
            known = kind == AxisType.Explicit or spec[0] is not None
            assert not known or lowered.output_shardings.is_equivalent_to(expected, 4), (kind, spec)


def test_a_kernel_that_the_compiler_cannot_cut_is_refused_beside_automatic_axes():
    mesh = jax.make_mesh((2, 2), ("ring", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=FOUR)
    x = jax.ShapeDtypeStruct((2, 32, 2, 8), jnp.float32)
    plan = ra.plan(mesh, seq_len=32, kernel="splash")
    why = ["kernel='splash'", "fsdp=2", "Explicit", "'data'", "kernel='reference'"]
    expect(why, partial(jax.eval_shape, lambda x: ra.attention(x, x, x, plan), x), NotImplementedError)


@pytest.mark.parametrize("attention", [ra.attention, ra.linear_attention])
def test_without_a_plan_within_a_shard_map_over_other_axes(square, attention):
    """Explicit axes that it leaves free are read, automatic ones are the compiler's."""
    plan, (q, k, v), placed = square
    cut = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
    found = jax.jit(jax.shard_map(attention, mesh=plan.ring_axis.mesh, **cut))(*placed)
    assert found.sharding.spec[1] == "ring"
    close(found, attention(q, k, v))
    auto = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(AxisType.Auto,) * 2, devices=FOUR)
    close(jax.jit(jax.shard_map(attention, mesh=auto, **cut))(q, k, v), attention(q, k, v))


def test_without_a_plan_data_beside_what_is_traced_lies_alike(small):
    """A function's arrays may be arguments, or closed over."""
    meshes = [
        jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[i : i + 2]) for i in (0, 2)
    ]
    q, k, v = spread(meshes[0], small, None, "x")
    found = jax.jit(lambda q: ra.attention(q, k, v))(q)
    assert found.sharding.spec[1] == "x"
    close(found, ra.attention(*(x[:, :28] for x in small)))
    expect(["2 devices from cpu:0 on", "cpu:2"], lambda: ra.attention(q, k, *spread(meshes[1], small, None, "x")[2:]))


@pytest.mark.slow
def test_without_a_plan_concrete_arrays_are_computed_where_they_are_sharded(small):
    """On a mesh of automatic axes too; two axes of one size are not mistaken for each other."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    expected = ra.attention(*(x[:, :28] for x in small))
    for spec in (("a", "b"), ("b", "a"), (None, ("b", "a")), ()):
        out = ra.attention(*spread(mesh, small, *spec))
        assert out.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P(*spec)), 4)
        close(out, expected)


def test_without_a_plan_an_unknown_sharding_is_refused(small):
    auto, explicit = (
        jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    placed = spread(auto, small, None, "a")
    expect(["('a', 'b')", "automatic", "plan", "Explicit"], lambda: jax.jit(ra.attention)(*placed))
    expect(["equal shardings", "q: batch ()", "one device", "reshard"], lambda: ra.attention(placed[0], *small[1:]))
    expect(["head dim of q", "('b',)"], lambda: ra.attention(*spread(explicit, small, None, "a", None, "b")))


def test_a_mesh_with_one_sequence_axis_is_factored_by_the_plan_whose_mesh_jax_must_hold(small):
    mesh = rj.init_mesh(data=2, sequence=4)
    plan = ra.plan(mesh, seq_len=30, heads=(4, 2), head_dim=8)
    assert plan.ring * plan.ulysses == 4
    close(through(plan)(*small), ra.attention(*small))
    cache = ra.KVCache.allocate(plan, batch=2, max_len=30, kv_heads=2, head_dim=8, dtype=jnp.float32)
    remedy = "with jax.set_mesh(plan.ring_axis.mesh)"
    with jax.set_mesh(mesh):
        expect(["'sequence': 4", "'ring'", remedy], lambda: jax.eval_shape(through(plan), *small))
        expect(["'sequence': 4", "'ring'", remedy], lambda: cache.append(*small[1:]))
    with jax.set_mesh(plan.ring_axis.mesh):
        assert jax.eval_shape(through(plan), *small).shape == small[0].shape
        assert cache.append(*small[1:]).lengths.tolist() == [30, 30]


def test_plans_over_other_devices_are_not_equal(small):
    """Nor do they share a program that has its plan as a static argument."""
    first, same, other = (
        ra.plan(rj.init_mesh(ring=2, devices=jax.devices()[i : i + 2]), seq_len=30, layout="zigzag") for i in (0, 0, 2)
    )
    assert first == same and hash(first) == hash(same) and first != other
    attend = jax.jit(lambda plan, *x: ra.attention(*map(plan.shard, x), plan), static_argnums=0)
    assert [attend(plan, *small).devices() for plan in (first, other)] == [
        set(jax.devices()[i : i + 2]) for i in (0, 2)
    ]


# Processes.

WORKER = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jax.numpy as jnp, numpy as np
import ringattn as ra, ringattn.jax as rj

how = {"strategy": "ring", "layout": "zigzag"}
plan = ra.plan(rj.init_mesh(ring=2, ulysses=2), seq_len=30, heads=(4, 2), head_dim=8, **how)
rng = np.random.default_rng(0)
x = [rng.normal(size=(2, 30, h, 8)).astype(np.float32) for h in (4, 2, 2)]

def whole(q, k, v):
    return plan.unshard(ra.attention(*map(plan.shard, (q, k, v)), plan))

def grads(f):
    return jax.jit(jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(*x)

def error(a, b):
    a, b = (np.asarray(y.addressable_data(0)) for y in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))

print(json.dumps(jax.tree.leaves(jax.tree.map(error, grads(whole), grads(ra.attention)))))
"""


@pytest.mark.slow
def test_two_processes_of_two_devices_each():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, address, str(i)], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [w.communicate(timeout=600) for w in workers]
    finally:
        for w in workers:
            w.kill()
    for worker, (out, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, err[-2000:]
        assert max(json.loads(out.splitlines()[-1])) <= LIMIT


def test_an_uneven_length_is_not_gathered_by_the_compiler(capfd):
    """In a jitted program XLA sharded the heads of the padded q first, and had to replicate it (it logs a warning)."""
    mesh = rj.init_mesh(ring=2, ulysses=2, devices=jax.devices()[:4])
    plan = ra.plan(mesh, seq_len=61, layout="contiguous", strategy="ring")
    q, k, v = (jnp.full((1, 61, 6, 8), i) for i in (0.1, 0.2, 0.3))
    assert all(jnp.isfinite(x).all() for x in jax.jit(gradients(through(plan)))(q, k, v))
    assert "rematerialization" not in capfd.readouterr().err
