"""Flash attention for TPUs over intervals, forward and backward; pairs of blocks without work are not visited.

    B batch   T queries   S keys   H query heads   G key/value heads   R = H / G   D head dim   V value dim

Scores are transposed, [keys, queries]: the maxima and sums of queries then lie along lanes, and scale the accumulator
[V, queries] without a transpose. Exponentials are base 2, with log2(e) as part of the float32 scale; the lse of the
arguments and results is natural.
"""

from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ringattn.kernels import Problem
from ringattn.kernels.attention import jax_finite
from ringattn.kernels.attention.pallas.backward import attend_backward, prepare
from ringattn.kernels.attention.pallas.blocks import columns
from ringattn.kernels.attention.pallas.walk import (
    LOG2E,
    NN,
    Patch,
    Score,
    Walk,
    current_entry,
    on_work,
    pieces,
    precision_of,
    setup_of,
    visible,
)
from ringattn.kernels.attention.pallas.worklist import ANY_KEYS, ENDS, FIRST, LAST, STAIRS, WHOLE
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial
from ringattn.kernels.protocol import JaxKernel

WIDTH = 256  # keys of values that lie side by side: a row of the matrix unit


class Pieces(NamedTuple):
    """Of a tile: the queries and keys of a piece, and how many pieces' scores are computed before this one's rest.

    Matrix and vector units work at the same time, on different pieces. The sizes have the fewest instruction bundles on
    v6e. Half of the queries with all keys rescales the accumulator once, but needs two pieces.
    """

    queries: int
    keys: int
    ahead: int
    exponents: int  # keys whose exponentials are computed, and meet their values, at once

    @classmethod
    def of(cls, queries: int, keys: int) -> "Pieces":
        if queries > 512 and queries % 512 == 0:
            return cls(512, keys, 1, 512)
        return cls(queries, 256 if keys % 256 == 0 else keys, 2, 256)


def refuses(problem: Problem) -> str | None:
    if problem.device not in ("tpu", "cpu"):
        return f"is a TPU kernel (interpreted on CPUs), and the device is {problem.device}"
    if problem.dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {problem.dtype}"
    return None


def options(problem: Problem) -> dict[str, Any]:
    """The kernel's own keyword arguments for this problem."""
    return {"interpret": problem.device != "tpu", "arch": problem.arch}


