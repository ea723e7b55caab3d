"""One device's part of linear attention: its maps of the state, the exchange of states, its output.

    B batch   T this device's tokens   P segments a device   R = B * P rows   N chunks
    H heads   K key dim   V value dim

Every device gets the maps of all segments, and composes those before its own. In `jax.numpy` (`on_device`) XLA lets the
products within chunks run beside that. On TPUs a kernel computes forward (`by_kernel`): once to find what this device
does to the state, if there are others, and once from the state that arrives. Kept for backward are the inputs and the
state before each chunk; all else is worked out again, chunk by chunk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ringattn.comms.jax import MeshAxis
from ringattn.jax.attention.function import real_tokens
from ringattn.jax.attention.steps import first_order, local_positions, numbered
from ringattn.jax.attention.ulysses import cleared
from ringattn.jax.lookup import entry, up_to
from ringattn.jax.sharding import sequence_axes
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear import jax_chunkwise as chunkwise
from ringattn.kernels.linear import pallas
from ringattn.kernels.linear.jax_chunkwise import CHUNK, Map, composed, walk
from ringattn.kernels.varying import axes_of, vary
from ringattn.plans.plan import Plan
from ringattn.plans.segments import BEFORE, order, segments

Arrays = tuple[Array, Array, Array, Array | None, Array | None, Array | None]  # q, k, v, gates, beta, initial state
STATES = "states"  # what jax.checkpoint finds the states before chunks by


@dataclass(frozen=True)
class Call:
    """All of a call that is not an array: what a program is cached by."""

    plan: Plan
    scale: float
    returns_state: bool
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


def on_device(call: Call, arrays: Arrays, starts: Any, precomputed: Array | None = None) -> tuple[Array, Array | None]:
    """Its tokens in, its tokens' output back, and the state behind the last token of all.

    The states before chunks may be `precomputed` (see `exchange`).
    """
    x = Segments.of(call, arrays, starts)
    q, k = (jnp.repeat(each, x.v.shape[2] // each.shape[2], 2) for each in (x.q, x.k))  # a copy for each value head
    q, k, v = chunkwise.chunks(q) * call.scale, chunkwise.chunks(k), chunkwise.chunks(x.v)
    g, begin = chunkwise.gates(x.v, x.g), chunkwise.begins(x.begin)
    beta = None if x.beta is None else chunkwise.chunks(x.beta[..., None])
    written = chunkwise.written(k, v, g, beta, begin)
    maps = chunkwise.maps_of(k, v, written, g, begin)
    before, end = exchange(call.plan, maps, x.start, precomputed)
    inner = chunkwise.within((q, k, written, g), begin)
    out = chunkwise.joined(chunkwise.passing(q, g, begin, inner, before), q.shape[0] * CHUNK)
    return x.joined(out), end if call.returns_state else None


def exchange(plan: Plan, maps: Map, start: Array, precomputed: Array | None = None) -> tuple[Array, Array]:
    """The state before each chunk [N, R, H, K, V], and the one behind the whole sequence.

    `maps` is what each chunk does, [N, R, ...]; `start` is before the first of all, the same on every device. If the
    states before chunks are `precomputed`, nothing is exchanged and the state behind is 0; gradients are the same.
    """
    before, end = states(plan, False, *vary((maps, start), axes_of(maps, start)), precomputed)
    return before, summed(end, plan)


def summed(end: Array, plan: Plan) -> Array:
    """Over the axes that cut the sequence; one of size 1 only where it counts as different along it."""
    if not isinstance(plan.ring_axis, MeshAxis):
        return end
    sizes, varying = plan.ring_axis.mesh.shape, axes_of(end)
    names = tuple(name for name in sequence_axes(plan) if sizes[name] > 1 or name in varying)
    return lax.psum(end, names) if names else end


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def states(plan: Plan, reverse: bool, maps: Map, start: Array, precomputed: Array | None = None) -> tuple[Array, Array]:
    """The state before each chunk, and behind all, on the device that the walk ends at, zeros elsewhere.

    `start` is the same on every device, and so it is in reverse: every device gets the sum of those ends.
    """
    if precomputed is not None:
        return precomputed, vary(jnp.zeros_like(start), axes_of(maps, start))
    if plan.ring * plan.ulysses == 1:
        return walk(maps, start, reverse)
    before, end = across(plan, reverse, composed(maps, reverse), start)
    return walk(maps, before, reverse)[0], end


def forward(plan: Plan, reverse: bool, maps: Map, start: Array, precomputed: Array | None) -> tuple[Any, Any]:
    before, end = states(plan, reverse, maps, start, precomputed)
    before = checkpoint_name(before, STATES)
    return (before, end), (maps, before)


def backward(plan: Plan, reverse: bool, saved: Any, given: Any) -> tuple[Map, Array, None]:
    """The gradient of the state behind a chunk is factor * (that behind the next one) + (what read the state there)."""
    (maps, before), (dbefore, dend) = saved, given
    dbehind, dstart = states(plan, not reverse, maps.transposed(dbefore), dend)
    return Map(maps.factor_gradient(before, dbehind), dbehind), dstart, None


states.defvjp(forward, backward)


def across(plan: Plan, reverse: bool, local: Map, start: Array) -> tuple[Array, Array]:
    """The state before each segment of this device [R, H, K, V], and the end of `states`; all segments are composed."""
    parts, places = segments(plan), order(plan)[:: -1 if reverse else 1]
    at = np.array([(ring * plan.ulysses + ulysses) * parts + part for ring, ulysses, part in places])

    def everywhere(x: Array) -> Array:
        """[R, ...] of every device as [their segments, B, ...]."""
        every = x[None]
        for axis in (plan.ulysses_axis, plan.ring_axis):
            every = axis.all_gather(every).wait()
        every = jnp.moveaxis(every.reshape(len(every), -1, parts, *x.shape[1:]), 2, 1)
        return every.reshape(-1, *every.shape[2:])

    before, end = walk(jax.tree.map(lambda x: everywhere(x)[at], local), start)
    ring, ulysses = plan.ring_axis.rank, plan.ulysses_axis.rank
    mine = np.argsort(at).astype(np.int32).reshape(plan.ring, plan.ulysses, parts)
    before = jnp.moveaxis(before[jnp.asarray(mine)[ring, ulysses]], 0, 1)
    is_last = (ring == places[-1][0]) & (ulysses == places[-1][1])
    return before.reshape(-1, *before.shape[2:]), jnp.where(is_last, end, 0)


def kernel_of(kernel: str, plan: Plan, q: Array, v: Array) -> str:
    """The kernel that runs: for "auto" the TPU's where it serves, else jax.numpy."""
    problem = None
    if plan.device not in ("tpu", "cpu"):
        problem = f"it is a TPU kernel (interpreted on CPUs), and the device is {plan.device}"
    elif q.dtype not in (jnp.float32, jnp.bfloat16):
        problem = f"it takes float32 and bfloat16, not {q.dtype}"
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
        (before,), behind = exchange(plan, maps, x.start)
    out, end, *kept = pallas.outputs(rows, before, call.scale, keep, interpret)
    end = summed(end, plan) if behind is None else behind
    return x.joined(out), end if call.returns_state else None, kept[0] if kept else None
