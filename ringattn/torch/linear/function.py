"""Linear attention in PyTorch: each rank's map of the state, the exchange of states, each rank's output.

    B batch   T this rank's tokens   H heads   K key dim   V value dim   P segments per rank

Backward needs the inputs and the states before all chunks. These are kept if they are small compared to the inputs;
otherwise only the state before each segment is, and the others are recomputed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ringattn.check.linear import Given
from ringattn.kernels.arrays import accumulator
from ringattn.torch.agree import agree
from ringattn.torch.attention.ulysses import cleared
from ringattn.torch.dispatch import first_order, no_autocast, no_view
from ringattn.torch.linear.call import LinearCall, rows
from ringattn.torch.linear.documents import state_of
from ringattn.torch.sharding import summed

Gradients = tuple[Tensor | None, ...]  # in the order of `Given`


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

    backward = first_order(run_backward, "ringattn.linear_attention")


def forward(call: LinearCall, given: Given) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, the state behind the last token), and for backward, if it will run, the state before each of this rank's
    segments, or before each chunk. With one state a document: the state behind each of them, the states before segments
    and, in the place of those before chunks, those before rows.
    """
    with no_autocast(given.q.device):
        if call.documents is not None:
            out, end, *more = forward_by_documents(call, given)
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
            return backward_by_documents(call, given, start, kept, dout, dend)
        x, dout = call.inputs(given), rows(cleared(dout, call.real), call.parts)
        back = call.kernel.scan_gradients(x, dout, maps=not call.alone)
        transfer: Any = None
        if call.passages:
            passage: Any = call.passages[1]
            total = None if dend is None else summed(dend, call.plan.ulysses_axis, call.plan.ring_axis)
            transfer = passage.start(back.map, total)
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


def forward_by_documents(call: LinearCall, given: Given) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(out, the state behind each document, and for backward the states before segments and before rows)."""
    d = call.documents
    assert d is not None
    x, initial = call.rows_of(given[:5]), d.of_documents(given.initial_state)
    like = state_of(x)
    scan = call.kernel.scan_states(x, maps=d.joined)
    transfer: Any = None
    if not d.alone:
        assert scan.map is not None
        before = d.walked(scan.map, d.before(initial, None, like))
        transfer = call.passages[0].start(d.of_segments(scan.map, before))
    starts = cache(lambda: d.walked(scan.map, d.before(initial, transfer.before() if transfer else None, like)))
    out, behind = call.kernel.read_out(x, scan, starts)
    end = d.shared(call.plan, behind, initial) if call.returned else None
    if call.returned == "rows" and end is not None:
        end = end.index_select(0, d.final)
    return d.whole(out), end, transfer.before() if transfer else None, starts()


def backward_by_documents(
    call: LinearCall, given: Given, segments: Tensor | None, starts: Tensor | None, dout: Tensor, dend: Tensor | None
) -> Gradients:
    """As `backward`. Without the states before rows they are found again, from those before segments."""
    d = call.documents
    assert d is not None
    x, initial = call.rows_of(given[:5]), d.of_documents(given.initial_state)
    like, dout = state_of(x), d.folded(dout)
    if call.returned == "rows" and dend is not None:
        dend = dend.new_zeros(d.count, *dend.shape[1:]).index_copy_(0, d.final, dend)
    back = call.kernel.scan_gradients(x, dout, maps=d.joined)
    dends = None if dend is None else summed(dend, call.plan.ulysses_axis, call.plan.ring_axis)
    transfer: Any = None
    if not d.alone:
        assert back.map is not None
        behind = d.walked_back(back.map, d.behind(dends, None, like))
        transfer = call.passages[1].start(d.of_segments(back.map, behind, True))
    scan = call.kernel.scan_states(x, maps=d.joined and starts is None)
    if starts is None:
        starts = d.walked(scan.map, d.before(initial, segments, like))
    dbehind: Callable[[], Tensor] = cache(
        lambda: d.walked_back(back.map, d.behind(dends, transfer.before() if transfer else None, like))
    )
    *grads, dbefore = call.kernel.gradients(x, scan, starts, back, dout, dbehind)
    dinitial = d.of_initial(dbefore, dend, given.initial_state)
    return *(None if t is None else d.whole(t) for t in grads), dinitial
