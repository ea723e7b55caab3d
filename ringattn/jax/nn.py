"""Layers of Flax (nnx) over devices: attention, what Flax's own layer takes, and the delta rule; needs flax.

Weights and results are those of the layers of the same names in `ringattn.nn`, for torch. Arrays are global, in the
plan's order; without a plan in the sequence's own.

B batch   T tokens   C width
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from ringattn.check.arguments import head_size
from ringattn.check.linear import Given, Settings
from ringattn.jax.attention.function import attention
from ringattn.jax.layers import causal_convolution, positions_of, rope
from ringattn.jax.layers import cross_entropy as cross_entropy
from ringattn.jax.layers import token_mean as token_mean
from ringattn.jax.linear.function import linear_attention
from ringattn.kernels.arrays import in_sums
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.plan import Plan


def attention_fn(
    plan: Plan | None = None, spec: AttentionSpec | None = None, docs: Docs | None = None
) -> Callable[..., Array]:
    """`attention_fn` for `nnx.MultiHeadAttention`: attention over the plan's devices, with flax's keywords.

    Without a spec `is_causal` decides. A mask, a bias, dropout and sown weights are refused: they have no form over
    devices; `spec` and `docs` describe masks.
    """

    def attend(
        query: Array, key: Array, value: Array, bias: Any = None, mask: Any = None, *, broadcast_dropout: bool = True,
        dropout_rng: Any = None, dropout_rate: float = 0.0, deterministic: bool = False, dtype: Any = None,
        precision: Any = None, module: Any = None, is_causal: bool = False, **unknown: Any,
    ) -> Array:  # fmt: skip
        wrong = {
            "bias": bias is not None,
            "mask": mask is not None,
            "dropout_rate": dropout_rate > 0 and not deterministic,
            "sow_weights": module is not None,
            **dict.fromkeys(unknown, True),
            "is_causal": is_causal and spec is not None and not spec.causal,
        }
        if refused := [name for name, given in wrong.items() if given]:
            raise ValueError(
                f"{', '.join(refused)}: not supported by ringattn's attention_fn; describe masks by its spec= and docs="
            )
        given = (query, key, value) if dtype is None else (x.astype(dtype) for x in (query, key, value))
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in given)
        out = attention(q, k, v, plan, spec=spec or AttentionSpec(causal=is_causal), docs=docs)
        return out.reshape(*query.shape[:-1], out.shape[-1])

    return attend


class Attention(nnx.Module):
    """out(attention(rope(q(x)), rope(k(x)), v(x))). `how` are nnx.Linear's own arguments: dtype, param_dtype, ..."""

    def __init__(
        self, d_model: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None,
        spec: AttentionSpec | None = None, theta: float = 10000.0, *, rngs: nnx.Rngs, **how: Any,
    ):  # fmt: skip
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_dim, self.theta = head_size(d_model, heads, head_dim), theta
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs, so it must be even")
        self.spec = AttentionSpec() if spec is None else spec
        linear: Any = partial(nnx.Linear, use_bias=False, rngs=rngs, **how)
        self.q, self.k, self.v = (linear(d_model, n * self.head_dim) for n in (heads, self.kv_heads, self.kv_heads))
        self.out = linear(heads * self.head_dim, d_model)

    def __call__(
        self, x_BTC: Array, plan: Plan | None = None, positions: Array | None = None, docs: Docs | None = None
    ) -> Array:
        """`positions` [T] or [B, T] are those of the sequence, unless they are given."""
        at = positions_of(x_BTC, plan) if positions is None else positions
        q, k, v = (in_heads(f(x_BTC), self.head_dim) for f in (self.q, self.k, self.v))
        q, k = rope(q, at, self.theta), rope(k, at, self.theta)
        out = attention(q, k, v, plan, spec=self.spec, docs=docs)
        return self.out(out.reshape(*x_BTC.shape[:2], -1))


class GatedDeltaNet(nnx.Module):
    """out(norm(linear_attention(q, k, v, log decay, beta)) * swish(w x)): the delta rule with a gate a head.

    As in Qwen3-Next: q and k have length 1 after the convolution, beta is sigmoid(b x), and the log decay is
    -exp(log_rate) * softplus(decay(x) + bias).
    """

    def __init__(
        self, d_model: int, heads: int, key_heads: int | None = None, key_dim: int | None = None,
        value_dim: int | None = None, convolution: int = 4, *, rngs: nnx.Rngs, **how: Any,
    ):  # fmt: skip
        key_heads = key_heads or heads
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads={key_heads} must divide heads={heads}")
        self.value_dim = head_size(d_model, heads, value_dim)
        self.key_dim = max(1, d_model // heads // 2) if key_dim is None else key_dim
        self.keys, values, self.convolution = key_heads * self.key_dim, heads * self.value_dim, convolution
        linear: Any = partial(nnx.Linear, use_bias=False, rngs=rngs, **how)
        self.qkv = linear(d_model, 2 * self.keys + values)
        if convolution:
            shape = 2 * self.keys + values, convolution
            self.mix = nnx.Param(jax.random.normal(rngs.params(), shape) * convolution**-0.5)
        self.swish, self.out = linear(d_model, values), linear(values, d_model)
        self.beta, self.decay = linear(d_model, heads), linear(d_model, heads)
        self.log_rate = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.bias, self.weight = nnx.Param(jnp.ones(heads)), nnx.Param(jnp.ones(self.value_dim))

    def __call__(self, x_BTC: Array, plan: Plan | None = None, docs: Docs | None = None) -> Array:
        mixed = self.qkv(x_BTC)
        if self.convolution:
            mixed = jax.nn.silu(causal_convolution(mixed, self.mix[...].astype(mixed.dtype), plan, docs))
        q, k, v = jnp.split(mixed, (self.keys, 2 * self.keys), -1)
        q, k, v = in_heads(q, self.key_dim), in_heads(k, self.key_dim), in_heads(v, self.value_dim)
        q, k = (x * jax.lax.rsqrt((in_sums(x) ** 2).sum(-1, keepdims=True) + 1e-6).astype(x.dtype) for x in (q, k))
        g = -jax.nn.softplus(in_sums(self.decay(x_BTC)) + self.bias[...]) * jnp.exp(self.log_rate[...])
        beta = jax.nn.sigmoid(in_sums(self.beta(x_BTC)))
        out = in_sums(linear_attention(Given(q, k, v, g, beta), plan, Settings(docs, check=False)))
        out = out * jax.lax.rsqrt((out**2).mean(-1, keepdims=True) + 1e-6) * self.weight[...]
        out = out.astype(v.dtype).reshape(*x_BTC.shape[:2], -1)
        return self.out(out * jax.nn.silu(self.swish(x_BTC)))


def in_heads(x: Array, size: int) -> Array:
    """[B, T, heads * size] -> [B, T, heads, size]."""
    return x.reshape(*x.shape[:-1], -1, size)
