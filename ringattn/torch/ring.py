"""The ring: keys travel, queries stay, partials merge; backward, the keys' gradients travel one hop behind them."""

from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, Done, Pending
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial, empty
from ringattn.torch.steps import Run, Score


def ring_forward(q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Run, score: Score, start: Partial | None) -> Partial:
    """Attention of this rank's queries over all ranks' keys. The next hop flies while this step computes.

    Accumulates in float32 from `start`; `out` of the result has the dtype of `q` unless no step had work.
    """
    part, keys = start, (k, v)
    last = max((i for i, (step, _) in enumerate(run) if step.work), default=-1)
    for i, (step, where) in enumerate(run):
        hop = axis.rotate(keys, step.hop.shift, step.hop.send, step.hop.recv) if step.hop else Done()
        if step.work:
            part = score.attend(q, *keys, where, carry=part, out_dtype=q.dtype if i == last else None)
        keys = hop.wait() or (k, v)
    return part or empty(q, v.shape[-1])


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Run, score: Score, rows: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float32. `rows` are this rank's dout, global lse and delta.

    At home a block's gradient adds up in `own`; while it travels, every rank adds its part to what arrives, and the
    last rank that sees the block sends its gradient straight home.
    """
    dq: Tensor | None = None
    own: tuple[Tensor, ...] = zeros(k, v)
    keys = (k, v)
    arriving: Pending = Done()
    returning: list[Pending] = []
    for i, (step, where) in enumerate(run):
        hop = axis.rotate(keys, step.hop.shift, step.hop.send, step.hop.recv) if step.hop else Done()
        if i == 0:
            if step.work:
                dq, *own = score.attend_backward(q, *keys, where, *rows, dq=dq, dk=own[0], dv=own[1])
        else:
            grads: Any = None
            if step.work:
                dq, *grads = score.attend_backward(q, *keys, where, *rows, dq=dq)
            grads = added(arriving.wait(), grads) or (zeros(k, v) if step.here else own)
            arriving = axis.rotate(grads, step.hop.shift, step.hop.send, step.hop.recv) if step.hop else Done()
            if step.home:
                returning.append(axis.rotate(grads, step.home.shift, step.home.send, step.home.recv))
        keys = hop.wait() or (k, v)
    for transfer in returning:  # this rank's own block comes home in one of them; the others only sent
        own = added(own, transfer.wait())
    return zeros(q)[0] if dq is None else dq, own[0], own[1]


def zeros(*like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=accumulator(x), device=x.device) for x in like)


def added(a: Any, b: Any) -> Any:
    """The sum of two (dk, dv) of which either may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))
