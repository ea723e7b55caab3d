"""Adds up the terms of a gradient in one pass (`ringattn.kernels.total`)."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.triton import cdiv, launch, power_of_2

MOST = 6  # terms that one pass can add
Term = tuple[Tensor, tuple[int, int], tuple[int, int]]  # of a gradient, for these half-open ranges of rows and heads


@triton.jit
def add_kernel(
    out_ptr, x0, x1, x2, x3, x4, x5, places, T, H,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each row (t, h) of out is the sum of those of the N terms that cover it; all are contiguous."""
    terms = (x0, x1, x2, x3, x4, x5)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b = tl.program_id(1).to(tl.int64)
    t, h, live = row // H, row % H, row < T * H
    column = tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(N):
        first, end, top, bottom = places[4 * i], places[4 * i + 1], places[4 * i + 2], places[4 * i + 3]
        here = live & (t >= first) & (t < end) & (h >= top) & (h < bottom)
        at = ((b * (end - first) + t - first) * (bottom - top) + h - top) * D
        inside = here[:, None] & (column < D)[None, :]
        total += tl.load(terms[i] + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (b * T * H + row) * D
    inside = live[:, None] & (column < D)[None, :]
    tl.store(out_ptr + at[:, None] + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts(out: Tensor, terms: Sequence[Term]) -> Tensor:
    """The sum of up to six terms, added in float32 in their order, into `out`, which may be the first of them."""
    B, T, H, D = out.shape
    grads = [x.contiguous() for x, _, _ in terms]
    places = tuple([n for _, rows, heads in terms for n in (*rows, *heads)])
    width = power_of_2(D)
    rows = max(1, 4096 // width)
    tensors = (out, *grads, *[out] * (MOST - len(grads)))
    launch(
        add_kernel, (cdiv(T * H, rows), B), tensors, (places, T, H), N=len(grads), D=D, WIDTH=width, ROWS=rows
    )  # fmt: skip
    return out
