"""Merges partials on the GPU in one kernel: many at the same time, or one into another in place.

As in `ringattn.kernels.partial`, an lse of -inf marks an empty side, whatever its out holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.partial import Partial
from ringattn.kernels.triton import Launch, kind_of, power_of_2

STACK = 128  # partials that one program can hold; `merge_stack` merges the rest of longer stacks first


@triton.jit(do_not_specialize=["N", "B", "T", "H"])
def merge_kernel(
    out, top,  # [N, B, T, H, V] and [N, B, T, H]
    old_out, old_lse, sinks,  # [B, T, H, V] and [B, T, H] with CARRY, [H] with SINKS
    new_out, new_lse,
    out_st, top_st, old_st, lse_st, new_st, end_st, N, B, T, H, V,
    CARRY: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out = sum_i w_i out_i / sum_i w_i and lse = log sum_i w_i, where w_i = exp(lse_i), for BLOCK_R rows (b, t, h).

    Programs: (blocks of rows, blocks of columns). There is no loop: a program loads all N partials of its rows at the
    same time, as a tile [BLOCK_N, BLOCK_R, BLOCK_V], and reduces along N. Carry and sinks are merged after that, as two
    more sides with statistics (out, max, sum).

    Why at the odd places: an lse may be float64, so an old one is split into a float32 maximum and a factor `one`,
    which is 0 for an empty side. The out of an empty side is not loaded, since it may be NaN. If the carry is
    overwritten, a program owns whole rows (`merge_once`): otherwise one program could read an lse that another one has
    replaced.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    live, inside = row < B * T * H, column < V
    b, t, h = (row // (T * H)).to(tl.int64), (row // H % T).to(tl.int64), (row % H).to(tl.int64)
    n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    here = (n < N) & live[None, :]
    at = n * top_st[0] + (b * top_st[1] + t * top_st[2] + h * top_st[3])[None, :]
    m = tl.load(top + at, mask=here, other=float("-inf"))
    empty = m == float("-inf")
    o_at = n * out_st[0] + (b * out_st[1] + t * out_st[2] + h * out_st[3])[None, :]
    o_at = o_at[:, :, None] + (column * out_st[4])[None, None, :]
    o = tl.load(out + o_at, mask=(here & ~empty)[:, :, None] & inside[None, None, :], other=0.0).to(tl.float32)
    safe = tl.max(m, 0).to(tl.float32)
    safe = tl.where(safe == float("-inf"), 0.0, safe)
    w = tl.exp((m - safe[None, :]).to(tl.float32))
    o = tl.sum(o * w[:, :, None], 0)
    m = tl.broadcast_to(safe[:, None], (BLOCK_R, BLOCK_V))
    z = tl.broadcast_to(tl.sum(w, 0)[:, None], (BLOCK_R, BLOCK_V))
    if CARRY:
        lse = tl.load(old_lse + b * lse_st[0] + t * lse_st[1] + h * lse_st[2], mask=live, other=float("-inf"))
        seen = live & (lse != float("-inf"))
        old_top = lse.to(tl.float32)
        weight = tl.exp((lse - tl.where(seen, old_top, 0.0)).to(tl.float32))  # 0 for an empty side
        old_at = (b * old_st[0] + t * old_st[1] + h * old_st[2])[:, None] + (column * old_st[3])[None, :]
        old = tl.load(old_out + old_at, mask=seen[:, None] & inside[None, :], other=0.0).to(tl.float32)
        o, m, z = merge_statistics(o, m, z, old * weight[:, None], old_top[:, None], weight[:, None])
    if SINKS:
        sink = tl.load(sinks + h, mask=live, other=float("-inf")).to(tl.float32)
        weight = tl.where(sink != float("-inf"), 1.0, 0.0)
        o, m, z = merge_statistics(o, m, z, tl.zeros_like(o), sink[:, None], weight[:, None])
    some = z != 0  # also where z is NaN
    o = tl.where(some, o / tl.where(some, z, 1.0), 0.0)
    new_at = (b * new_st[0] + t * new_st[1] + h * new_st[2])[:, None] + (column * new_st[3])[None, :]
    tl.store(new_out + new_at, o.to(new_out.dtype.element_ty), mask=live[:, None] & inside[None, :])
    lse = m.to(new_lse.dtype.element_ty) + tl.log(tl.where(some, z, 1.0))
    lse = tl.where(some, lse, float("-inf"))  # the same in every column, so only column 0 is stored
    lse_at = (b * end_st[0] + t * end_st[1] + h * end_st[2])[:, None] + (column * 0)[None, :]
    tl.store(new_lse + lse_at, lse, mask=live[:, None] & (column == 0)[None, :])


@triton.jit
def merge_statistics(out_a, top_a, sum_a, out_b, top_b, sum_b):
    """(out, max, sum) of both sides, scaled to the larger maximum and added."""
    top = tl.maximum(top_a, top_b)
    safe = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp(top_a - safe), tl.exp(top_b - safe)
    return out_a * a + out_b * b, top, sum_a * a + sum_b * b


def merge_stack(
    parts: Partial, carry: Partial | None = None, sinks_H: Tensor | None = None, into: Partial | None = None,
    dtype: torch.dtype = torch.float32,
) -> Partial:  # fmt: skip
    """Merge the partials stacked along a first dim, `carry`, and a sink for each head.

    The result is written to `into` if given, with any strides and any dtype of its out, perhaps the carry itself; else
    its out has `dtype`.
    """
    n = parts.out.shape[0]
    while n > STACK:  # merge the rest first, so that the last launch gets at most STACK
        keep = n - STACK
        tail = Partial(*(x[keep:] for x in parts))
        carry, parts, n = merge_stack(tail, carry), Partial(*(x[:keep] for x in parts)), keep
    if into is None:
        into = Partial(*(torch.empty_like(x[0], dtype=d) for x, d in zip(parts, (dtype, parts.lse.dtype), strict=True)))
    return merge_once(parts, carry, sinks_H, into)


def merge_once(parts: Partial, carry: Partial | None, sinks_H: Tensor | None, new: Partial) -> Partial:
    """One launch of `merge_kernel`. If `new` is the carry, a program owns whole rows, since it overwrites their lse."""
    out, top = parts
    n, B, T, H, V = out.shape
    rows = B * T * H
    if out.dtype == torch.float64:
        raise NotImplementedError("the fused merge computes in float32; for float64 use kernels.partial.merge")
    if rows == 0:
        return new
    columns = power_of_2(V)
    block_n = power_of_2(n)
    block_v = columns if new is carry else min(columns, max(16, 4096 // block_n))
    block_r = max(1, min(power_of_2(rows), 2048 // (block_n * block_v)))
    old = new if carry is None else carry
    grid = (-(-rows // block_r), -(-V // block_v), 1)
    tensors = out, top, old.out, old.lse, new.lse if sinks_H is None else sinks_H, new.out, new.lse
    strides = tuple([x.stride() for x in (out, top, old.out, old.lse, new.out, new.lse)])
    constants = carry is not None, sinks_H is not None, block_n, block_r, block_v
    dtypes = tuple([x.dtype for x in tensors])
    kind = dtypes, kind_of((*strides, V)), constants
    numbers = *strides, n, B, T, H, V, *constants
    Launch(merge_kernel, grid, out.device, numbers, kind, num_warps=4)(*tensors)
    return new
