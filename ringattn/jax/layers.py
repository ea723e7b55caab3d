"""What layers of any JAX library need around attention: rotary positions, a causal convolution, the loss.

All arrays are global, in the plan's order; without a plan in the sequence's own.

B batch   T tokens   C channels   H heads   D head dim   V classes   W tokens of a convolution
"""

from functools import reduce
from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringattn.jax.lookup import cut_as, entry, rows_of, spoiled, uncut, up_to
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


def causal_convolution(x_BTC: Array, weight_CW: Array, plan: Plan | None = None, docs: Docs | None = None) -> Array:
    """y[t] = sum_w weight[:, w] * x[t - w] within t's document; only the last W - 1 tokens of each segment travel."""
    B, T, C = x_BTC.shape
    W, order = weight_CW.shape[1], np.arange(T) if plan is None else plan.tokens.order()
    cuts = [] if plan is None else [plan.local_len]
    segment = gcd(T, *cuts, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist())
    if segment < W - 1:
        raise ValueError(f"a convolution over {W} tokens needs longer segments than {segment} tokens; use zigzag")
    firsts = order[::segment]
    before = np.searchsorted(np.sort(firsts), firsts) - 1  # the place in the sequence of the segment before each
    before = np.argsort(firsts)[before]
    parts = x_BTC.reshape(B, -1, segment, C)
    tails = uncut(parts[:, :, segment - (W - 1) :], 1)[:, before]
    tails = cut_as(jnp.where((firsts == 0)[:, None, None], 0, tails), parts)
    rows = jnp.concatenate([tails, parts], 2)
    at = positions_of(x_BTC, plan)
    start = jnp.zeros((1, T), int) if docs is None else start_of(at, docs)
    inside = [(at - w >= start)[..., None] for w in range(W)]
    taken = [rows[:, :, W - 1 - w : W - 1 - w + segment].reshape(B, T, C) for w in range(W)]
    pairs = zip(taken, inside, strict=True)
    made = jnp.stack([jnp.where(ok, x, 0) * weight_CW[:, w] for w, (x, ok) in enumerate(pairs)]).sum(0)
    return spoiled(made, docs and docs.starts)


def start_of(positions_T: Array, docs: Docs) -> Array:
    """Where the document of each token begins, [rows, T]."""
    return entry(docs.starts, up_to(docs.starts, positions_T) - 1)


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
