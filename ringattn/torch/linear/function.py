"""Linear attention in PyTorch: each rank's map of the state, the exchange of states, each rank's output.

    B batch   T this rank's tokens   H heads   K key dim   V value dim   P segments per rank

Backward needs the inputs and the states before all chunks. These are kept if they are small compared to the inputs;
otherwise only the state before each segment is, and the others are recomputed. Under torch.compile a call is one op
(compiled.py).
"""

from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan
from ringattn.torch.agree import agree
from ringattn.torch.attention.ulysses import cleared
from ringattn.torch.bind import autocast, traced
from ringattn.torch.dispatch import no_autocast, no_view, once
from ringattn.torch.linear import documents
from ringattn.torch.linear.call import Given, LinearCall, bind

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Gradients = tuple[Tensor | None, ...]  # in the order of `Given`


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
        from ringattn.torch.linear.compiled import linear_op

        out, end = linear_op(x, plan, docs, scale, kernel, scan, keep, check, return_state)
    else:
        call = bind(x, plan, docs, scale, kernel, scan, keep, check, return_state)
        out, end = LinearAttention.apply(call, *x) if keep else forward(call, x)[:2]
    return (out, end) if return_state else out


class LinearAttention(torch.autograd.Function):
    """A bound call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: LinearCall, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        out, end, start, kept = forward(call, Given(*tensors))
        ctx.call = call
        ctx.set_materialize_grads(False)  # no zeros as large as the states
        ctx.save_for_backward(*tensors, start, kept)
        return no_view(out), None if end is None else no_view(end)

    def run_backward(ctx: Any, dout: Tensor | None, dend: Tensor | None) -> tuple[Any, ...]:
        *tensors, start, kept = ctx.saved_tensors
        return None, *backward(ctx.call, Given(*tensors), start, kept, dout, dend)

    backward = once(run_backward, "ringattn.linear_attention")


def forward(call: LinearCall, given: Given) -> Outputs:
    """(out, the state behind the last token), and for backward, if it will run, the state before each of this rank's
    segments, or before each chunk. With one state a document: the state behind each of them, the states before segments
    and, in the place of those before chunks, those before rows.
    """
    with no_autocast(given.q.device):
        if call.documents is not None:
            out, end, *more = documents.forward(call, given)
            return out, end, *(more if call.gradients else (None, None))
        x = call.inputs(given)
        scan = call.kernel.scan_states(x, maps=not call.alone)
        transfer: Any = None
        if call.passages:
            passage: Any = call.passages[0]
            transfer = passage.start(scan.map, given.initial_state, bool(call.returned))
        kept = None if call.kept is None else given.q.new_empty(call.kept[0], dtype=call.kept[1])
        out, end = call.kernel.read_out(x, scan, transfer.before if transfer else given.initial_state, kept)
        start = None
        if transfer is not None:
            start, end = transfer.before(), transfer.behind if call.returned else None
    start = start if call.gradients and kept is None else None
    return call.whole(out).contiguous(), end if call.returned else None, start, kept


def backward(
    call: LinearCall, given: Given, start: Tensor | None, kept: Tensor | None, dout: Tensor | None, dend: Tensor | None
) -> Gradients:
    """The gradients of the tensors, that of the initial state as this rank's share; `dend` is this rank's share too."""
    if call.compared:
        agree(call.plan, {"call": "backward of linear_attention"})
    dout = torch.zeros_like(given.v) if dout is None else dout
    if not call.returned:
        dend = None
    elif dend is None:  # unused here, but perhaps used on another rank
        dend = dout.new_zeros(call.state_shape, dtype=accumulator(given.q))
    with no_autocast(given.q.device):
        if call.documents is not None:
            return documents.backward(call, given, start, kept, dout, dend)
        x, dout = call.inputs(given), call.of_output(dout)
        back = call.kernel.scan_gradients(x, dout, maps=not call.alone)
        transfer: Any = None
        if call.passages:
            passage: Any = call.passages[1]
            transfer = passage.start(back.map, None if dend is None else passage.total(dend))
        scan: Any = kept
        if kept is None:  # recompute them while the gradients of the states travel
            scan = call.kernel.scan_states(x, maps=False)
        before = given.initial_state if call.alone else start
        *grads, dinitial = call.kernel.gradients(x, scan, before, back, dout, transfer.before if transfer else dend)
        if transfer is not None and given.initial_state is not None:
            dinitial = transfer.behind if passage.ends_on_this_rank else torch.zeros_like(given.initial_state)
        dq, dk, dv, dg, dbeta = (None if t is None else call.whole(t).contiguous() for t in grads)
        if dg is not None and call.real is not None:  # padding lies before the end state, so its gates have gradients
            dg = cleared(dg, call.real).contiguous()
    return dq, dk, dv, dg, dbeta, None if given.initial_state is None else dinitial
