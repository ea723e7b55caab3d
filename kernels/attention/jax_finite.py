"""Keeps values that are not finite from queries that do not see them, in JAX.

A key that a query does not see has a weight of 0, but 0 * NaN is NaN. So values that are not finite are replaced by 0
in products, and NaN is put into the scores instead, which are masked. This works without looking at numbers while a
program is traced.
"""

from functools import reduce
from operator import or_

import jax.numpy as jnp
from jax import Array


def of_keys(k_BSGD: Array, v_BSGV: Array) -> tuple[Array, Array, Array]:
    """(k for scores, k for products, v): if a key or its value is not finite, its score is NaN and its value 0."""
    bad = any_bad(k_BSGD, v_BSGV)
    return jnp.where(bad, jnp.nan, k_BSGD), jnp.where(bad, 0, k_BSGD), jnp.where(bad, 0, v_BSGV)


def of_rows(q_BTHD: Array, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array) -> tuple[Array, Array, Array, Array]:
    """(q, dout, lse, delta) for backward: if one of them is not finite, q, dout and delta are 0 and the lse is NaN.

    Then all weights of the query are NaN before they are masked. An lse of -inf belongs to a query that sees no key.
    """
    bad = any_bad(q_BTHD, dout_BTHV, delta_BTH[..., None])[..., 0] | jnp.isnan(lse_BTH) | (lse_BTH == jnp.inf)
    q, dout = (jnp.where(bad[..., None], 0, x) for x in (q_BTHD, dout_BTHV))
    return q, dout, jnp.where(bad, jnp.nan, lse_BTH), jnp.where(bad, 0, delta_BTH)


def any_bad(*arrays: Array) -> Array:
    """Which rows have a value that is not finite in any of these arrays, [..., 1]."""
    return reduce(or_, (~jnp.isfinite(x).all(-1, keepdims=True) for x in arrays))
