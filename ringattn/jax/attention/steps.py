"""What the steps of a recipe need on a device: the kernel, and its queries' intervals, traced by rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringattn.comms.jax import automatic_axes, generation
from ringattn.jax.lookup import entry, up_to
from ringattn.kernels.attention.pallas import TABLE
from ringattn.kernels.families import over_families_in_jax
from ringattn.kernels.intervals import Choice, Intervals, Rectangle, Sets, stack
from ringattn.kernels.protocol import JaxKernel
from ringattn.layouts.layout import Layout, to_local
from ringattn.masks.bands import bounds_at, intervals
from ringattn.plans.cost import Shape
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.plans.spmd import SharedRecipe


class Score(NamedTuple):
    """A kernel's functions bound to all of the spec except intervals."""

    attend: Callable[..., Any]
    attend_backward: Callable[..., Any]
    prepare: Callable[..., Any]  # (q, dout, lse, delta, out, dlse) -> q and the rows that steps of a backward take
    halves: Callable[..., Any] | None = None  # as attend_backward, at the cost of only those gradients that are used


@dataclass(frozen=True)
class TracedRange:
    """A range whose start is traced, for the same arithmetic as on a `range`."""

    start: Any
    step: int
    length: int

    def __len__(self) -> int:
        return self.length


def shard_of(layout: Layout, rank: Any) -> tuple[Any, ...]:
    """`layout.shard(rank)` for a traced rank, from a table of starts: all shards have ranges of the same sizes."""
    shards = [layout.shard(r) for r in range(layout.ring)]
    assert len({tuple((len(r), r.step) for r in shard) for shard in shards}) == 1, layout
    starts = jnp.asarray(np.array([[r.start for r in shard] for shard in shards], np.int32))[rank]
    return tuple(TracedRange(starts[i], r.step, len(r)) for i, r in enumerate(shards[0]))


def shard_positions(layout: Layout, rank: Any) -> Array:
    """The global positions of one ring rank's tokens, increasing, int32."""
    return jnp.concatenate([r.start + r.step * jnp.arange(len(r), dtype=jnp.int32) for r in shard_of(layout, rank)])


def local_positions(plan: Plan) -> Array:
    """The global positions of this device's tokens."""
    at = shard_positions(plan.tokens, plan.ring_axis.rank)
    return jax.lax.dynamic_slice_in_dim(at, plan.ulysses_axis.rank * plan.local_len, plan.local_len)


Side = tuple[Array, Array]


def global_bounds(mask: Mask, positions: Array, starts: Any, key_starts: Any, spans: Any = None) -> list[Side]:
    """Of each family the keys [begin, end) of queries, for traced positions, documents and spans: int32 [1 or rows, T].

    Trees and slices are constants of the program, from which the intervals are looked up.
    """
    spec, seq_len, key_len = mask.spec, mask.plan.seq_len, mask.plan.keys.seq_len
    aligned = p = positions[None]
    if mask.docs is not None and (mask.docs.parents is not None or mask.docs.slices is not None):
        return [bounds_at(family, positions, jnp) for family in mask.families]
    begin, end = jnp.zeros_like(p), jnp.full_like(p, key_len)
    if starts is not None:
        starts = numbered(starts)
        limits = starts if key_starts is None else numbered(key_starts)
        limits = jnp.pad(limits, ((0, 0), (0, 1)), mode="edge")  # the last document is the padding, and is empty
        i = up_to(starts, positions) - 1
        begin, end = entry(limits, i), entry(limits, i + 1)
        if key_starts is not None:
            lasts = jnp.pad(starts, ((0, 0), (0, 1)), mode="edge")
            aligned = p + (end - entry(lasts, i + 1))
    seen = intervals(spec, aligned, begin, end, None if spans is None else span_of(jnp.asarray(spans, jnp.int32), p))
    return [(jnp.where(p < seq_len, low, key_len), jnp.where(p < seq_len, high, key_len)) for low, high in seen]


def numbered(starts: Any) -> Array:
    """The starts as int32; a row of -1, which had too many documents, has none."""
    return jnp.maximum(jnp.asarray(starts, jnp.int32), 0)


