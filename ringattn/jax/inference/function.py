"""Attention of new tokens against a cache that is spread over devices: prefill and decode, on JAX arrays.

    B batch   T new tokens   H query heads   G key/value heads   D head dim   V value dim

Both take a cache and give (out, the cache with the new tokens). Lengths may be traced: a loop over tokens is one
`lax.scan`. Both attend to intervals of what each device holds, and merge partials in the order of the devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ringattn.check.arguments import of_sizes, of_unknown
from ringattn.check.attention import of_dtypes, of_shapes, of_sinks
from ringattn.check.cache import of_chunk, of_decoded
from ringattn.jax.attention.steps import local_positions, recipe_of, score_of
from ringattn.jax.inference.cache import KVCache, keep, over_devices
from ringattn.jax.lookup import reordered
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, add_sinks, empty, merge_stack, packed, unpacked
from ringattn.masks.bands import intervals
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import AttentionSpec, raise_if, whole
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.serving import WAYS, keys_at_once


def prefill(
    q: Array, k: Array, v: Array, plan: Plan, cache: KVCache, *, spec: AttentionSpec | None = None,
    sinks: Array | None = None, move: str = "auto", keys: int | None = None,
) -> tuple[Array, KVCache]:  # fmt: skip
    """`ringattn.prefill`: (out [B, T, H, V], the cache). Arrays are global, in the order of `plan`.

    For move="auto" the cache counts as full. `keys` is by default a few times a device's queries.
    """
    spec = AttentionSpec() if spec is None else spec
    raise_if(
        of_choice("move", move, ("auto", *WAYS))
        or of_sizes("keys", keys=keys)
        or of_shapes(q, k, v)
        or of_dtypes(q, k, v)
        or of_sinks(sinks, q.shape[2])
        or of_chunk(q, k, v, plan, cache, spec, plan.tokens.padded_length)
    )
    way = cache.way(plan, q.shape[2]) if move == "auto" else move
    work = Prefill(plan, spec, way, whole(keys) or keys_at_once(plan.local_len))
    cache, out = over_devices(work, cache, (q, k, v), (sinks,))
    return out, cache


def decode(
    q: Array, k: Array, v: Array, cache: KVCache, *, spec: AttentionSpec | None = None, sinks: Array | None = None,
    parents: Sequence[int] | None = None, **unknown: Any,
) -> tuple[Array, KVCache]:  # fmt: skip
    """`ringattn.decode` of q, k, v [B, n, H or G, D], which every device has: (out [B, n, H, V], the cache).

    Each device attends to its own keys; the partials of all are gathered in one transfer. Trees of drafts are refused.
    """
    spec = AttentionSpec() if spec is None else spec
    if parents is not None:
        raise NotImplementedError("parents: trees of drafts are for torch; in JAX decode the branches one by one")
    raise_if(
        of_unknown("decode", unknown)
        or of_shapes(q, k, v)
        or of_dtypes(q, k, v)
        or of_sinks(sinks, q.shape[2])
        or of_decoded(q, k, v, cache, spec, cache.concrete_lengths)
    )
    cache, out = over_devices(Decode(spec), cache, (), (q, k, v, sinks))
    return out, cache


@dataclass(frozen=True)
class Decode:
    """One device's part of a decode."""

    spec: AttentionSpec

    def __call__(self, cache: KVCache, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[KVCache, Array]:
        before, n = cache.lengths, q.shape[1]
        cache, _ = keep(cache, k, v)
        queries = Queries(q, cache, self.spec, before, n, jnp.arange(n))
        partial = queries.attend((cache.k, cache.v), cache.line.rank, empty(q, v.shape[-1]))
        every = cache.line.all_gather(packed(partial)[None]).wait()
        return cache, finished(merge_stack(unpacked(every, v.shape[-1])), sinks, q)


@dataclass(frozen=True)
class Prefill:
    """One device's part of a chunk."""

    plan: Plan
    spec: AttentionSpec
    way: str
    keys: int

    def __call__(self, cache: KVCache, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[KVCache, Array]:
        tokens, before = self.plan.seq_len, cache.lengths
        cache, _ = keep(cache, self.everyone(k), self.everyone(v))
        if self.way == "queries":
            queries = Queries(self.everyone(q), cache, self.spec, before, tokens, jnp.arange(tokens))
            partial = self.scattered(queries.attend_around(self.keys, hops=0), cache.line)
        else:
            queries = Queries(q, cache, self.spec, before, tokens, local_positions(self.plan))
            partial = queries.attend_around(self.keys, hops=cache.line.size - 1)
        return cache, finished(partial, sinks, q)

    def everyone(self, x: Array) -> Array:
        """The whole chunk's tokens, in their own order."""
        every = x
        for axis in (self.plan.ulysses_axis, self.plan.ring_axis):
            every = axis.all_gather(every, 1).wait()
        return reordered(every, self.plan.tokens, 1, back=True)[:, : self.plan.seq_len]

    def scattered(self, whole: Partial, line: Any) -> Partial:
        """Partials of the whole chunk on every device -> this device's tokens, merged over all devices in order."""
        pad = self.plan.tokens.padded_length - self.plan.seq_len
        rows = jnp.pad(packed(whole), ((0, 0), (0, pad), (0, 0), (0, 0)))
        rows = reordered(rows, self.plan.tokens, 1)
        (every,) = line.all_to_all([rows[None]], split=2, join=0).wait()
        return merge_stack(unpacked(every, whole.out.shape[-1]))


class Queries(NamedTuple):
    """Some queries of a chunk, and a cache that already has the keys of the whole chunk."""

    q: Array
    cache: KVCache
    spec: AttentionSpec
    before: Array  # how many tokens each batch row had
    tokens: int
    at: Array  # the queries' places in the chunk

    def visible(self, at: Array) -> list[tuple[Array, Array]]:
        """Of each family, the positions that the queries `at` see, begin and end [B, T], which never decrease.

        A token that did not fit sees nothing.
        """
        last = self.cache.lengths[:, None]
        position = self.before[:, None] + at[None].astype(jnp.int32)
        seen = intervals(self.spec, position, jnp.zeros_like(position), jnp.broadcast_to(last, position.shape))
        fits = position < last
        return [(jnp.where(fits, begin, last), jnp.where(fits, end, last)) for begin, end in seen]

    def attend(self, keys: tuple[Array, Array], source: Any, partial: Partial, start: Any = 0, low: Any = 0) -> Partial:
        """Attention over keys and values of slots of the device `source`, merged into `partial`.

        The slots are those from `start` on; those before `low` were attended to already. Nothing runs if no key is
        seen. What a chunk sees of a device is at most as many keys as there are slots. Counted from the start of the
        round in which its first key lies, they lie in that round and in the next: an interval of slots in either.
        """
        cache, size = self.cache, keys[0].shape[1]
        slots = cache.k.shape[1]
        score = score_of(recipe_of(self.q, *keys, Mask(cache.plan, self.spec), static=False))
        for seen in self.visible(self.at):
            begin, end = (cache.stripes.below(side, source, jnp) for side in seen)
            origin = begin[:, :1] // slots * slots
            for _ in range(1 if slots * cache.stripes.ranks >= cache.max_len else 2):
                first, last = (jnp.clip(x - origin - start, low - start, size) for x in (begin, end))
                partial = lax.cond(
                    (first < last).any(),
                    lambda partial, where: Partial(*score.attend(self.q, *keys, where, carry=partial)),
                    lambda partial, where: partial,
                    partial, Intervals(first, last),
                )  # fmt: skip
                origin = origin + slots
        return partial

    def attend_around(self, keys: int, hops: int) -> Partial:
        """Attention over this device's keys and those of `hops` devices before it, at most `keys` slots at once.

        The latter travel around the ring behind the compute.
        """
        line, rank, slots = self.cache.line, self.cache.line.rank, self.cache.k.shape[1]
        size = min(keys, slots)

        def attend_next(i: Array, partial: Partial) -> Partial:
            low, start = i * size, jnp.minimum(i * size, slots - size)
            pair: Any = tuple(lax.dynamic_slice_in_dim(x, start, size, 1) for x in (self.cache.k, self.cache.v))

            def hop(carry: Any, distance: Any) -> Any:
                pair, partial = carry
                arriving = line.rotate(pair).wait()
                partial = self.attend(pair, (rank - distance) % line.size, partial, start, low)
                return lax.optimization_barrier((arriving, partial)), None

            if hops:
                (pair, partial), _ = lax.scan(hop, (pair, partial), jnp.arange(hops))
            return self.attend(pair, (rank - hops) % line.size, partial, start, low)

        first, last = self.reach()
        return lax.fori_loop(first // size, -(-last // size), attend_next, empty(self.q, self.cache.v.shape[-1]))

    def reach(self) -> tuple[Array, Array]:
        """The smallest range of slots that has, on every device, all keys that some query of the chunk sees.

        All slots, where such keys have come round. It is worked out for all devices at once, so all get the same.
        """
        cache, slots = self.cache, self.cache.k.shape[1]
        sides = zip(*self.visible(jnp.array([0, self.tokens - 1])), strict=True)
        begin, end = (jnp.stack(side) for side in sides)
        below = cache.stripes.below
        low, high = below(begin, cache.stripes.ranks - 1, jnp).min(), below(end, 0, jnp).max()
        if cache.cut[0] is not None:  # all rows of the batch share a hop
            low, high = lax.pmin(low, cache.cut[0]), lax.pmax(high, cache.cut[0])
        return jnp.where(high > slots, 0, low), jnp.minimum(high, slots)


def finished(partial: Partial, sinks: Array | None, q: Array) -> Array:
    return (partial if sinks is None else add_sinks(partial, sinks)).out.astype(q.dtype)
