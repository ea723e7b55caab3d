"""The backward pass on TPUs: one kernel for dq, dk and dv, or two that each compute a half alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ringattn.kernels.attention import jax_finite
from ringattn.kernels.attention.pallas.blocks import LANES, Shape, columns, fits
from ringattn.kernels.attention.pallas.walk import (
    LOG2E,
    NN,
    NT,
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
from ringattn.kernels.attention.pallas.worklist import FIRST, LAST, STAIRS, WHOLE
from ringattn.kernels.intervals import Intervals

# The pieces of a tile, and how many of them have their scores computed ahead: those with the fewest bundles on v6e.
EDGE, AHEAD = 256, 2
RESIDENT = 4  # bytes of dk and dv that stay in vector memory while a key head is computed, for each number of it


def prepare(
    q_BTHD: Array, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array, out: Array, dlse: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Rows that are not finite are replaced once: as part of each step this would double the memory of a backward."""
    return jax_finite.of_rows(q_BTHD, dout_BTHV, lse_BTH, delta_BTH)


def attend_backward(
    q_BTHD: Array, k_BSGD: Array, v_BSGV: Array, where: Intervals, dout_BTHV: Array, lse_BTH: Array, delta_BTH: Array,
    *, scale: float, softcap: float | None = None, dq: Array | None = None, apart: bool = False, **how: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(dq, dk, dv) in float32, from one kernel that holds dk and dv of a key head, if they fit into vector memory.

    Else, and if they are wanted `apart`, two kernels compute dq, and dk and dv; XLA drops the one whose results are not
    used. q, dout, lse and delta are those of `prepare`. `dq` gives its memory to the new one of one kernel.
    """
    whole = Shape.of(q_BTHD, v_BSGV, resident=RESIDENT)
    one = not apart and fits(whole, k_BSGD.shape[1], how.get("arch"), how.get("blocks"))
    how |= {"resident": RESIDENT} if one else {}
    scored, k_BSGD, v_BSGV = jax_finite.of_keys(k_BSGD, v_BSGV)
    others = dout_BTHV, lse_BTH, delta_BTH, dq if one else None
    setup = setup_of((q_BTHD, scored, v_BSGV), where, others, **how)
    (_, H, T, D), (_, G, S, V), (bq, bk, _) = setup.q.shape, setup.v.shape, setup.blocks
    stats = [(columns(x[..., None], bq), 3) for x in (lse_BTH * LOG2E, delta_BTH)]  # the lse in base 2
    queries = [(setup.q.swapaxes(2, 3), 3), (columns(dout_BTHV, bq), 3), *stats]
    keys = [(setup.k, 2), (setup.v, 2)]
    k_t = columns(k_BSGD, bk), 3  # where a value of it is not finite, all of the key is 0
    settings: dict[str, Any] = {"score": Score(scale, softcap), "precision": precision_of(q_BTHD)}
    over_keys = partial(
        Walk(setup, queries_stay=True).run,
        keys=[*keys, k_t],
        results=[((H, D, T), 3)],
        scratch=[((D, bq), jnp.float32)],
    )
    if one:
        carried = [] if dq is None else [(columns(dq, bq), 3)]
        new_dq, dk, dv = over_keys(
            partial(backward_kernel, **settings, carried=bool(carried)),
            queries=[*queries, *carried],
            products=5,
            heads=((G, D, S), (G, V, S)),
            onto={len(queries): 0} if carried else None,
        )
    else:
        (new_dq,) = over_keys(partial(dq_kernel, **settings), queries=queries, products=3)
        dk, dv = Walk(setup, queries_stay=False).run(
            partial(dkv_kernel, **settings),
            queries=queries,
            keys=keys,
            results=[((G, D, S), 3), ((G, V, S), 3)],
            scratch=[((D, bk), jnp.float32), ((V, bk), jnp.float32)],
            products=4,
        )
    new_dq = rows_of(new_dq, q_BTHD)
    return new_dq if one or dq is None else dq + new_dq, rows_of(dk, k_BSGD), rows_of(dv, k_BSGD)


def rows_of(x_BHDT: Array, like_BTHD: Array) -> Array:
    """[B, T, H, D], without padding."""
    return jnp.einsum("bhdt->bthd", x_BHDT[..., : like_BTHD.shape[1]])


def backward_kernel(
    entries: Any, q_t: Any, dout_t: Any, lse2: Any, delta: Any, *rest: Any, walk: Walk, score: Score, precision: Any,
    carried: bool,
) -> None:  # fmt: skip
    """dq, dk and dv, transposed: five products for each pair of blocks, where the two kernels below make seven.

    Grid and entries are those of `forward_kernel`. dq of a block of queries is added up over the key blocks of its
    entries, dk and dv in place over all query blocks and query heads that share a key head. Tiles are computed in
    pieces, with the scores of the next AHEAD pieces ready.
    """
    *given, k, v, k_t, begin, end, dq, dk, dv, acc = rest
    entry, member, step = current_entry(entries, walk), pl.program_id(2), pl.program_id(3)
    bk = k.shape[2]

    def on_key_blocks(change: Any) -> None:
        def block(i: Any, _: Any) -> None:
            change(pl.ds(pl.multiple_of(i * bk, bk), bk))

        lax.fori_loop(0, dk.shape[3] // bk, block, None)

    @pl.when((member == 0) & (step == 0))
    def begin_head() -> None:
        def clear(at: Any) -> None:
            dk[0, 0, :, at] = jnp.zeros((dk.shape[2], bk), jnp.float32)
            dv[0, 0, :, at] = jnp.zeros((dv.shape[2], bk), jnp.float32)

        on_key_blocks(clear)

    @pl.when(entry & FIRST != 0)
    def start() -> None:
        acc[...] = jnp.zeros_like(acc)

    def tile(kind: int) -> None:
        block = Block(q_t, k, v, dout_t, lse2, delta, walk.key_block(entry), begin, end)
        queries = pieces(q_t.shape[3], EDGE)
        patches = [Patch.of(at, keys, kind) for at in queries for keys in pieces(bk, EDGE)]
        for at, keys, p, ds in block.of_patches(patches, score, precision):
            ds = ds.astype(q_t.dtype)
            here = pl.ds(pl.multiple_of(walk.key_block(entry) * bk + keys.start, LANES), keys.stop - keys.start)
            dv[0, 0, :, here] += lax.dot_general(
                dout_t[0, 0, :, at], p.astype(dout_t.dtype), NT, precision, jnp.float32
            )
            dk[0, 0, :, here] += lax.dot_general(q_t[0, 0, :, at], ds, NT, precision, jnp.float32)
            acc[:, at] += lax.dot_general(k_t[0, 0, :, keys], ds, NN, precision, jnp.float32)

    on_work(entry, tile, (WHOLE, STAIRS))

    @pl.when(entry & LAST != 0)
    def finish() -> None:
        new = acc[...] * score.scale
        dq[0, 0] = given[0][0, 0] + new if carried else new

    @pl.when((member == pl.num_programs(2) - 1) & (step == pl.num_programs(3) - 1))
    def finish_head() -> None:
        def scale(at: Any) -> None:
            dk[0, 0, :, at] *= score.scale

        on_key_blocks(scale)


def dq_kernel(
    entries: Any, q_t: Any, dout_t: Any, lse2: Any, delta: Any, k: Any, v: Any, k_t: Any, begin: Any, end: Any,
    dq: Any, acc: Any, *, walk: Walk, score: Score, precision: Any,
) -> None:  # fmt: skip
    """dq^T = scale * k^T ds of one block of queries, added up over the key blocks of its entries.

    Grid and entries are those of `forward_kernel`. The lse is final, so a tile is one step, without pieces.
    """
    entry = current_entry(entries, walk)

    @pl.when(entry & FIRST != 0)
    def start() -> None:
        acc[...] = jnp.zeros_like(acc)

    def tile(kind: int) -> None:
        block = Block(q_t, k, v, dout_t, lse2, delta, walk.key_block(entry), begin, end)
        patch = Patch.of(slice(0, q_t.shape[3]), slice(0, k.shape[2]), kind)
        for _, _, _, ds in block.of_patches([patch], score, precision):
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
    (`worklist.listed`). Query heads are the innermost axis: for each entry all heads of the group follow each other,
    so the accumulators start at the first head of the first entry and are written at the last head of the last one.
    Tiles are computed in pieces, with the scores of the next AHEAD pieces ready, as in `forward_kernel`.
    """
    entry, member = current_entry(entries, walk), pl.program_id(3)

    @pl.when((entry & FIRST != 0) & (member == 0))
    def start() -> None:
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    def tile(kind: int) -> None:
        block = Block(q_t, k, v, dout_t, lse2, delta, walk.key_block(entry), begin, end)
        queries = pieces(q_t.shape[3], EDGE)
        patches = [Patch.of(at, keys, kind) for keys in pieces(k.shape[2], EDGE) for at in queries]
        for at, keys, p, ds in block.of_patches(patches, score, precision):
            new_v = lax.dot_general(dout_t[0, 0, :, at], p.astype(dout_t.dtype), NT, precision, jnp.float32)
            new_k = lax.dot_general(q_t[0, 0, :, at], ds.astype(q_t.dtype), NT, precision, jnp.float32)
            acc_v[:, keys] += new_v
            acc_k[:, keys] += new_k

    on_work(entry, tile, (WHOLE, STAIRS))

    @pl.when((entry & LAST != 0) & (member == pl.num_programs(3) - 1))
    def finish() -> None:
        dk[0, 0] = acc_k[...] * score.scale
        dv[0, 0] = acc_v[...]


class Block(NamedTuple):
    """A pair of blocks in the backward pass; `number` is that of the key block."""

    q_t: Any
    k: Any
    v: Any
    dout_t: Any
    lse2: Any
    delta: Any
    number: Any
    begin: Any
    end: Any

    def of_patches(self, patches: list[Patch], score: Score, precision: Any) -> Iterator[tuple[slice, slice, Any, Any]]:
        """(queries, keys, p, ds) of each piece with something to see, while the scores of the next are computed."""
        patches = [patch for patch in patches if patch.size]
        ready = [self.scores(patch, score, precision) for patch in patches[:AHEAD]]
        for i, patch in enumerate(patches):
            ready += [self.scores(following, score, precision) for following in patches[i + AHEAD : i + AHEAD + 1]]
            yield patch.queries, patch.keys, *self.gradients(*ready[i], patch, score)

    def scores(self, patch: Patch, score: Score, precision: Any) -> tuple[Any, Any]:
        """Base-2 scores, and v dout^T: both [keys, queries]."""
        at, keys, _ = patch
        s = score(lax.dot_general(self.k[0, 0, keys], self.q_t[0, 0, :, at], NN, precision, jnp.float32))
        return s, lax.dot_general(self.v[0, 0, keys], self.dout_t[0, 0, :, at], NN, precision, jnp.float32)

    def gradients(self, s: Any, dp: Any, patch: Patch, score: Score) -> tuple[Any, Any]:
        """p = exp2(s - lse), exact since the lse is global, and 0 where a query does not see a key, whatever its score;
        ds = p (v dout^T - delta).
        """
        at, keys, free = patch
        p = jnp.exp2(s - self.lse2[0, 0, :, at])
        if free < keys.stop:
            first_key = self.number * self.k.shape[2] + keys.start
            seen = visible(s, first_key, self.begin[:, :, at], self.end[:, :, at])
            p = jnp.where(seen, p, 0.0)
            s = s if score.softcap is None else jnp.where(seen, s, 0.0)
        ds = p * (dp - self.delta[0, 0, :, at])
        return p, ds if score.softcap is None else ds * score.slope(s)
