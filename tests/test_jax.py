"""The JAX backend equals dense float64 attention on eight CPU devices, and works under JAX's transformations."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from ringattn.jax.steps import Mask, Sight, global_bounds, route_of, score_of, table_of  # noqa: E402
from ringattn.kernels.partial import empty  # noqa: E402
from ringattn.launch import oracle  # noqa: E402
from ringattn.launch.cases import CASES, FEATURES, Case  # noqa: E402
from ringattn.spec import bounds  # noqa: E402

LIMIT = 5e-6
PLACES = len(CASES) // len(FEATURES)

# Every feature on one place, every place with all features at once.
SOME = [CASES[i * PLACES + (5 * i) % PLACES] for i in range(len(FEATURES))]
SOME += [case for case in CASES if case.name == "all_at_once" and case not in SOME]


def plan_of(case: Case):
    mesh = rj.init_mesh(ring=case.ring, ulysses=case.ulysses, devices=jax.devices()[: case.ranks])
    return ra.plan(
        mesh, seq_len=case.seq_len, key_len=case.key_len, spec=case.spec, strategy=case.strategy, layout=case.layout,
    )  # fmt: skip


def poisoned(x, plan):
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    sharded = plan.shard(x)
    real = plan.positions() < plan.seq_len
    return jnp.where(real.reshape(1, -1, *[1] * (x.ndim - 2)), sharded, jnp.nan)


def results(case: Case, given, kernel: str = "auto", device: str = "cpu", dtype=jnp.float32):
    """out, lse and every gradient of the whole sequence, in one program."""
    plan = dataclasses.replace(plan_of(case), kernel=kernel, device=device)

    def everything(q, k, v, sinks, dout, dlse):
        def loss(q, k, v, sinks):
            out, lse = ra.attention(
                poisoned(q, plan), poisoned(k, plan.keys), poisoned(v, plan.keys), plan, spec=case.spec, docs=case.docs,
                key_docs=case.key_docs, sinks=sinks if case.sinks else None, return_lse=True,
            )  # fmt: skip
            out, lse = plan.unshard(out), plan.unshard(lse)
            finite = jnp.isfinite(lse)
            return (out * dout).sum() + (jnp.where(finite, lse, 0) * dlse).sum(where=finite), (out, lse)

        (_, (out, lse)), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
        return out, lse, *grads

    kinds = (*[dtype] * 3, jnp.float32, dtype, jnp.float32)  # q, k, v, sinks, dout, dlse
    arrays = (jnp.asarray(x.float().numpy(), kind) for x, kind in zip(given.values(), kinds, strict=True))
    found = jax.jit(everything)(*arrays)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {n: torch.from_numpy(np.array(x, np.float32)) for n, x in zip(names, found, strict=True)}


def check(case: Case, found, truth, limit: float = LIMIT) -> None:
    for name, expected in truth.items():
        scale = float(torch.nan_to_num(expected, neginf=0).norm())
        value = oracle.error(found[name], expected, scale)
        assert value <= limit, f"{case}: {name} is off by {value:.2e} (limit {limit:.0e})"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_equals_dense_float64(case):
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given), oracle.dense(case, given))


def test_agrees_with_torch_on_the_same_inputs():
    case = next(c for c in CASES if str(c) == "causal-ring4x1-zigzag")
    given = oracle.inputs(case, torch.float32)
    leaves = [given[n].clone().requires_grad_() for n in ("q", "k", "v")]
    out, lse = ra.attention(*leaves, spec=case.spec, return_lse=True)
    oracle.loss(out, lse, given["dout"], given["dlse"]).backward()
    expected = {
        "out": out.detach(),
        "lse": lse.detach(),
        **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True)),
    }
    check(case, results(case, given), expected)


@pytest.mark.parametrize("name", ["all_at_once-ring4x1-zigzag", "docs_rows-gather2x2-zigzag"])
def test_the_tpu_kernel_interpreted_equals_dense_float64(name):
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, kernel="splash"), oracle.dense(case, given))


@pytest.mark.parametrize(
    "name", ["docs_rows-gather2x2-zigzag", "window-ring4x1-contiguous", "softcap-gather2x2-zigzag"]
)
def test_the_stock_kernel_is_a_second_opinion_on_any_fixed_mask(name):
    """Interpreted, with the lse over all keys: the whole ring, and every gradient."""
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, kernel="stock_splash"), oracle.dense(case, given))


@pytest.fixture
def tile_by_tile(monkeypatch):
    """cuDNN's place taken by a dense call a tile, which knows full and causal rectangles and nothing else."""
    from ringattn.kernels import reference, select
    from ringattn.kernels.intervals import Intervals
    from ringattn.kernels.vendor import jax_cudnn
    from ringattn.kernels.vendor.jax_tiles import over_tiles

    def where(T, S, causal):
        assert not causal or T == S
        return Intervals(jnp.zeros((1, T), int), (jnp.arange(1, T + 1) if causal else jnp.full(T, S))[None])

    def forward(q, k, v, causal, scale, softcap):
        return reference.attend(q, k, v, where(q.shape[1], k.shape[1], causal), scale=scale)

    def backward(q, k, v, rows, causal, scale, softcap):
        (dout, lse, (out,)), seen = rows, where(q.shape[1], k.shape[1], causal)
        return reference.attend_backward(q, k, v, seen, dout, lse, (dout * out).sum(-1), scale=scale)

    monkeypatch.setattr(jax_cudnn, "refuses", lambda problem: None if problem.tiles else "no tiles")
    attend, attend_backward = over_tiles("a stand-in", forward, backward, jax_cudnn.prepare)
    monkeypatch.setattr(jax_cudnn, "attend", attend)
    monkeypatch.setattr(jax_cudnn, "attend_backward", attend_backward)
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.mark.parametrize(
    "name",
    ["causal-ring4x1-zigzag", "causal-ring4x1-striped", "docs-ring2x2-striped", "docs-gather4x1-zigzag"],
)
def test_steps_cut_into_tiles_equal_dense_float64(name, tile_by_tile):
    case = next(c for c in CASES if str(c) == name)
    given = oracle.inputs(case, torch.float32)
    check(case, results(case, given, kernel="cudnn", device="cuda"), oracle.dense(case, given))


