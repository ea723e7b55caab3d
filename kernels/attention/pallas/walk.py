"""How a TPU kernel visits pairs of blocks, and what it needs to know of them.

B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringattn.kernels.attention.pallas.blocks import Blocks, Shape, blocks_for, by_heads, padded
from ringattn.kernels.attention.pallas.worklist import (
    ANY_KEYS,
    NO_WORK,
    STAIRS,
    WHOLE,
    Ranges,
    kind_of,
    listed,
    passing,
    staying,
)
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.varying import axes_of, in_turn, vary

LOG2E = math.log2(math.e)

NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # a @ b and a @ b^T


class Score(NamedTuple):
    """The base-2 score of a product q k, and its derivative."""

    scale: float
    softcap: float | None

    def __call__(self, s: Array) -> Array:
        if self.softcap is None:
            return s * (self.scale * LOG2E)
        return jnp.tanh(s * (self.scale / self.softcap)) * (self.softcap * LOG2E)

    def slope(self, s2: Array) -> Array | float:
        """d score / d (scale * product), from the base-2 score."""
        return 1.0 if self.softcap is None else 1.0 - (s2 * (1 / (self.softcap * LOG2E))) ** 2


class Setup(NamedTuple):
    """What all three kernels share: operands by heads, padded to blocks; their ranges; and how to run."""

    q: Array  # [B, H, T, D]
    k: Array  # [B, G, S, D]
    v: Array  # [B, G, S, V]
    begin: Array  # [1 or B, 1, T]
    end: Array
    ranges: Ranges
    blocks: Blocks
    axes: frozenset[str]
    interpret: bool

    @property
    def key_blocks(self) -> int:
        return self.k.shape[2] // self.blocks.k

    @property
    def shared(self) -> int:
        """How many query heads share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def stride(self) -> int:
        """The distance from a batch row's entries to those of the next row; 0 if all rows share one list."""
        return 0 if self.begin.shape[0] == 1 else self.q.shape[2] // self.blocks.q * self.key_blocks


Part = tuple[Any, int]  # an array, or a shape, and the dim of its queries or keys


class Walk(NamedTuple):
    """How one kernel visits pairs of blocks: which queries, keys and heads a grid step loads.

    The grid is (batch, key heads, query heads that share a key head, entries) if queries stay, so that a block of
    queries meets all of its keys in a row; else entries come before heads: a block of keys meets all queries.
    """

    setup: Setup
    queries_stay: bool

    @property
    def dims(self) -> tuple[int, int]:
        """The grid's dimensions of the entries, and of the query heads that share a key head."""
        return (3, 2) if self.queries_stay else (2, 3)

    def entry(self, entries: Any, batch: Any, at: Any) -> Any:
        return entries[batch * self.setup.stride + at]

    def query_block(self, entry: Any) -> Any:
        return staying(entry) if self.queries_stay else passing(entry)

    def key_block(self, entry: Any) -> Any:
        return passing(entry) if self.queries_stay else staying(entry)

    def spec(self, shape: tuple[int, ...], dim: int, keys: bool = False) -> pl.BlockSpec:
        """The block of an array [B, heads, ...], whose `dim` is queries (or keys), that belongs to an entry."""
        setup = self.setup
        count = setup.key_blocks if keys else setup.q.shape[2] // setup.blocks.q
        block = (1, 1, *(n // count if i == dim else n for i, n in enumerate(shape) if i > 1))

        def index(*at: Any) -> tuple[Any, ...]:
            entry = self.entry(at[-1], at[0], at[self.dims[0]])
            head = at[1] if keys else at[1] * self.setup.shared + at[self.dims[1]]
            number = self.key_block(entry) if keys else self.query_block(entry)
            return (at[0], head, *(number if i == dim else 0 for i in range(2, len(shape))))

        return pl.BlockSpec(block, index)

    def intervals(self) -> pl.BlockSpec:
        def index(*at: Any) -> tuple[Any, ...]:
            return (at[0] if self.setup.stride else 0, 0, self.query_block(self.entry(at[-1], at[0], at[self.dims[0]])))

        return pl.BlockSpec((1, 1, self.setup.blocks.q), index)

    def run(
        self, kernel: Callable[..., None], queries: list[Part], keys: list[Part], results: list[Part],
        scratch: list[tuple[tuple[int, ...], Any]], products: int, heads: tuple[tuple[int, ...], ...] = (),
        onto: dict[int, int] | None = None,
    ) -> list[Array]:  # fmt: skip
        """Run the kernel over its grid; the number of entries is traced.

        Operands, and the shapes of results, come with the dim of their queries or keys; `heads` are results that stay
        in vector memory for all of a key head. The arguments of the kernel are the entries, queries, keys, begin, end,
        results, heads and scratch. `onto` says which operands give their memory to which results. `products` of a head
        dim for each pair tell the compiler how long the kernel runs, at most.
        """
        setup, (B, H, T, D) = self.setup, self.setup.q.shape
        entries, steps = listed(setup.ranges, setup.key_blocks, self.queries_stay)
        operands = [x for x, _ in (*queries, *keys)] + [setup.begin, setup.end]
        entries, steps, operands = vary((entries.reshape(-1), steps, operands), setup.axes)
        third: Any = "arbitrary" if heads or not self.queries_stay else "parallel"
        kind = {"manual_axis_type": jax.typeof(jnp.int32(0) if setup.interpret else operands[0]).manual_axis_type}
        shapes = [*(shape for shape, _ in results), *heads]
        out_shape = [jax.ShapeDtypeStruct((B, *shape), jnp.float32, **kind) for shape in shapes]
        pairs = B * H * T * setup.k.shape[2]

        def call(given: Any) -> Any:
            entries, steps, operands = given
            inner = (setup.shared, steps) if self.queries_stay else (steps, setup.shared)
            return pl.pallas_call(
                partial(kernel, walk=self),
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(B, H // setup.shared, *inner),
                    in_specs=[self.spec(x.shape, dim) for x, dim in queries]
                    + [self.spec(x.shape, dim, keys=True) for x, dim in keys]
                    + [self.intervals()] * 2,
                    out_specs=[self.spec((B, *shape), dim, keys=not self.queries_stay) for shape, dim in results]
                    + [whole_head(shape) for shape in heads],
                    scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
                ),
                out_shape=out_shape,
                input_output_aliases={1 + i: result for i, result in (onto or {}).items()},
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", third, "arbitrary"), vmem_limit_bytes=setup.blocks.vmem
                ),
                cost_estimate=pl.CostEstimate(
                    flops=2 * products * D * pairs,
                    transcendentals=pairs,
                    bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape)),
                ),
                interpret=setup.interpret,
                name=getattr(kernel, "func", kernel).__name__,
            )(entries, *operands)

        given = entries, steps, operands
        return in_turn(call, given) if setup.interpret else call(given)


