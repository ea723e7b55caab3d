"""Linear attention on JAX arrays equals the recurrence run token by token, over devices, with all gradients."""

import re
from functools import lru_cache, partial

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ringattn as ra  # noqa: E402
import ringattn.jax as rj  # noqa: E402
from ringattn.kernels.linear import jax_chunkwise  # noqa: E402
from ringattn.layouts.layout import MAKERS, Maker, block  # noqa: E402
from tests.cases import LEAVES, docs_of, inputs, relative_error, states_of, truth  # noqa: E402

T = 61  # a prime: no number of devices divides it
LONG = 4 * 2 * 70 - 3  # segments of more than one chunk
PACKED = ((20, 0, 11, 30), (1, 2, 50))
FIRST_EMPTY = ((0, 33, 20), (0, 61))
CASES = [  # where, what gates, which documents, how many tokens, how states travel
    ((1, 1, "contiguous"), "channel", FIRST_EMPTY, T, "auto"),
    ((3, 1, "contiguous"), "head", None, T, "gather"),
    ((2, 2, "zigzag"), None, PACKED, T, "gather"),
    ((2, 3, "zigzag"), "channel", PACKED, T, "gather"),
    ((1, 4, "contiguous"), "channel", ((20, 35),), T, "ring"),
    ((4, 1, "zigzag"), "channel", ((300, LONG - 300), (64, LONG - 100)), LONG, "gather"),
    ((8, 1, "contiguous"), "channel", ((300, LONG - 300), (64, LONG - 100)), LONG, "ring"),
    ((2, 3, "zigzag"), "channel", PACKED, T, "ring"),
    ((4, 2, "zigzag"), "head", ((300, LONG - 300), (64, LONG - 100)), LONG, "pipeline"),
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
        value = relative_error(torch.from_numpy(np.array(found[name])).double(), x)
        assert value <= limit, f"{name} is off by {value:.2e} on {place}"


@pytest.mark.parametrize(
    ("place", "gate", "lengths", "tokens", "scan"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i not in (0, 1, 3, 4))) for i, case in enumerate(CASES)],
)
def test_equals_the_recurrence(place, gate, lengths, tokens, scan):
    check(place, gate, lengths, tokens, scan=scan)


def test_states_are_gathered_where_they_pass_devices_in_another_order(monkeypatch):
    """In a layout that is nowhere named."""
    made = lambda x, n, r: tuple(block(x.pieces[0], 2 * n, i) for i in (r, n + r))  # noqa: E731
    monkeypatch.setitem(MAKERS, "halves", Maker(made, 2))
    check((2, 2, "halves"), "head", PACKED)
    with pytest.raises(ValueError):
        check((4, 1, "halves"), "head", PACKED, scan="ring")


def test_the_delta_rule_equals_the_recurrence():
    """From a state a row; from one a document, and by a pipeline, below."""
    place, gate, lengths, tokens, scan = CASES[2]
    check(place, gate, lengths, tokens, scan=scan, rule={"beta": True, "key_heads": 1})


KERNEL = [  # one device; what the first pass finds, in documents; a gate a channel, whose chunks have two segments
    ((1, 1, "contiguous"), "head", None, T, "auto", {"beta": True, "key_heads": 1}),
    ((2, 2, "zigzag"), None, PACKED, T, "gather", {"beta": True, "key_heads": 1}),
    ((1, 4, "contiguous"), "channel", ((20, 35),), T, "ring", {}),
    ((2, 1, "zigzag"), "channel", ((300, LONG - 300), (64, LONG - 100)), LONG, "ring", {"beta": True, "key_heads": 1}),
]


@pytest.mark.parametrize(
    ("place", "gate", "lengths", "tokens", "scan", "rule"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(KERNEL)],
)
def test_the_tpu_kernel_interpreted_equals_the_recurrence(place, gate, lengths, tokens, scan, rule):
    check(place, gate, lengths, tokens, torch.float32, 2e-6, rule, scan=scan, kernel="pallas")


def test_the_tpu_kernel_rounds_bfloat16_no_more_than_its_results_are():
    given = {n: jnp.asarray(x.numpy()) for n, x in inputs(T, "head", torch.float32, beta=True).items()}
    q, k, v = (given[n].astype(jnp.bfloat16) for n in "qkv")
    ours, exact = (
        ra.linear_attention(*x, given["g"], beta=given["beta"], kernel=kernel, return_state=True)
        for x, kernel in (((q, k, v), "pallas"), ([x.astype(jnp.float32) for x in (q, k, v)], "chunkwise"))
    )
    for found, expected, limit in zip(ours, exact, (3e-3, 3e-5), strict=True):  # the state is float32
        assert jnp.linalg.norm(found - expected) <= limit * jnp.linalg.norm(expected)


