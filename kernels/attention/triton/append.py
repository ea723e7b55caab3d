"""Appends new tokens to a rank's cache and computes the intervals of their queries, from lengths on the device.

    B batch   T new tokens   S rows of the cache   G key/value heads   D head dim   V value dim

This rank holds position p if `mine <= (p - origin) % round < mine + block`. Whatever changes from token to token is
read on the device, so that a CUDA graph of one step can be replayed for the next one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.intervals import Intervals
from ringattn.kernels.triton import Launch, kind_of, power_of_2

MAX_POSITION = 2**31 - 1  # positions lie below it, and Triton compiles another kernel for numbers above it


@triton.jit(do_not_specialize=["T", "S", "G", "origin", "block", "round", "mine", "window"])
def append_kernel(
    k, v, lengths, into_k, into_v, begin, end,  # [B, T, G, D], [B, T, G, V], [B], [B, S, G, D or V], [B, T] twice
    k_st, v_st, ik_st, iv_st, T, S, G, D, V, origin, block, round, mine, window,  # 0: no window
    CAUSAL: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token of one batch row: store its key and value if this rank holds them, and what its query sees."""
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    p = length + t
    last = p + 1 if CAUSAL else length + T
    first = tl.where(window > 0, tl.maximum(p + 1 - window, 0), 0)
    tl.store(begin + b * T + t, local_index(first, origin, block, round, mine).to(tl.int32))
    tl.store(end + b * T + t, local_index(last, origin, block, round, mine).to(tl.int32))

    offset = (p - origin) % round - mine
    row = (p - origin) // round * block + offset
    heads = tl.where((offset >= 0) & (offset < block) & (row < S), G, 0)  # none if another rank holds it
    g, d, w = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    mask = (g < heads)[:, None] & (d < D)[None, :]
    key = tl.load(k + b * k_st[0] + t * k_st[1] + g[:, None] * k_st[2] + d[None, :] * k_st[3], mask=mask)
    into_k += b * ik_st[0] + row * ik_st[1]
    tl.store(into_k + g[:, None] * ik_st[2] + d[None, :] * ik_st[3], key, mask=mask)
    mask = (g < heads)[:, None] & (w < V)[None, :]
    value = tl.load(v + b * v_st[0] + t * v_st[1] + g[:, None] * v_st[2] + w[None, :] * v_st[3], mask=mask)
    into_v += b * iv_st[0] + row * iv_st[1]
    tl.store(into_v + g[:, None] * iv_st[2] + w[None, :] * iv_st[3], value, mask=mask)


@triton.jit
def local_index(position, origin, block, round, mine):
    """How many of the positions that this rank holds lie below `position`."""
    p = tl.maximum(position - origin, 0)
    return p // round * block + tl.minimum(tl.maximum(p % round - mine, 0), block)


def append(
    k_BTGD: Tensor, v_BTGV: Tensor, into_k: Tensor, into_v: Tensor, lengths_B: Tensor,
    where: tuple[int, int, int, int], *, causal: bool = True, window: int | None = None,
) -> Intervals:  # fmt: skip
    """Store the tokens at positions `lengths` to `lengths + T` of every row, those that this rank holds.

    `where` is (origin, block, round, mine), as above. `lengths` does not change. Tokens past the end of the cache are
    dropped. Returns the intervals of local indices that queries at these positions see.
    """
    B, T, G, D = k_BTGD.shape
    S, V = into_v.shape[1], v_BTGV.shape[-1]
    begin = torch.empty(B, T, dtype=torch.int32, device=k_BTGD.device)
    end = torch.empty(B, T, dtype=torch.int32, device=k_BTGD.device)
    strides = k_BTGD.stride(), v_BTGV.stride(), into_k.stride(), into_v.stride()
    constants = causal, power_of_2(G), power_of_2(D), power_of_2(V)
    tensors = k_BTGD, v_BTGV, lengths_B, into_k, into_v, begin, end
    Launch(
        append_kernel, (T, B, 1), k_BTGD.device,
        (*strides, T, S, G, D, V, *where, min(window or 0, MAX_POSITION), *constants),
        (k_BTGD.dtype, kind_of((*strides, D, V)), constants), num_warps=4,
    )(*tensors)  # fmt: skip
    return Intervals(begin, end)
