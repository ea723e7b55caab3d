"""One device's part of linear attention: its maps of the state, the exchange of states, its output.

    B batch   T this device's tokens   P segments a device   R = B * P rows   N chunks
    H heads   K key dim   V value dim

In `jax.numpy` (`on_device`) the states travel (states.py) beside the products within chunks. On TPUs a kernel computes
forward (`by_kernel`): once to find what this device does to the state, if there are others, and once from the state
that arrives. Kept for backward are the inputs and the state before each chunk; all else is worked out again, chunk by
chunk.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ringattn.jax.attention.function import real_tokens
from ringattn.jax.attention.steps import first_order, local_positions, numbered
from ringattn.jax.attention.ulysses import cleared
from ringattn.jax.linear.documents import Documents
from ringattn.jax.linear.states import STATES, exchange, summed
from ringattn.jax.lookup import entry, up_to
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear import jax_chunkwise as chunkwise
from ringattn.kernels.linear import pallas
from ringattn.kernels.linear.jax_chunkwise import CHUNK
from ringattn.kernels.varying import axes_of, vary
from ringattn.plans.plan import Plan
from ringattn.plans.segments import BEFORE, Way, choose, segments

Arrays = tuple[Array, Array, Array, Array | None, Array | None, Array | None]  # q, k, v, gates, beta, initial state


@dataclass(frozen=True)
class Call:
    """All of a call that is not an array: what a program is cached by."""

    plan: Plan
    scale: float
    scan: str
    returns: str  # which states: "", "rows" or "documents"
    by_document: bool  # whether states are one a document
    docs_padded: bool
    kernel: str


class Segments(NamedTuple):
    """This device's segments as rows, and the state before the sequence, [B, H, K, V]."""

    q: Array  # [R, T / P, heads, K]
    k: Array
    v: Array
    g: Array | None
    beta: Array | None
    start: Array
    begin: Array | None  # where each token's document began, see `begins`
    real: Any
    batch: int

    @classmethod
    def of(cls, call: Call, arrays: Arrays, starts: Any) -> "Segments":
        """With zeros where the plan or the documents pad."""
        plan, parts, batch = call.plan, segments(call.plan), arrays[0].shape[0]
        ranks = jnp.int32(plan.ring_axis.rank), jnp.int32(plan.ulysses_axis.rank)
        tokens: Any
        start: Any
        *tokens, start = vary(arrays, axes_of(arrays, starts, ranks))
        real = real_tokens(plan, starts, call.docs_padded)
        rows: Any = (None if x is None else cleared(x, real).reshape(batch * parts, -1, *x.shape[2:]) for x in tokens)
        q, k, v, g, beta = rows
        if start is None:
            start = jnp.zeros_like(k, accumulator(k), shape=(batch, v.shape[2], k.shape[3], v.shape[3]))
        begin = None if starts is None else begins(plan, numbered(starts), batch)
        return cls(q, k, v, g, beta, start, begin, real, batch)

    def joined(self, out: Array) -> Array:
        """The output of the rows as that of this device's tokens."""
        out = out[:, : self.v.shape[1]].reshape(self.batch, -1, *out.shape[2:])
        return cleared(out, self.real).astype(self.v.dtype)


def begins(plan: Plan, starts: Array, batch: int) -> Array:
    """Where each token's document began, counted from its segment's first token, [1 or R, T / P].

    Padding continues the last document; a row's first document, even an empty one, continues from the initial state.
    """
    at, parts = local_positions(plan), segments(plan)
    i = up_to(starts, jnp.minimum(at, starts[:, -1:] - 1)) - 1  # -1 if a row has no tokens
    i, first = (x.reshape(len(starts), parts, -1) for x in (i, entry(starts, i)))
    begin = jnp.where(i <= 0, BEFORE, first - at.reshape(parts, -1)[:, :1])
    if parts > 1:
        begin = jnp.broadcast_to(begin, (batch, *begin.shape[1:]))
    return begin.reshape(-1, begin.shape[-1])


def way_of(call: Call, x: Segments) -> Way:
    """How states travel; a symbolic batch counts as one row."""
    states = prod(n for n in (x.batch, *x.start.shape[1:3]) if isinstance(n, int))
    factor = 1 if x.beta is None else x.k.shape[-1]
    return choose(call.plan, call.scan, states * x.start.dtype.itemsize, x.v.shape[-1], factor)


