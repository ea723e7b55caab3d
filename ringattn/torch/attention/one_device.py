"""Attention on one device over local intervals as a torch op, differentiable and compilable.

    B batch   T queries   S keys   H query heads   G key/value heads   D head dim   V value dim

It is one node for torch.compile and one function for autograd. A partial is float32 (float64 for float64 inputs), and
both out and lse have gradients: that of the lse is one more term of delta.
"""

from typing import Any

import torch
from torch import Tensor

from ringattn import kernels
from ringattn.check.arguments import has_shape
from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import row_delta
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import of_factor, raise_if
from ringattn.plans.sizes import heads_problem
from ringattn.torch.attention.steps import problem_of
from ringattn.torch.check import of_tensors, of_types
from ringattn.torch.dispatch import differentiate, fake, no_autocast, op


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str = "auto",
    check: bool | None = None,
) -> Partial:
    """softmax(scale * q k^T) v, where query t sees the keys [begin[t], end[t]): out [B, T, H, V] and lse [B, T, H].

    `begin` and `end` are integers [T] or [B, T], and neither decreases along the queries; begin >= end is an empty
    row (out = 0, lse = -inf). `impl` names a kernel of `ringattn.kernels.TABLE`; those that run rectangles only
    (cudnn, flash) read the intervals back to find them. `check=True` checks every interval, which waits for the
    device; by default only CPUs do so. Unchecked intervals that lie outside of the keys may crash the process.

    >>> q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 1, 8)
    >>> causal = torch.arange(4)
    >>> attend(q, k, k, causal * 0, causal + 1).out.shape
    torch.Size([1, 4, 2, 8])
    """
    raise_if(
        of_types(q=q, k=k, v=v, begin=begin, end=end)
        or of_tensors(q, k, v)
        or heads_problem(q.shape[2], k.shape[2], ulysses=1)
        or of_intervals(q, begin, end)
        or of_factor("scale", scale)
        or of_factor("softcap", softcap)
        or of_choice("impl", impl, ("auto", *kernels.BY_NAME))
        or of_values(begin, end, k.shape[1], check)
    )
    begin, end = (x.to(torch.int32)[None] if x.dim() == 1 else x.to(torch.int32) for x in (begin, end))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.ops.ringattn.attend(q, k, v, begin, end, scale, softcap, impl)
    return Partial(out, lse.to(out.dtype))


def of_intervals(q: Tensor, begin: Tensor, end: Tensor) -> str | None:
    B, T = q.shape[:2]
    for name, x in (("begin", begin), ("end", end)):
        if x.dtype not in (torch.int32, torch.int64):
            return f"{name} is {x.dtype}; intervals are int32 (or int64)"
        if not has_shape(x, (T,), (1, T), (B, T)):
            return f"{name} has shape {tuple(x.shape)}; expected ({T},) or ({B}, {T}): one number for each query of q"
        if x.device != q.device:
            return f"{name} is on {x.device}, q on {q.device}; put both on one device"
    if begin.shape != end.shape:
        return f"begin has shape {tuple(begin.shape)}, end {tuple(end.shape)}; give both the same"
    return None


def of_values(begin: Tensor, end: Tensor, keys: int, check: bool | None) -> str | None:
    """The first interval that is out of range or decreases, if intervals are checked."""
    compiling = torch.compiler.is_compiling()
    if not (begin.is_cpu and not compiling if check is None else check):
        return None
    if compiling:
        return "check=True reads the intervals, which a compiled graph cannot; check outside torch.compile"
    for name, x in (("begin", begin), ("end", end)):
        rows = torch.atleast_2d(x).cpu()
        outside = ((rows < 0) | (rows > keys)).nonzero()
        if len(outside):
            row, t = outside[0].tolist()
            return f"{name}[{row}, {t}] = {rows[row, t]} lies outside [0, {keys}], the range of keys; clamp it"
        falls = (rows.diff(dim=-1) < 0).nonzero()
        if len(falls):
            row, t = falls[0].tolist()
            return (
                f"{name} decreases in row {row}, from {rows[row, t]} at query {t} to {rows[row, t + 1]} at query "
                f"{t + 1}; sort the queries by position, and let empty rows repeat their neighbour's bounds"
            )
    return None


def chosen(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, softcap: float | None, impl: str
) -> tuple[Any, Intervals]:
    """The selected kernel's module, and the intervals, with rectangles if the kernel needs them or reading is free."""
    needed = q.device.type == "cpu" or (impl != "auto" and kernels.BY_NAME[impl].rectangles)
    rectangles = rectangles_of(begin.numpy(force=True), end.numpy(force=True)) if needed else None
    problem = problem_of(q, k, v, softcap, rectangles is not None)
    return kernels.select(problem, impl, exact=True).load(), Intervals(begin, end, rectangles)


@op("attend")
def attend_op(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scale: float, softcap: float | None, impl: str
) -> tuple[Tensor, Tensor]:
    kernel, where = chosen(q, k, v, begin, end, softcap, impl)
    with no_autocast(q.device):
        partial = kernel.attend(q, k, v, where, scale=scale, softcap=softcap)
    return partial.out.contiguous(), partial.lse.contiguous()


@fake("attend")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[3], dtype=accumulator(q)), q.new_empty(B, T, H, dtype=fine(q))


@op("attend_backward")
def attend_backward_op(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor,
    scale: float, softcap: float | None, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel, where = chosen(q, k, v, begin, end, softcap, impl)
    with no_autocast(q.device):
        delta = row_delta(out, dout, dlse.to(out.dtype))
        grads = kernel.attend_backward(q, k, v, where, dout, lse, delta, scale=scale, softcap=softcap)
    dq, dk, dv = (g.to(x.dtype).contiguous() for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@fake("attend_backward")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _attend_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.ringattn.attend_backward(*ctx.saved_tensors, dout, dlse, ctx.scale, ctx.softcap, ctx.impl)
    return *grads, None, None, None, None, None


differentiate("attend", _save_attend, _attend_backward)
