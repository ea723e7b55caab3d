"""Linear attention on JAX arrays: each device's maps of the state, the exchange of states, each device's output.

    B batch   T this device's tokens   H heads   K key dim   V value dim   P segments a device

The states travel beside the products within chunks (states.py). Kept for backward are the inputs and the state before
each chunk; all else is worked out again, chunk by chunk.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ringattn.check import by_document, of_choice, of_linear, of_scale, of_state, returned_states, wrong_number
from ringattn.jax.attention.function import cut_of_rows, filled, is_eager, real_tokens, whole_numbers
from ringattn.jax.attention.steps import local_positions
from ringattn.jax.attention.ulysses import cleared
from ringattn.jax.check import of_dtypes
from ringattn.jax.linear.documents import Documents
from ringattn.jax.linear.states import KEPT, exchange, summed
from ringattn.jax.sharding import cut_of_tokens, located, mesh_here, over_mesh
from ringattn.kernels import jax_chunkwise as chunkwise
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.jax_chunkwise import CHUNK
from ringattn.kernels.pallas.varying import axes_of, vary
from ringattn.planning import Plan
from ringattn.segments import BEFORE, WAYS, choose, segments
from ringattn.spec import Docs

WORDS = {"kernel": ("auto", "chunkwise"), "scan": ("auto", *WAYS)}

Arrays = tuple[Array, Array, Array, Array | None, Array | None, Array | None]  # q, k, v, gates, beta, initial state


@dataclass(frozen=True)
class Call:
    """All of a call that is not an array: what a program is kept by."""

    plan: Plan
    scale: float
    scan: str
    returned: str  # which states: "", "rows" or "documents"
    documents: bool  # whether states are one a document
    docs_padded: bool


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
    plan, lying, inside = located(q, k, v, plan, linear=True)
    arrays = q, k, v, log_decay, beta, initial_state
    words = {"kernel": kernel, "scan": scan}
    held = plan.local_len if inside else plan.tokens.padded_length
    problem = problem_of(arrays, plan, docs, scale, words, held) or of_numbers(log_decay, beta, plan, docs, check)
    if problem:
        raise ValueError(problem)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    returned = returned_states(return_state, initial_state, docs, q.shape[0])
    documents = returned == "documents" or by_document(initial_state, docs, q.shape[0])
    if is_eager(q) and not documents:
        docs = filled(docs)
    call = Call(plan, scale, scan, returned, documents, docs is not None and docs.padded)
    if inside:
        out, end = alone(call)(arrays, whole_numbers(docs and docs.starts))
    else:
        mesh, tokens = mesh_here(plan), cut_of_tokens(q, k, plan, lying)
        rows = cut_of_rows(docs, tokens)
        starts = whole_numbers(docs and docs.starts, mesh if is_eager(q) else None, rows)
        out, end = program(call, mesh, tokens, rows)(arrays, starts)
    return (out, end) if return_state else out


def problem_of(
    arrays: Arrays, plan: Plan, docs: Docs | None, scale: float | None, words: dict[str, str], held: int
) -> str | None:
    """The first thing that is wrong with a call, as far as shapes and dtypes show it."""
    q, k, v, log_decay, beta, initial_state = arrays
    found = of_linear(q, k, v, log_decay, beta, plan, docs, held) or of_dtypes(q, k, v) or of_scale(scale, q.shape[-1])
    for name, word in words.items():
        found = found or of_choice(name, word, WORDS[name])
    if found is None and initial_state is not None:
        found = of_state("initial_state", initial_state, q, v, accumulator(q), docs)
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if found is None and x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            found = f"{name} is {x.dtype}; expected floats"
    return found


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


@lru_cache(maxsize=128)
def program(call: Call, mesh: Mesh | AbstractMesh, tokens: P, rows: P) -> Any:
    """`Arrays`, starts -> out, end on global arrays, of which `tokens` says how q is cut."""
    state = P(tokens[0], tokens[2])
    free = call.plan.axes.cuts is None
    return over_mesh(recomputed(call), mesh, ((*[tokens] * 5, state), rows), (tokens, state), free=free)


@lru_cache(maxsize=128)
def alone(call: Call) -> Any:
    """One device's part as a program of its own, which is compiled once."""
    return jax.jit(recomputed(call))


