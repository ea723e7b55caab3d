"""Flash attention forward over intervals: one kernel for every mask, which also merges into the carried partial."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.arrays import fine
from ringattn.kernels.attention.triton.blocks import (
    Shape,
    add_rows,
    are_aligned,
    head_of,
    logits,
    matrix,
    rows_of,
    seen,
    span,
    tanh,
    tile,
)
from ringattn.kernels.attention.triton.table import Table
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial
from ringattn.kernels.triton import LN2, LOG2E, Kept, Launch, cdiv, ready


@triton.jit(do_not_specialize=["blocks"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, begin_ptr, end_ptr, old_out_ptr, old_lse_ptr, out_ptr, lse_ptr,
    q_st, k_st, v_st, rows_st, old_out_st, old_lse_st, out_st, lse_st, T, H, blocks, unit, cap,
    R: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_V: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, CARRY: tl.constexpr, IN_PLACE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out and lse of a block of QUERIES queries of one head, over the keys of their intervals.

    Programs: one for each block of queries of each head; `head_of` gives the order.

    Statistics are in base 2: m is the running maximum of the scores, sum that of 2^(score - m), acc that of
    2^(score - m) v. With CARRY they start from the carried partial, as (m, sum, acc) = (lse, 1, out), so a ring step
    needs no merge of its own. With IN_PLACE the result overwrites the carry, so a block that sees no key stops early.

    Loop: over the keys [lo, hi) that at least one query sees, KEYS at a time, in four phases: 0 the masked head, 1 and
    2 the middle, 3 the masked tail. Every query sees every key of the middle. PHASE is a constant, so the code for the
    middle has no mask. `span` says why the middle takes two phases.

    Why at the odd places:
    - `rise`: without a softcap the scale is applied inside exp2, where it is one fused multiply-add a score. It is
      positive, so the maximum can be taken before it is applied.
    - `zero`: a row that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN. Only a masked tile can leave
      a row so, because a block with an empty row has no middle.
    - A float64 lse (float32 inputs) does not fit into m, which is float32: sum and acc take the rest as a factor.
    - `sum != 0` also holds for NaN, so NaN is not mistaken for an empty row.
    - hi is where loads stop: what padding holds past it is read as 0, since 0 * NaN would be NaN.
    """
    block, b, h = head_of(H, blocks, True)
    first = block * QUERIES
    rows = first + tl.arange(0, QUERIES)
    real = rows < T
    begin, end, lo, hi, head, tail, count = seen(
        begin_ptr + b * rows_st, end_ptr + b * rows_st, first, T, QUERIES, KEYS
    )
    if IN_PLACE:  # noqa: SIM102
        if lo >= hi:
            return

    q = tile(q_ptr + b * q_st[0] + h * q_st[2], first, T, q_st[1], q_st[3], QUERIES, D, WIDTH_D, False)
    at = rows.to(tl.int64)
    if CARRY:
        old = old_lse_ptr + b * old_lse_st[0] + at * old_lse_st[1] + h * old_lse_st[2]
        lse = tl.load(old, mask=real, other=float("-inf")) * LOG2E
        m = lse.to(tl.float32)
        sum = tl.where(m == float("-inf"), 0.0, 1.0)
        old = old_out_ptr + b * old_out_st[0] + h * old_out_st[2]
        acc = tile(old, first, T, old_out_st[1], old_out_st[3], QUERIES, V, WIDTH_V, False).to(tl.float32)
        if old_lse_ptr.dtype.element_ty == tl.float64:  # the part of the lse that float32 rounds away
            sum = tl.exp2((lse - tl.where(m == float("-inf"), 0.0, m)).to(tl.float32))
            acc *= sum[:, None]
    else:
        m = tl.full([QUERIES], float("-inf"), tl.float32)
        sum = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, WIDTH_V], tl.float32)

    k_src = matrix(k_ptr + b * k_st[0] + h // R * k_st[2], hi, k_st[1], KEYS, D, WIDTH_D, TMA)
    v_src = matrix(v_ptr + b * v_st[0] + h // R * v_st[2], hi, v_st[1], KEYS, V, WIDTH_V, TMA)
    for PHASE in tl.static_range(4):
        start, stop = span(PHASE, block, head, tail, count)
        for i in tl.range(start, stop):
            n = lo + i * KEYS
            k = tile(k_src, n, hi, k_st[1], k_st[3], KEYS, D, WIDTH_D, TMA)
            s = tl.dot(q, k.T, input_precision=PRECISION)
            if SOFTCAP:
                s = tanh(s * unit) * cap
                rise = 1.0
            else:
                rise = unit
            if PHASE % 3 == 0:
                keys = n + tl.arange(0, KEYS)
                s = tl.where((begin[:, None] <= keys[None, :]) & (keys[None, :] < end[:, None]), s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1) * rise)
            zero = top
            if PHASE % 3 == 0:  # a row that has seen no key yet: 2^(-inf - 0) = 0
                zero = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s * rise - zero[:, None])
            shrink = tl.exp2(m - zero)
            sum = sum * shrink + tl.sum(p, 1)
            v = tile(v_src, n, hi, v_st[1], v_st[3], KEYS, V, WIDTH_V, TMA)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            m = top

    total = tl.where(sum != 0, sum, 1.0)
    lse = (m.to(lse_ptr.dtype.element_ty) + tl.log2(total)) * LN2
    lse = tl.where(sum != 0, lse, float("-inf"))
    tl.store(lse_ptr + b * lse_st[0] + at * lse_st[1] + h * lse_st[2], lse, mask=real)
    out = out_ptr + b * out_st[0] + h * out_st[2]
    add_rows(out, acc / total[:, None], first, T, out_st[1], out_st[3], QUERIES, V, WIDTH_V, False)


