"""What one device runs: its ring's hops, the same on all of them, and the intervals of its queries, traced by rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringattn.comms.jax import generation
from ringattn.kernels import pallas
from ringattn.kernels.intervals import Intervals
from ringattn.layout import Layout, to_local
from ringattn.planning import Plan
from ringattn.schedule import Schedule, needed
from ringattn.spec import AttentionSpec, Docs, bounds


class Score(NamedTuple):
    """A kernel's two functions with everything of the spec that is not an interval already said."""

    attend: Callable[..., Any]
    attend_backward: Callable[..., Any]


@dataclass(frozen=True)
class Mask:
    """All that decides who sees whom and is known when the program is made; traced documents are not."""

    plan: Plan
    spec: AttentionSpec
    docs: Docs | None = None
    key_docs: Docs | None = None


class Hop(NamedTuple):
    """One rotation: how far, and the ranks that send something somebody still needs."""

    shift: int
    senders: tuple[int, ...]


class Move(NamedTuple):
    """The hops that fly during one step: of the keys to the next step, and of the gradients of the step before."""

    keys: Hop | None
    grads: Hop | None


@dataclass(frozen=True)
class Route:
    """The distances at which somebody sees something, and the keys' hops between them."""

    distances: tuple[int, ...]
    hops: tuple[Hop, ...]
    ring: int

    @property
    def forward(self) -> list[tuple[Move, list[int]]]:
        """The steps as runs of equal moves: (move, distances)."""
        return runs(self.distances, [Move(hop, None) for hop in (*self.hops, None)])

    @property
    def backward(self) -> list[tuple[Move, list[int]]]:
        """The steps after the first. A gradient sets out one step after its keys, and all ranks take part."""
        grads = [Hop(hop.shift, tuple(range(self.ring))) for hop in self.hops[1:]]
        moves = [Move(k, g) for k, g in zip((*self.hops[1:], None), (None, *grads), strict=True) if self.hops]
        return runs(self.distances[1:], moves)

    @property
    def home(self) -> Hop | None:
        """The last hop of the gradients."""
        return Hop(-self.distances[-1], tuple(range(self.ring))) if self.hops else None


def runs(distances: tuple[int, ...], moves: list[Move]) -> list[tuple[Move, list[int]]]:
    """Consecutive steps with the same move, together: they become one loop.

    >>> runs((1, 2, 4), [Move(None, None)] * 3)
    [(Move(keys=None, grads=None), [1, 2, 4])]
    """
    grouped = groupby(zip(moves, distances, strict=True), key=lambda pair: pair[0])
    return [(move, [d for _, d in pairs]) for move, pairs in grouped]


@lru_cache(maxsize=64)
def route_of(mask: Mask) -> Route:
    """Distances at which nobody sees anything are left out, and a hop that nobody needs on the way is not sent."""
    plan, everyone = mask.plan, range(mask.plan.ring)
    tokens, keys = plan.tokens, plan.keys.tokens
    at = np.arange(tokens.padded_length)
    begin, end = bounds(mask.spec, at, plan.seq_len, plan.keys.seq_len, mask.docs, mask.key_docs)
    schedule = Schedule(needed(begin, end, [tokens.shard(r) for r in everyone], [keys.shard(r) for r in everyone]))
    steps = [schedule.steps(r) for r in everyone]
    pairs = list(pairwise(schedule.distances))
    hops = [[(r, steps[r][i].hop) for r in everyone] for i in range(len(pairs))]
    sends = [{r for r, hop in at if hop is not None and hop.send} for at in hops]
    shifts = [b - a for a, b in pairs]
    joined = {s: set().union(*(sends[i] for i in range(len(pairs)) if shifts[i] == s)) for s in shifts}
    return Route(tuple(schedule.distances), tuple(Hop(s, tuple(sorted(joined[s]))) for s in shifts), plan.ring)


@dataclass(frozen=True)
class Piece:
    """A range whose start is traced: the same arithmetic as on a `range` serves it."""

    start: Any
    step: int
    length: int

    def __len__(self) -> int:
        return self.length