def on_device(call: Call, arrays: Arrays, starts: Any, precomputed: Array | None = None) -> tuple[Array, Array | None]:
    """Its tokens in, its tokens' output back, and the state behind the last token of all, or of each document.

    The states before chunks may be `precomputed` (see `exchange`).
    """
    plan, x = call.plan, Segments.of(call, arrays, starts)
    q, k = (jnp.repeat(each, x.v.shape[2] // each.shape[2], 2) for each in (x.q, x.k))  # a copy for each value head
    v, g, beta, begin, start = x.v, x.g, x.beta, x.begin, x.start
    documents = Documents(plan, numbered(starts), x.batch, segments(plan)) if call.by_document else None
    if documents:
        begin, initial, start = None, documents.initial(start), jnp.zeros_like(start, shape=(x.batch, *start.shape[1:]))
        by_chunk: Any = (None if each is None else documents.by_chunk(each) for each in (q, k, v, g, beta))
        q, k, v, g, beta = by_chunk
    g, begin = chunkwise.gates(v, g), chunkwise.begins(begin)
    beta = None if beta is None else chunkwise.chunks(beta[..., None])
    q, k, v = chunkwise.chunks(q) * call.scale, chunkwise.chunks(k), chunkwise.chunks(v)
    written = chunkwise.written(k, v, g, beta, begin)
    maps = chunkwise.maps_of(k, v, written, g, begin)
    entered = maps
    if documents:
        first = documents.of_chunks(initial)
        entered = documents.entered(maps, first)
    within = chunkwise.within, ((q, k, written, g), begin)
    before, end, inner = exchange(plan, way_of(call, x), entered, start, *within, precomputed)
    if documents:
        before = documents.replaced(first, before)
        if call.returns:
            end = summed(documents.ends(maps, before, initial), plan)
    out = chunkwise.joined(chunkwise.passing(q, g, begin, inner, before), q.shape[0] * CHUNK)
    return x.joined(documents.by_token(out) if documents else out), end if call.returns else None


def kernel_of(kernel: str, plan: Plan, q: Array, v: Array, by_document: bool) -> str:
    """The kernel that runs: for "auto" the TPU's where it serves, else jax.numpy."""
    problem = None
    if plan.device not in ("tpu", "cpu"):
        problem = f"it is a TPU kernel (interpreted on CPUs), and the device is {plan.device}"
    elif q.dtype not in (jnp.float32, jnp.bfloat16):
        problem = f"it takes float32 and bfloat16, not {q.dtype}"
    elif by_document:
        problem = "it has no states of documents (initial_state or return_state one a document)"
    elif not all(isinstance(n, int) for n in q.shape):
        problem = f"the shape {q.shape} has symbols"
    elif max(q.shape[-1], v.shape[-1]) > pallas.MAX_DIM:
        problem = f"heads of {q.shape[-1]} and {v.shape[-1]} are wider than {pallas.MAX_DIM}"
    if kernel == "pallas" and problem:
        raise NotImplementedError(f"kernel='pallas': {problem}; leave kernel out, or use kernel='chunkwise'")
    if kernel == "auto":
        return "pallas" if plan.device == "tpu" and not problem else "chunkwise"
    return kernel


def by_kernel(call: Call, arrays: Arrays, starts: Any) -> tuple[Array, Array | None]:
    """As `on_device`, from the TPU kernel; gradients are those of `on_device`."""
    ranks = jnp.int32(call.plan.ring_axis.rank), jnp.int32(call.plan.ulysses_axis.rank)
    return computed(call, vary(arrays, axes_of(arrays, starts, ranks)), starts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def computed(call: Call, arrays: Arrays, starts: Any) -> tuple[Array, Array | None]:
    return in_two_passes(call, False, arrays, starts)[:2]


def computed_forward(call: Call, arrays: Arrays, starts: Any) -> tuple[Any, Any]:
    first = first_order("pallas", partial(in_two_passes, call, True), "use kernel='chunkwise'")
    out, end, before = first(arrays, starts)
    return (out, end), (arrays, starts, checkpoint_name(before, STATES))


def computed_backward(call: Call, saved: Any, given: Any) -> tuple[Any, None]:
    arrays, starts, before = saved
    _, back = jax.vjp(lambda arrays: on_device(call, arrays, starts, before), arrays)
    return *back(given), None


computed.defvjp(computed_forward, computed_backward)


def in_two_passes(call: Call, keep: bool, arrays: Arrays, starts: Any) -> tuple[Array, Array | None, Array | None]:
    """Output, the state behind all (if asked for), and if kept the states before chunks.

    The first pass is not needed on one device, and its exchange has nothing beside it: the second waits for the state.
    """
    plan, x, interpret = call.plan, Segments.of(call, arrays, starts), call.plan.device != "tpu"
    rows = pallas.Rows.of(x.q, x.k, x.v, x.g, x.beta, x.begin)
    before, behind = x.start, None
    if plan.ring * plan.ulysses > 1:
        maps = jax.tree.map(lambda each: each[None], pallas.segment(rows, interpret))
        nothing = jnp.zeros(1), None
        (before,), behind, _ = exchange(plan, way_of(call, x), maps, x.start, lambda each, _: each, nothing)
    out, end, *kept = pallas.outputs(rows, before, call.scale, keep, interpret)
    end = summed(end, plan) if behind is None else behind
    return x.joined(out), end if call.returns else None, kept[0] if kept else None
