"""Attention by rectangles: their partials merge, and with the lse over all keys their gradients add up.

A vendor's backward computes delta = rowsum(dout * out) itself and uses `out` for nothing else. Given the out over all
keys, each rectangle is exact. If the lse has a gradient too, or out is on another rank, no `out` gives the right delta
in every range of numbers. Then call without out=: a vendor that takes delta gets it, and instead of others our own
kernel computes the gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial as bind
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringattn.kernels import partial
from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.attention import tiled
from ringattn.kernels.intervals import Intervals, Rectangle
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.rows import EVERY, NO_SUMS, Rows, with_out
from ringattn.kernels.total import Total, in_dtype

# (q, k, v, mask, scale=, softcap=) -> out [B, T, H, V], lse [B, T, H]
# (dout, q, k, v, out, lse, mask, scale=, softcap=) -> dq, dk, dv
Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Made = TypeVar("Made")
Rectangles = Callable[..., tuple[Rectangle, ...]]  # (intervals, q, k, v, backward)


def over_rectangles(
    name: str, forward: Forward, backward: Backward, refuses: Callable[..., str | None],
    rectangles_of: Rectangles | None = None, fills: bool = False,
) -> TorchKernel:  # fmt: skip
    """A kernel that runs a vendor's two functions of one rectangle over all rectangles of a step.

    They are those that the intervals come with, whose mask is whether they are causal. A vendor that runs any intervals
    gives `rectangles_of`, which makes its own, and takes delta= for out in its backward.
    """
    cut_into = rectangles_of or bind(own_rectangles, name)

    def attend(
        q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, where: Intervals, *, carry: Partial | None = None,
        out_dtype: torch.dtype | None = None, **score: Any,
    ) -> Partial:  # fmt: skip
        """One vendor call for each rectangle, merged into the carry's rows: in place if its out has `out_dtype`."""
        q_BTHD, k_BSGD, v_BSGV = unit_stride(q_BTHD, k_BSGD, v_BSGV)
        rectangles = cut_into(where, q_BTHD, k_BSGD, v_BSGV)

        def run(queries: slice, keys: slice, mask: Any) -> Partial:
            out, lse = forward(sliced(q_BTHD, queries), sliced(k_BSGD, keys), sliced(v_BSGV, keys), mask, **score)
            return Partial(out, in_dtype(lse, fine(q_BTHD)))

        if carry is None and is_one(rectangles, q_BTHD):
            part = run(*rectangles[0])
            return Partial(in_dtype(part.out, out_dtype or accumulator(q_BTHD)), part.lse)
        exact = accumulator(q_BTHD)
        dtype = out_dtype or exact
        between = untouched([x.queries for x in rectangles], q_BTHD.shape[1])  # None: a row has several merges
        total = carry or empty(q_BTHD, v_BSGV.shape[-1])
        if between is None:
            total = Partial(total.out.to(exact), total.lse)
        in_place = between is None or total.out.dtype == dtype
        new = total if in_place else Partial(torch.empty_like(total.out, dtype=dtype), torch.empty_like(total.lse))
        for rectangle in largest_first(rectangles):
            merge_rows(total, rectangle.queries, run(*rectangle), new)
        for rows in between if between and not in_place else ():
            new.out[:, rows], new.lse[:, rows] = total.out[:, rows], total.lse[:, rows]
        return Partial(new.out.to(dtype), new.lse)

    def gradients(
        tensors: tuple[Tensor, Tensor, Tensor], where: Intervals, rows: Rows, want: tuple[int, ...] = EVERY,
        into: tuple[Any, Any, Any] = NO_SUMS, *, final: bool = False, **score: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """One vendor call for each rectangle; if one is the whole step, its gradients are as the vendor gives them."""
        rectangles = cut_into(where, *tensors, True)
        if rows.out is None and not rectangles_of:
            return own_kernel(tensors[0]).backward(tensors, where, rows, want, into, final=final, **score)
        q_BTHD, k_BSGD, v_BSGV, dout, *given = unit_stride(*tensors, rows.dout, *[] if rows.out is None else [rows.out])
        out = given[0] if given else None

        def run(queries: slice, keys: slice, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
            some = [None if x is None else sliced(x, queries) for x in (dout, q_BTHD, out, rows.lse)]
            more = {"delta": sliced(rows.delta, queries)} if out is None and rows.delta is not None else {}
            return backward(*some[:2], sliced(k_BSGD, keys), sliced(v_BSGV, keys), *some[2:], mask, **score, **more)

        if is_one(rectangles, q_BTHD) and sliced(k_BSGD, rectangles[0].keys) is k_BSGD:
            return run(*rectangles[0])
        sums = Total(q_BTHD), Total(k_BSGD), Total(v_BSGV)
        for queries, keys, mask in largest_first(rectangles):
            for total, grad, at in zip(sums, run(queries, keys, mask), (queries, keys, keys), strict=True):
                total.add(grad, at)
        return sums

    def rounds(where: Intervals) -> bool:
        return rectangles_of is not None or len(where.rectangles or ()) == 1

    return TorchKernel(attend, gradients, refuses, with_out, rounds=rounds, fills=fills)


def cached(where: Intervals, kind: Any, make: Callable[[], Made]) -> Made:
    """What `make` gives for these intervals, made once; not while a graph is captured, whose memory is its own."""
    cache = where.made
    if cache is not None and kind in cache:
        result: Made = cache[kind]
        return result
    result = make()
    if cache is not None and not (where.begin.is_cuda and torch.cuda.is_current_stream_capturing()):
        cache[kind] = result
    return result


def sliced(x: Tensor, rows: slice) -> Tensor:
    """These rows of a tensor; the tensor itself if they are all."""
    return x if rows.start == 0 and rows.stop == x.shape[1] else x[:, rows]


def is_one(rectangles: Sequence[Rectangle], q: Tensor) -> bool:
    """Whether there is one rectangle, with all queries."""
    return len(rectangles) == 1 and sliced(q, rectangles[0].queries) is q


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a contiguous last dim, which vendor kernels require."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def own_rectangles(name: str, where: Intervals, *_: Any) -> tuple[Rectangle, ...]:
    """The full and causal rectangles that the intervals come with."""
    if where.rectangles is None:
        raise NotImplementedError(
            f"{name} runs full and causal rectangles only, and these intervals come without them "
            "(kernels.intervals.rectangles_of finds them); the triton and tiled kernels run any intervals"
        )
    return where.rectangles


def merge_rows(total: Partial, rows: slice, part: Partial, into: Partial) -> None:
    """into[:, rows] = merge(total[:, rows], part)."""
    mine, new = [Partial(x.out[:, rows], x.lse[:, rows]) for x in (total, into)]
    if total.out.is_cuda and total.lse.dtype == torch.float32:
        from ringattn.kernels.attention.triton.merge import merge_stack  # triton is part of torch for GPUs

        merge_stack(Partial(part.out[None], part.lse[None]), mine, into=mine if into is total else new)
        return
    merged = partial.merge(*[Partial(x.out.to(accumulator(x.out)), x.lse) for x in (mine, part)])
    new.out.copy_(merged.out)
    new.lse.copy_(merged.lse)


def untouched(queries: Sequence[slice], length: int) -> list[slice] | None:
    """The rows between slices, none of which may overlap; None if some do."""
    gaps, at = [], 0
    for rows in sorted(queries, key=lambda rows: rows.start):
        if rows.start < at:
            return None
        if rows.start > at:
            gaps.append(slice(at, rows.start))
        at = rows.stop
    return [*gaps, slice(at, length)] if at < length else gaps


def largest_first(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
    """The rectangles by size: while a large one runs, the host launches the next ones."""
    return sorted(
        rectangles, key=lambda x: (x.queries.stop - x.queries.start) * (x.keys.stop - x.keys.start), reverse=True
    )


def own_kernel(q: Tensor) -> TorchKernel:
    """Our own kernel for q's device, which takes delta."""
    if q.is_cuda:
        from ringattn.kernels.attention import triton  # triton is part of torch for GPUs

        return triton.KERNEL
    return tiled.KERNEL
