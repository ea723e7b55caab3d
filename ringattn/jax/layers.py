"""What layers of any JAX library need around attention: rotary positions, the loss.

All arrays are global, in the plan's order; without a plan in the sequence's own.

B batch   T tokens   C channels   H heads   D head dim   V classes
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringattn.jax.lookup import rows_of
from ringattn.kernels.arrays import accumulator
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan

DIGIT = 1024


def positions_of(x_BTC: Array, plan: Plan | None) -> Array:
    """The positions of x's tokens."""
    return jnp.arange(x_BTC.shape[1]) if plan is None else plan.positions()


def rope(x_BTHD: Array, positions_T: Array, theta: float = 10000.0) -> Array:
    """Turn the pair (x[i], x[i + D/2]) by position * theta^(-2i / D), exact at any position: [T] or [B, T].

    A float32 angle of a position above 10,000 is off by more than 1e-3. So the angles of the digits of a position come
    from tables that were made in float64.
    """
    D, digits = x_BTHD.shape[-1], []
    rates = theta ** -(np.arange(0, D, 2) / D)
    for digit in range(4):  # positions have 31 bits
        angles = np.arange(DIGIT if digit < 3 else 2)[:, None] * float(DIGIT**digit) * rates
        at = (positions_T // DIGIT**digit) % DIGIT
        cos, sin = (jnp.asarray(f(angles), accumulator(x_BTHD)) for f in (np.cos, np.sin))
        digits.append((rows_of(cos, at), rows_of(sin, at)))
    cos, sin = reduce(lambda a, b: (a[0] * b[0] - a[1] * b[1], a[1] * b[0] + a[0] * b[1]), digits)
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x_BTHD.astype(cos.dtype), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHD.dtype)


def token_mean(
    losses_BT: Array, plan: Plan | None = None, *, mask: Array | None = None, docs: Docs | None = None
) -> Array:
    """The mean loss of the real tokens for which `mask` is true; losses of others are ignored, even NaN."""
    counted = jnp.broadcast_to(True if mask is None else mask.astype(bool), losses_BT.shape)
    if plan is not None:
        counted &= plan.real_tokens()
    ends = jnp.zeros(()) if docs is None else jnp.asarray(docs.starts)[:, -1:]
    if docs is not None:
        counted &= positions_of(losses_BT, plan) < ends
    mean = jnp.where(counted, losses_BT, 0).sum() / jnp.maximum(counted.sum(), 1)
    return jnp.where((ends < 0).any(), jnp.nan, mean)  # a row of too many documents


def cross_entropy(
    logits_BTV: Array, labels_BT: Array, plan: Plan | None = None, *, ignore_index: int = -100,
    docs: Docs | None = None,
) -> Array:  # fmt: skip
    """The mean cross entropy of the labels of real tokens that are not `ignore_index`, in float32 or float64.

    A label is the class of its own token: for a language model shift the labels first, or use `plan.roll(tokens, -1)`.
    """
    counted = labels_BT != ignore_index
    real = counted if plan is None else counted & plan.real_tokens()
    logits = jnp.where(real[..., None], logits_BTV, 0).astype(accumulator(logits_BTV))  # NaN times 0 is NaN
    label = jnp.where(real, labels_BT, 0)[..., None]  # compared, not looked up: an axis may cut the classes
    right = jnp.where(jnp.arange(logits.shape[-1]) == label, logits, 0).sum(-1)
    return token_mean(jax.nn.logsumexp(logits, -1) - right, plan, mask=counted, docs=docs)