def shard_of(layout: Layout, rank: Any) -> tuple[Any, ...]:
    """`layout.shard(rank)` for a traced rank, from a small table of starts."""
    shards = [layout.shard(r) for r in range(layout.ring)]
    starts = jnp.asarray(np.array([[r.start for r in shard] for shard in shards], np.int32))[rank]
    return tuple(Piece(starts[i], r.step, len(r)) for i, r in enumerate(shards[0]))


def shard_positions(layout: Layout, rank: Any) -> Array:
    """The global positions of one ring rank's tokens, increasing, int32."""
    pieces = shard_of(layout, rank)
    return jnp.concatenate([p.start + p.step * jnp.arange(len(p), dtype=jnp.int32) for p in pieces])


def local_positions(plan: Plan) -> Array:
    """The global positions of this device's tokens."""
    at = shard_positions(plan.tokens, plan.ring_axis.rank)
    return jax.lax.dynamic_slice_in_dim(at, plan.ulysses_axis.rank * plan.local_len, plan.local_len)


def global_bounds(mask: Mask, positions: Array, starts: Any, key_starts: Any) -> tuple[Array, Array]:
    """`ringattn.spec.bounds` for traced positions and document starts: int32 [1 or rows, T]."""
    spec, seq_len, key_len = mask.spec, mask.plan.seq_len, mask.plan.keys.seq_len
    p = positions[None]
    begin, end = jnp.zeros_like(p), jnp.full_like(p, key_len)
    if starts is not None:
        starts = jnp.asarray(starts, jnp.int32)
        limits = starts if key_starts is None else jnp.asarray(key_starts, jnp.int32)
        limits = jnp.pad(limits, ((0, 0), (0, 1)), mode="edge")  # the last document is the padding, and is empty
        i = jax.vmap(lambda row: jnp.searchsorted(row, positions, side="right"))(starts) - 1
        i = jnp.where(p < starts[:, -1:], i, starts.shape[1] - 1)
        begin, end = jnp.take_along_axis(limits, i, 1), jnp.take_along_axis(limits, i + 1, 1)
    if spec.causal:
        end = jnp.minimum(end, p + 1)
    if spec.window is not None:
        begin = jnp.maximum(begin, p + 1 - spec.window)
    begin = jnp.where(p < seq_len, jnp.minimum(begin, key_len), key_len)
    end = jnp.where(p < seq_len, jnp.minimum(end, key_len), key_len)
    return jnp.minimum(begin, end), end


class Sight(NamedTuple):
    """What this ring rank's queries see: global intervals, and their part in any block of keys."""

    begin: Array
    end: Array
    keys: Layout
    rank: Any

    def at(self, distance: Any) -> Intervals:
        """The local intervals among the keys of the rank `distance` steps back."""
        source = (self.rank - distance) % self.keys.ring
        return Intervals(*to_local(shard_of(self.keys, source), self.begin, self.end))

    @property
    def everywhere(self) -> Intervals:
        """The intervals among all keys in their global order."""
        return Intervals(self.begin, self.end)


def sight_of(mask: Mask, starts: Any, key_starts: Any) -> Sight:
    rank = mask.plan.ring_axis.rank
    positions = shard_positions(mask.plan.tokens, rank)
    return Sight(*global_bounds(mask, positions, starts, key_starts), mask.plan.keys.tokens, rank)


def score_of(q: Array, k: Array, v: Array, spec: AttentionSpec, plan: Plan) -> Score:
    """The selected kernel, its scale, its softcap and its own options filled in."""
    problem = problem_of(q, k, v, spec, plan)
    module = pallas.select(problem, plan.kernel).load()
    given = {"scale": spec.scale_for(q.shape[-1]), "softcap": spec.softcap}
    given |= module.options(problem) if hasattr(module, "options") else {}
    return Score(partial(module.attend, **given), partial(module.attend_backward, **given))


def problem_of(q: Array, k: Array, v: Array, spec: AttentionSpec, plan: Plan) -> pallas.Problem:
    return pallas.Problem(
        device=plan.device,
        dtype=q.dtype.name,
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        softcap=spec.softcap is not None,
        arch=generation(getattr(plan.ring_axis, "mesh", None)) if plan.device == "tpu" else None,
        queries=q.shape[1],
    )
