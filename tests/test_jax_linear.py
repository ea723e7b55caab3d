"""Linear attention on JAX arrays equals the recurrence run token by token, over devices, with all gradients."""

import re
from functools import partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from ringattn.kernels.linear import jax_chunkwise  # noqa: E402
from ringattn.launch.verify.oracle import error  # noqa: E402
from ringattn.layouts.layout import MAKERS, Maker, block  # noqa: E402
from tests.cases import LEAVES, docs_of, inputs, truth  # noqa: E402

T = 61  # a prime: no number of devices divides it
LONG = 4 * 2 * 70 - 3  # segments of more than one chunk
PACKED = ((20, 0, 11, 30), (1, 2, 50))
FIRST_EMPTY = ((0, 33, 20), (0, 61))
CASES = [  # where, what gates, which documents, how many tokens
    ((1, 1, "contiguous"), "channel", FIRST_EMPTY, T),
    ((3, 1, "contiguous"), "head", None, T),
    ((2, 2, "zigzag"), None, PACKED, T),
    ((2, 3, "zigzag"), "channel", PACKED, T),
    ((1, 4, "contiguous"), "channel", ((20, 35),), T),
    ((8, 1, "contiguous"), "channel", ((300, LONG - 300), (64, LONG - 100)), LONG),
    ((4, 2, "zigzag"), "head", ((300, LONG - 300), (64, LONG - 100)), LONG),
]


def plan_of(ring, ulysses, layout, T=T):
    mesh = rj.init_mesh(ring=ring, ulysses=ulysses, devices=jax.devices()[: ring * ulysses])
    return ra.plan(mesh, seq_len=T, layout=layout)


def poisoned(x, plan):
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    real = plan.real_tokens().reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(real, plan.shard(x), jnp.nan)


def results(plan, given, docs, **choices):
    """out, the end state and every gradient, in one program."""

    def loss(leaves):
        tokens = {n: poisoned(leaves[n], plan) for n in LEAVES if n in leaves}
        out, end = ra.linear_attention(
            tokens["q"], tokens["k"], tokens["v"], tokens.get("g"), plan,
            beta=tokens.get("beta"), initial_state=leaves["state"], return_state=True, docs=docs, **choices,
        )  # fmt: skip
        out = plan.unshard(out)
        return (out * given["dout"]).sum() + (end * given["dend"]).sum(), {"out": out, "end": end}

    leaves = {n: given[n] for n in (*LEAVES, "state") if n in given}
    (_, found), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)
    return {**found, **{f"d{n}": x for n, x in grads.items()}}


def check(place, gate, lengths, T=T, dtype=torch.float64, limit=1e-10, rule=None, **choices):
    rule = rule or {}
    with jax.enable_x64(dtype == torch.float64):
        given = {n: jnp.asarray(x.numpy()) for n, x in inputs(T, gate, dtype, **rule).items() if x is not None}
        found = results(plan_of(*place, T), given, docs_of(lengths, T), **choices)
    expected = truth(T, gate, lengths, dtype, **rule)
    for name, x in expected.items():
        value = error(torch.from_numpy(np.array(found[name])).double(), x)
        assert value <= limit, f"{name} is off by {value:.2e} on {place}"


@pytest.mark.parametrize(
    ("place", "gate", "lengths", "tokens"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i not in (0, 1, 3, 4))) for i, case in enumerate(CASES)],
)
def test_equals_the_recurrence(place, gate, lengths, tokens):
    check(place, gate, lengths, tokens)


def test_states_pass_devices_in_any_order(monkeypatch):
    """In a layout that is nowhere named."""
    made = lambda x, n, r: tuple(block(x.pieces[0], 2 * n, i) for i in (r, n + r))  # noqa: E731
    monkeypatch.setitem(MAKERS, "halves", Maker(made, 2))
    check((2, 2, "halves"), "head", PACKED)


@pytest.mark.parametrize(
    ("place", "gate", "lengths", "tokens"), [CASES[2], pytest.param(*CASES[6], marks=pytest.mark.slow)]
)
def test_the_delta_rule_equals_the_recurrence(place, gate, lengths, tokens):
    check(place, gate, lengths, tokens, rule={"beta": True, "key_heads": 1})