def attend(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, *, scale: float, softcap: float | None = None,
    carry: Partial | None = None, out_dtype: torch.dtype | None = None, table: Table | None = None,
) -> Partial:  # fmt: skip
    """softmax(scale * q k^T) v over each query's interval, merged into `carry` inside the kernel.

    `carry` is updated in place if `carry.out` has the dtype of the result; use the returned partial. `table` replaces
    the built-in tile sizes.
    """
    dtype, device = out_dtype or torch.float32, q_BTHD.device
    in_place = carry is not None and carry.out.dtype == dtype
    if carry is None:
        B, T, H, _ = q_BTHD.shape
        out = torch.empty(B, T, H, v_BSGV.shape[3], dtype=dtype, device=device)
        lse = torch.empty_strided((B, T, H), (H * T, 1, T), dtype=fine(q_BTHD), device=device)  # no view, for autograd
        old, merges = Partial(out, lse), None
    else:
        out = carry.out if in_place else torch.empty_like(carry.out, dtype=dtype)
        old, lse = carry, carry.lse
        merges = in_place, old.out.dtype, old.out.stride(), lse.stride(), out.stride()
    begin, end, rows_st = rows_of(where)
    tensors = (q_BTHD, k_BSGD, v_BSGV, begin, end, *old, out, lse)
    key = (
        q_BTHD.shape, v_BSGV.shape, device, q_BTHD.dtype, k_BSGD.dtype, v_BSGV.dtype, dtype, q_BTHD.stride(),
        k_BSGD.stride(), v_BSGV.stride(), rows_st, are_aligned(q_BTHD, k_BSGD, v_BSGV), scale, softcap, merges,
    )  # fmt: skip
    launch = LAUNCHES.get(key) if table is None else None
    if launch is None:
        launch = launch_of(tensors, rows_st, scale, softcap, carry is not None, in_place, table)
        if table is None:
            LAUNCHES.keep(key, launch)
    launch(*tensors)
    return Partial(out, lse)


LAUNCHES = Kept()  # of `attend`, by all that it depends on but addresses; without a carry, out and lse are contiguous


def launch_of(
    tensors: tuple[Tensor, ...], rows_st: int, scale: float, softcap: float | None, carry: bool, in_place: bool,
    table: Table | None,
) -> Launch:  # fmt: skip
    """The launch of `attend` for tensors of these shapes, dtypes and strides."""
    (q, k, v), device = tensors[:3], tensors[0].device
    shape, strides = Shape.of(q, v), [x.stride() for x in (q, k, v)]
    config = shape.tiles(device, q.itemsize, tuple(strides), are_aligned(q, k, v), table).forward
    blocks = cdiv(shape.T, config.queries)
    return ready(
        forward_kernel, (blocks * shape.B * shape.H,), device, tuple([x.dtype for x in tensors]),
        (*strides, rows_st, *[x.stride() for x in tensors[5:]], shape.T, shape.H, blocks,
         *logits(scale, softcap)), config,
        **shape.constants(softcap, q.dtype, device), QUERIES=config.queries, KEYS=config.keys, CARRY=carry,
        IN_PLACE=in_place, TMA=config.tma,
    )  # fmt: skip