@pytest.mark.parametrize("lse_too", [False, True])
def test_programs_for_gpus_call_cudnn(monkeypatch, lse_too):
    """Lowered for GPUs without one: a call a tile in each branch, and the work at home is not done twice.

    A stand-in for `out` is made once for all steps, and only where somebody gets the lse.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    mesh = rj.init_mesh(ring=4, devices=jax.devices()[:4])
    plan = ra.plan(mesh, seq_len=1024, heads=(4, 2), head_dim=64, layout="zigzag", strategy="ring")
    plan = dataclasses.replace(plan, device="cuda")

    def loss(q, k, v):
        found = ra.attention(q, k, v, plan, return_lse=lse_too)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    given = [jax.ShapeDtypeStruct((1, 1024, h, 64), jnp.bfloat16) for h in (4, 2, 2)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    found = Counter(re.findall(r"@__cudnn\$fmha(\w+)\(.*?mask_type\\22: \\22(\w+)", lowered))
    # forward: a loop that begins at home, then the last step's two kinds; backward: three steps away, then home
    assert found == {
        ("Softmax", "CAUSAL"): 1, ("Softmax", "NO_MASK"): 2 + 2,
        ("SoftmaxBackward", "NO_MASK"): 3 * 2, ("SoftmaxBackward", "CAUSAL"): 1,
    }  # fmt: skip
    assert lowered.count("stablehlo.sqrt") == lse_too  # of a row's norm, in stand_in


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_cudnn_computes_every_step_of_a_ring(layout):
    """Four ranks' steps on one GPU, one after the other: bfloat16 costs no more than twice what it costs densely."""
    case = Case("gpu", layout=layout, seq_len=1000, head_dim=128, value_dim=128, batch=1, lengths=[700, 300])
    given = oracle.inputs(case, torch.bfloat16)
    truth, dense = oracle.dense(case, given), oracle.dense(case, given, torch.bfloat16)
    plan = ra.Plan(1000, 4, layout=layout, framework="jax", device="cuda", kernel="cudnn")
    mask, tokens = Mask(plan, case.spec, case.docs), plan.tokens
    shards = [np.concatenate(tokens.shard(rank)) for rank in range(4)]
    sights = [
        Sight(*(jnp.asarray(x, jnp.int32) for x in bounds(case.spec, at, 1000, 1000, case.docs)), tokens, rank,
              table_of(mask))
        for rank, at in enumerate(shards)
    ]  # fmt: skip
    whole = {n: jnp.asarray(x.float().numpy()) for n, x in given.items()}
    q, k, v, dout = ([whole[n][:, at].astype(jnp.bfloat16) for at in shards] for n in ("q", "k", "v", "dout"))
    score = score_of(q[0], k[0], v[0], case.spec, plan, tiles=True)
    dk, dv = ([jnp.zeros(x.shape, jnp.float32) for x in k] for _ in range(2))
    found = {n: np.zeros(x.shape, np.float32) for n, x in truth.items()}
    for rank, at in enumerate(shards):
        part = empty(q[rank], 128)
        for distance in range(4):
            source = (rank - distance) % 4
            part = score.attend(q[rank], k[source], v[source], sights[rank].at(distance), carry=part)
        delta = (dout[rank].astype(jnp.float32) * part.out).sum(-1) - whole["dlse"][:, at]
        dq = jnp.zeros(q[rank].shape, jnp.float32)
        for distance in range(4):
            source = (rank - distance) % 4
            dq, dk[source], dv[source] = score.attend_backward(
                q[rank], k[source], v[source], sights[rank].at(distance), dout[rank], part.lse, delta,
                dq=dq, dk=dk[source], dv=dv[source],
            )  # fmt: skip
        for name, x in (("out", part.out), ("lse", part.lse), ("dq", dq)):
            found[name][:, at] = x
    for name, parts in (("dk", dk), ("dv", dv)):
        for at, x in zip(shards, parts, strict=True):
            found[name][:, at] = x
    for name, expected in truth.items():
        scale = float(expected.norm())
        off, allowed = (oracle.error(x, expected, scale) for x in (torch.from_numpy(found[name]), dense[name]))
        assert off <= 2 * allowed + 1e-5, f"{name} is off by {off:.1e}, bfloat16 densely by {allowed:.1e}"


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("name", ["causal", "docs", "window", "softcap"])
def test_over_gpus_equals_dense_float64(name, strategy):
    """bfloat16: by cuDNN where the mask is rectangles, by the reference where it is not."""
    feature = next(c for c in FEATURES if c.name == name)
    devices = jax.devices("gpu")
    case = dataclasses.replace(feature, ring=len(devices), strategy=strategy, seq_len=61 * 8, head_dim=64, value_dim=64,
                               lengths=[400, 88] if feature.lengths else None)  # fmt: skip
    given = oracle.inputs(case, torch.bfloat16)
    truth, dense = oracle.dense(case, given), oracle.dense(case, given, torch.bfloat16)
    found = results(case, given, device="cuda", dtype=jnp.bfloat16)
    for n, expected in truth.items():
        scale = float(torch.nan_to_num(expected, neginf=0).norm())
        off, allowed = (oracle.error(x, expected, scale) for x in (found[n], dense[n]))
        assert off <= 2 * allowed + 1e-5, f"{case}: {n} is off by {off:.1e}, bfloat16 densely by {allowed:.1e}"


