"""Layers in JAX: over devices they are the layers of torch with the same weights, and of one device."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import ringattn as ra  # noqa: E402
from ringattn.jax import layers  # noqa: E402
from tests.test_jax_programs import close, expect  # noqa: E402

T = 61


@pytest.fixture(scope="module", params=["Auto", "Explicit"])
def plan(request):
    kinds = (jax.sharding.AxisType[request.param],) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "ulysses"), axis_types=kinds)
    return ra.plan(mesh, seq_len=T, layout="zigzag", strategy="ring")


def on(plan, x):
    """Whole on every device of the plan's mesh."""
    return jax.device_put(x, jax.sharding.NamedSharding(plan.ring_axis.mesh, jax.sharding.PartitionSpec()))


def test_rotary_positions_are_exact_far_out():
    x = np.random.default_rng(0).normal(size=(1, 4, 1, 8)).astype(np.float32)
    at = np.array([0, 1023, 1048577, 2**31 - 1])
    angles = at[:, None] * 10000.0 ** -(np.arange(0, 8, 2) / 8)
    a, b = x[0, :, 0, :4], x[0, :, 0, 4:]
    expected = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
    found = layers.rope(jnp.asarray(x), jnp.asarray(at, jnp.int32))[0, :, 0]
    assert np.abs(found - expected).max() < 3e-6


@pytest.mark.parametrize("docs", [None, ra.Docs.from_lengths([[30, 2, 20], [1, 60]], pad_to=T)], ids=["", "documents"])
def test_a_convolution_and_the_loss_over_devices(plan, docs):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, T, 6), (6, 4)))
    labels = jnp.asarray(rng.integers(-1, 6, (2, T)))
    expected = np.zeros(x.shape)
    start = np.zeros((2, T), int) if docs is None else np.asarray(layers.start_of(jnp.arange(T), docs))
    for w in range(4):
        for t in range(w, T):
            expected[:, t] += np.where(t - w >= start[:, t, None], x[:, t - w] * weight[:, w], 0)

    def both(plan):
        shard = (lambda x: x) if plan is None else plan.shard

        def loss(x):
            y = layers.causal_convolution(shard(x), weight, plan, docs)
            return layers.cross_entropy(y, shard(labels), plan, ignore_index=-1, docs=docs), y

        (value, y), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(x if plan is None else on(plan, x))
        return y if plan is None else plan.unshard(y), value, grad

    (y, *alone), (over, *ranks) = both(None), both(plan)
    end = T if docs is None else docs.starts[:, -1].min()
    for found in (y, over):
        assert np.abs(np.asarray(found) - expected)[:, :end].max() < 1e-5
    close(ranks, alone, 2e-6)
    counted = np.asarray(labels) >= 0
    counted &= True if docs is None else np.arange(T) < docs.starts[:, -1:]
    p = torch.log_softmax(torch.from_numpy(expected), -1).numpy()
    right = np.take_along_axis(p, np.maximum(np.asarray(labels), 0)[..., None], -1)[..., 0]
    assert abs(float(alone[0]) + right[counted].mean()) < 1e-5


def weights_of(layer, state):
    """The state of a Flax layer, from that of the torch layer: a matrix lies the other way round."""
    nnx = pytest.importorskip("flax.nnx")
    given = {n.replace("norm.", ""): x.detach().numpy() for n, x in state.items()}

    def own(path, leaf):
        *names, last = map(str, path)
        x = given[".".join([*names, "weight" if last == "kernel" else last]).removesuffix(".value")]
        return jnp.asarray(x.T if last == "kernel" else x.reshape(leaf.shape))

    flat = nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(layer)))
    flat = {path: own(path, leaf) for path, leaf in flat.items()}
    nnx.update(layer, nnx.traversals.unflatten_mapping(flat))
    return layer


@pytest.mark.parametrize(
    ("name", "given"),
    [("Attention", {"kv_heads": 2}), pytest.param("GatedDeltaNet", {"key_heads": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_flax_layers_equal_those_of_torch(plan, name, given):
    nnx = pytest.importorskip("flax.nnx")
    from ringattn.jax import nn

    torch.manual_seed(0)
    docs = ra.Docs.from_lengths([20, 41])
    theirs = getattr(ra.nn, name)(32, 4, **given)
    ours = weights_of(getattr(nn, name)(32, 4, **given, rngs=nnx.Rngs(0)), theirs.state_dict())
    x = torch.randn(2, T, 32, requires_grad=True)
    y = theirs(x, docs=docs)
    y.square().sum().backward()

    @nnx.jit
    def grads(layer, x):
        return nnx.value_and_grad(
            lambda layer, x: (layer(plan.shard(x), plan, docs=docs) ** 2).sum(where=plan.real_tokens()[:, None]),
            argnums=(0, 1),
        )(layer, x)

    nnx.update(ours, on(plan, nnx.state(ours)))
    value, (dweights, dx) = grads(ours, on(plan, jnp.asarray(x.detach().numpy())))
    assert abs(float(value) / float(y.detach().square().sum()) - 1) < 1e-5
    close(dx, x.grad.numpy(), 2e-5)
    close(dweights["out"]["kernel"][...].T, theirs.out.weight.grad.numpy(), 2e-5)


@pytest.mark.slow
def test_attention_fn_takes_flax_keywords(plan):
    nnx = pytest.importorskip("flax.nnx")
    from ringattn.jax import nn

    given = {"num_heads": 4, "in_features": 16, "decode": False}
    dense = nnx.MultiHeadAttention(**given, rngs=nnx.Rngs(0))
    ours = nnx.MultiHeadAttention(**given, attention_fn=nn.attention_fn(plan), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, T, 16))
    mask = nnx.make_causal_mask(x[..., 0])
    close(plan.unshard(ours(plan.shard(x), is_causal=True)), dense(x, mask=mask), 2e-6)
    close(plan.unshard(ours(plan.shard(x))), dense(x), 2e-6)
    expect(["mask", "spec="], lambda: ours(plan.shard(x), mask=mask))
    dropping = nnx.MultiHeadAttention(
        **given, dropout_rate=0.5, deterministic=False, attention_fn=nn.attention_fn(plan), rngs=nnx.Rngs(0)
    )
    expect(["dropout_rate"], lambda: dropping(plan.shard(x)))


@pytest.mark.slow
def test_the_flax_example_has_one_devices_losses_and_resumes(tmp_path, capfd):
    """Two steps as its users start it, a third one here, and then all on one device."""
    pytest.importorskip("flax")
    script = Path(__file__).parent.parent / "examples" / "train_flax.py"
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    words = "steps=2", "devices=4", "save_every=1", "folder=four"
    subprocess.run([sys.executable, str(script), *words], env=given, cwd=tmp_path, check=True)
    main = runpy.run_path(str(script))["main"]
    main(steps=3, devices=4, save_every=1, folder=tmp_path / "four")
    main(steps=3, devices=1, folder=tmp_path / "one")
    assert {"2", "3"} <= {path.name for path in (tmp_path / "four").iterdir()}
    losses = [float(x) for x in re.findall(r"loss (\S+)", capfd.readouterr().out)]
    assert np.allclose(losses[:3], losses[3:], atol=2e-5) and losses[2] < losses[0] - 0.5
