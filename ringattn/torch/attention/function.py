"""A bound call runs: heads enter, attend to the keys of all ranks, and leave.

B batch   T this rank's tokens   H query heads   G key/value heads   D head dim   V value dim
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat, zip_longest
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Pending, one_ahead
from ringattn.kernels.arrays import accumulator, fine
from ringattn.kernels.partial import NEVER, Partial, empty, sink_gradient
from ringattn.kernels.rows import rows_of
from ringattn.kernels.total import Total, in_dtype
from ringattn.torch.agree import agree
from ringattn.torch.attention import ring
from ringattn.torch.attention.call import Call
from ringattn.torch.attention.gather import gathered, scattered
from ringattn.torch.attention.steps import Grads
from ringattn.torch.attention.ulysses import Real, cleared, enter, joined, leave, repeated, summed
from ringattn.torch.dispatch import first_order, no_autocast, no_view

Kept = list[Tensor]  # q, k, v, out and lse after they entered: group of heads by group of heads


class Attention(torch.autograd.Function):
    """A bound call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse, kept = forward(call, q, k, v, sinks)
        out, lse = no_view(out), no_view(lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, *kept if call.ulysses.size > 1 else (q, k, v, out, lse, *kept))
        return out, lse

    def run_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        sinks, *kept = ctx.saved_tensors
        dq, dk, dv, dsinks = backward(ctx.call, kept, sinks, dout, dlse)
        return None, dq, dk, dv, dsinks

    backward = first_order(run_gradients, "ringattn.attention")


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    """`run_forward`, or a replay of it."""
    run, given = functools.partial(run_forward, call), (q, k, v, sinks)
    out, lse, *kept = run(*given) if call.graphs is None else call.graphs.run(call, "forward", run, *given)
    return out, lse, kept


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> list[Tensor]:
    """(out in q's dtype, lse) of this rank's queries over all keys, and what backward needs of the heads that entered.

    While one group of heads is computed, the next one enters and the previous one leaves.
    """
    kept: Kept = []
    with no_autocast(q.device):
        if call.keeps_heads:
            if call.padded:
                q, k, v = (cleared(x, real) for x, real in zip((q, k, v), call.reals, strict=True))
            start = None if sinks is None else sink_partial(q, sinks, v.shape[-1])
            partial, arrived = next(attended(call, iter([(q, k, v, start)])))
            kept += arrived
            out, lse = in_dtype(partial.out, q.dtype), partial.lse
        else:
            out, lse, kept = swapped(call, q, k, v, sinks)
        if call.padded:
            out, lse = cleared(out, call.real), cleared(lse, call.real, NEVER)
        return [out.contiguous(), by_heads(lse), *kept]


def swapped(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Kept]:
    """`forward` where heads are exchanged, or computed group by group."""
    axis = call.ulysses
    kept: list[list[Tensor]] = []
    keep = call.gradients and axis.size > 1

    def entering() -> Iterator[tuple[Any, ...]]:
        tensors = q, repeated(k, axis), repeated(v, axis)
        for g, group in enumerate(entered(call, tensors, call.reals, shared=2 * call.shares)):
            if keep:
                kept.append(group[:1] if g and call.shares else group[:])
            yield *group, None if sinks is None else sink_partial(group[0], local_sinks(call, sinks)[g], v.shape[-1])
            del group

    def leaving() -> Iterator[Pending]:
        for g, (partial, arrived) in enumerate(attended(call, entering())):
            results = [partial.out.to(q.dtype), partial.lse]
            if keep:
                kept[g] += [*results, *arrived]
            yield leave(results, axis, call.groups, call.order)

    outs, lses = zip(*one_ahead(leaving()), strict=True)
    return joined(outs, axis.size), joined(lses, axis.size), [x.contiguous() for group in kept for x in group]