# Transformations: one small problem, and the same function with and without a plan.


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 30, h, 8)), jnp.float32) for h in (4, 2, 2)]


@pytest.fixture(scope="module")
def plan():
    return ra.plan(rj.init_mesh(data=2, ring=2, ulysses=2), seq_len=30, heads=(4, 2), head_dim=8, strategy="ring")


def through(plan, **given):
    return lambda q, k, v: plan.unshard(ra.attention(*map(plan.shard, (q, k, v)), plan, **given))


def close(found, expected, limit=LIMIT):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.linalg.norm(a - b)) <= limit * float(jnp.linalg.norm(b))


def test_runs_without_jit_and_over_a_data_axis(small, plan):
    close(through(plan)(*small), ra.attention(*small))
    assert plan.positions().sharding.spec == P(("ring", "ulysses"))


def test_documents_may_be_traced(small, plan):
    docs = ra.Docs.from_lengths([[10, 5, 15], [3, 20, 7]])
    found = jax.jit(lambda docs, *x: through(plan, docs=docs)(*x))(docs, *small)
    close(found, ra.attention(*small, docs=docs))


def test_vmap_over_a_batch_of_batches_with_gradients(small, plan):
    more = [jnp.stack([x, 2 * x, x + 1]) for x in small]

    def grads(f):
        return jax.jit(jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2))))(*more)

    close(grads(through(plan)), grads(ra.attention))