def span_of(spans: Array, p: Array) -> Side:
    """Start and stop of the span of each position; for those in none, a start behind all and a stop before all."""
    j = up_to(spans[..., 0], p) - 1
    start, stop = (entry(spans[..., i], jnp.maximum(j, 0)) for i in (0, 1))
    inside = (j >= 0) & (p < stop)
    return jnp.where(inside, start, jnp.iinfo(jnp.int32).max), jnp.where(inside, stop, 0)


class Table(NamedTuple):
    """A mask as rectangles: which of a few sets of them each ring rank has, for each distance."""

    sets: tuple[tuple[Rectangle, ...], ...]
    which: np.ndarray  # [distances, ranks]

    def choice(self, row: Any, rank: Any) -> Choice:
        """The sets that can be met in this row, and this rank's; a traced row is not the first, which is in no loop."""
        one_row = isinstance(row, int)
        met = sorted(set(self.which[row] if one_row else self.which[1:].flat))
        renamed = np.searchsorted(met, self.which).astype(np.int32)
        return Choice(Sets(self.sets[i] for i in met), jnp.asarray(renamed)[row, rank])


# A choice may pass through loops and barriers: its index is a value, its sets belong to the program.
jax.tree_util.register_pytree_node(Choice, lambda c: ((c.which,), c.sets), lambda sets, which: Choice(sets, *which))


MAX_RECTANGLES = 256  # of all sets in a program: each is compiled
Cut = Callable[[np.ndarray, np.ndarray, int], tuple[Rectangle, ...] | None]


def cut_of(plan: Plan) -> Cut | None:
    """How a kernel of the plan's devices cuts known intervals (begin, end, keys); None if all take intervals."""
    kernels = (kernel for kernel in TABLE if kernel.rectangles and plan.device not in kernel.skipped_on)
    return next((kernel.load().cut for kernel in kernels), None)


def tables_of(mask: Mask) -> list[Table] | None:
    """Of each family the rectangles of every ring rank; None if the kernel takes intervals, or if they are too many."""
    make = cut_of(mask.plan)
    tables = [table_of(mask, make, i) for i in range(len(mask.families))] if make else []
    return [table for table in tables if table] if tables and None not in tables else None


@lru_cache(maxsize=64)
def table_of(mask: Mask, make: Cut, family: int) -> Table | None:
    """The rectangles of every ring rank: by distance on a ring, among all keys for a gather; None if too many."""
    plan, keys = mask.plan, mask.plan.keys
    gathers = plan.strategy == "gather"
    seen = [mask.bounds(plan.tokens.shard(rank))[family] for rank in range(plan.ring)]
    sets: list[tuple[Rectangle, ...]] = []
    which = np.zeros((1 if gathers else plan.ring, plan.ring), np.int64)
    for row, rank in np.ndindex(which.shape):
        limits = seen[rank]
        if not gathers:
            limits = to_local(keys.tokens.shard((rank - row) % plan.ring), *limits)
        rectangles = make(*limits, keys.tokens.padded_length if gathers else keys.tokens.shard_len)
        if rectangles is None:
            return None
        if rectangles not in sets:
            sets.append(rectangles)
        which[row, rank] = sets.index(rectangles)
        if sum(map(len, sets)) > MAX_RECTANGLES:
            return None
    return Table(tuple(sets), which)


class Visible(NamedTuple):
    """The keys that this ring rank's queries see: of each family global intervals, and their part in any block."""

    seen: list[Side]
    keys: Layout
    rank: Any
    tables: list[Table] | None = None

    def at(self, distance: Any) -> Intervals:
        """The local intervals among the keys of the rank `distance` steps back."""
        shard = shard_of(self.keys, (self.rank - distance) % self.keys.ring)
        return self.stacked([to_local(shard, *sides) for sides in self.seen], distance)

    @property
    def everywhere(self) -> Intervals:
        """The intervals among all keys in their global order."""
        return self.stacked(self.seen, 0)

    def stacked(self, families: list[Side], row: Any) -> Intervals:
        choices: list[Choice | None] = [table.choice(row, self.rank) for table in self.tables or ()]
        choices = choices or [None] * len(families)
        return stack([Intervals(*sides, choice=choice) for sides, choice in zip(families, choices, strict=True)])


