"""Layers in JAX: over devices they are the layers of torch with the same weights, and of one device."""

import os
import re
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
def test_the_loss_over_devices(plan, docs):
    rng = np.random.default_rng(1)
    logits, labels = jnp.asarray(rng.normal(size=(2, T, 6)), jnp.float32), jnp.asarray(rng.integers(-1, 6, (2, T)))

    def loss(logits, plan=None):
        shard = (lambda x: x) if plan is None else plan.shard
        return layers.cross_entropy(shard(logits), shard(labels), plan, ignore_index=-1, docs=docs)

    alone = jax.jit(jax.value_and_grad(loss))(logits)
    close(jax.jit(jax.value_and_grad(lambda x: loss(x, plan)))(on(plan, logits)), alone, 2e-6)
    counted = np.asarray(labels) >= 0
    counted &= True if docs is None else np.arange(T) < docs.starts[:, -1:]
    p = torch.log_softmax(torch.from_numpy(np.array(logits)).double(), -1).numpy()
    right = np.take_along_axis(p, np.maximum(np.asarray(labels), 0)[..., None], -1)[..., 0]
    assert abs(float(alone[0]) + right[counted].mean()) < 1e-5


def test_the_flax_layer_equals_that_of_torch(plan):
    nnx = pytest.importorskip("flax.nnx")
    from ringattn.jax import nn

    torch.manual_seed(0)
    docs = ra.Docs.from_lengths([20, 41])
    theirs, ours = ra.nn.Attention(32, 4, kv_heads=2), nn.Attention(32, 4, kv_heads=2, rngs=nnx.Rngs(0))
    for name in ("q", "k", "v", "out"):  # a matrix lies the other way round
        getattr(ours, name).kernel[...] = jnp.asarray(getattr(theirs, name).weight.detach().numpy().T)
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


def example(folder, *words):
    """What an example prints."""
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__).parent.parent / "examples" / words[0]), *words[1:]]
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_the_flax_example_has_one_devices_losses_and_resumes(tmp_path):
    pytest.importorskip("flax")
    whole = example(tmp_path, "train_flax.py", "steps=3", "devices=1", "folder=one")
    words = "devices=4", "save_every=1", "folder=four"
    parts = [example(tmp_path, "train_flax.py", f"steps={n}", *words) for n in (2, 3)]
    assert {"2", "3"} <= {path.name for path in (tmp_path / "four").iterdir()}
    assert [len(part) for part in parts] == [2, 1]
    assert np.allclose([*parts[0], *parts[1]], whole, atol=2e-5) and whole[-1] < whole[0] - 0.5
