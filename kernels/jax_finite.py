"""What is not finite, in JAX: it reaches the queries that see it, and no others.

A key that a query does not see has weight 0 there, and 0 * NaN is NaN. So what is not finite is kept out of products:
it becomes 0, and its NaN goes through the scores, which are masked. No number is looked at while a program is made.
"""

from functools import reduce
from operator import or_

import jax.numpy as jnp
from jax import Array


def of_keys(k_BSGD: Array, v_BSGV: Array) -> tuple[Array, Array, Array]:
    """(k for scores, k for products, v): a key or value that is not finite is a key of NaN with a value of 0."""
    bad = any_bad(k_BSGD, v_BSGV)
    return jnp.where(bad, jnp.nan, k_BSGD), jnp.where(bad, 0, k_BSGD), jnp.where(bad, 0, v_BSGV)


def of_rows(q_BTHD: Array, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array) -> tuple[Array, Array, Array, Array]:
    """(q, dout, lse, delta) for backward: a query of which one is not finite is 0, with an lse of NaN.

    Then all its weights are NaN, before they are masked. An lse of -inf is that of a query that sees nothing.
    """
    bad = any_bad(q_BTHD, dout_BTHV, delta_BTH[..., None])[..., 0] | jnp.isnan(lse_BTH) | (lse_BTH == jnp.inf)
    q, dout = (jnp.where(bad[..., None], 0, x) for x in (q_BTHD, dout_BTHV))
    return q, dout, jnp.where(bad, jnp.nan, lse_BTH), jnp.where(bad, 0, delta_BTH)


def any_bad(*arrays: Array) -> Array:
    """Whether the rows of one of these arrays hold something that is not finite, [..., 1]."""
    return reduce(or_, (~jnp.isfinite(x).all(-1, keepdims=True) for x in arrays))
