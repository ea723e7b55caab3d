"""`linear_attention` on JAX arrays: check, then each device's part (device.py) under shard_map."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from ringattn.check.attention import of_dtypes
from ringattn.check.linear import Given, Settings, by_document, of_asked, of_linear, of_numbers, returned_states
from ringattn.jax.attention.function import filled, is_eager
from ringattn.jax.linear.device import Arrays, Call, by_kernel, kernel_of, on_device
from ringattn.jax.linear.states import STATES
from ringattn.jax.lookup import spoiled
from ringattn.jax.sharding import located, on_every_device
from ringattn.masks.spec import raise_if
from ringattn.plans.plan import Plan

KERNELS = "chunkwise", "pallas"


def linear_attention(x: Given, plan: Plan | None, asked: Settings) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t, on global arrays in the plan's order.

    Inside shard_map over the plan's axes it takes this device's tokens. Without a plan the arrays are in the
    sequence's own order, on the mesh that their sharding names.
    """
    q, k, v, *_ = x
    plan, inside = located(q, k, v, plan, linear=True)
    length, docs = plan.local_len if inside else plan.tokens.padded_length, asked.docs
    problem = of_linear(x, plan, docs, length) or of_dtypes(q, k, v) or of_asked(x, plan, asked, KERNELS)
    raise_if(problem or of_known(x, plan, asked))
    scale = q.shape[-1] ** -0.5 if asked.scale is None else float(asked.scale)
    returns = returned_states(x, asked)
    documents = returns == "documents" or by_document(x, docs)
    eager = is_eager(q)
    docs = filled(docs) if eager and not documents else docs
    kernel = kernel_of(asked.kernel, plan, q, v, documents)
    call = Call(plan, scale, asked.scan, returns, documents, docs is not None and docs.padded, kernel)

    def cuts(tokens: P) -> Any:
        state = P(tokens[0], tokens[2])
        return (*[tokens] * 5, state), (tokens, state)

    out, end = on_every_device(recomputed, call, plan, inside, tuple(x), (docs and docs.starts,), cuts, eager)
    return (out, end) if asked.return_state else out


def of_known(x: Given, plan: Plan, asked: Settings) -> str | None:
    """`of_numbers` of real tokens. Only concrete arrays can be checked."""
    docs, check = asked.docs, asked.check
    if not (plan.device == "cpu" if check is None else check):
        return None
    if any(isinstance(t, jax.core.Tracer) for t in (x.log_decay, x.beta, docs and docs.starts)):
        return "check=True needs gates, betas and documents that are not traced (jit, grad, vmap)" if check else None
    real = plan.tokens.order() < (plan.seq_len if docs is None else np.minimum(plan.seq_len, docs.starts[:, -1:]))

    def first(bad: Array) -> tuple[int, ...] | None:
        bad &= real.reshape(-1, bad.shape[1], *[1] * (bad.ndim - 2))
        return tuple(np.argwhere(np.asarray(bad))[0].tolist()) if bool(bad.any()) else None

    return of_numbers(x, first)


def recomputed(call: Call, arrays: Arrays, given: tuple[Any]) -> Any:
    """One device's part, of which the inputs and the states before chunks are kept for backward, and nothing else."""
    (starts,) = given
    if call.kernel == "pallas":
        part: Any = by_kernel(call, arrays, starts)
    else:
        policy = jax.checkpoint_policies.save_only_these_names(STATES)
        part = jax.checkpoint(partial(on_device, call), policy=policy)(arrays, starts)
    return jax.tree.map(lambda x: spoiled(x, starts), part)
