"""A cache of keys and values spread over devices, as a value: what appends returns another cache.

Position p lies on device (p // block) % devices, as in ringattn.torch.cache: a device's positions are sorted, and what
a query sees of them is one interval. A cache is a pytree whose lengths are traced: a decode loop is compiled once. Give
it to a jitted step with `donate_argnums`, and its memory is written in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringattn.check import of_kept
from ringattn.comms.axis import Solo
from ringattn.comms.jax import MeshAxis
from ringattn.jax.sharding import sequence_axes
from ringattn.planning import Plan
from ringattn.serving import BLOCK, Stripes


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("k", "v", "lengths"), meta_fields=("plan", "max_len", "stripes", "axes"),
)  # fmt: skip
@dataclass(frozen=True)
class KVCache:
    """Keys and values of every token so far; `lengths` says how many each batch row has. Make it with `allocate`."""

    k: Array  # [B, all devices' rows, G, D], cut along the second dim
    v: Array
    lengths: Array  # [B], int32
    plan: Plan
    max_len: int
    stripes: Stripes
    axes: Any = field(repr=False)  # plans are equal whatever their axes, and programs over others are not

    @classmethod
    def allocate(
        cls,
        plan: Plan,
        *,
        batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.bfloat16,
        block: int = BLOCK,
        window: int | None = None,
    ) -> "KVCache":
        """An empty cache for `max_len` tokens a row, of which each device holds its share."""
        if window is not None:
            raise NotImplementedError(
                f"window={window}: a cache of JAX arrays keeps every token; leave it out; a spec's window is seen"
            )
        for name, value in (("batch", batch), ("max_len", max_len), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if plan.framework != "jax":
            raise ValueError("the plan was made for a torch mesh; give plan() a mesh of jax devices")
        stripes = Stripes(plan.ring * plan.ulysses, block)
        rows = (batch, -(-max_len // stripes.round) * stripes.round, kv_heads)
        there = everywhere = None
        if isinstance(plan.ring_axis, MeshAxis):
            cuts = P(None, sequence_axes(plan) or None), P()
            there, everywhere = (NamedSharding(plan.ring_axis.mesh, cut) for cut in cuts)
        k, v = (jnp.zeros((*rows, dim), dtype, device=there) for dim in (head_dim, value_dim or head_dim))
        return cls(k, v, jnp.zeros(batch, jnp.int32, device=everywhere), plan, max_len, stripes, plan.axes)

    @property
    def known(self) -> np.ndarray | None:
        """The lengths, where they are at hand; None while they are traced."""
        return None if isinstance(self.lengths, jax.core.Tracer) else np.asarray(self.lengths)

    @property
    def line(self) -> Any:
        """All devices as one axis, in the order in which they hold the blocks."""
        ring = self.plan.ring_axis
        return MeshAxis(sequence_axes(self.plan), ring.mesh) if isinstance(ring, MeshAxis) else Solo()

    def append(self, k: Array, v: Array) -> "KVCache":
        """With the next tokens, k and v [B, n, G, D], which every device is given; each keeps its own.

        Where lengths are traced, what does not fit is dropped.
        """
        problem = self.problem(k, v, k.shape[1])
        if problem:
            raise ValueError(problem)
        return over_devices(keep, self, (), (k, v))[0]

    def truncate(self, lengths: int | Sequence[int] | Array) -> "KVCache":
        """Without the tokens from these lengths on (rejected ones, say); one number for all rows or one a row."""
        new = jnp.full_like(self.lengths, jnp.asarray(lengths, jnp.int32))
        held = self.known
        if held is not None and not isinstance(new, jax.core.Tracer) and bool(((new > held) | (new < 0)).any()):
            back = np.zeros_like(held).tolist()
            raise ValueError(f"truncate to {new.tolist()}: the rows can go back from {held.tolist()} to {back}")
        return replace(self, lengths=new)

    def fork(self, copies: int = 1) -> "KVCache":
        """`copies` continuations of every row, which append their own."""
        k, v, lengths = (jnp.repeat(x, copies, axis=0) for x in (self.k, self.v, self.lengths))
        return replace(self, k=k, v=v, lengths=lengths)

    def state_dict(self) -> dict[str, Any]:
        """The cache's arrays, and how they are dealt out."""
        return {"k": self.k, "v": self.v, "lengths": self.lengths, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> "KVCache":
        """A cache with a state that was saved from as many devices."""
        if tuple(state["place"]) != self.place:
            names = "{} devices, in blocks of {}"
            raise ValueError(
                f"the state is of {names.format(*state['place'])}; this cache is of {names.format(*self.place)}"
            )
        if state["k"].shape != self.k.shape or state["v"].shape != self.v.shape:
            raise ValueError(f"the state holds k {tuple(state['k'].shape)}, this cache {tuple(self.k.shape)}")
        k, v, lengths = (jax.device_put(state[n], getattr(self, n).sharding) for n in ("k", "v", "lengths"))
        return replace(self, k=k, v=v, lengths=lengths)

    @property
    def place(self) -> tuple[int, int]:
        return self.stripes.ranks, self.stripes.block

    def problem(self, k: Array, v: Array, n: int) -> str | None:
        """Why n such tokens, of which k and v are some, cannot be appended."""
        for name, x, mine in (("k", k, self.k), ("v", v, self.v)):
            if wrong := of_kept(name, x, mine):
                return wrong
            if x.dtype != mine.dtype:
                return f"{name} is {x.dtype}, the cache {mine.dtype}"
        most = 0 if self.known is None else int(self.known.max())
        if most + n > self.max_len:
            return f"{n} more tokens do not fit: rows hold up to {most} of max_len={self.max_len}"
        return None


def below(cache: KVCache, positions: Array, rank: Any) -> Array:
    """`Stripes.below` of traced positions."""
    stripes = cache.stripes
    whole, rest = positions // stripes.round, positions % stripes.round
    return whole * stripes.block + jnp.clip(rest - rank * stripes.block, 0, stripes.block)


def keep(cache: KVCache, k: Array, v: Array) -> tuple[KVCache, None]:
    """On one device: append, of the next tokens k and v [B, n, G, D], those that lie here."""
    rank, n = cache.line.rank, k.shape[1]
    at = cache.lengths[:, None] + jnp.arange(n, dtype=jnp.int32)
    here = (at // cache.stripes.block % cache.stripes.ranks == rank) & (at < cache.max_len)
    target = jnp.where(here, below(cache, at, rank), cache.k.shape[1])  # what lies behind the end is dropped
    rows = jnp.arange(len(at))[:, None]
    k, v = (mine.at[rows, target].set(new, mode="drop") for mine, new in ((cache.k, k), (cache.v, v)))
    return replace(cache, k=k, v=v, lengths=jnp.minimum(cache.lengths + n, cache.max_len)), None


def over_devices(work: Any, cache: KVCache, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> tuple[KVCache, Any]:
    """`work(cache, *cut, *whole)` on every device: of `cut`, [B, T, ...], it has its tokens, of `whole` everything.

    Gives the cache and what is found, which is cut as `cut` is, or the same on all devices if nothing is.
    """
    if not isinstance(cache.plan.ring_axis, MeshAxis):
        return work(cache, *cut, *whole)
    return program(work, cache.plan.ring_axis.mesh, sequence_axes(cache.plan), len(cut))(cache, cut, whole)


@lru_cache(maxsize=128)
def program(work: Any, mesh: Mesh, names: tuple[str, ...], cuts: int) -> Any:
    tokens = P(None, names or None)

    def call(cache: KVCache, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> tuple[KVCache, Any]:
        def on_device(k: Array, v: Array, lengths: Array, cut: tuple[Any, ...], whole: tuple[Any, ...]) -> Any:
            after, found = work(replace(cache, k=k, v=v, lengths=lengths), *cut, *whole)
            return after.k, after.v, after.lengths, found

        specs = (tokens, tokens, P()), tokens if cuts else P()
        inner = jax.shard_map(
            on_device, mesh=mesh, in_specs=(*specs[0], tokens, P()), out_specs=(*specs[0], specs[1]), check_vma=False
        )
        k, v, lengths, found = inner(cache.k, cache.v, cache.lengths, cut, whole)
        return replace(cache, k=k, v=v, lengths=lengths), found

    return jax.jit(call)