KERNEL = [  # one device; what the first pass finds, in documents; a gate a channel, whose chunks have two segments
    ((1, 1, "contiguous"), "head", None, T, {"beta": True, "key_heads": 1}),
    ((2, 2, "zigzag"), None, PACKED, T, {"beta": True, "key_heads": 1}),
    ((1, 4, "contiguous"), "channel", ((20, 35),), T, {}),
    ((2, 1, "zigzag"), "channel", ((300, LONG - 300), (64, LONG - 100)), LONG, {"beta": True, "key_heads": 1}),
]


@pytest.mark.parametrize(
    ("place", "gate", "lengths", "tokens", "rule"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(KERNEL)],
)
def test_the_tpu_kernel_interpreted_equals_the_recurrence(place, gate, lengths, tokens, rule):
    check(place, gate, lengths, tokens, torch.float32, 2e-6, rule, kernel="pallas")


def test_the_tpu_kernel_rounds_bfloat16_no_more_than_its_results_are():
    given = {n: jnp.asarray(x.numpy()) for n, x in inputs(T, "head", torch.float32, beta=True).items()}
    q, k, v = (given[n].astype(jnp.bfloat16) for n in "qkv")
    ours, exact = (
        ra.linear_attention(*x, given["g"], beta=given["beta"], kernel=kernel, return_state=True)
        for x, kernel in (((q, k, v), "pallas"), ([x.astype(jnp.float32) for x in (q, k, v)], "chunkwise"))
    )
    for found, expected, limit in zip(ours, exact, (3e-3, 3e-5), strict=True):  # the state is float32
        assert jnp.linalg.norm(found - expected) <= limit * jnp.linalg.norm(expected)


def test_the_tpu_kernel_refuses_derivatives_of_higher_order():
    q, k, v, g = (jnp.asarray(inputs(32, "head", torch.float32)[n].numpy()) for n in "qkvg")

    def gradient(q):
        return jax.grad(lambda q: ra.linear_attention(q, k, v, g, kernel="pallas").sum())(q).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(gradient)(q)


def trained(ring):
    """The loss and all gradients as a compiled program for `ring` devices, which work on one chunk at a time."""
    tokens = 8 * 64 * 56
    plan = plan_of(ring, 1, "contiguous", tokens)
    there = jax.sharding.NamedSharding(plan.ring_axis.mesh, jax.sharding.PartitionSpec(None, "ring"))
    shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32, sharding=there)] * 4

    def loss(*leaves):
        return ra.linear_attention(*leaves, plan).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_chunkwise, "AT_ONCE", 1)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile()


def test_temporaries_fall_as_devices_are_added_and_states_are_gathered_in_one_transfer_each_way():
    two, eight = map(trained, (2, 8))
    assert len(re.findall(r" all-gather(?:-start)?\(", eight.as_text())) <= 2 * 2  # a factor and a summand
    assert " collective-permute" not in eight.as_text()
    two, eight = (program.memory_analysis().temp_size_in_bytes for program in (two, eight))
    assert eight < two / 4 * 1.5, f"{eight} of {two}"


