"""A Flax language model over devices, with optax and orbax: the losses of one device, and a run that can be resumed.

    python examples/train_flax.py steps=20 devices=4 save_every=5 folder=runs/flax

Run it again, after it was killed, with more steps, or with another number of devices: it continues from its last
checkpoint.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import ringattn as ra
import ringattn.jax
from ringattn.jax import nn

LENGTH, BATCH, WIDTH, WORDS = 250, 4, 64, 256
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.inner_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nn.Attention(WIDTH, heads=4, kv_heads=2, rngs=rngs)
        self.inner, self.out = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, plan):
        x = x + self.attention(self.norm(x), plan)
        return x + self.out(jax.nn.gelu(self.inner(self.inner_norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm, self.head = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens, plan):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, plan)
        return self.head(self.norm(x))


def batch_of(step):
    """Tokens [B, T + 1], the same on every machine."""
    at = np.random.default_rng(step).integers(0, len(TEXT) - LENGTH - 1, BATCH)
    return jnp.asarray(np.stack([TEXT[a : a + LENGTH + 1] for a in at]), jnp.int32)


def main(steps=20, devices=4, save_every=5, folder="runs/flax"):
    mesh = ringattn.jax.init_mesh(ring=devices, devices=jax.devices()[:devices])
    plan = ra.plan(mesh, seq_len=LENGTH, heads=(4, 2), head_dim=WIDTH // 4)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    # The state lies on all devices from the beginning, as a step returns it: else the second step compiles again.
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), there))

    @nnx.jit
    def train_step(model, optimizer, tokens):
        inputs, labels = plan.shard(tokens[:, :-1]), plan.shard(tokens[:, 1:])
        loss, grads = nnx.value_and_grad(lambda m: nn.cross_entropy(m(inputs, plan), labels, plan))(model)
        optimizer.update(model, grads)
        return loss

    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=save_every)
    manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)
    begun = manager.latest_step() or 0  # the steps that are done
    if begun:  # on all devices, as many as there are now
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), nnx.state((model, optimizer))
        )
        nnx.update((model, optimizer), manager.restore(begun, args=ocp.args.StandardRestore(like)))
    for step in range(begun, steps):
        loss = train_step(model, optimizer, batch_of(step))
        print(f"step {step + 1}: loss {float(loss):.6f}", flush=True)
        now = ocp.args.StandardSave(nnx.state((model, optimizer)))
        manager.save(step + 1, args=now, force=step + 1 == steps)  # every so many steps, in the background
    manager.close()


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[1:])
    given = {name: x if name == "folder" else int(x) for name, x in given.items()}
    jax.config.update("jax_num_cpu_devices", given.get("devices", 4))  # if there is nothing but a CPU
    main(**given)
