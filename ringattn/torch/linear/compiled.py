"""`linear_attention` as ops, for torch.compile and all else that sees ops."""

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.planning import Plan, of_text
from ringattn.segments import segments
from ringattn.spec import Docs
from ringattn.torch.dispatch import differentiate, fake, op
from ringattn.torch.handles import docs_of, plan_of, spread, starts_of, text_of
from ringattn.torch.linear import function
from ringattn.torch.linear.call import Call, bind, empty_states, problem, rows, selected


def linear_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None, plan: Plan,
    docs: Docs | None, scale: float | None, kernel: str, scan: str, keep: bool, check: bool | None, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, end) by the op `ringattn::linear_attention`."""
    if check and torch.compiler.is_compiling():
        raise ValueError("check=True reads the gates, which a compiled graph cannot; check outside torch.compile")
    if found := problem(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan):
        raise ValueError(found)
    look = (q.device.type == "cpu" if check is None else check) and not torch.compiler.is_compiling()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, end, *_ = torch.ops.ringattn.linear_attention(
        q, k, v, log_decay, initial_state, starts_of(docs), text_of(plan), look, scale, kernel, scan, return_state, keep
    )
    return out, end


@op("linear_attention")
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial: Tensor | None,
    docs: Tensor | None,
    plan: str,
    look: bool,
    scale: float,
    kernel: str,
    scan: str,
    return_state: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`function.forward`; a missing tensor is an empty one."""
    live = plan_of(plan, q.shape[1], q.shape[1])
    known = docs_of(docs, live.seq_len)
    call = bind(q, k, v, g, live, initial, known, scale, kernel, scan, keep, look, return_state)
    out, *rest = function.forward(call, q, k, v, g, initial)
    end, start, kept = (q.new_empty(0, dtype=accumulator(q)) if x is None else x for x in rest)
    return out, end, start, kept


@fake("linear_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Any, initial: Any, docs: Any, plan: str, look: bool, scale: float,
    kernel: str, scan: str, return_state: bool, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, T, H, K), V, live, dtype = q.shape, v.shape[3], spread(plan), accumulator(q)
    P = segments(live)
    end = q.new_empty(B, H, K, V, dtype=dtype) if return_state else q.new_empty(0, dtype=dtype)
    folded = rows(q, P), rows(k, P), rows(v, P), None if g is None else rows(g, P)
    found = empty_states(selected(q, v, kernel), *folded) if keep else None
    walked = keep and found is None and live.ring * live.ulysses > 1
    start = q.new_empty(B * P, H, K, V, dtype=dtype) if walked else q.new_empty(0, dtype=dtype)
    return q.new_empty(B, T, H, V), end, start, q.new_empty(0, dtype=dtype) if found is None else found


@op("linear_attention_backward")
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
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
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`function.backward`; a missing tensor is an empty one."""
    live = plan_of(plan, q.shape[1], q.shape[1])
    known = docs_of(docs, live.seq_len)
    call = Call(q, v, live, known, scale, kernel, scan, True, return_state)
    before, every = (x if x.numel() else None for x in (start, kept))
    dq, dk, dv, *rest = function.backward(call, q, k, v, g, initial, before, every, dout, dend)
    dg, dinitial = (start.new_empty(0) if x is None else x for x in rest)
    return dq, dk, dv, dg, dinitial


@fake("linear_attention_backward")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, docs: Any, start: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(x, memory_format=contiguous) for x in (q, k, v)]
    for x in (g, initial):
        grads.append(start.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous))
    return tuple(grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.text, _, ctx.scale, ctx.kernel, ctx.scan, ctx.return_state, _ = inputs
    ctx.plan = ctx.text and of_text(ctx.text)  # as in attention
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)  # no zeros as large as the states


def _backward(ctx: Any, dout: Tensor | None, dend: Tensor | None) -> tuple[Any, ...]:
    q, k, v, g, initial, docs, *kept = ctx.saved_tensors
    dq, dk, dv, dg, dinitial = torch.ops.ringattn.linear_attention_backward(
        q, k, v, g, initial, docs, *kept, dout, dend, ctx.text, ctx.scale, ctx.kernel, ctx.scan, ctx.return_state
    )
    return dq, dk, dv, None if g is None else dg, None if initial is None else dinitial, *[None] * 8


differentiate("linear_attention", _save, _backward, shown=2)
