"""A cache of keys and values spread over devices, as a value: what appends returns another cache.

Position p lies on device (p // block) % devices, as in torch: a device's positions are sorted, and what a query sees of
them is one interval. In a device's memory they go round: the i-th of them lies in slot i % slots. Where there is a slot
for every token nothing ever comes round; a cache with a window has fewer, and a new key takes the slot of one that
nobody sees any more.

A cache is a pytree whose lengths are traced: a decode loop is compiled once. Give it to a jitted step with
`donate_argnums`, and its memory is written in place.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringattn import serving
from ringattn.check.arguments import of_arrays
from ringattn.check.cache import beside_window, each, of_back, of_fork, of_new, of_room, of_truncated
from ringattn.comms.axis import Solo
from ringattn.comms.jax import MeshAxis
from ringattn.jax.sharding import batch_axes, check_context, moved, over_mesh, sequence_axes
from ringattn.masks.spec import raise_if
from ringattn.plans.plan import LARGEST_POSITION, Plan
from ringattn.serving import Heads, Stripes, prefill_way


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("k", "v", "lengths", "first"),
    meta_fields=("plan", "max_len", "stripes", "window", "most", "cut"),
)
@dataclass(frozen=True)
class KVCache(serving.KVCache):
    """Keys and values of every token so far; `lengths` says how many each batch row has. Make it with `allocate`."""

    k: Array  # [B, all devices' slots, G, D], cut along the second dim, and as `cut` says
    v: Array
    lengths: Array  # [B], int32
    first: Array  # [B], int32: the position from which on a row's keys are kept
    plan: Plan
    max_len: int
    stripes: Stripes
    window: int | None
    most: int | None  # tokens of a row that need a slot at one time; None: all of them
    cut: P  # the axes of the mesh that cut batch and heads

    @classmethod
    def made(
        cls, plan: Plan, batch: int, max_len: int, kv_heads: int, dims: tuple[int, int], dtype: str, stripes: Stripes,
        window: int | None, most: int | None,
    ) -> "KVCache":  # fmt: skip
        """An empty cache for `allocate`, which has checked the sizes; with a window for `most` tokens at one time.

        The axes that the plan names cut the batch and the heads; by default data cuts the batch, if it divides it.
        """
        mesh = plan.ring_axis.mesh if isinstance(plan.ring_axis, MeshAxis) else None
        heads = (plan.axes.cuts or ((), ()))[1] or None
        cut = P((mesh and batch_axes(plan, mesh, batch)) or None, None, heads)
        raise_if(of_positions(max_len))
        if kv_heads % devices_along(plan, heads):
            raise ValueError(f"kv_heads={kv_heads}: {heads}={devices_along(plan, heads)} cut the heads; name others")
        rows = (batch, stripes.ranks * slots_for(max_len, most, stripes), kv_heads)
        tokens = spec_of(cut, sequence_axes(plan)) if mesh else P()
        k, v = (zeros((*rows, dim), dtype, mesh, tokens) for dim in dims)
        lengths, first = (zeros((batch,), jnp.int32, mesh, P(cut[0])) for _ in range(2))
        return cls(k, v, lengths, first, plan, max_len, stripes, window, most, cut)

    @property
    def concrete_lengths(self) -> np.ndarray | None:
        """The lengths as numbers; None while they are traced."""
        return at_hand(self.lengths)

    def room(self) -> Array:
        """How many more tokens every row can take: a number, traced if lengths are."""
        return self.max_len - self.lengths.max()

    @property
    def line(self) -> Any:
        """All devices as one axis, in the order in which they hold the blocks."""
        ring = self.plan.ring_axis
        return MeshAxis(sequence_axes(self.plan), ring.mesh) if isinstance(ring, MeshAxis) else Solo()

    def append(self, k: Array, v: Array) -> "KVCache":
        """The cache with the next tokens, k and v [B, n, G, D], the same on every device; each keeps its share.

        Where lengths are traced, what does not fit is dropped.
        """
        raise_if(of_arrays({"k": k, "v": v}, {}, self.plan) or self.problem(k, v, k.shape[1]))
        return over_devices(keep, self, (), (k, v))[0]

    def truncate(self, lengths: int | Sequence[int] | Array) -> "KVCache":
        """The cache without the tokens from these lengths on, one number for all rows or one per row."""
        new = counted(lengths, len(self.lengths))
        first = self.first
        if self.window is not None:  # the next token must still see its whole window
            first = jnp.where(first > 0, first + min(self.window, LARGEST_POSITION) - 1, 0)
        raise_if(of_back(None if isinstance(new, Array) else new, self.concrete_lengths, at_hand(first)))
        return replace(self, lengths=jnp.minimum(self.lengths, new.clip(0, self.max_len).astype(np.int32)))

    def fork(self, copies: int = 1, max_len: int | None = None) -> "KVCache":
        """`copies` continuations of every row, each with its own copy of the memory."""
        max_len = self.max_len if max_len is None else max_len
        raise_if(of_fork(copies, max_len, self.concrete_lengths) or of_positions(max_len))
        copies, max_len = operator.index(copies), operator.index(max_len)  # also from arrays with one number
        slots = slots_for(max_len, self.most, self.stripes)  # more than before only if no slot was used twice
        return replace(over_devices(Fork(copies, slots), self, (), ())[0], max_len=max_len)

    def way(self, plan: Plan, heads: int) -> str:
        """What will travel when a chunk under `plan` attends to this cache, as if it were full: "queries" or "keys"."""
        road = plan.machine, plan.link, plan.device != "cpu"
        ranks, cached = self.stripes.ranks, min(self.max_len, self.k.shape[1])
        return prefill_way(ranks, plan.local_len, cached, self.heads_of(heads), *road)

    def heads_of(self, heads: int) -> Heads:
        """The sizes of a token on one device, if there are `heads` query heads in all."""
        rows, cut = (devices_along(self.plan, self.cut[dim]) for dim in (0, 2))
        B, _, G, D = self.k.shape
        return Heads(heads // cut, G // cut, D, self.v.shape[-1], self.k.dtype.itemsize, B // rows)

    def problem(self, k: Array, v: Array, n: int) -> str | None:
        """Why n tokens like those in k and v cannot be appended."""
        if problem := of_new(k, v, self):
            return problem
        for name, x, mine in (("k", k, self.k), ("v", v, self.v)):
            if x.dtype != mine.dtype:
                return f"{name} is {x.dtype}, the cache {mine.dtype}; cast {name}, or allocate the cache so"
        problem = of_room(n, self.concrete_lengths, self.max_len)
        if problem is None and self.window is not None and min(self.max_len, self.window - 1 + n) > self.k.shape[1]:
            return beside_window(n, self.window)
        return problem

    def __repr__(self) -> str:
        lengths = "traced" if self.concrete_lengths is None else self.concrete_lengths.tolist()
        return f"KVCache(lengths {lengths} of {self.max_len}, over {self.stripes.ranks} ranks)"


def zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh | AbstractMesh | None, spec: P) -> Array:
    """Zeros, cut over the mesh if there is one, also while traced, when `device=` has no effect."""
    there = mesh and NamedSharding(mesh, spec)
    x = jnp.zeros(shape, dtype, device=there)
    return moved(x, there) if there else x


def at_hand(x: Any) -> np.ndarray | None:
    """The numbers of a concrete array on this host; None for traced ones, shapes, and arrays on other hosts."""
    concrete = isinstance(x, Array) and not isinstance(x, jax.core.Tracer)
    return np.asarray(x) if concrete and (x.is_fully_addressable or x.is_fully_replicated) else None


def counted(lengths: Any, rows: int) -> Any:
    """A length for each row: an array that cannot be read here, or Python integers, which never overflow."""
    away = isinstance(lengths, Array) and at_hand(lengths) is None
    if away and jnp.issubdtype(lengths.dtype, jnp.integer) and lengths.shape in ((), (rows,)):
        return jnp.broadcast_to(lengths.astype(jnp.int32), rows)
    raise_if(of_truncated(jax.typeof(lengths) if away else lengths, rows))
    return np.array(each(lengths, rows), object)


def spec_of(cut: P, tokens: tuple[str, ...]) -> P:
    return P(cut[0], tokens or None, cut[2])


def of_positions(max_len: int) -> str | None:
    """Every position is an int32."""
    fits = max_len <= LARGEST_POSITION
    return None if fits else f"max_len={max_len}: JAX counts positions in 32 bits, at most {LARGEST_POSITION} tokens"


def devices_along(plan: Plan, by: Any) -> int:
    return 1 if by is None else MeshAxis(by, plan.ring_axis.mesh).size


def slots_for(max_len: int, most: int | None, stripes: Stripes) -> int:
    """A device's slots: whole blocks."""
    return -(-(max_len if most is None else min(max_len, most)) // stripes.round) * stripes.block


def keep(cache: KVCache, k: Array, v: Array) -> tuple[KVCache, None]:
    """On one device: append, of the next tokens k and v [B, n, G, D], those that this device holds."""
    rank, n, slots = cache.line.rank, k.shape[1], cache.k.shape[1]
    at = cache.lengths[:, None] + jnp.arange(n, dtype=jnp.int32)
    is_local = (at // cache.stripes.block % cache.stripes.ranks == rank) & (at < cache.max_len)
    target = jnp.where(is_local, cache.stripes.below(at, rank, jnp) % slots, slots)  # tokens after the end are dropped
    rows = jnp.arange(len(at))[:, None]
    k, v = (mine.at[rows, target].set(new, mode="drop") for mine, new in ((cache.k, k), (cache.v, v)))
    lengths = jnp.minimum(cache.lengths + n, cache.max_len)
    first = jnp.maximum(cache.first, lengths - slots * cache.stripes.ranks)
    return replace(cache, k=k, v=v, lengths=lengths, first=first), None


@dataclass(frozen=True)
class Fork:
    """One device's part of a fork: `copies` of every row, in memory of at least `slots` slots."""

    copies: int
    slots: int

    def __call__(self, cache: KVCache) -> tuple[KVCache, None]:
        more = (0, 0), (0, max(0, self.slots - cache.k.shape[1])), (0, 0), (0, 0)
        k, v = jnp.pad(cache.k, more), jnp.pad(cache.v, more)
        k, v, lengths, first = (jnp.repeat(x, self.copies, axis=0) for x in (k, v, cache.lengths, cache.first))
        return replace(cache, k=k, v=v, lengths=lengths, first=first), None


def over_devices(work: Any, cache: KVCache, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> tuple[KVCache, Any]:
    """`work(cache, *cut, *whole)` on every device: each gets its tokens of `cut`, [B, T, ...], and all of `whole`.

    Gives the cache and the result, which is cut as `cut` is, or the same on all devices if nothing is.
    """
    if not isinstance(cache.plan.ring_axis, MeshAxis):
        return undifferentiated(work, cache, cut, whole)
    check_context(cache.plan)
    tokens, everyone, rows = spec_of(cache.cut, sequence_axes(cache.plan)), spec_of(cache.cut, ()), P(cache.cut[0])
    cached = jax.tree.unflatten(jax.tree.structure(cache), (tokens, tokens, rows, rows))
    each = tuple(P(tokens[2]) if x is not None and x.ndim == 1 else everyone for x in whole)  # sinks are of heads
    given, results = (cached, (tokens,) * len(cut), each), (cached, tokens if cut else everyone)
    program = over_mesh(undifferentiated, work, cache.plan.ring_axis.mesh, given, results, free=False, check_vma=False)
    return program(cache, cut, whole)


def undifferentiated(work: Any, cache: KVCache, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> tuple[KVCache, Any]:
    """`work(cache, *cut, *whole)`, whose gradient is refused."""

    @jax.custom_vjp
    def call(cache: KVCache, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
        return work(cache, *cut, *whole)

    def refused(*_: Any) -> Any:
        raise NotImplementedError(
            "nothing of a cache is differentiable (append, prefill, decode): train with ringattn.attention, and give "
            "what needs no gradient here through jax.lax.stop_gradient"
        )

    call.defvjp(lambda *given: (call(*given), None), refused)
    return call(cache, cut, whole)
