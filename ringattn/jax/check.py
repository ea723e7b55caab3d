"""What a call must satisfy in JAX: the shapes of ringattn.check, and dtypes."""

import jax.numpy as jnp
from jax import Array

from ringattn.check.attention import of_batch, of_docs, of_lengths, of_plan, of_sinks
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.plans.plan import Plan


def check(
    arrays: tuple[Array, Array, Array, Array | None], plan: Plan, lengths: tuple[int, int], spec: AttentionSpec,
    docs: Docs | None, key_docs: Docs | None,
) -> None:  # fmt: skip
    """Raise what is wrong with arrays whose shapes match.

    `lengths` are how many tokens q and k must have: all of them, or one device's.
    """
    q, k, v, sinks = arrays
    raise_if(
        of_dtypes(q, k, v)
        or of_batch(q)
        or of_plan(q, k, v, plan)
        or of_sinks_for(q, sinks)
        or of_lengths(q, k, plan, spec, lengths, docs, key_docs)
        or of_docs(q.shape[0], plan, spec, docs, key_docs)
    )


def of_sinks_for(q: Array, sinks: Array | None) -> str | None:
    return None if sinks is None else of_sinks(sinks, q.shape[2], jnp.issubdtype(sinks.dtype, jnp.floating))


def of_dtypes(q: Array, k: Array, v: Array) -> str | None:
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            return f"{name} is {x.dtype}; attention takes float16, bfloat16, float32 or float64"
    if len({x.dtype for x in named.values()}) > 1:
        return ", ".join(f"{n} is {x.dtype}" for n, x in named.items()) + "; give all three the same dtype"
    return None
