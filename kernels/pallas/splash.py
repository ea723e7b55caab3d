"""Flash attention for TPUs over intervals, forward and backward; pairs of blocks without work are not visited.

    B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim

Scores are transposed, [keys, queries]: the maxima and sums of queries then lie along lanes, and scale the accumulator
[V, queries] without a transpose. Exponentials are base 2, with log2(e) as part of the float32 scale; the lse of the
arguments and results is natural.
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

from ringattn.kernels import Problem, jax_finite
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.pallas.blocks import Blocks, Shape, blocks_for, by_heads, columns, padded
from ringattn.kernels.pallas.varying import axes_of, vary
from ringattn.kernels.pallas.worklist import FIRST, LAST, WHOLE, WORK, Ranges, by_keys, by_queries, passing, staying
from ringattn.kernels.partial import NEVER, Partial
from ringattn.kernels.protocol import JaxKernel

LOG2E = math.log2(math.e)

# A tile is computed in pieces. The scores of the next pieces are computed beside the exponentials of this one, so that
# matrix and vector units work at the same time. The sizes are those with the fewest instruction bundles on v6e.
SOME_QUERIES, SOME_KEYS, AHEAD = 512, 256, 2
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # a @ b and a @ b^T


def refuses(problem: Problem) -> str | None:
    if problem.device not in ("tpu", "cpu"):
        return f"is a TPU kernel (interpreted on CPUs), and the device is {problem.device}"
    if problem.dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {problem.dtype}"
    return None


def options(problem: Problem) -> dict[str, Any]:
    """The kernel's own keyword arguments for this problem."""
    return {"interpret": problem.device != "tpu", "arch": problem.arch}


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


class Walk(NamedTuple):
    """How one kernel visits pairs of blocks: which queries, keys and heads a grid step loads."""

    setup: Setup
    queries_stay: bool

    def entry(self, entries: Any, batch: Any, place: Any) -> Any:
        return entries[batch * self.setup.stride + place]

    def query_block(self, entry: Any) -> Any:
        return staying(entry) if self.queries_stay else passing(entry)

    def key_block(self, entry: Any) -> Any:
        return passing(entry) if self.queries_stay else staying(entry)

    def spec(self, shape: tuple[int, ...], dim: int, keys: bool = False) -> pl.BlockSpec:
        """The block of an array [B, heads, ...], whose `dim` is queries (or keys), that belongs to an entry."""
        size = self.setup.blocks.k if keys else self.setup.blocks.q
        block = (1, 1, *(size if i == dim else n for i, n in enumerate(shape) if i > 1))

        def index(b: Any, h: Any, place: Any, *rest: Any) -> tuple[Any, ...]:
            *member, entries = rest  # which of the query heads that share key head h
            entry = self.entry(entries, b, place)
            if member and not keys:
                head = h * self.setup.shared + member[0]
            else:
                head = h // self.setup.shared if keys and not member else h
            at = self.key_block(entry) if keys else self.query_block(entry)
            return (b, head, at, 0) if dim == 2 else (b, head, 0, at)

        return pl.BlockSpec(block, index)

    def intervals(self) -> pl.BlockSpec:
        def index(b: Any, h: Any, place: Any, *rest: Any) -> tuple[Any, ...]:
            return (b if self.setup.stride else 0, 0, self.query_block(self.entry(rest[-1], b, place)))

        return pl.BlockSpec((1, 1, self.setup.blocks.q), index)

    def run(
        self, kernel: Callable[..., None], queries: list[tuple[Array, int]], keys: list[tuple[Array, int]],
        results: list[tuple[tuple[int, ...], int]], scratch: list[tuple[int, ...]],
    ) -> list[Array]:  # fmt: skip
        """Run the kernel over the grid (batch, heads, entries[, query heads that share a key head]).

        Operands and results come with the dim of their queries or keys. The arguments of the kernel are the entries,
        queries, keys, begin, end, results and scratch. The number of entries is traced.
        """
        setup = self.setup
        work = (by_queries if self.queries_stay else by_keys)(setup.ranges, setup.key_blocks)
        operands = [x for x, _ in (*queries, *keys)] + [setup.begin, setup.end]
        entries, steps, operands = vary((work.entries.reshape(-1), work.steps, operands), setup.axes)
        order: Any = ("parallel",) * 2 + ("arbitrary",) * (1 if self.queries_stay else 2)
        batch, heads = setup.q.shape[0], (setup.q.shape[1],) if self.queries_stay else (setup.k.shape[1], setup.shared)
        kind = {"manual_axis_type": jax.typeof(operands[0]).manual_axis_type}
        return pl.pallas_call(
            partial(kernel, walk=self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(batch, heads[0], steps, *heads[1:]),
                in_specs=[self.spec(x.shape, dim) for x, dim in queries]
                + [self.spec(x.shape, dim, keys=True) for x, dim in keys]
                + [self.intervals()] * 2,
                out_specs=[self.spec((batch, *shape), dim, keys=not self.queries_stay) for shape, dim in results],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct((batch, *shape), jnp.float32, **kind) for shape, _ in results],
            compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=setup.blocks.vmem),
            interpret=setup.interpret,
            name=getattr(kernel, "func", kernel).__name__,
        )(entries, *operands)