def test_what_is_kept_for_backward_are_the_inputs_and_one_state_a_chunk():
    plan, T, K = plan_of(4, 1, "zigzag", 4 * 512), 4 * 512, 32
    tokens = [jax.ShapeDtypeStruct((1, T, 2, K), jnp.bfloat16)] * 4
    kept = jax.eval_shape(lambda *x: jax.vjp(lambda *x: ra.linear_attention(*x, plan), *x)[1], *tokens)
    numbers = [x.size for x in jax.tree.leaves(kept) if x.size > 2**15]  # the masks of a chunk are smaller
    assert sorted(numbers) == sorted([T * 2 * K] * 4 + [T // 64 * 2 * K * K])


@pytest.mark.slow
def test_a_few_chunks_at_a_time(monkeypatch):
    monkeypatch.setattr(jax_chunkwise, "AT_ONCE", 2 * 6 * 2 * 2 * 64 * 8)  # two of five
    check((2, 1, "contiguous"), "channel", None, LONG)


@pytest.mark.slow
def test_float32():
    check((8, 1, "zigzag"), "channel", PACKED, dtype=torch.float32, limit=2e-6, rule={"beta": True})


def test_without_a_plan_as_in_torch():
    given = inputs(T, "head", torch.float32, beta=True, key_heads=1)
    given["g"][:, 30] = -torch.inf
    *arrays, beta = (given[n] for n in LEAVES)
    expected = ra.linear_attention(*arrays, beta=beta)
    found = ra.linear_attention(*(jnp.asarray(x.numpy()) for x in arrays), beta=jnp.asarray(beta.numpy()))
    assert error(torch.from_numpy(np.array(found)).double(), expected.double()) <= 2e-6


def test_inside_shard_map():
    given = {n: jnp.asarray(x.numpy()) for n, x in inputs(64, "head", torch.float32).items() if x is not None}
    plan, tokens = plan_of(2, 2, "contiguous", 64), jax.sharding.PartitionSpec(None, ("ring", "ulysses"))
    mesh, arrays = plan.ring_axis.mesh, [given[n] for n in "qkvg"]

    def inner(kernel, *local):
        return ra.linear_attention(*local, plan, kernel=kernel)

    expected = ra.linear_attention(*arrays)
    for vma, kernel in ((True, "auto"), (False, "auto"), (True, "pallas")):
        found = jax.jit(
            jax.shard_map(partial(inner, kernel), mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=vma)
        )(*arrays)
        assert jnp.allclose(found, expected, atol=1e-5)


def test_an_axis_of_size_1_need_not_cut_anything():
    x, plan = jax.ShapeDtypeStruct((2, 64, 2, 8), jnp.float32), plan_of(2, 1, "contiguous", 64)
    tokens = jax.sharding.PartitionSpec(None, "ring")
    inside = jax.shard_map(
        lambda x: ra.linear_attention(x, x, x, plan=plan, return_state=True),
        mesh=plan.ring_axis.mesh, in_specs=tokens, out_specs=(tokens, jax.sharding.PartitionSpec()),
    )  # fmt: skip
    assert [x.shape for x in jax.eval_shape(inside, x)] == [(2, 64, 2, 8), (2, 2, 8, 8)]


def test_wrong_arguments_are_errors_with_a_remedy():
    given = {n: jnp.asarray(x.numpy()) for n, x in inputs(64, "channel", torch.float32).items() if x is not None}
    q, k, v, g = (given[n] for n in "qkvg")
    one, docs = given["state"][:1], ra.Docs.from_lengths([30, 34])
    for says, call in (
        (r"striped.*zigzag", lambda: ra.linear_attention(q, k, v, g, plan_of(2, 1, "striped", 64))),
        ("this plan's order has 62", lambda: ra.linear_attention(q, k, v, g, plan_of(2, 1, "contiguous", 62))),
        ("choose one of auto, gather, ring, pipeline", lambda: ra.linear_attention(q, k, v, g, scan="tree")),
        (r"log_decay\[0, 3, 1, 2\] = 0.5", lambda: ra.linear_attention(q, k, v, g.at[0, 3, 1, 2].set(0.5))),
        ("check=True needs", lambda: jax.jit(lambda g: ra.linear_attention(q, k, v, g, check=True))(g)),
        ("initial_state has shape", lambda: ra.linear_attention(q, k, v, g, initial_state=one)),
        ("one a document: 2 x 2", lambda: ra.linear_attention(q, k, v, g, initial_state=one, docs=docs)),
        ("scan='ring' is for torch", lambda: ra.linear_attention(q, k, v, g, plan_of(2, 1, "zigzag", 64), scan="ring")),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    each = jnp.concatenate([given["state"]] * 2)
    for how in ({"return_state": "documents"}, {"initial_state": each}):
        with pytest.raises(NotImplementedError, match="give each document a row of the batch"):
            ra.linear_attention(q, k, v, g, docs=docs, **how)
