"""The training run of `ringattn train` in JAX: the same configuration, data, first weights and losses.

python examples/train_jax.py experiment=smoke steps=20 strategy=hybrid nproc=4 device=cpu
"""

import math
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

import ringattn as ra
import ringattn.jax
from ringattn.conf.schema import Model, Train
from ringattn.launch.train import configured, data
from ringattn.launch.train.model import head_dim
from ringattn.launch.train.parallelize import build
from ringattn.launch.train.start import resolved
from ringattn.launch.train.trainer import learning_rate

Weights = dict[str, Array]


def norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + jnp.finfo(x.dtype).eps) * weight


def rope(x_BTHD: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x_BTHD, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(w: Weights, tokens: Array, angles: tuple[Array, Array], model: Model, plan: ra.Plan) -> Array:
    """The decoder of ringattn.launch.train.model, of arrays that stay in the plan's order from one end to the other."""
    x, spec = w["embed.weight"][tokens], ra.AttentionSpec(window=model.window, softcap=model.softcap)
    for i in range(model.layers):
        block = {n.removeprefix(f"blocks.{i}."): v for n, v in w.items() if n.startswith(f"blocks.{i}.")}
        h = norm(x, block["attention_norm.weight"])
        q, k, v = ((h @ block[f"attention.{n}.weight"].T).reshape(*h.shape[:2], -1, head_dim(model)) for n in "qkv")
        out = ra.attention(rope(q, *angles), rope(k, *angles), v, plan, spec=spec)
        x = x + out.reshape(*h.shape[:2], -1) @ block["attention.out.weight"].T
        h = norm(x, block["mlp_norm.weight"])
        inner = jax.nn.silu(h @ block["mlp.gate.weight"].T) * (h @ block["mlp.up.weight"].T)
        x = x + inner @ block["mlp.down.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


@partial(jax.jit, static_argnames=("config", "plan"))
def train_step(w: Weights, moments: Any, tokens: Array, angles: Any, rate: Array, step: Array, config: Any, plan: Any):
    """AdamW on a gradient of clipped length: (weights, moments, the loss before the step)."""
    o, real = config.value.optimizer, plan.real_tokens()[None]

    def loss_of(w: Weights) -> Array:
        inputs, labels = plan.shard(tokens[:, :-1]), plan.shard(tokens[:, 1:])
        chances = jax.nn.log_softmax(logits(w, inputs, angles, config.value.model, plan))
        losses = -jnp.take_along_axis(chances, labels[..., None], -1)[..., 0]
        return (losses * real).sum() / (plan.seq_len * len(tokens))

    loss, grads = jax.value_and_grad(loss_of)(w)
    size = jnp.sqrt(sum((g * g).sum() for g in grads.values()))
    grads = {n: g * jnp.minimum(1.0, o.clip / (size + 1e-6)) for n, g in grads.items()}
    first = {n: o.beta1 * m + (1 - o.beta1) * grads[n] for n, m in moments[0].items()}
    second = {n: o.beta2 * m + (1 - o.beta2) * grads[n] ** 2 for n, m in moments[1].items()}

    def moved(n: str) -> Array:
        mean, square = first[n] / (1 - o.beta1**step), second[n] / (1 - o.beta2**step)
        decay = o.weight_decay if w[n].ndim > 1 else 0.0
        return w[n] * (1 - rate * decay) - rate * mean / (jnp.sqrt(square) + 1e-8)

    return {n: moved(n) for n in w}, (first, second), loss


class Fixed:
    """A configuration as a constant of a program: the same only as itself."""

    def __init__(self, value: Train):
        self.value = value


def devices_for(ranks: int | None) -> list[Any]:
    """As many devices as ranks, or all that there are. A CPU is split into as many."""
    if ranks:
        jax.config.update("jax_num_cpu_devices", ranks)
    devices = jax.devices()
    if len(devices) < (ranks or 1):
        raise ValueError(
            f"nproc={ranks} ranks need a device each, and JAX has {len(devices)}; use nproc={len(devices)}"
        )
    return devices[:ranks]


def main(config: Train) -> int:
    """Train; a wrong configuration is one sentence."""
    try:
        return train(config)
    except ValueError as error:
        sys.exit(f"train_jax.py: {error}")


def train(config: Train) -> int:
    """Every step of the run, one line each."""
    m, s = config.model, config.strategy
    if m.softmax_every != 1 or config.data.documents or config.accumulate != 1 or s.data != 1:
        raise ValueError("this example trains softmax attention on whole sequences, without accumulate= or data=")
    if config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # nobody looks for a TPU, and says that there is none
    devices = devices_for(config.nproc)
    s = resolved(config, len(devices)).strategy
    mesh = ringattn.jax.init_mesh(ring=s.ring, ulysses=s.ulysses, devices=devices)
    plan = ra.plan(mesh, seq_len=config.seq_len, heads=(m.heads, m.kv_heads), head_dim=head_dim(m), strategy=s.keys,
                   layout=s.layout, dtype="float32")  # fmt: skip
    samples = data.of(config)
    start = build(m, config.seed, torch.device("cpu")).state_dict()
    w = {n: jnp.asarray(x.numpy()) for n, x in start.items()}
    zeros = {n: jnp.zeros_like(x) for n, x in w.items()}
    moments: Any = (zeros, zeros)
    turns = np.asarray(plan.positions(), np.float64)[:, None] * m.rope_theta ** -(
        np.arange(0, head_dim(m), 2) / head_dim(m)
    )
    angles = jnp.asarray(np.cos(turns)[:, None], jnp.float32), jnp.asarray(np.sin(turns)[:, None], jnp.float32)
    constant = Fixed(config)
    for step in range(config.steps):
        batch = np.stack([samples.train(step * config.batch + i).tokens for i in range(config.batch)]).astype(np.int32)
        w, moments, loss = train_step(
            w, moments, jnp.asarray(batch), angles, jnp.float32(learning_rate(config, step)), jnp.float32(step + 1),
            constant, plan,
        )  # fmt: skip
        print(f"step {step + 1}: loss {float(loss):.6f}", flush=True)
        if not math.isfinite(float(loss)):
            raise ValueError(f"the loss of step {step + 1} is {loss}; lower optimizer.lr={config.optimizer.lr}")
    return 0


if __name__ == "__main__":
    sys.exit(configured.run(sys.argv[1:], main))