def attend(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, **how: Any,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, merged into `carry`; `how` to run is as for `setup_of`."""
    k_BSGD, _, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
    setup = setup_of((q_BTHD, k_BSGD, v_BSGV), where, carry, **how)
    (_, H, T, _), V, bq = setup.q.shape, v_BSGV.shape[3], setup.blocks.q
    carried = [] if carry is None else [(columns(carry.out, bq), 3), (columns(carry.lse[..., None], bq, NEVER), 3)]
    out, lse = Walk(setup, queries_stay=True).run(
        partial(forward_kernel, score=Score(scale, softcap), precision=precision_of(q_BTHD), carried=bool(carried)),
        queries=[(setup.q, 2), *carried],
        keys=[(setup.k, 2), (setup.v.swapaxes(2, 3), 3)],
        results=[((H, V, T), 3), ((H, 1, T), 3)],
        scratch=[(1, bq), (8, bq), (V, bq)],
    )
    out, lse = (jnp.einsum("bhxt->bthx", x[..., : q_BTHD.shape[1]]) for x in (out, lse))
    return Partial(out, lse[..., 0])


def prepare(
    q_BTHD: Array, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Rows that are not finite are replaced once: as part of each step this would double the memory of a backward."""
    return jax_finite.of_rows(q_BTHD, dout_BTHV, lse_BTH, delta_BTH)


def attend_backward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array,
    *, scale: float, softcap: float | None = None, dq: Array | None = None, **how: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(dq, dk, dv) in float32, from two kernels; XLA drops the one whose results are not used.

    q, dout, lse and delta are those of `prepare`.
    """
    scored, k_BSGD, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
    setup = setup_of((q_BTHD, scored, v_BSGV), where, (dout_BTHV, lse_BTH, delta_BTH), **how)
    (_, H, T, D), (_, G, S, V) = setup.q.shape, setup.v.shape
    bq, bk, _ = setup.blocks
    rows = [(columns(x[..., None], bq), 3) for x in (lse_BTH * LOG2E, delta_BTH)]
    queries = [(setup.q.swapaxes(2, 3), 3), (columns(dout_BTHV, bq), 3), *rows]
    kernel = {"score": Score(scale, softcap), "precision": precision_of(q_BTHD)}
    (new_dq,) = Walk(setup, queries_stay=True).run(
        partial(dq_kernel, **kernel),
        queries=queries,
        keys=[(setup.k, 2), (setup.v, 2), (columns(k_BSGD, bk), 3)],
        results=[((H, D, T), 3)],
        scratch=[(D, bq)],
    )
    new_dk, new_dv = Walk(setup, queries_stay=False).run(
        partial(dkv_kernel, **kernel),
        queries=queries,
        keys=[(setup.k, 2), (setup.v, 2)],
        results=[((G, D, S), 3), ((G, V, S), 3)],
        scratch=[(D, bk), (V, bk)],
    )
    new_dq = jnp.einsum("bhdt->bthd", new_dq[..., : q_BTHD.shape[1]])
    dk, dv = (jnp.einsum("bgds->bsgd", x[..., : k_BSGD.shape[1]]) for x in (new_dk, new_dv))
    return new_dq if dq is None else dq + new_dq, dk, dv


def forward_kernel(entries: Any, q: Any, *rest: Any, walk: Walk, score: Score, precision: Any, carried: bool) -> None:
    """The online softmax of one block of queries and one block of keys, transposed.

    Grid: (batch, query heads, entries). Consecutive entries of one query block share the scratch: top is the running
    maximum, total the sum of 2^(score - top) in eight rows, acc the sum of 2^(score - top) v, [V, queries]. `start`
    sets them at the block's first entry, from the carry if there is one, and `finish` writes out and lse at its last.
    Every query block has at least one entry, so its result is written even if it sees nothing.

    A tile is one pair of blocks, computed in pieces: for each piece of the queries, all pieces of the keys. The loop is
    unrolled, and `ready` holds the scores of the next AHEAD pieces, so that the compiler can compute them beside the
    exponentials of this one. `before`, `sums` and `result` keep the statistics of a piece of the queries in registers.

    Why at the odd places: `sums` has eight rows, one for each sublane, because adding whole registers is cheap; they
    are added up once, in `finish`. A masked tile may leave a maximum at -inf, and `safe` keeps -inf - -inf out. A whole
    tile needs no mask (`on_work`).
    """
    *given, k, v_t, begin, end, out, lse, top, total, acc = rest
    entry = entry_here(entries, walk)
    first_key = walk.key_block(entry) * k.shape[2]

    @pl.when(entry & FIRST != 0)
    def start() -> None:
        if carried:  # as statistics: a maximum of lse, a sum of 1, an accumulator of out
            top[...] = given[1][0, 0] * LOG2E
            row = lax.broadcasted_iota(jnp.int32, total.shape, 0)
            total[...] = jnp.where((row == 0) & (top[...] != NEVER), 1.0, 0.0)
            acc[...] = given[0][0, 0]
        else:
            top[...] = jnp.full_like(top, NEVER)
            total[...] = jnp.zeros_like(total)
            acc[...] = jnp.zeros_like(acc)

    def scores(at: slice, keys: slice, whole: bool) -> Any:
        s = score(lax.dot_general(k[0, 0, keys], q[0, 0, at], NT, precision, jnp.float32))
        return s if whole else jnp.where(visible(s, first_key + keys.start, begin[:, :, at], end[:, :, at]), s, NEVER)

    def tile(whole: bool) -> None:
        columns = pieces(k.shape[2], SOME_KEYS)
        parts = [(at, keys) for at in pieces(q.shape[2], SOME_QUERIES) for keys in columns]
        ready = [scores(*part, whole) for part in parts[:AHEAD]]
        for i, (at, keys) in enumerate(parts):
            ready += [scores(*part, whole) for part in parts[i + AHEAD : i + AHEAD + 1]]
            if keys == columns[0]:
                before, sums, result = top[:, at], total[:, at], acc[:, at]
            now = jnp.maximum(before, ready[i].max(0, keepdims=True))
            safe = now if whole else jnp.where(now == NEVER, 0.0, now)
            p, shrink = jnp.exp2(ready[i] - safe), jnp.exp2(before - safe)
            before, sums = now, sums * shrink + p.reshape(-1, 8, p.shape[1]).sum(0)
            new = lax.dot_general(v_t[0, 0, :, keys], p.astype(v_t.dtype), NN, precision, jnp.float32)
            result = result * shrink + new
            if keys == columns[-1]:
                top[:, at], total[:, at], acc[:, at] = before, sums, result

    on_work(entry, tile)

    @pl.when(entry & LAST != 0)
    def finish() -> None:
        sums = total[...].sum(0, keepdims=True)
        seen = sums != 0
        sums = jnp.where(seen, sums, 1.0)
        out[0, 0] = acc[...] / sums
        lse[0, 0] = jnp.where(seen, (top[...] + jnp.log2(sums)) * (1 / LOG2E), NEVER)


def dq_kernel(
    entries: Any, q_t: Any, dout_t: Any, lse2: Any, delta: Any, k: Any, v: Any, k_t: Any, begin: Any, end: Any,
    dq: Any, acc: Any, *, walk: Walk, score: Score, precision: Any,
) -> None:  # fmt: skip
    """dq^T = scale * k^T ds of one block of queries, added up over the key blocks of its entries.

    Grid and entries are those of `forward_kernel`. The lse is final, so a tile is one step, without pieces.
    """
    entry = entry_here(entries, walk)

    @pl.when(entry & FIRST != 0)
    def start() -> None:
        acc[...] = jnp.zeros_like(acc)

    def tile(whole: bool) -> None:
        block = Block(q_t, k, v, dout_t, lse2, delta, None if whole else (walk.key_block(entry), begin, end))
        _, ds = block.gradients(*block.scores(slice(None), slice(None), score, precision), slice(None), score)
        acc[...] += lax.dot_general(k_t[0, 0], ds.astype(k_t.dtype), NN, precision, jnp.float32)

    on_work(entry, tile)

    @pl.when(entry & LAST != 0)
    def finish() -> None:
        dq[0, 0] = acc[...] * score.scale


def dkv_kernel(
    entries: Any, q_t: Any, dout_t: Any, lse2: Any, delta: Any, k: Any, v: Any, begin: Any, end: Any,
    dk: Any, dv: Any, acc_k: Any, acc_v: Any, *, walk: Walk, score: Score, precision: Any,
) -> None:  # fmt: skip
    """dk^T = scale * q^T ds^T and dv^T = dout^T p^T of one block of keys, added up over query blocks and query heads.

    Grid: (batch, key heads, entries, query heads that share a key head). Here key blocks stay and query blocks pass
    (`worklist.by_keys`). Query heads are the innermost axis: for each entry all heads of the group follow each other,
    so the accumulators start at the first head of the first entry and are written at the last head of the last one.
    Tiles are computed in pieces, with the scores of the next AHEAD pieces ready, as in `forward_kernel`.
    """
    entry, member = entry_here(entries, walk), pl.program_id(3)

    @pl.when((entry & FIRST != 0) & (member == 0))
    def start() -> None:
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    def tile(whole: bool) -> None:
        block = Block(q_t, k, v, dout_t, lse2, delta, None if whole else (walk.key_block(entry), begin, end))
        parts = [(keys, at) for keys in pieces(k.shape[2], SOME_KEYS) for at in pieces(q_t.shape[3], SOME_KEYS)]
        ready = [block.scores(*part, score, precision) for part in parts[:AHEAD]]
        for i, (keys, at) in enumerate(parts):
            ready += [block.scores(*part, score, precision) for part in parts[i + AHEAD : i + AHEAD + 1]]
            p, ds = block.gradients(*ready[i], at, score)
            new_v = lax.dot_general(dout_t[0, 0, :, at], p.astype(dout_t.dtype), NT, precision, jnp.float32)
            new_k = lax.dot_general(q_t[0, 0, :, at], ds.astype(q_t.dtype), NT, precision, jnp.float32)
            acc_v[:, keys] += new_v
            acc_k[:, keys] += new_k

    on_work(entry, tile)

    @pl.when((entry & LAST != 0) & (member == pl.num_programs(3) - 1))
    def finish() -> None:
        dk[0, 0] = acc_k[...] * score.scale
        dv[0, 0] = acc_v[...]


class Block(NamedTuple):
    """A pair of blocks in the backward pass. `mask` is (number of the key block, begin, end) or None."""

    q_t: Any
    k: Any
    v: Any
    dout_t: Any
    lse2: Any
    delta: Any
    mask: tuple[Any, Any, Any] | None

    def scores(self, keys: slice, at: slice, score: Score, precision: Any) -> tuple[Any, Any]:
        """Base-2 scores, -inf where a query does not see a key, and v dout^T: both [keys, queries]."""
        s = score(lax.dot_general(self.k[0, 0, keys], self.q_t[0, 0, :, at], NN, precision, jnp.float32))
        if self.mask is not None:
            number, begin, end = self.mask
            first_key = number * self.k.shape[2] + (keys.start or 0)
            s = jnp.where(visible(s, first_key, begin[:, :, at], end[:, :, at]), s, NEVER)
        return s, lax.dot_general(self.v[0, 0, keys], self.dout_t[0, 0, :, at], NN, precision, jnp.float32)

    def gradients(self, s: Any, dp: Any, at: slice, score: Score) -> tuple[Any, Any]:
        """p = exp2(s - lse), exact since the lse is global, and ds = p (v dout^T - delta)."""
        p = jnp.exp2(s - self.lse2[0, 0, :, at])
        if self.mask is not None:
            p = jnp.where(s == NEVER, 0.0, p)
        ds = p * (dp - self.delta[0, 0, :, at])
        return p, ds if score.softcap is None else ds * score.slope(jnp.where(s == NEVER, 0.0, s))


def entry_here(entries: Any, walk: Walk) -> Any:
    return walk.entry(entries, pl.program_id(0), pl.program_id(2))


def on_work(entry: Any, tile: Callable[[bool], None]) -> None:
    """Run the tile without a mask if every pair is seen, with a mask if some are, else not at all."""
    pl.when(entry & WHOLE != 0)(lambda: tile(True))
    pl.when(entry & (WORK | WHOLE) == WORK)(lambda: tile(False))


def visible(s: Any, first_key: Any, begin: Any, end: Any) -> Any:
    """Which scores [keys, queries] are visible, for keys from `first_key` on; begin and end are [1, 1, queries]."""
    index = lax.broadcasted_iota(jnp.int32, s.shape, 0) + first_key
    return (begin[0] <= index) & (index < end[0])


def pieces(length: int, most: int) -> list[slice]:
    """A block cut into pieces of `most`, or left whole if `most` does not divide it."""
    size = most if length % most == 0 else length
    return [slice(at, at + size) for at in range(0, length, size)]


def setup_of(
    operands: tuple[Array, Array, Array], where: Intervals, others: Any, *, blocks: Blocks | None = None,
    arch: tuple[int, int] | None = None, interpret: bool = False,
) -> Setup:  # fmt: skip
    """Operands by heads, padded to whole blocks: padding queries see no key, and no query sees padding keys.

    By default the blocks are the largest for the TPU generation `arch`. `interpret` runs the kernels on any device.
    """
    q_BTHD, k_BSGD, v_BSGV = operands
    shape = Shape(q_BTHD.shape[3], v_BSGV.shape[3], q_BTHD.dtype.itemsize)
    chosen = blocks_for(q_BTHD.shape[1], k_BSGD.shape[1], shape, arch, blocks)
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


KERNEL = JaxKernel(attend, attend_backward, refuses, options, prepare)
