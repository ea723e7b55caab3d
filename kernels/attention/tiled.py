"""Flash attention in plain torch: the same tiling, rescaling and skipping as the GPU kernels, written to be read.

Queries are cut into blocks of `block_q` and keys into blocks of `block_k` (neither needs to divide its length). A block
of queries visits the blocks of keys in order, and carries three statistics: the running maximum of the scores, the
running sum of exp(score - maximum), and the running sum of exp(score - maximum) * v. When a block raises the maximum,
the sums so far are scaled by exp(old maximum - new maximum). Memory is one tile of scores, whatever the lengths. On
CPUs it runs what torch's own kernel does not support.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.attention import reference
from ringattn.kernels.attention.reference import product
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial, empty
from ringattn.kernels.protocol import TorchKernel, at_once
from ringattn.kernels.rows import rounded

BLOCK = 256


class Statistics(NamedTuple):
    """Attention over the keys seen so far: `out` = sum(exp(s - max) v), `max`, and `sum` = sum(exp(s - max))."""

    out: Tensor
    max: Tensor
    sum: Tensor


def attend(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, out_dtype: torch.dtype | None = None, block_q: int = BLOCK, block_k: int = BLOCK,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, tile by tile, merged into `carry`."""
    part = empty(q_BTHD, v_BSGV.shape[-1])
    for queries in blocks(q_BTHD.shape[1], block_q):
        inside = rows_of(where, queries)
        q = grouped(q_BTHD[:, queries], k_BSGD) * scale
        so_far = start(q, v_BSGV.shape[-1])
        for keys in seen_blocks(inside, k_BSGD.shape[1], block_k):
            hidden = hidden_of(shifted(inside, keys), keys.stop - keys.start, q)
            s = scores(q, k_BSGD[:, keys], hidden, softcap)
            so_far = absorb(so_far, s, by_head(v_BSGV[:, keys]), hidden)
        for whole, rows in zip(part, divided(so_far), strict=True):
            whole[:, queries] = ungrouped(rows, whole[:, queries])
    return reference.finish(part, carry, out_dtype)


def start(q_BGND: Tensor, value_dim: int) -> Statistics:
    """Statistics of no keys: the maximum is -inf, both sums are zero."""
    rows = q_BGND.shape[:-1]
    return Statistics(q_BGND.new_zeros(*rows, value_dim), q_BGND.new_full(rows, NEVER), q_BGND.new_zeros(rows))


def absorb(old: Statistics, s_BGNS: Tensor, v_BGSV: Tensor, hidden: Tensor | None) -> Statistics:
    """One step of the online softmax: the statistics after one more tile of scores."""
    top = torch.maximum(old.max, s_BGNS.amax(-1))
    safe = torch.where(top == NEVER, 0.0, top)  # a row that has seen no key yet: exp(-inf - 0) = 0
    shrink = torch.exp(old.max - safe)
    p = s_BGNS.sub_(safe[..., None]).exp_()
    return Statistics(old.out * shrink[..., None] + product(p, v_BGSV, hidden), top, old.sum * shrink + p.sum(-1))


def divided(x: Statistics) -> Partial:
    """(out / sum, max + log(sum)); an empty row, whose sum is 0 and not NaN, becomes zeros and -inf."""
    total = torch.where(x.sum != 0, x.sum, 1.0)
    top = x.max.to(fine(x.max))
    return Partial(x.out / total[..., None], torch.where(x.sum != 0, top + total.log(), NEVER))


