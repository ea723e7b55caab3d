"""`linear_attention` in PyTorch: in eager mode one autograd function, else one op, as attention."""

from typing import Any

import torch
from torch import Tensor

from ringattn.check.linear import Given, Settings, returned_states
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear.maps import Inputs
from ringattn.masks.spec import raise_if
from ringattn.plans.plan import Plan
from ringattn.plans.segments import segments, uneven
from ringattn.torch.dispatch import autocast, differentiate, fake, gradients_like, op, traced
from ringattn.torch.handles import docs_of, of_text, plan_of, spread, starts_of, text_of, whole_on_one
from ringattn.torch.linear import function
from ringattn.torch.linear.call import bind, bound, kept_states, problem, rows, selected

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial, Tensor? docs"  # of both ops


def linear_attention(x: Given, plan: Plan | None, asked: Settings) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t; this rank holds its plan's tokens."""
    q, k, v = autocast(*x[:3])
    x = Given(q, k, v, *x[3:])
    keep = torch.is_grad_enabled() and any([getattr(t, "requires_grad", False) for t in x])
    out: Tensor
    end: Tensor | None
    if traced(*x):
        out, end = linear_op(x, plan, asked, keep)
    else:
        call = bind(x, plan, asked, keep)
        out, end = function.LinearAttention.apply(call, *x) if keep else function.forward(call, x)[:2]
    return (out, end) if asked.return_state else out


def linear_op(x: Given, plan: Any, asked: Settings, keep: bool) -> tuple[Tensor, Tensor]:
    """(out, end) by the op `ringattn::linear_attention`."""
    docs, scale, kernel, scan, check, _ = asked
    if check and torch.compiler.is_compiling():
        raise ValueError("check=True reads the gates, which a compiled graph cannot; check outside torch.compile")
    raise_if(problem(x, plan, asked))
    plan = whole_on_one(x.q, x.q) if plan is None else plan
    look = (x.q.device.type == "cpu" if check is None else check) and not torch.compiler.is_compiling()
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    out, end, *_ = torch.ops.ringattn.linear_attention(
        *x, starts_of(docs), text_of(plan), look, scale, kernel, scan, returned_states(x, asked), keep
    )
    return out, end


@op(
    "linear_attention",
    f"({TENSORS}, str plan, bool look, float scale, str kernel, str scan, str returned, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def forward_op(*inputs: Any) -> tuple[Tensor, ...]:
    """`function.forward`; a missing tensor is an empty one."""
    *tensors, docs, plan, look, scale, kernel, scan, returned, keep = inputs
    x = Given(*tensors)
    live = plan_of(plan, x.q.shape[1], x.q.shape[1])
    returned_as = returned if returned == "documents" else bool(returned)
    call = bind(x, live, Settings(docs_of(docs, live.seq_len), scale, kernel, scan, look, returned_as), keep)
    out, *rest = function.forward(call, x)
    if call.documents is not None:
        rest[-1] = None  # as many as there are rows, which a graph cannot know: backward finds them again
    return out, *(x.q.new_empty(0, dtype=accumulator(x.q)) if t is None else t for t in rest)


@fake("linear_attention")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, docs, plan, _, scale, kernel, _, returned, keep = inputs
    x, live = Given(*tensors), spread(plan)
    (B, T, H, V), K, P, dtype = x.v.shape, x.q.shape[3], segments(live), accumulator(x.q)
    width = 1 if docs is None else docs.shape[1] - 1
    initial = x.initial_state
    each = returned == "documents" or (width > 1 and initial is not None and initial.shape[0] == B * width)
    end = (B * width if each else B, H, K, V) if returned else (0,)
    kept = None
    if keep and not each and not uneven(live):
        of_rows: Any = (None if t is None else rows(t, P) for t in x[:5])
        kept = kept_states(selected(x, kernel), Inputs(*of_rows, None, scale))  # type: ignore[call-arg]
    start = (B * P, H, K, V) if keep and kept is None and live.ring * live.ulysses > 1 else (0,)
    sizes = ((B, T, H, V), x.q.dtype), (end, dtype), (start, dtype), kept or ((0,), dtype)
    return tuple([x.q.new_empty(size, dtype=kind) for size, kind in sizes])


@op(
    "linear_attention_backward",
    f"({TENSORS}, Tensor start, Tensor kept, Tensor? dout, Tensor? dend, str plan, float scale, str kernel, str scan, "
    "str returned) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    """`function.backward`; a missing tensor is an empty one."""
    *tensors, docs, start, kept, dout, dend, plan, scale, kernel, scan, returned = inputs
    x = Given(*tensors)
    live = plan_of(plan, x.q.shape[1], x.q.shape[1])
    call = bound(x, live, Settings(docs_of(docs, live.seq_len), scale, kernel, scan, None, returned))
    before, every = (t if t.numel() else None for t in (start, kept))
    grads = function.backward(call, x, before, every, dout, dend)
    return tuple([start.new_empty(0) if t is None else t for t in grads])


@fake("linear_attention_backward")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return gradients_like(inputs[:6], inputs[7])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.text, _, ctx.scale, ctx.kernel, ctx.scan, ctx.returned, _ = inputs
    ctx.plan = ctx.text and of_text(ctx.text)  # as in attention
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)  # no zeros as large as the states


def _backward(ctx: Any, dout: Tensor | None, dend: Tensor | None) -> tuple[Any, ...]:
    *tensors, docs, start, kept = ctx.saved_tensors
    grads = torch.ops.ringattn.linear_attention_backward(
        *tensors, docs, start, kept, dout, dend, ctx.text, ctx.scale, ctx.kernel, ctx.scan, ctx.returned
    )
    return *(None if x is None else dx for x, dx in zip(tensors, grads, strict=True)), *[None] * 8


differentiate("linear_attention", _save, _backward, count=2)
