"""What arrays must satisfy in JAX, beside what ringattn.check says of shapes: their dtypes."""

import jax.numpy as jnp
from jax import Array

from ringattn.check.attention import of_sinks


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