def backward(
    call: Call, kept: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of gradients that may be missing on some ranks: `run_backward`, or a replay of it."""
    if call.compared:  # one rank may run its backward twice while others go on
        agree(call.plan, {"call": "backward of attention"})
    rows = call.shape.batch, call.plan.local_len, call.shape.heads
    if dout is None:
        dout = kept[0].new_zeros(*rows, call.shape.value_dim)
    if dlse is None and call.exchanges_dlse:
        dlse = kept[0].new_zeros(rows)
    dlse = None if dlse is None else dlse.to(accumulator(dout))
    given: list[Any] = [dout, sinks, *kept]
    run = functools.partial(run_backward, call, dlse)  # dlse is None if it is captured
    dq, dk, dv, dsinks = run(*given) if call.graphs is None else call.graphs.run(call, "backward", run, *given)
    return dq, dk, dv, dsinks


def run_backward(
    call: Call, dlse: Tensor | None, dout: Tensor, sinks: Tensor | None, *kept: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) in the dtypes of their inputs, accumulated in float32 on the way."""
    with no_autocast(dout.device):
        if call.keeps_heads:
            q, k, v, out, lse, *arrived = kept
            if call.padded:
                q, k, v, dout = (cleared(x, r) for x, r in zip((q, k, v, dout), (*call.reals, call.real), strict=True))
                dlse = None if dlse is None else cleared(dlse, call.real)
            groups = iter([(q, k, v, out, lse, dout, dlse, arrived)])
            (dq, dk, dv, deltas), lses = next(gradients(call, groups, sinks is not None)), lse
        else:
            dq, dk, dv, lses, deltas = swapped_backward(call, kept, sinks is not None, dout, dlse)
        grads: tuple[Tensor, ...] = dq, summed(dk, call.shape.kv_heads), summed(dv, call.shape.kv_heads)
        if call.padded:
            grads = tuple(cleared(x, real) for x, real in zip(grads, call.reals, strict=True))
        dq, dk, dv = [x.contiguous() for x in grads]
        if sinks is None:
            return dq, dk, dv, None
        dsinks = torch.zeros_like(sinks)
        mine = sink_gradient(local_sinks(call, sinks).flatten(), lses, deltas)
        local_sinks(call, dsinks).copy_(mine.view(call.groups, -1))
        return dq, dk, dv, dsinks


def swapped_backward(
    call: Call, kept: Sequence[Tensor], with_delta: bool, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """`backward` where heads are exchanged: (dq, dk, dv, lse, delta) of all groups side by side."""
    axis, real = call.ulysses, call.real
    over_ranks = axis.size > 1  # the kept tensors have already entered
    tensors, whole = ((), ()) if over_ranks else (tuple(kept), (*call.reals, None, None))
    new = (dout,) if dlse is None else (dout, dlse)
    lses, deltas = [], []
    entered_before = by_group(call, kept) if over_ranks else repeat(((), ()))

    def entering() -> Iterator[Sequence[Any]]:
        groups = entered(call, (*tensors, *new), (*whole, *[real] * len(new)))
        for (before, arrived), group in zip(entered_before, groups, strict=False):
            group = [*before, *group]
            lses.append(group[4])
            yield *group, *([None] if dlse is None else []), arrived

    def leaving() -> Iterator[Pending]:
        for *grads, delta in gradients(call, entering(), with_delta):
            deltas.append(delta)
            yield leave([x.to(kept[0].dtype) for x in grads], axis, call.groups, call.order)

    left = zip_longest(*one_ahead(leaving()))
    grads = [joined([x for x in groups if x is not None], axis.size) for groups in left]
    return *grads, joined(lses), joined(deltas) if with_delta else joined(lses)


def entered(call: Call, tensors: Sequence[Tensor], real: Sequence[Real], shared: int = 0) -> Iterator[list[Tensor]]:
    """For each group of heads, its tensors over the whole ring shard; the last ones may be `shared`, by all groups."""
    later = len(tensors) - shared

    def entering() -> Iterator[Pending]:
        for g in range(call.groups):
            some = slice(later if g else None)
            yield enter(tensors[some], real[some], call.ulysses, g, call.groups, call.order)

    last: list[Tensor] = []
    for group in one_ahead(entering()):
        group += last
        last = group[later:]
        yield group
        del group


def by_group(call: Call, kept: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """For each group of heads, the q, k, v, out and lse that forward kept, and the keys and values that arrived."""
    each, arrived = iter(kept), 2 * call.keeps
    for g in range(call.groups):
        q = next(each)
        if g == 0 or not call.shares:
            k, v = next(each), next(each)
        yield (q, k, v, next(each), next(each)), [next(each) for _ in range(arrived)]


def local_sinks(call: Call, sinks: Tensor) -> Tensor:
    """This rank's sinks, [groups, h]; a view."""
    return sinks.view(call.ulysses.size, call.groups, -1)[call.ulysses.rank]


def by_heads(lse: Tensor) -> Tensor:
    """[B, T, H] in memory as [B, H, T], as kernels write it."""
    _, T, H = lse.shape
    return lse if lse.stride() == (T * H, 1, T) else lse.transpose(1, 2).contiguous().transpose(1, 2)


def attended(call: Call, groups: Iterable[Sequence[Any]]) -> Iterator[tuple[Partial, Sequence[Tensor]]]:
    """Attention of each group (q, k, v, the partial to start from) over the keys of the whole ring.

    Also the keys and values that arrived, if backward gets them.
    """
    steps, kernel, where = call.forward
    if call.gathers:
        groups = one_ahead(gathered(group, call.ring, call.key_order) for group in groups)
    result: tuple[Partial, Sequence[Tensor]]
    for q, k, v, start in groups:
        if where is not None:
            result = kernel.attend(q, k, v, where, carry=start, out_dtype=q.dtype), ()
        elif call.gathers:
            result = start or empty(q, v.shape[-1]), ()
        else:
            result = ring.forward(q, k, v, call.ring, steps, kernel, start)
        yield result[0], result[1] if call.keeps else ()
        del q, k, v, start, result  # frees their memory before the group after the next is allocated


def gradients(call: Call, groups: Iterable[Sequence[Any]], with_delta: bool) -> Iterator[Grads]:
    """dq, dk, dv of each group (q, k, v, out, lse, dout, dlse, kept keys), and its delta if `with_delta`.

    Of keys that all groups share the last one has dk and dv, summed, and the others have none.
    """
    steps, kernel, where = call.backward
    if call.gathers:
        groups = one_ahead(gathered(group, call.ring, call.key_order) for group in groups)
    sums: Sequence[Total] = ()
    leaving: list[Pending] = []
    for g, (q, k, v, out, lse, dout, dlse, kept) in enumerate(groups, start=1):
        rows, delta = rows_of(kernel.kernel, out, lse, dout, dlse, with_delta)
        sums = sums or [Total(x) for x in (k, v) if call.shares]
        if where is not None:
            into = None, *([total.running for total in sums] or (None, None))
            final = not (call.shares or call.gathers)
            dq, *grads = kernel.backward((q, k, v), where, rows, into=into, final=final)
        elif call.gathers:
            dq, *grads = map(Total, (q, k, v))
        else:
            dq, *grads = ring.backward(q, k, v, rows, call.ring, steps, kernel, call.low, kept)
        for total, grad in zip(sums, grads, strict=False):
            total.add(grad)
            total.fold()
        if call.shares:
            grads = sums if g == call.groups else []
        dtype = accumulator(k) if call.gathers else k.dtype
        result: Grads = (in_dtype(dq, q.dtype), *[in_dtype(grad, dtype) for grad in grads], delta)
        del q, k, v, out, lse, dout, dlse, kept, rows, dq, grads  # frees their memory
        if call.gathers:
            leaving.append(scattered(result, call.ring, call.key_order))
            result = leaving.pop(0).wait() if g > 1 else ()
        if result:
            yield result
        del result
    if leaving:
        yield leaving.pop().wait()


def sink_partial(q: Tensor, sinks: Tensor, value_dim: int) -> Partial:
    """The partial of every query before its first key: the sink's logit, and a value of zero. Kernels overwrite it."""
    out = torch.zeros(*q.shape[:3], value_dim, dtype=accumulator(q), device=q.device)
    return Partial(out, out.new_empty(q.shape[:3], dtype=fine(q)).copy_(sinks.detach()))
