"""The public functions: each finds the framework from its arguments and calls the function of the same name there."""

import sys
from typing import Any

from ringattn.plan import Plan
from ringattn.spec import AttentionSpec, Docs

REFUSED = {
    "dropout": "attention dropout is not supported: it has no exact form over ranks",
    "dropout_p": "attention dropout is not supported: it has no exact form over ranks",
    "alibi_slopes": "ALiBi is not supported: use rotary positions (plan.positions())",
    "alibi": "ALiBi is not supported: use rotary positions (plan.positions())",
    "bias": "an additive bias is not supported: masks are intervals (causal, window, docs)",
    "attn_bias": "an additive bias is not supported: masks are intervals (causal, window, docs)",
    "attn_mask": "an arbitrary mask is not supported: masks are intervals (causal, window, docs)",
    "mask": "an arbitrary mask is not supported: masks are intervals (causal, window, docs)",
    "is_causal": "say spec=AttentionSpec(causal=...)",
    "causal": "say spec=AttentionSpec(causal=...)",
    "window": "say spec=AttentionSpec(window=...)",
    "window_size": "say spec=AttentionSpec(window=...)",
    "softcap": "say spec=AttentionSpec(softcap=...)",
    "scale": "say spec=AttentionSpec(scale=...)",
    "softmax_scale": "say spec=AttentionSpec(scale=...)",
    "cu_seqlens": "say docs=Docs.from_cu_seqlens(...)",
}


def attention(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan | None = None,
    *,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, exact, whichever rank holds which part of it.

    q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] are this rank's tokens under `plan` (see `Plan.shard`); G divides
    H. Without a plan they are everything, on one device. Returns out [B, T, H, V] in q's dtype, and with
    `return_lse` also lse [B, T, H], the natural log-sum-exp in float32, differentiable.

    spec      causal, window, softcap, scale; causal by default
    docs      packed documents, the same on every rank; `key_docs` those of the keys where they are another sequence
    sinks     [H], a logit a head that takes part in the softmax with a value of zero
    """
    if unknown:
        refuse(unknown)
    return framework(q).attention(
        q, k, v, plan, spec=spec, docs=docs, key_docs=key_docs, sinks=sinks, return_lse=return_lse
    )


def refuse(unknown: dict[str, Any]) -> None:
    """Name every argument that attention does not take, and what to use instead."""
    said = [f"{name}: {REFUSED.get(name, 'attention has no such argument')}" for name in unknown]
    raise ValueError("; ".join(said))


def framework(x: Any) -> Any:
    """The module of functions for this tensor's framework."""
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        import ringattn.torch.attention

        return ringattn.torch.attention
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        raise NotImplementedError("the JAX backend is not part of this version; pass torch tensors")
    raise ValueError(f"expected a torch tensor or a jax array, got {type(x).__name__}")