def attend(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, **how: Any,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, merged into `carry`; `how` to run is as for `setup_of`.

    `carry` gives its memory to the result: a query block is read before it is written, and by no other.
    """
    k_BSGD, _, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
    setup = setup_of((q_BTHD, k_BSGD, v_BSGV), where, carry, **how)
    (_, H, T, _), V, bq = setup.q.shape, v_BSGV.shape[3], setup.blocks.q
    size = Pieces.of(bq, setup.blocks.k)
    carried = [] if carry is None else [(columns(carry.out, bq), 3), (columns(carry.lse[..., None], bq, NEVER), 3)]
    out, lse = Walk(setup, queries_stay=True).run(
        partial(
            forward_kernel,
            score=Score(scale, softcap),
            precision=precision_of(q_BTHD),
            carried=bool(carried),
            size=size,
        ),
        queries=[(setup.q.swapaxes(2, 3), 3), *carried],
        keys=[(setup.k, 2), (in_columns(setup.v, setup.blocks.k), 2)],
        results=[((H, V, T), 3), ((H, 1, T), 3)],
        scratch=[((n, bq), jnp.float32) for n in (1, 8, V)]
        + [((size.ahead + 1, size.keys, size.queries), jnp.float32)],
        products=2,
        onto={1: 0, 2: 1} if carried else None,
    )
    out, lse = (jnp.einsum("bhxt->bthx", x[..., : q_BTHD.shape[1]]) for x in (out, lse))
    return Partial(out, lse[..., 0])


def in_columns(v: Array, block: int) -> Array:
    """[B, G, S, V] -> [B, G, S / WIDTH, V, WIDTH], or as wide as the block if WIDTH does not divide it.

    The matrix unit takes rows of 256, which are combined from registers if they are part of longer rows in memory.
    """
    width = WIDTH if block % WIDTH == 0 else block
    return v.reshape(*v.shape[:2], -1, width, v.shape[3]).swapaxes(3, 4)


def columns_at(v_t: Any, keys: slice) -> Any:
    """[V, keys], of one block of `in_columns`."""
    width = v_t.shape[4]
    first, last = keys.start // width, -(-keys.stop // width)
    cuts = [(max(keys.start - i * width, 0), min(keys.stop - i * width, width)) for i in range(first, last)]
    return jnp.concatenate([v_t[0, 0, first + i, :, a:b] for i, (a, b) in enumerate(cuts)], axis=1)


def forward_kernel(
    entries: Any, q_t: Any, *rest: Any, walk: Walk, score: Score, precision: Any, carried: bool, size: Pieces
) -> None:
    """The online softmax of one block of queries and one block of keys, transposed.

    Grid: (batch, query heads, entries). Consecutive entries of one query block share the scratch: top is the running
    maximum, total the sum of 2^(score - top) in eight rows, acc the sum of 2^(score - top) v, [V, queries]. `start`
    sets them at the block's first entry, from the carry if there is one, and `finish` writes out and lse at its last.
    Every query block has at least one entry, so its result is written even if it sees nothing.

    A tile is one pair of blocks, computed in pieces: for each piece of the queries, all pieces of the keys. The loop is
    unrolled, and `ready` has the scores of this piece and the next ones, so that the compiler can compute them beside
    the exponentials of this one. Queries are transposed too, as the matrix unit takes them.

    Why at the odd places: `ready` is memory of its own, since the compiler stores twice as much when scores that do not
    fit into registers are left to it. `sums` has eight rows, one for each sublane, because adding whole registers is
    cheap; they are added up once, in `finish`. A masked tile may leave a maximum at -inf, and `safe` keeps -inf - -inf
    out. A whole tile needs no mask; where no interval begins inside a tile, its mask is one operation cheaper; and on
    the diagonal of a causal mask the first half of the queries sees only half of the keys, the other one needs no mask
    for these.
    """
    *given, k, v_t, begin, end, out, lse, top, total, acc, ready = rest
    entry = current_entry(entries, walk)
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

    def tile(kind: int) -> None:
        queries = pieces(q_t.shape[3], size.queries)
        patches = [Patch.of(at, keys, kind) for at in queries for keys in pieces(k.shape[2], size.keys)]
        patches = [patch for patch in patches if patch.size]
        tops = []  # of the pieces whose scores were computed

        def compute(number: int) -> None:
            for at, keys, free in patches[number : number + 1]:
                s = score(lax.dot_general(k[0, 0, keys], q_t[0, 0, :, at], NN, precision, jnp.float32))
                if free < keys.stop:
                    low, high = s[: free - keys.start], s[free - keys.start :]
                    starts = begin[:, :, at] if kind == ANY_KEYS else None
                    high = jnp.where(visible(high, first_key + free, starts, end[:, :, at]), high, NEVER)
                    s = jnp.concatenate([low, high]) if low.size else high
                ready[number % len(ready), : s.shape[0]] = s
                tops.append(s.max(0, keepdims=True))

        for number in range(size.ahead):
            compute(number)
        for i, (at, keys, _) in enumerate(patches):
            compute(i + size.ahead)
            before, now = top[:, at], jnp.maximum(top[:, at], tops[i])
            safe = now if kind == WHOLE else jnp.where(now == NEVER, 0.0, now)
            shrink = jnp.exp2(before - safe)
            sums, result = [], []
            for some in pieces(patches[i].size, size.exponents):
                p = jnp.exp2(ready[i % len(ready), some] - safe)
                sums.append(p.reshape(-1, 8, p.shape[1]).sum(0))
                values = columns_at(v_t, slice(keys.start + some.start, keys.start + some.stop))
                result.append(lax.dot_general(values, p.astype(v_t.dtype), NN, precision, jnp.float32))
            top[:, at] = now
            total[:, at] = total[:, at] * shrink + reduce(add, sums)
            acc[:, at] = acc[:, at] * shrink + reduce(add, result)

    on_work(entry, tile, (WHOLE, STAIRS, ENDS))

    @pl.when(entry & LAST != 0)
    def finish() -> None:
        sums = total[...].sum(0, keepdims=True)
        seen = sums != 0
        sums = jnp.where(seen, sums, 1.0)
        out[0, 0] = acc[...] / sums
        lse[0, 0] = jnp.where(seen, (top[...] + jnp.log2(sums)) * (1 / LOG2E), NEVER)


KERNEL = JaxKernel(attend, attend_backward, refuses, options, prepare, separable=True)