def step_of(
    q: Array, k: Array, v: Array, mask: Mask, given: tuple[Any, Any, Any], heads: tuple[int, int] | None = None
) -> tuple[SharedRecipe, Score, Visible]:
    """The recipe, its kernel, and what the queries see.

    `given` are the starts of documents and of the keys' documents, and spans. `heads` are all of the call; by default q
    and k have those of a device after the exchange.
    """
    plan, (starts, key_starts, spans) = mask.plan, given
    static = (starts is None or mask.docs is not None) and (key_starts is None or mask.key_docs is not None)
    seen = global_bounds(mask, shard_positions(plan.tokens, plan.ring_axis.rank), starts, key_starts, spans)
    tables = tables_of(mask) if static else None
    recipe = recipe_of(q, k, v, mask, rectangles=tables is not None, static=static, heads=heads)
    return recipe, score_of(recipe), Visible(seen, plan.keys.tokens, plan.ring_axis.rank, tables)


def recipe_of(
    q: Array, k: Array, v: Array, mask: Mask, rectangles: bool = False, static: bool = True,
    heads: tuple[int, int] | None = None,
) -> SharedRecipe:  # fmt: skip
    """The recipe of a call of so many query and key heads, by default of those that q and k have of a device."""
    plan = mask.plan
    heads = heads or (q.shape[2] * plan.ulysses, k.shape[2] * plan.ulysses)
    arch = generation(getattr(plan.ring_axis, "mesh", None)) if plan.device == "tpu" else None
    return SharedRecipe(
        mask, shape_of(q, k, v, plan, heads), plan.device, q.dtype.name, arch,
        deterministic=plan.deterministic, static=static, rectangles=rectangles,
    )  # fmt: skip


def shape_of(q: Array, k: Array, v: Array, plan: Plan, heads: tuple[int, int]) -> Shape:
    """The shape of a call of so many query and key heads."""
    batch = q.shape[0] if isinstance(q.shape[0], int) else 1  # a program may be exported for any batch
    return Shape(plan.seq_len, plan.keys.seq_len, *heads, q.shape[3], v.shape[3], q.dtype.itemsize, batch)


def score_of(recipe: SharedRecipe) -> Score:
    """The selected kernel, its scale, its softcap and its own options filled in."""
    (kernel, problem), spec = recipe.chosen, recipe.mask.spec
    loaded: JaxKernel = over_families_in_jax(kernel.load())
    given = {"scale": spec.scale_for(problem.head_dim), "softcap": spec.softcap, **loaded.options(problem)}
    whole: Callable[..., Any] = partial(loaded.attend_backward, **given)
    halves: Callable[..., Any] | None = whole  # of plain jax.numpy XLA computes only what is used
    if not loaded.plain:
        refuse_automatic(kernel.name)
        first = partial(first_order, kernel.name, instead="make the plan with kernel='reference'")
        whole, halves = first(whole), first(partial(whole, apart=True)) if loaded.separable else None
    return Score(partial(loaded.attend, **given), whole, loaded.prepare, halves)


def refuse_automatic(kernel: str) -> None:
    """Raise inside a shard_map that leaves axes to the compiler: it can cut jax.numpy, but no kernel's own call."""
    if left := automatic_axes():
        axes = ", ".join(f"{name}={size}" for name, size in left.items())
        raise NotImplementedError(
            f"kernel={kernel!r} on a mesh with the automatic axes {axes}: the compiler cannot cut the kernel's call by "
            "them, and would gather q, k and v on every device. Make these axes AxisType.Explicit, so that the type of "
            "q says what they cut; or name those that cut the batch and the heads, in "
            "plan(axes={'batch': 'data', 'heads': 'tensor'}); or call attention inside a shard_map over these axes "
            "too; or make the plan with kernel='reference'"
        )


def first_order(kernel: str, function: Callable[..., Any], instead: str) -> Callable[..., Any]:
    """The same function, which refuses to be differentiated."""

    @jax.custom_jvp
    def call(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return function(*given, **named)

    @call.defjvp
    def refused(*_: Any) -> Any:
        raise NotImplementedError(f"kernel={kernel!r} has first derivatives only; for those of higher order {instead}")

    return lambda *given, **named: call(given, named)
