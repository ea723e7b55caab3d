"""Adds up the terms of a gradient in one pass (`ringattn.kernels.total`)."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.total import Term
from ringattn.kernels.triton import cdiv, launch, power_of_2

TERMS = 16  # terms that one pass can add


@triton.jit
def add_kernel(
    out_ptr, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, places, T, H,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Each row (t, h) of out is the sum of those of the N terms that cover it; all are contiguous.

    A program has ROWS rows, and skips the terms that have none of their tokens. IN_PLACE: out is the first term, and a
    program ends at once if no other term has any.
    """
    terms = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, h, live = row // H, row % H, row < T * H
    column = tl.arange(0, WIDTH)
    if IN_PLACE:
        others = 0
        for i in tl.static_range(1, N):
            others += (places[4 * i] // 16 <= (start + ROWS - 1) // H) & (places[4 * i + 1] // 16 > start // H)
        if others == 0:
            return
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(N):
        first, end, top, bottom = (
            places[4 * i] // 16, places[4 * i + 1] // 16, places[4 * i + 2] // 16, places[4 * i + 3] // 16
        )  # fmt: skip
        if (first <= (start + ROWS - 1) // H) & (end > start // H):
            here = live & (t >= first) & (t < end) & (h >= top) & (h < bottom)
            at = ((b * (end - first) + t - first) * (bottom - top) + h - top) * D
            inside = here[:, None] & (column < D)[None, :]
            total += tl.load(terms[i] + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (b * T * H + row) * D
    inside = live[:, None] & (column < D)[None, :]
    tl.store(out_ptr + at[:, None] + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(out: Tensor, terms: Sequence[Term]) -> Tensor:
    """The sum of up to TERMS terms, added in float32 in their order, into `out`, which may be the first of them.

    Each batch of packed documents has other ranges, and another number of them. For few kernels to be compiled, ranges
    come as 16 n + 8, which the compiler cannot tell apart, and terms as a power of two, of which the last are empty.
    """
    B, T, H, D = out.shape
    count = power_of_2(len(terms))
    grads = [x.contiguous() for x, _, _ in terms]
    places = [16 * n + 8 for _, rows, heads in terms for n in (*rows, *heads)] + [8] * (4 * (count - len(terms)))
    width = power_of_2(D)
    rows = max(1, 4096 // width)
    tensors = (out, *grads, *[grads[-1]] * (TERMS - len(grads)))
    launch(
        add_kernel, (cdiv(T * H, rows), B), tensors, (tuple(places), T, H), N=count, D=D, WIDTH=width, ROWS=rows,
        IN_PLACE=out is terms[0][0],
    )  # fmt: skip
    return out
