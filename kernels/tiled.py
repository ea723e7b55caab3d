"""Flash attention in plain torch: the same tiling, rescaling and skipping as the GPU kernels, written for reading.

Queries are cut into chunks of `block_q` and keys into chunks of `block_k` (neither needs to divide its length). For
one query chunk the key chunks come one after the other, and three statistics are carried: the running maximum of the
scores, the running sum of exp(score - maximum), and the running sum of exp(score - maximum) * v. Whenever a chunk
raises the maximum, what was summed before is scaled down by exp(old maximum - new maximum). Memory is one tile of
scores, whatever the lengths. This is also what runs on CPUs.
"""

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial, Streams, empty, from_streams

BLOCK = 512


def attend(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    where: Intervals,
    *,
    scale: float,
    softcap: float | None = None,
    carry: Partial | None = None,
    out_dtype: torch.dtype | None = None,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
) -> Partial:
    """softmax(scale * q k^T) v over each query's interval, one tile after the other, merged into `carry`."""
    rows = []
    for queries in blocks(q_BTHD.shape[1], block_q):
        q, inside = q_BTHD[:, queries], rows_of(where, queries)
        streams = start(q, v_BSGV.shape[-1])
        for keys in seen_blocks(inside, k_BSGD.shape[1], block_k):
            s = reference.visible_scores(q, k_BSGD[:, keys], shifted(inside, keys), scale, softcap)
            streams = absorb(streams, s, v_BSGV[:, keys])
        rows.append(from_streams(streams))
    part = Partial(torch.cat([r.out for r in rows], 1), torch.cat([r.lse for r in rows], 1)) if rows else None
    part = part or empty(q_BTHD, v_BSGV.shape[-1])
    return reference.finish(part, carry, out_dtype)


def start(q: Tensor, value_dim: int) -> Streams:
    """Statistics of no keys: the maximum is -inf, both sums are zero."""
    out, lse = empty(q, value_dim)
    return Streams(out, lse, torch.zeros_like(lse))


def absorb(old: Streams, s_BGRTS: Tensor, v_BSGV: Tensor) -> Streams:
    """One step of the online softmax: the statistics after one more tile of scores."""
    B, T, H = old.max.shape
    s = s_BGRTS.permute(0, 3, 1, 2, 4)  # [B, T, G, R, S]
    top = torch.maximum(old.max, s.amax(-1).reshape(B, T, H))
    safe = torch.where(top == NEVER, 0.0, top)  # a row that has still seen nothing: exp(-inf - 0) = 0
    shrink = torch.exp(old.max - safe)
    p = torch.exp(s - safe.reshape(s.shape[:-1])[..., None])
    new = torch.einsum("btgrs,bsgv->btgrv", p, v_BSGV.to(p.dtype)).reshape(old.out.shape)
    return Streams(old.out * shrink[..., None] + new, top, old.sum * shrink + p.sum(-1).reshape(B, T, H))


def attend_backward(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    where: Intervals,
    dout_BTHV: Tensor,
    lse_BTH: Tensor,
    delta_BTH: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), tile by tile: scores are computed again, and with the global lse no tile waits for another."""
    totals = tuple(
        torch.zeros(x.shape, dtype=accumulator(x), device=x.device) if given is None else given
        for x, given in ((q_BTHD, dq), (k_BSGD, dk), (v_BSGV, dv))
    )
    for queries in blocks(q_BTHD.shape[1], block_q):
        inside = rows_of(where, queries)
        row = (dout_BTHV[:, queries], lse_BTH[:, queries], delta_BTH[:, queries])
        for keys in seen_blocks(inside, k_BSGD.shape[1], block_k):
            tile = (q_BTHD[:, queries], k_BSGD[:, keys], v_BSGV[:, keys], shifted(inside, keys))
            for total, part, at in zip(
                totals,
                reference.attend_backward(*tile, *row, scale=scale, softcap=softcap),
                (queries, keys, keys),
                strict=True,
            ):
                total[:, at] += part
    return totals


def blocks(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def rows_of(where: Intervals, queries: slice) -> Intervals:
    return Intervals(where.begin[:, queries], where.end[:, queries])


def shifted(where: Intervals, keys: slice) -> Intervals:
    """The same intervals, counted from the first key of the block."""
    return Intervals(where.begin - keys.start, where.end - keys.start)


def seen_blocks(where: Intervals, length: int, size: int) -> list[slice]:
    """The key blocks that at least one of these queries sees; the others are never touched."""
    real = where.begin < where.end
    if not bool(real.any()):
        return []
    first, last = int(where.begin[real].min()), int(where.end[real].max())
    return [b for b in blocks(length, size) if b.start < last and first < b.stop]
