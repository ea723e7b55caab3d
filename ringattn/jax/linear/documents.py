"""Linear attention with one state a document, in JAX: documents begin at chunks, where the state is replaced.

    B batch   P segments a device   R = B * P rows   T tokens a segment   N chunks of C tokens
    n documents of a row of the batch   H heads   K key dim   V value dim

Each segment's tokens are laid out again, so that every document begins with a chunk; a document's last chunk is filled
up with tokens that write nothing and decay nothing. So a chunk holds tokens of one document only. Where a document
begins, a chunk's map takes the document's initial state in the place of what was before: its factor becomes 0. Then
states travel as without documents. Documents may be traced, so N is the most chunks that n documents can need.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ringattn.jax.attention.steps import local_positions
from ringattn.jax.lookup import entry, up_to
from ringattn.kernels.linear.jax_chunkwise import CHUNK, Map
from ringattn.plans.plan import Plan


class Documents:
    """Where the documents of this device's segments lie, as (traced) index arrays."""

    def __init__(self, plan: Plan, starts: Array, batch: int, parts: int):
        at = local_positions(plan)
        first, T, n = at.reshape(parts, -1)[:, :1], at.shape[0] // parts, starts.shape[1] - 1
        self.batch, self.parts, self.each = batch, parts, n
        self.first_device = (plan.ring_axis.rank == 0) & (plan.ulysses_axis.rank == 0)
        self.N = min(T, (T + n * (CHUNK - 1)) // CHUNK)
        starts = jnp.broadcast_to(starts, (batch, n + 1))
        begin, end = (jnp.repeat(x, parts, 0) for x in (starts[:, :-1], starts[:, 1:]))  # [R, n]
        first = jnp.tile(first, (batch, 1))
        lo, hi = jnp.clip(begin - first, 0, T), jnp.clip(end - first, 0, T)
        used = hi > lo
        chunks = -(-(hi - lo) // CHUNK)
        behind = jnp.cumsum(chunks, 1)  # the chunks of documents up to this one
        self.begun, self.ended = used & (begin >= first), used & (end <= first + T)
        self.last = jnp.maximum(behind - 1, 0)
        self.empty = starts[:, 1:] == starts[:, :-1]  # [B, n]

        chunk, token = jnp.arange(self.N, dtype=behind.dtype), jnp.arange(T, dtype=behind.dtype)
        self.document = of_ranges(behind, chunk)  # [R, N]
        at_first = entry(behind - chunks, self.document) == chunk
        self.fresh = at_first & entry(self.begun, self.document)  # whether a document begins with it
        inner = (chunk - entry(behind - chunks, self.document))[..., None] * CHUNK + jnp.arange(CHUNK)
        source = entry(lo, self.document)[..., None] + inner
        inside = (chunk < behind[:, -1:])[..., None] & (source < entry(hi, self.document)[..., None])
        self.source = jnp.where(inside, source, -1).reshape(lo.shape[0], -1)  # [R, N * C]: which token; -1: none
        mine = of_ranges(hi, token)  # [R, T]
        into = entry((behind - chunks) * CHUNK - lo, mine) + token
        self.into = jnp.where((token >= entry(lo, mine)) & (token < hi.max(1, keepdims=True)), into, -1)

    def by_chunk(self, x: Array) -> Array:
        """[R, T, ...] as [R, N * C, ...]; zeros where a chunk is filled up."""
        return taken(x, self.source, self.into)

    def by_token(self, x: Array) -> Array:
        """The inverse of `by_chunk`; zeros for padding."""
        return taken(x, self.into, self.source)

    def initial(self, state: Array) -> Array:
        """The state before each document, [B, n, H, K, V], from as many or from one a row, that of its first one."""
        given = state.reshape(self.batch, -1, *state.shape[1:])
        return jnp.pad(given, [(0, 0), (0, self.each - given.shape[1]), *[(0, 0)] * 3])

    def of_chunks(self, initial: Array) -> Array:
        """The state that a chunk begins with if a document does, [N, R, H, K, V]."""
        row = jnp.arange(self.batch * self.parts)[:, None] // self.parts
        return initial[row, self.document].swapaxes(0, 1)

    def replaced(self, first: Array, before: Array) -> Array:
        """`before`, and `first` where a document begins: [N, R, ...] both."""
        return jnp.where(self.fresh.T.reshape(*self.fresh.T.shape, *[1] * (before.ndim - 2)), first, before)

    def entered(self, maps: Map, first: Array) -> Map:
        """The maps of chunks, which take the state `first` in the place of the one before where a document begins."""
        factor, kv = jnp.zeros_like(maps.factor), maps.after(first)
        return Map(self.replaced(factor, maps.factor), self.replaced(kv, maps.kv))

    def ends(self, maps: Map, before: Array, initial: Array) -> Array:
        """The state behind each document that ends on this device, 0 for others: [B * n, H, K, V].

        Behind an empty document is the state before it; it ends on the first device.
        """
        behind = maps.after(before)[self.last, jnp.arange(self.batch * self.parts)[:, None]]  # [R, n, ...]
        behind = jnp.where(self.ended[..., None, None, None], behind, 0)
        ending = behind.reshape(self.batch, self.parts, *behind.shape[1:]).sum(1)
        ending = jnp.where((self.empty & self.first_device)[..., None, None, None], initial, ending)
        return ending.reshape(-1, *ending.shape[2:])


def of_ranges(ends: Array, x: Array) -> Array:
    """The range that each x [X] lies in, [R, X]; range i of a row ends at ends[i], the last one has no end."""
    return jnp.minimum(up_to(ends, x), ends.shape[1] - 1)


@jax.custom_vjp
def taken(x: Array, to: Array, back: Array) -> Array:
    """x[r, to[r, i]], 0 where `to` is negative; `back` is the inverse, by which gradients go."""
    rows = x[jnp.arange(x.shape[0])[:, None], jnp.maximum(to, 0)]
    return jnp.where(to.reshape(*to.shape, *[1] * (x.ndim - 2)) < 0, 0, rows)


def taken_forward(x: Array, to: Array, back: Array) -> tuple[Array, Any]:
    return taken(x, to, back), (to, back)


def taken_backward(saved: Any, dfound: Array) -> tuple[Array, None, None]:
    to, back = saved
    return taken(dfound, back, to), None, None


taken.defvjp(taken_forward, taken_backward)
