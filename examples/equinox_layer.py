"""An Equinox layer over four devices: the same loss and gradients as on one.

python examples/equinox_layer.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import ringattn as ra
import ringattn.jax
from ringattn.jax.layers import positions_of, rope, token_mean

jax.config.update("jax_num_cpu_devices", 4)  # if there is nothing but a CPU


class Attention(eqx.Module):
    qkv: jax.Array
    out: jax.Array
    heads: tuple[int, int] = eqx.field(static=True)

    def __init__(self, width, heads, kv_heads, key):
        one, two = jax.random.split(key)
        self.heads, size = (heads, kv_heads), width // heads
        self.qkv = jax.random.normal(one, (width, (heads + 2 * kv_heads) * size)) * width**-0.5
        self.out = jax.random.normal(two, (heads * size, width)) * width**-0.5

    def __call__(self, x, plan=None):
        heads, kv_heads = self.heads
        q, k, v = jnp.split(
            (x @ self.qkv).reshape(*x.shape[:2], heads + 2 * kv_heads, -1), (heads, heads + kv_heads), 2
        )
        at = positions_of(x, plan)
        return ra.attention(rope(q, at), rope(k, at), v, plan).reshape(*x.shape[:2], -1) @ self.out


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(layer, x, plan=None):
    x = x if plan is None else plan.shard(x)
    return token_mean((layer(x, plan) ** 2).mean(-1), plan)


layer, x = Attention(64, 4, 2, jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 250, 64))
plan = ra.plan(ringattn.jax.init_mesh(ring=4, devices=jax.devices()[:4]), seq_len=250, heads=(4, 2), head_dim=16)
one, four = loss(layer, x), loss(layer, x, plan)
assert all(jnp.allclose(a, b, atol=1e-5) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True))
print(f"loss {one[0]:.6f} on one device, {four[0]:.6f} on four")