def attend_backward(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, dout_BTHV: Tensor, lse_BTH: Tensor,
    delta_BTH: Tensor, *, scale: float, softcap: float | None = None, block_q: int = BLOCK, block_k: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), tile by tile. Scores are recomputed; with the lse over all keys, tiles are independent."""
    dout_BTHV, lse_BTH, delta_BTH = rounded(dout_BTHV, lse_BTH, delta_BTH)
    inputs = q_BTHD, k_BSGD, v_BSGV
    dq, dk, dv = (torch.zeros(x.shape, dtype=accumulator(x), device=x.device) for x in inputs)
    for queries in blocks(q_BTHD.shape[1], block_q):
        inside = rows_of(where, queries)
        q = grouped(q_BTHD[:, queries], k_BSGD) * scale
        dout, lse, delta = (grouped(x[:, queries], k_BSGD) for x in (dout_BTHV, lse_BTH, delta_BTH))
        lse = torch.where(lse == NEVER, 0.0, lse)[..., None]  # an empty row: exp(-inf - 0) = 0
        dq_rows = torch.zeros_like(q)
        for keys in seen_blocks(inside, k_BSGD.shape[1], block_k):
            k, v = by_head(k_BSGD[:, keys]), by_head(v_BSGV[:, keys])
            hidden = hidden_of(shifted(inside, keys), keys.stop - keys.start, q)
            s = scores(q, k_BSGD[:, keys], hidden, softcap)
            slope = None if softcap is None else 1 - (torch.where(s == NEVER, 0.0, s) / softcap) ** 2
            p = s.sub_(lse).exp_()
            ds = (dout @ v.mT).sub_(delta[..., None]).mul_(p)
            ds = ds if slope is None else ds.mul_(slope)
            if hidden is not None:  # 0 unless the row or the key is not finite
                p, ds = p.masked_fill_(hidden, 0.0), ds.masked_fill_(hidden, 0.0)
            unseen = None if hidden is None else hidden.mT
            dq_rows += product(ds, k, hidden)
            dk[:, keys] += product(ds.mT, q, unseen).transpose(1, 2)
            dv[:, keys] += product(p.mT, dout, unseen).transpose(1, 2)
        dq[:, queries] += ungrouped(dq_rows, dq[:, queries]) * scale
    return dq, dk, dv


def scores(q_BGND: Tensor, k_BSGD: Tensor, hidden: Tensor | None, softcap: float | None) -> Tensor:
    """The tile q k^T (q is already scaled) with the softcap applied, and -inf where it is hidden: [B, G, N, S]."""
    s = q_BGND @ by_head(k_BSGD).mT
    if softcap is not None:
        s = s.div_(softcap).tanh_().mul_(softcap)
    return s if hidden is None else s.masked_fill_(hidden, NEVER)


def hidden_of(where: Intervals, keys: int, q_BGND: Tensor) -> Tensor | None:
    """Which keys a row does not see, [B or 1, 1, N, S], or None if all rows see all keys."""
    if bool((where.begin <= 0).all()) and bool((where.end >= keys).all()):
        return None
    index = torch.arange(keys, device=q_BGND.device)
    hidden = (index < where.begin[..., None]) | (where.end[..., None] <= index)  # [B or 1, T, S]
    return hidden.repeat(1, q_BGND.shape[2] // hidden.shape[1], 1)[:, None]


def grouped(x_BTH_: Tensor, k_BSGD: Tensor) -> Tensor:
    """[B, T, H, ...] as [B, G, R * T, ...]: one matrix of all rows that share a key head, in float32 or float64."""
    x = reference.split_heads(x_BTH_, k_BSGD)
    return x.permute(0, 2, 3, 1, *range(4, x.dim())).flatten(2, 3)


def ungrouped(x_BGN_: Tensor, like_BTH_: Tensor) -> Tensor:
    """The inverse of `grouped`."""
    B, T, H = like_BTH_.shape[:3]
    x = x_BGN_.unflatten(2, (-1, T))
    return x.permute(0, 3, 1, 2, *range(4, x.dim())).reshape(B, T, H, *x.shape[4:])


def by_head(x_BSGD: Tensor) -> Tensor:
    """[B, S, G, D] as [B, G, S, D], in float32 or float64."""
    return x_BSGD.transpose(1, 2).to(accumulator(x_BSGD))


def blocks(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


def rows_of(where: Intervals, queries: slice) -> Intervals:
    return Intervals(where.begin[:, queries], where.end[:, queries])


def shifted(where: Intervals, keys: slice) -> Intervals:
    """The same intervals, counted from the first key of the block."""
    return Intervals(where.begin - keys.start, where.end - keys.start)


def seen_blocks(where: Intervals, length: int, size: int) -> list[slice]:
    """The key blocks that at least one of these queries sees."""
    real = where.begin < where.end
    if not bool(real.any()):
        return []
    first, last = int(where.begin[real].min()), int(where.end[real].max())
    return [b for b in blocks(length, size) if b.start < last and first < b.stop]


KERNEL = TorchKernel(attend, at_once(attend_backward))
