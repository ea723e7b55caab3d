"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

`ringattn.steps` decides who reads what when; these two loops carry it out. The keys of the next step travel while this
one computes. Those that go on to another host do so during a whole phase, in which a rank holds one block. In backward
each step's gradients go to the rank that holds the block. They add up there, move on with the keys, and go home from
the last holder.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from ringattn.comms.axis import Axis, Done, Pending
from ringattn.kernels.partial import Partial
from ringattn.kernels.rows import Rows
from ringattn.kernels.total import Total
from ringattn.steps.rank import Step
from ringattn.steps.table import Ranges
from ringattn.torch.attention.steps import Score
from ringattn.torch.attention.transfers import Side, Sums, copy_own, exchange_for, on, receive, send_on

NOTHING: Pending = Done()


def forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, steps: Sequence[Step], score: Score, start: Partial | None
) -> tuple[Partial, Sequence[Tensor]]:
    """Attention of this rank's queries over all ranks' keys, and the keys and values of the last step.

    Accumulates in float32 from `start`; `out` of the result has the dtype of `q` unless no step had work.
    """
    held: Sequence[Tensor] = (k, v)
    current, onward, phase, side = held, NOTHING, None, None
    result = score.result(q, v, steps, start)
    for i, (step, following) in enumerate(with_next(steps), start=2):
        if step.phase is not phase:
            phase = step.phase
            onward = send_on(axis, held, phase.onward, f"keys after step {i - 1} of {len(steps)}, forward")
        remote, trip = exchange_for(following, held)
        beside = Side.of(following, q.device)
        with on(side), axis.sharing(*trip, f"keys of step {i} of {len(steps)}, forward", score.kernel.fills) as coming:
            result.add(step, *current)
        with on(beside):
            if beside:
                copy_own(axis, following, held, remote)
            coming.wait()
        if following is not None:
            if following.phase is not phase:
                held = remote = onward.wait() or held
            current, side = remote, beside
    if side:
        side.join()
    return result.whole(), current


def backward(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, axis: Axis, steps: Sequence[Step], score: Score, narrow: bool,
    kept: Sequence[Tensor] = (),
) -> tuple[Total, Total, Total]:  # fmt: skip
    """(dq, dk, dv) of this rank; `narrow`: gradients travel in the dtype of the inputs.

    `kept` are the keys and values that arrived in forward, if they are here since. A step's gradients of other ranks'
    keys travel while the rest is computed.
    """
    held: Sequence[Tensor] = (k, v)
    phase, side, passed_on, gone_home = None, None, NOTHING, NOTHING
    landing: Ranges = ()  # of what has gone home
    own = sums = Sums(axis, narrow, score.kernel.fills, *held)
    gradients = score.gradients(q, rows, steps)
    for i, (step, following) in enumerate(with_next(steps), start=1):
        label = f"step {i} of {len(steps)}"
        if step.phase is not phase:
            phase = step.phase
            onward = send_on(axis, held, phase.onward, f"keys after {label}, backward")
            current = receive(axis, step, held, kept, f"keys of {label}, backward")
        following = following if following is not None and following.phase is phase else None
        remote, trip = exchange_for(following, held, kept)
        beside = Side.of(following, q.device)
        with on(side):
            if score.kernel.parted:  # gradients travelled while those of queries were computed; else they may now
                sums.settle()
            with axis.sharing(*trip, f"keys after {label}, backward", score.kernel.fills) as coming:
                grads = gradients.of_keys(step, *current)
            sums.add(step, grads, f"gradients of {label}")
            gradients.of_queries(step, *current)
        with on(beside):
            if beside and not kept:
                copy_own(axis, following, held, remote)
            coming.wait()
        del grads  # frees what is used up before memory for the next step is allocated
        if following is None:
            if side:
                side.join()
            sums.settle(last=True)
            if sums is not own:  # add those of the block's last holder, and pass them on
                sums.add_all(passed_on.wait() or ())
                passed_on, whole = NOTHING, sums.tensors()  # frees what arrived before memory for more is allocated
                passed_on = send_on(axis, whole, phase.onward, f"sums after {label}, backward")
                own.add_at(landing, gone_home.wait() or ())
                landing = phase.home.receive if phase.home else ()
                gone_home = send_on(axis, whole, phase.home, f"sums home after {label}, backward")
            if phase.onward:
                held = remote = onward.wait() or held
                sums = Sums(axis, narrow, score.kernel.fills, *held)
        current, side = remote, beside
    own.add_at(landing, gone_home.wait() or ())
    return gradients.whole(), own.totals[0], own.totals[1]


def with_next(steps: Sequence[Step]) -> Iterable[tuple[Step, Step | None]]:
    """Each step and the one that follows."""
    return zip(steps, [*steps[1:], None], strict=True)
