"""`linear_attention` in PyTorch: in eager mode one autograd function, else one op, as attention."""

from typing import Any

import torch
from torch import Tensor

from ringattn.check.linear import returned_states
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear.maps import Inputs
from ringattn.masks.spec import Docs, raise_if
from ringattn.plans.plan import Plan
from ringattn.plans.segments import segments, uneven
from ringattn.torch.bind import autocast, traced
from ringattn.torch.dispatch import differentiate, fake, op
from ringattn.torch.handles import docs_of, of_text, plan_of, spread, starts_of, text_of, whole_on_one
from ringattn.torch.linear import function
from ringattn.torch.linear.call import Given, bind, bound, kept_states, of_types, problem, rows, selected


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    plan: Plan | None = None,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool | str = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t; this rank holds its plan's tokens."""
    q, k, v = autocast(q, k, v)
    x = Given(q, k, v, log_decay, beta, initial_state)
    keep = torch.is_grad_enabled() and any([getattr(t, "requires_grad", False) for t in x])
    out: Tensor
    end: Tensor | None
    if traced(*x):
        out, end = linear_op(x, plan, docs, scale, kernel, scan, keep, check, return_state)
    else:
        call = bind(x, plan, docs, scale, kernel, scan, keep, check, return_state)
        out, end = function.LinearAttention.apply(call, *x) if keep else function.forward(call, x)[:2]
    return (out, end) if return_state else out


def linear_op(
    x: Given, plan: Any, docs: Docs | None, scale: float | None, kernel: str, scan: str, keep: bool,
    check: bool | None, return_state: bool | str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, end) by the op `ringattn::linear_attention`."""
    raise_if(of_types(x, plan, docs, check, return_state))
    plan = whole_on_one(x.q, x.q) if plan is None else plan
    if check and torch.compiler.is_compiling():
        raise ValueError("check=True reads the gates, which a compiled graph cannot; check outside torch.compile")
    raise_if(problem(x, plan, docs, scale, kernel, scan))
    look = (x.q.device.type == "cpu" if check is None else check) and not torch.compiler.is_compiling()
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    out, end, *_ = torch.ops.ringattn.linear_attention(
        *x, starts_of(docs), text_of(plan), look, scale, kernel, scan,
        returned_states(return_state, x.initial_state, docs, x.v.shape[0]), keep,
    )  # fmt: skip
    return out, end


@op("linear_attention")
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    docs: Tensor | None,
    plan: str,
    look: bool,
    scale: float,
    kernel: str,
    scan: str,
    returned: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`function.forward`; a missing tensor is an empty one."""
    live = plan_of(plan, q.shape[1], q.shape[1])
    packed = docs_of(docs, live.seq_len)
    given = Given(q, k, v, g, beta, initial)
    returned_as = returned if returned == "documents" else bool(returned)
    call = bind(given, live, packed, scale, kernel, scan, keep, look, returned_as)
    out, *rest = function.forward(call, given)
    if call.documents is not None:
        rest[-1] = None  # as many as there are rows, which a graph cannot know: backward finds them again
    end, start, kept = (q.new_empty(0, dtype=accumulator(q)) if x is None else x for x in rest)
    return out, end, start, kept


@fake("linear_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, initial: Any, docs: Any, plan: str, look: bool, scale: float,
    kernel: str, scan: str, returned: str, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, T, H, V), K, live, dtype = v.shape, q.shape[3], spread(plan), accumulator(q)
    P = segments(live)
    width = 1 if docs is None else docs.shape[1] - 1
    each = returned == "documents" or (width > 1 and initial is not None and initial.shape[0] == B * width)
    end = q.new_empty(0, dtype=dtype)
    if returned:
        end = q.new_empty(B * width if each else B, H, K, V, dtype=dtype)
    kept = None
    if keep and not each and not uneven(live):
        g, beta = (None if t is None else rows(t, P) for t in (g, beta))
        x = Inputs(rows(q, P), rows(k, P), rows(v, P), g, beta, None, scale)
        kept = kept_states(selected(Given(q, k, v, g, beta), kernel), x)
    walked = keep and kept is None and live.ring * live.ulysses > 1
    start = q.new_empty(B * P, H, K, V, dtype=dtype) if walked else q.new_empty(0, dtype=dtype)
    sizes, kept_dtype = kept or ((0,), dtype)
    return q.new_empty(B, T, H, V), end, start, q.new_empty(sizes, dtype=kept_dtype)


@op("linear_attention_backward")
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    docs: Tensor | None,
    start: Tensor,
    kept: Tensor,
    dout: Tensor | None,
    dend: Tensor | None,
    plan: str,
    scale: float,
    kernel: str,
    scan: str,
    returned: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`function.backward`; a missing tensor is an empty one."""
    live = plan_of(plan, q.shape[1], q.shape[1])
    packed = docs_of(docs, live.seq_len)
    given = Given(q, k, v, g, beta, initial)
    call = bound(given, live, packed, scale, kernel, scan, returned)
    before, every = (x if x.numel() else None for x in (start, kept))
    grads = function.backward(call, given, before, every, dout, dend)
    dq, dk, dv, dg, dbeta, dinitial = (start.new_empty(0) if x is None else x for x in grads)
    return dq, dk, dv, dg, dbeta, dinitial


@fake("linear_attention_backward")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, initial: Any, docs: Any, start: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(x, memory_format=contiguous) for x in (q, k, v)]
    for x in (g, beta, initial):
        grads.append(start.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous))
    return tuple(grads)


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


differentiate("linear_attention", _save, _backward, shown=2)