def recomputed(call: Call) -> Any:
    """`on_device`, of which the inputs and the states before chunks are kept for backward, and nothing else."""
    return jax.checkpoint(partial(on_device, call), policy=jax.checkpoint_policies.save_only_these_names(KEPT))


def on_device(call: Call, arrays: Arrays, starts: Any) -> tuple[Array, Array | None]:
    """One device's part: its tokens in, its tokens' output back, and the state behind the last token of all, or of each
    document.
    """
    plan, parts = call.plan, segments(call.plan)
    B, T = arrays[0].shape[:2]
    ranks = jnp.int32(plan.ring_axis.rank), jnp.int32(plan.ulysses_axis.rank)
    *tokens, start = vary(arrays, axes_of(arrays, starts, ranks))
    real = real_tokens(plan, starts, call.docs_padded)
    folded: Any = (None if x is None else rows_of(cleared(x, real), parts) for x in tokens)
    q, k, v, g, beta = folded
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q, k))  # a copy for each value head
    documents = Documents(plan, starts, B, parts) if call.documents else None
    begin = None if starts is None or documents else begins(plan, starts, B, parts)
    zero = jnp.zeros_like(k, accumulator(k), shape=(B, *k.shape[2:], v.shape[-1]))
    start = zero if start is None else start
    if documents:
        initial, start = documents.initial(start), zero
        q, k, v, g, beta = (None if x is None else documents.laid_out(x) for x in (q, k, v, g, beta))
    known = prod(n for n in start.shape[:3] if isinstance(n, int))  # a batch that is a symbol counts as one row
    way = choose(plan, call.scan, known * start.dtype.itemsize, v.shape[-1], 1 if beta is None else k.shape[-1])
    shape, dtype = (B, T, *v.shape[2:]), v.dtype
    g, begin, beta = (
        chunkwise.gates(v, g),
        chunkwise.begins(begin),
        None if beta is None else chunkwise.chunks(beta[..., None]),
    )
    q, k, v = chunkwise.chunks(q) * call.scale, chunkwise.chunks(k), chunkwise.chunks(v)
    written = chunkwise.written(k, v, g, beta, begin)
    maps = chunkwise.maps_of(k, v, written, g, begin)
    if documents:
        own, alone = documents.of_chunks(initial), maps
        maps = documents.entered(maps, own)
    before, end, inner = exchange(plan, way, maps, start, chunkwise.within, ((q, k, written, g), begin))
    if documents:
        before = documents.replaced(own, before)
        if call.returned:
            end = summed(documents.ends(alone, before, initial), plan)
    out = chunkwise.passing(q, g, begin, inner, before)
    out = documents.whole(chunkwise.joined(out, q.shape[0] * CHUNK)) if documents else chunkwise.joined(out, T // parts)
    return cleared(out.reshape(shape), real).astype(dtype), end if call.returned else None


def rows_of(x: Array, parts: int) -> Array:
    """The segments of each row, as rows."""
    return x.reshape(x.shape[0] * parts, -1, *x.shape[2:])


def begins(plan: Plan, starts: Array, batch: int, parts: int) -> Array:
    """Where each token's document began, counted from its segment's first token, [1 or B * P, T / P].

    Padding continues the last document; a row's first document, even an empty one, continues from the initial state.
    """
    at = local_positions(plan)
    i = jax.vmap(partial(jnp.searchsorted, side="right"))(starts, jnp.minimum(at, starts[:, -1:] - 1)) - 1
    i = i.reshape(len(starts), parts, -1)  # -1 if a row has no tokens
    first = jnp.take_along_axis(starts[:, None], i, 2)
    local = jnp.where(i <= 0, BEFORE, first - at.reshape(parts, -1)[:, :1])
    if parts > 1:
        local = jnp.broadcast_to(local, (batch, *local.shape[1:]))
    return local.reshape(-1, local.shape[-1])
