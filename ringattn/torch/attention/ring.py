"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

`ringattn.steps` decides who receives what when; these two loops carry it out. The keys of the next step travel while
this one computes. Those that go on to another host do so during a whole phase, in which a rank holds one block. In
backward each step's gradients go to the rank that holds the block. They add up there, move on with the keys, and return
from the last holder.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import Rows
from ringattn.kernels.total import Total
from ringattn.layouts.dealing import joined
from ringattn.steps.rank import Step
from ringattn.steps.table import Ranges
from ringattn.torch.attention.steps import DisjointGradients, DisjointResult, Gradients, Result, Score
from ringattn.torch.attention.transfers import DONE, MAIN, Side, Sums, exchange_for, receive, send


def forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, steps: Sequence[Step], score: Score, start: Partial | None
) -> tuple[Partial, Sequence[Tensor]]:
    """Attention of this rank's queries over all ranks' keys, and the keys and values of the last step.

    Accumulates in float32 from `start`; `out` of the result has the dtype of `q` unless no step had work.
    """
    block: Sequence[Tensor] = (k, v)
    keys, next_block, phase, side = block, DONE, None, None
    result = (DisjointResult if steps[0].queries else Result)(score, q, v.shape[-1], steps, start)
    for i, (step, next_step) in enumerate(with_next(steps), start=2):
        if step.phase is not phase:
            phase = step.phase
            next_block = send(axis, block, phase.onward, f"keys after step {i - 1} of {len(steps)}, forward")
        next_keys, exchange = exchange_for(axis, next_step, block)
        next_side = Side(q.device) if next_step is not None and next_step.side else None
        label = f"keys of step {i} of {len(steps)}, forward"
        with side.on if side else MAIN, axis.sharing(*exchange, label, score.kernel.fills) as receiving:
            result.add(step, *keys)
        with next_side.on if next_side else MAIN:
            receiving.wait()
        if next_step is not None:
            if next_step.phase is not phase:
                block = next_keys = next_block.wait() or block
            keys, side = next_keys, next_side
    if side:
        side.join()
    return result.whole(), keys


def backward(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, axis: Axis, steps: Sequence[Step], score: Score, low: bool,
    kept: Sequence[Tensor] = (),
) -> tuple[Total, Total, Total]:  # fmt: skip
    """(dq, dk, dv) of this rank; `low`: gradients travel in the low precision of the inputs.

    `kept` are the keys and values that arrived in forward, if backward gets them. A step's gradients of remote keys
    travel while the rest is computed.
    """
    block: Sequence[Tensor] = (k, v)
    phase, side, sums_received, returned = None, None, DONE, DONE
    returned_rows: Ranges = ()
    local = sums = Sums(axis, low, score.kernel.fills, *block)
    gradients = (DisjointGradients if steps[0].queries else Gradients)(score, q, rows, steps)
    for i, (step, next_step) in enumerate(with_next(steps), start=1):
        label = f"step {i} of {len(steps)}"
        if step.phase is not phase:
            phase = step.phase
            next_block = send(axis, block, phase.onward, f"keys after {label}, backward")
            keys = receive(axis, step, block, kept, f"keys of {label}, backward")
        next_step = next_step if next_step is not None and next_step.phase is phase else None
        next_keys, exchange = exchange_for(axis, next_step, block, kept)
        next_side = Side(q.device) if next_step is not None and next_step.side else None
        with side.on if side else MAIN:
            if score.kernel.separable:  # gradients travelled while those of queries were computed; else they may now
                sums.settle()
            with axis.sharing(*exchange, f"keys after {label}, backward", score.kernel.fills) as receiving:
                grads = gradients.of_keys(step, *keys)
            sums.add(step, grads, f"gradients of {label}")
            gradients.of_queries(step)
        with next_side.on if next_side else MAIN:
            receiving.wait()
        del grads  # frees what is used up before memory for the next step is allocated
        if next_step is None:
            if side:
                side.join()
            sums.settle(last=True)
            if sums is not local:  # add those of the block's last holder, and send them on
                sums.add_at((range(block[0].shape[1]),), sums_received.wait() or ())
                sums_received, tensors = DONE, sums.tensors()  # frees what arrived before more is allocated
                sums_received = send(axis, tensors, phase.onward, f"sums after {label}, backward")
                local.add_at(returned_rows, returned.wait() or ())
                returned_rows = joined(phase.home.receive) if phase.home else ()
                returned = send(axis, tensors, phase.home, f"sums home after {label}, backward")
            if phase.onward:
                block = next_keys = next_block.wait() or block
                sums = Sums(axis, low, score.kernel.fills, *block)
        keys, side = next_keys, next_side
    local.add_at(returned_rows, returned.wait() or ())
    return gradients.whole(), local.totals[0], local.totals[1]


def with_next(steps: Sequence[Step]) -> Iterable[tuple[Step, Step | None]]:
    """Each step and the one that follows."""
    return zip(steps, [*steps[1:], None], strict=True)