def test_checkpointed_layers_in_a_scan(small, plan):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)) * 0.3, jnp.float32)

    def train(f):
        @jax.checkpoint
        def layer(x, w):
            return x + f(x @ w, x[:, :, :2], x[:, :, 2:]), None

        return jax.jit(jax.grad(lambda ws: (jax.lax.scan(layer, small[0], ws)[0] ** 2).sum()))(weights)

    close(train(through(plan)), train(ra.attention))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_it_takes_local_arrays(small, plan, check_vma):
    tokens, sinks = P("data", ("ring", "ulysses")), jnp.arange(4.0)
    inside = jax.shard_map(
        lambda q, k, v, s: rj.local_attention(q, k, v, plan, sinks=s),
        mesh=plan.ring_axis.mesh, in_specs=(tokens, tokens, tokens, P()), out_specs=tokens, check_vma=check_vma,
    )  # fmt: skip

    def grads(f):
        return jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(*small, sinks)

    def whole(q, k, v, s):
        return plan.unshard(inside(*map(plan.shard, (q, k, v)), s))

    close(grads(whole), grads(lambda q, k, v, s: ra.attention(q, k, v, sinks=s)))


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


def test_without_a_plan_data_at_hand_says_where_it_lies(small):
    """On a mesh of automatic axes too; two axes of one size are not mistaken for each other."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    expected = ra.attention(*(x[:, :28] for x in small))
    for spec in (("a", "b"), ("b", "a"), (None, ("b", "a")), ()):
        out = ra.attention(*spread(mesh, small, *spec))
        assert out.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P(*spec)), 4)
        close(out, expected)


def test_without_a_plan_what_cannot_be_known_is_refused(small):
    auto, explicit = (
        jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    placed = spread(auto, small, None, "a")
    expect(["('a', 'b')", "automatic", "plan", "Explicit"], lambda: jax.jit(ra.attention)(*placed))
    expect(["lie alike", "q: batch ()", "one device", "reshard"], lambda: ra.attention(placed[0], *small[1:]))
    expect(["head dim of q", "('b',)"], lambda: ra.attention(*spread(explicit, small, None, "a", None, "b")))


def test_a_mesh_with_one_sequence_axis_is_factored_by_the_plan(small):
    plan = ra.plan(rj.init_mesh(data=2, sequence=4), seq_len=30, heads=(4, 2), head_dim=8)
    assert plan.ring * plan.ulysses == 4
    close(through(plan)(*small), ra.attention(*small))


def test_shard_and_unshard_are_inverse_in_every_layout():
    x = jnp.arange(2 * 30).reshape(2, 30)
    for layout in ("contiguous", "striped", "zigzag"):
        plan = ra.plan(rj.init_mesh(ring=4, ulysses=2), seq_len=30, layout=layout)
        whole = plan.shard(x)
        order = plan.tokens.order()
        assert (np.asarray(plan.positions()) == order).all()
        assert (np.asarray(whole)[:, order < 30] == np.asarray(x)[:, order[order < 30]]).all()
        assert (plan.unshard(whole) == x).all()


# Decisions: made in Python, before anything runs.


def test_traced_bounds_equal_the_specs_own():
    for case in FEATURES:
        plan = ra.Plan(case.seq_len, key_len=case.key_len)
        at = np.arange(case.seq_len + 3)
        docs, key_docs = case.docs, case.key_docs
        expected = bounds(case.spec, at, case.seq_len, case.key_len, docs, key_docs)
        starts = [None if d is None else d.starts for d in (docs, key_docs)]
        found = global_bounds(Mask(plan, case.spec), jnp.asarray(at, jnp.int32), *starts)
        for a, b in zip(found, expected, strict=True):
            assert (np.broadcast_to(a, b.shape) == b).all(), case.name


def test_a_window_stops_the_ring_early():
    window, causal = ra.AttentionSpec(window=4), ra.AttentionSpec()
    place = ra.Plan(64, ring=8, layout="contiguous", framework="jax")
    assert route_of(Mask(place, window)).distances == (0, 1)
    assert route_of(Mask(dataclasses.replace(place, layout="zigzag"), window)).distances == (0, 1, 7)
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
    eight = rj.init_mesh(ulysses=8)
    expect(["ulysses=8", "12 query heads", "ulysses=4, ring=2"], lambda: ra.plan(eight, seq_len=32, heads=(12, 4)))
    expect(["needs 3 devices", "8"], lambda: rj.init_mesh(ring=3))
    expect(["data=2", "batch of 1"], lambda: ra.attention(*(x[:1] for x in sharded), plan))
    expect(["same dtype"], lambda: ra.attention(sharded[0].astype(jnp.bfloat16), *sharded[1:], plan))
    expect(["torch mesh"], lambda: ra.attention(q, k, v, ra.plan(seq_len=30)))
    expect(["kernel='triton'", "splash"], lambda: ra.plan(eight, seq_len=32, heads=8, head_dim=8, kernel="triton"))
    expect(["alibi", "rotary"], lambda: ra.attention(q, k, v, alibi=1))
    uneven = [jnp.ones((2, 32, h, 8)) for h in (4, 3, 3)]
    expect(["3 key heads do not divide 4 query heads"], lambda: ra.attention(*uneven))
    odd = [jnp.ones((2, 32, h, 8)) for h in (3, 1, 1)]
    free = dataclasses.replace(plan, heads=None)
    expect(["ulysses=2", "3 query heads", "ulysses=1, ring=4"], lambda: ra.attention(*odd, free))
    expect(
        ["float64", "reference"],
        lambda: ra.plan(eight, seq_len=32, heads=8, head_dim=8, kernel="splash", dtype="float64"),
        NotImplementedError,
    )


def test_a_kernel_that_the_platform_lacks_or_that_cannot_do_it_says_why(small, plan):
    for kernel, why in (("cudnn", "CUDA devices, not on cpu"), ("triton", "choose one of auto, splash")):
        kind = NotImplementedError if kernel == "cudnn" else ValueError
        expect([why], lambda kernel=kernel: through(dataclasses.replace(plan, kernel=kernel))(*small), kind)
    stock = dataclasses.replace(plan, kernel="stock_splash")
    docs = ra.Docs.from_lengths([10, 20])
    traced = jax.jit(lambda docs, *x: through(stock, docs=docs)(*x))
    expect(["these documents are not", "'splash' would serve"], lambda: traced(docs, *small), NotImplementedError)
    whole, tokens = [stock.shard(x) for x in small], P("data", ("ring", "ulysses"))
    inside = jax.shard_map(
        lambda *x: rj.local_attention(*x, stock), mesh=stock.ring_axis.mesh, in_specs=tokens, out_specs=tokens
    )
    expect(["check_vma=False", "kernel='splash'"], lambda: inside(*whole), NotImplementedError)


# Processes.

WORKER = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jax.numpy as jnp, numpy as np
import ringattn as ra, ringattn.jax as rj

plan = ra.plan(rj.init_mesh(ring=2, ulysses=2), seq_len=30, heads=(4, 2), head_dim=8, strategy="ring")
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
        said = [w.communicate(timeout=600) for w in workers]
    finally:
        for w in workers:
            w.kill()
    for worker, (out, err) in zip(workers, said, strict=True):
        assert worker.returncode == 0, err[-2000:]
        assert max(json.loads(out.splitlines()[-1])) <= LIMIT