STATES = [case for case in CASES if case[2] is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "gate", "lengths", "tokens", "scan"), [STATES[0], *STATES[1::2]])
def test_every_document_goes_on_from_its_own_state(place, gate, lengths, tokens, scan):
    """Each by one of the rules, the first by both."""
    rules = [{}, {"beta": True, "key_heads": 1}]
    for rule in rules if (at := STATES.index((place, gate, lengths, tokens, scan))) == 0 else [rules[at // 2 % 2]]:
        check(place, gate, lengths, tokens, scan=scan, rule={**rule, "states": states_of(lengths)})


def few(**rule):
    """q, k, v, gates, beta, a state a row, in JAX and in torch; documents of two rows."""
    given = inputs(32, "head", torch.float32, **rule)
    numbers = [given[n] for n in (*LEAVES, "state")]
    return [x if x is None else jnp.asarray(x.numpy()) for x in numbers], numbers, docs_of(((20, 0, 12), (0, 9)), 32)


def both(arrays, docs, plan=None, **how):
    q, k, v, g, beta, state = arrays
    return ra.linear_attention(q, k, v, g, plan, beta=beta, initial_state=state, docs=docs, **how)


@pytest.mark.parametrize("rule", [pytest.param({"states": 6, "beta": True}, marks=pytest.mark.slow), {"states": 2}])
def test_states_of_documents_as_in_torch_also_where_documents_are_traced(rule):
    """From one a document, and from one a row; inside jit, and with a batch that an axis of the mesh cuts."""
    arrays, tensors, docs = few(**rule)
    expected = both(tensors, docs, return_state="documents")
    mesh = jax.make_mesh((2, 2), ("data", "ring"), devices=jax.devices()[:4])
    for plan in (None, ra.plan(mesh, seq_len=32, layout="contiguous")):
        program = jax.jit(lambda docs, x, p=plan: both(x, docs, p, return_state="documents"))
        for found, x in zip(program(docs, arrays), expected, strict=True):
            assert relative_error(torch.from_numpy(np.array(found)), x) <= 2e-6


@pytest.mark.slow
def test_states_of_documents_inside_shard_map():
    arrays, _, docs = few(states=6, beta=True)
    plan, P = plan_of(2, 2, "zigzag", 32), jax.sharding.PartitionSpec
    tokens = P(None, ("ring", "ulysses"))
    inner = jax.shard_map(
        lambda docs, *x: both(x, docs, plan, return_state=True),
        mesh=plan.ring_axis.mesh, in_specs=(P(), *[tokens] * 5, P()), out_specs=(tokens, P()),
    )  # fmt: skip
    out, end = jax.jit(inner)(docs, *(plan.shard(x) for x in arrays[:5]), arrays[5])
    expected = both(arrays, docs, return_state=True)
    assert jnp.allclose(plan.unshard(out), expected[0], atol=1e-5) and jnp.allclose(end, expected[1], atol=1e-5)


@lru_cache
def trained(ring, scan):
    """The loss and all gradients as a compiled program for `ring` devices, which work on one chunk at a time."""
    tokens = 8 * 64 * 56  # 56 chunks for each of 8 devices, whose 7 or 8 hops divide them: all have work beside them
    plan = plan_of(ring, 1, "contiguous", tokens)
    there = jax.sharding.NamedSharding(plan.ring_axis.mesh, jax.sharding.PartitionSpec(None, "ring"))
    shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.float32, sharding=there)] * 4

    def loss(*leaves):
        return ra.linear_attention(*leaves, plan, scan=scan).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_chunkwise, "AT_ONCE", 1)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(*shapes).compile()


@pytest.mark.parametrize("scan", ["ring", "pipeline"])
def test_a_relay_gathers_nothing_and_no_state_travels_twice(scan):
    text = trained(8, scan).as_text()
    hops = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    pieces = 2 if scan == "pipeline" else 1
    assert hops == [f"1,2,16,{16 // pieces}"] * 2, "one loop forward, one backward"
    assert "all-gather" not in text


def test_temporaries_fall_as_devices_are_added():
    two, eight = (trained(n, "ring").memory_analysis().temp_size_in_bytes for n in (2, 8))
    assert eight < two / 4 * 1.5, f"{eight} of {two}"  # a hop's share of the chunks is there twice


