"""Gated linear attention in PyTorch: each rank's pass from zero, the exchange of states, each rank's output.

    B batch   T this rank's tokens   H heads   K key dim   V value dim   P segments per rank

Backward needs the inputs and the states before all chunks. These are kept if they are small compared to the inputs;
otherwise only the state before each segment is, and the others are recomputed. Under torch.compile a call is one op
(compiled.py).
"""

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.planning import Plan
from ringattn.segments import order
from ringattn.spec import Docs
from ringattn.torch.attention.function import autocast
from ringattn.torch.attention.ulysses import cleared
from ringattn.torch.dispatch import no_autocast, no_view, once, traced
from ringattn.torch.handles import whole_on_one
from ringattn.torch.linear import states
from ringattn.torch.linear.call import Call, bind, empty_states

Found = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    plan: Plan | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T v_t and o_t = scale * q_t S_t; this rank holds its plan's tokens."""
    plan = whole_on_one(q, q) if plan is None else plan
    q, k, v = autocast(q, k, v)
    tensors = q, k, v, log_decay, initial_state
    keep = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
    out: Tensor
    end: Tensor | None
    if traced(*tensors):
        from ringattn.torch.linear.compiled import linear_op

        out, end = linear_op(*tensors, plan, docs, scale, kernel, scan, keep, check, return_state)
    else:
        look = q.device.type == "cpu" if check is None else check
        call = bind(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan, keep, look, return_state)
        out, end = LinearAttention.apply(call, *tensors) if keep else forward(call, *tensors)[:2]
    return (out, end) if return_state else out


class LinearAttention(torch.autograd.Function):
    """A bound call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        out, end, start, kept = forward(call, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)  # no zeros as large as the states
        ctx.save_for_backward(*tensors, start, kept)
        return no_view(out), None if end is None else no_view(end)

    def run_backward(ctx: Any, dout: Tensor | None, dend: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, initial, start, kept = ctx.saved_tensors
        return None, *backward(ctx.call, q, k, v, g, initial, start, kept, dout, dend)

    backward = once(run_backward, "ringattn.linear_attention")


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None) -> Found:
    """(out, the state behind the last token), and for backward, if it will run, the state before each of this rank's
    segments, or before each chunk.
    """
    with no_autocast(q.device):
        q, k, v, g = call.folded(q, k, v, g)
        own = call.kernel.scan_states(k, v, g, call.begin)
        flying = call.exchange(own.end, initial, end_everywhere=call.return_state)
        kept = empty_states(call.kernel, q, k, v, g) if call.gradients else None
        out = call.kernel.read_out(q, k, v, g, call.begin, own, flying.before, call.scale, kept)
        start = flying.before()
        start = start if call.gradients and kept is None and not call.alone else None
        end = flying.behind if call.return_state else None
    return call.whole(out).contiguous(), end, start, kept


def backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, start: Tensor | None,
    kept: Tensor | None, dout: Tensor | None, dend: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dg, this rank's share of the initial state's gradient); `dend` is this rank's share too."""
    dout = torch.zeros_like(v) if dout is None else dout
    if not call.return_state:
        dend = None
    elif dend is None:  # unused here, but perhaps used on another rank
        dend = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3], dtype=accumulator(q))
    with no_autocast(q.device):
        q, k, v, g, dout = call.folded(q, k, v, g, dout)
        back = call.kernel.scan_gradients(q, dout, g, call.begin, call.scale)
        last, first = order(call.plan)[-1], order(call.plan)[0]
        if dend is not None and not call.alone:
            dend = states.total_at(call.plan, dend, call.way, last[0])
        flying = call.exchange(back.end, dend, backward=True)
        own: Any = kept
        if kept is None:  # recompute them while the gradients of the states travel
            own = call.kernel.scan_states(k, v, g, call.begin)
        before = initial if call.alone else start
        dq, dk, dv, dg = call.kernel.gradients(
            q, k, v, g, call.begin, own, before, back, dout, flying.before, call.scale
        )
        flying.before()
        dinitial = None
        if initial is not None:
            dinitial = flying.behind if call.place == first[:2] else torch.zeros_like(flying.behind)
        # the gates of padding lie before the end state, and have gradients
        dg = None if dg is None else cleared(call.whole(dg), call.real).contiguous()
    dq, dk, dv = (call.whole(x).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv, dg, dinitial
