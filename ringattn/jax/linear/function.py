"""`linear_attention` on JAX arrays: check, then each device's part (device.py) under shard_map."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from ringattn.check.linear import by_document, of_linear, of_scale, of_scan, of_state, returned_states, wrong_number
from ringattn.jax.attention.function import filled, is_eager
from ringattn.jax.check import of_dtypes
from ringattn.jax.linear.device import Arrays, Call, by_kernel, kernel_of, on_device
from ringattn.jax.linear.states import STATES
from ringattn.jax.lookup import spoiled
from ringattn.jax.sharding import located, on_every_device
from ringattn.kernels.arrays import accumulator
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import Docs, raise_if
from ringattn.plans.plan import Plan

KERNELS = ("auto", "chunkwise", "pallas")


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None = None,
    plan: Plan | None = None,
    *,
    beta: Array | None = None,
    initial_state: Array | None = None,
    return_state: bool | str = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t, on global arrays in the plan's order.

    Inside shard_map over the plan's axes it takes this device's tokens. Without a plan the arrays are in the
    sequence's own order, on the mesh that their sharding names.
    """
    plan, inside = located(q, k, v, plan, linear=True)
    arrays = q, k, v, log_decay, beta, initial_state
    length = plan.local_len if inside else plan.tokens.padded_length
    problem = problem_of(arrays, plan, docs, scale, kernel, scan, length)
    raise_if(problem or of_numbers(log_decay, beta, plan, docs, check))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    returns = returned_states(return_state, initial_state, docs, q.shape[0])
    documents = returns == "documents" or by_document(initial_state, docs, q.shape[0])
    eager = is_eager(q)
    docs = filled(docs) if eager and not documents else docs
    kernel = kernel_of(kernel, plan, q, v, documents)
    call = Call(plan, scale, scan, returns, documents, docs is not None and docs.padded, kernel)

    def cuts(tokens: P) -> Any:
        state = P(tokens[0], tokens[2])
        return (*[tokens] * 5, state), (tokens, state)

    out, end = on_every_device(recomputed, call, plan, inside, arrays, (docs and docs.starts,), cuts, eager)
    return (out, end) if return_state else out


def problem_of(
    arrays: Arrays, plan: Plan, docs: Docs | None, scale: float | None, kernel: str, scan: str, length: int
) -> str | None:
    """The first thing that is wrong with a call, as far as shapes and dtypes show it."""
    q, k, v, log_decay, beta, state = arrays
    gates = [(n, x.dtype) for n, x in (("log_decay", log_decay), ("beta", beta)) if x is not None]
    return (
        of_linear(q, k, v, log_decay, beta, plan, docs, length)
        or of_dtypes(q, k, v)
        or of_scale(scale, q.shape[-1])
        or of_choice("kernel", kernel, KERNELS)
        or of_scan(plan, scan)
        or (None if state is None else of_state("initial_state", state, q, v, accumulator(q), docs))
        or next((f"{n} is {x}; expected floats" for n, x in gates if not jnp.issubdtype(x, jnp.floating)), None)
    )


def of_numbers(
    log_decay: Array | None, beta: Array | None, plan: Plan, docs: Docs | None, check: bool | None
) -> str | None:
    """The first gate above 0, or beta outside of [0, 2]. Only concrete arrays can be checked."""
    if not (plan.device == "cpu" if check is None else check):
        return None
    if any(isinstance(x, jax.core.Tracer) for x in (log_decay, beta, docs and docs.starts)):
        return "check=True needs gates, betas and documents that are not traced (jit, grad, vmap)" if check else None
    real = plan.tokens.order() < (plan.seq_len if docs is None else np.minimum(plan.seq_len, docs.starts[:, -1:]))
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x is None:
            continue
        bad = ~(x <= 0) if name == "log_decay" else ~((x >= 0) & (x <= 2))
        bad &= real.reshape(-1, x.shape[1], *[1] * (x.ndim - 2))
        if bool(bad.any()):
            at = tuple(np.argwhere(np.asarray(bad))[0].tolist())
            return wrong_number(name, at, float(x[at]))
    return None


def recomputed(call: Call, arrays: Arrays, given: tuple[Any]) -> Any:
    """One device's part, of which the inputs and the states before chunks are kept for backward, and nothing else."""
    (starts,) = given
    if call.kernel == "pallas":
        part: Any = by_kernel(call, arrays, starts)
    else:
        policy = jax.checkpoint_policies.save_only_these_names(STATES)
        part = jax.checkpoint(partial(on_device, call), policy=policy)(arrays, starts)
    return jax.tree.map(lambda x: spoiled(x, starts), part)