def whole_head(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of a key head, in one buffer: it is written once, after its last entry."""
    return pl.BlockSpec((1, 1, *shape[1:]), lambda b, g, *_: (b, g, 0, 0), pipeline_mode=pl.Buffered(1))


def current_entry(entries: Any, walk: Walk) -> Any:
    return walk.entry(entries, pl.program_id(0), pl.program_id(walk.dims[0]))


def on_work(entry: Any, tile: Callable[[int], None], kinds: tuple[int, ...] = (WHOLE,)) -> None:
    """Run the tile of the entry's kind: one of `kinds`, or that with the whole mask, unless no query sees any key."""
    kind = kind_of(entry)
    others = kind != NO_WORK
    for which in kinds:
        pl.when(kind == which)(partial(tile, which))
        others &= kind != which
    pl.when(others)(partial(tile, ANY_KEYS))


def visible(s: Any, first_key: Any, begin: Any, end: Any) -> Any:
    """Which scores [keys, queries] are visible, for keys from `first_key` on; begin and end are [1, 1, queries].

    begin <= index < end is one comparison of index - begin with end - begin, without a sign. The hardware compares
    with a sign, so both start at the least number. Without a begin, which no interval has behind `first_key`, nothing
    is subtracted for each score.
    """
    if begin is None:
        return lax.broadcasted_iota(jnp.int32, s.shape, 0) < end[0] - first_key
    least = jnp.iinfo(jnp.int32).min
    index = lax.broadcasted_iota(jnp.int32, s.shape, 0) + (first_key + least - begin[0])
    return index < end[0] - begin[0] + least


def pieces(length: int, most: int) -> list[slice]:
    """A block cut into pieces of `most`, or left whole if `most` does not divide it."""
    size = most if length % most == 0 else length
    return [slice(at, at + size) for at in range(0, length, size)]


class Patch(NamedTuple):
    """Queries and keys of a tile that are computed at once; keys before `free` are seen by all these queries."""

    queries: slice
    keys: slice
    free: int

    @classmethod
    def of(cls, queries: slice, keys: slice, kind: int) -> "Patch":
        """Without the keys that none of these queries sees, where that is known: all of them, perhaps."""
        if kind != STAIRS:
            return cls(queries, keys, keys.stop if kind == WHOLE else keys.start)
        stop = max(keys.start, min(keys.stop, queries.stop))
        return cls(queries, slice(keys.start, stop), max(keys.start, min(stop, queries.start)))

    @property
    def size(self) -> int:
        return self.keys.stop - self.keys.start


def setup_of(
    operands: tuple[Array, Array, Array], where: Intervals, others: Any, *, blocks: Blocks | None = None,
    arch: tuple[int, int] | None = None, interpret: bool = False, resident: int = 0,
) -> Setup:  # fmt: skip
    """Operands by heads, padded to whole blocks: padding queries see no key, and no query sees padding keys.

    By default the blocks are the largest for the TPU generation `arch`, beside `resident` bytes a key that stay in
    vector memory. `interpret` runs the kernels on any device.
    """
    q_BTHD, k_BSGD, v_BSGV = operands
    chosen = blocks_for(q_BTHD.shape[1], k_BSGD.shape[1], Shape.of(q_BTHD, v_BSGV, resident), arch, blocks)
    begin, end = (padded(x.astype(jnp.int32), 1, chosen.q) for x in (where.begin, where.end))
    return Setup(
        by_heads(q_BTHD, chosen.q),
        by_heads(k_BSGD, chosen.k),
        by_heads(v_BSGV, chosen.k),
        begin[:, None],
        end[:, None],
        Ranges.of(Intervals(begin, end), chosen.q, chosen.k),
        chosen,
        axes_of(operands, where.begin, where.end, others),
        interpret,
    )


def precision_of(x: Array) -> Any:
    """The highest precision for float32, which the default would round to bfloat16."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
