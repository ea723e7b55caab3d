"""Attention for Flax (nnx) over devices: a layer, and what Flax's own layer takes; needs flax.

Arrays are global, in the plan's order; without a plan in the sequence's own.

B batch   T tokens   C width
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx
from jax import Array

from ringattn import api
from ringattn.jax.layers import cross_entropy as cross_entropy
from ringattn.jax.layers import positions_of, rope
from ringattn.jax.layers import token_mean as token_mean
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
        out = api.attention(q, k, v, plan, spec=spec or AttentionSpec(causal=is_causal), docs=docs)
        return out.reshape(*query.shape[:-1], out.shape[-1])

    return attend


class Attention(nnx.Module):
    """out(attention(rope(q(x)), rope(k(x)), v(x))), with the weights of `ringattn.nn.Attention` for torch.

    `how` are nnx.Linear's own arguments: dtype, param_dtype, ...
    """

    def __init__(
        self, d_model: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None,
        spec: AttentionSpec | None = None, theta: float = 10000.0, *, rngs: nnx.Rngs, **how: Any,
    ):  # fmt: skip
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if head_dim is None and d_model % heads:
            raise ValueError(f"heads={heads} does not divide d_model={d_model}; give the size of a head")
        self.head_dim, self.theta = d_model // heads if head_dim is None else head_dim, theta
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
        q, k, v = (f(x_BTC).reshape(*x_BTC.shape[:2], -1, self.head_dim) for f in (self.q, self.k, self.v))
        q, k = rope(q, at, self.theta), rope(k, at, self.theta)
        out = api.attention(q, k, v, plan, spec=self.spec, docs=docs)
        return self.out(out.reshape(*x_BTC.shape[:2], -1))