def test_what_is_kept_for_backward_are_the_inputs_and_one_state_a_chunk():
    plan, T, K = plan_of(4, 1, "zigzag", 4 * 512), 4 * 512, 32
    tokens = [jax.ShapeDtypeStruct((1, T, 2, K), jnp.bfloat16)] * 4
    kept = jax.eval_shape(lambda *x: jax.vjp(lambda *x: ra.linear_attention(*x, plan, scan="ring"), *x)[1], *tokens)
    numbers = [x.size for x in jax.tree.leaves(kept) if x.size > 2**15]  # the masks of a chunk are smaller
    assert sorted(numbers) == sorted([T * 2 * K] * 4 + [T // 64 * 2 * K * K])


def test_large_states_of_many_devices_are_not_gathered():
    """As in torch: the same prediction decides."""
    plan = plan_of(8, 1, "zigzag", 1024)
    for heads, dim, word in ((2, 64, "all_gather"), (128, 256, "collective_permute")):
        tokens = [jax.ShapeDtypeStruct((1, 1024, heads, dim), jnp.bfloat16)] * 4
        text = jax.jit(lambda *x: ra.linear_attention(*x, plan)).lower(*tokens).as_text()
        assert [w for w in ("all_gather", "collective_permute") if w in text] == [word]


@pytest.mark.slow
def test_a_few_chunks_at_a_time(monkeypatch):
    monkeypatch.setattr(jax_chunkwise, "AT_ONCE", 2 * 6 * 2 * 2 * 64 * 8)  # two of five
    check((2, 1, "contiguous"), "channel", None, LONG)


def test_without_a_plan_as_in_torch():
    given = inputs(T, "head", torch.float32, beta=True, key_heads=1)
    given["g"][:, 30] = -torch.inf
    *arrays, beta = (given[n] for n in LEAVES)
    expected = ra.linear_attention(*arrays, beta=beta)
    found = ra.linear_attention(*(jnp.asarray(x.numpy()) for x in arrays), beta=jnp.asarray(beta.numpy()))
    assert relative_error(torch.from_numpy(np.array(found)).double(), expected.double()) <= 2e-6


def test_inside_shard_map():
    given = {n: jnp.asarray(x.numpy()) for n, x in inputs(64, "head", torch.float32).items() if x is not None}
    plan, tokens = plan_of(2, 2, "contiguous", 64), jax.sharding.PartitionSpec(None, ("ring", "ulysses"))
    mesh, arrays = plan.ring_axis.mesh, [given[n] for n in "qkvg"]

    def inner(scan, kernel, *local):
        return ra.linear_attention(*local, plan, scan=scan, kernel=kernel)

    expected = ra.linear_attention(*arrays)
    for vma, scan, kernel in ((True, "gather", "auto"), (False, "ring", "auto"), (True, "ring", "pallas")):
        found = jax.jit(
            jax.shard_map(partial(inner, scan, kernel), mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=vma)
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

    def gradient(q):
        return jax.grad(lambda q: ra.linear_attention(q, k, v, g, kernel="pallas").sum())(q).sum()

    for says, call in (
        (r"striped.*zigzag", lambda: ra.linear_attention(q, k, v, g, plan_of(2, 1, "striped", 64))),
        ("this plan's order has 62", lambda: ra.linear_attention(q, k, v, g, plan_of(2, 1, "contiguous", 62))),
        ("choose one of auto, gather, ring, pipeline", lambda: ra.linear_attention(q, k, v, g, scan="tree")),
        (r"log_decay\[0, 3, 1, 2\] = 0.5", lambda: ra.linear_attention(q, k, v, g.at[0, 3, 1, 2].set(0.5))),
        ("check=True needs", lambda: jax.jit(lambda g: ra.linear_attention(q, k, v, g, check=True))(g)),
        ("initial_state has shape", lambda: ra.linear_attention(q, k, v, g, initial_state=one)),
        ("one a document: 2 x 2", lambda: ra.linear_attention(q, k, v, g, initial_state=one, docs=docs)),
        ("return_state='documents': pass True", lambda: ra.linear_attention(q, k, v, g, return_state="documents")),
        ("no states of documents", lambda: ra.linear_attention(
            q, k, v, g, docs=docs, return_state="documents", kernel="pallas")),
        ("first derivatives only", lambda: jax.grad(gradient)(q)),
    ):  # fmt: skip
        with pytest.raises((ValueError, NotImplementedError), match=says):
            call()
