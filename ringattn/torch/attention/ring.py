"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

A pass is rounds of steps (`ringattn.recipe` decides who reads what when; this file carries it out). A rank sends what
later hosts see of the block that it holds to the next holder during a whole round, and receives the keys of the next
step during one step. In backward each step's gradients go to the rank that holds the block. They add up there, move on
with the keys, and go home from the last holder.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, ByRank, Done, Pending, Slices, Then
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.rows import EVERY as ALL
from ringattn.kernels.rows import NONE, OF_KEYS, OF_QUERIES, Rows
from ringattn.kernels.total import Total
from ringattn.schedule import Hop, Ranges, Round, Step, joined, places
from ringattn.torch.attention.steps import Score

Trip = tuple[ByRank, ByRank]  # the arguments of `Axis.sharing`: what each rank reads here, and where this one receives
EVERY = slice(None), slice(None)  # query and key heads
NOTHING: Trip = {}, {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, rounds: Sequence[Round], score: Score, start: Partial | None
) -> tuple[Partial, Sequence[Tensor]]:
    """Attention of this rank's queries over all ranks' keys, and the keys and values of the last step.

    The next step's keys travel while this one computes. Accumulates in float32 from `start`; `out` of the result has
    the dtype of `q` unless no step had work.
    """
    if rounds[0].steps[0].only:
        return once(q, k, v, axis, rounds[0].steps, score, start)
    part: Partial | None = start
    held: Sequence[Tensor] = (k, v)
    last = held
    left = sum(step.where is not None for round_ in rounds for step in round_.steps)
    for i, round_ in enumerate(rounds, start=1):
        flight, here = carry(axis, held, round_.hop, f"keys of round {i + 1} of {len(rounds)}, forward"), held
        for j, (step, following) in enumerate(with_next(round_.steps), start=2):
            room, trip = room_for(following, *held)
            with axis.sharing(*trip, f"keys of step {j} of {len(round_.steps)}, forward", score.kernel.fills) as coming:
                if step.where:
                    left -= 1
                    rounded = part is None and score.kernel.rounds(step.where)
                    dtype = q.dtype if rounded or not left else None
                    part = score.attend(q, *here, step.where, carry=part, out_dtype=dtype)
            coming.wait()
            last, here = here, room
        held = flight.wait() or held
    return part or empty(q, v.shape[-1]), last


def once(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, steps: Sequence[Step], score: Score, start: Partial | None
) -> tuple[Partial, Sequence[Tensor]]:
    """`forward` in two steps of which no query has keys in both: only the partial to start from merges.

    Neither waits for the other. The second begins as soon as its keys are here, and the first fills what it leaves.
    """
    (home, other), kernel = steps, score.once
    assert kernel  # the recipe asked
    into = kernel.room(q, v.shape[-1])
    room, trip = room_for(other, k, v)
    aside = Aside(q.device)
    with axis.sharing(*trip, "keys of step 2 of 2, forward", score.kernel.fills) as coming:
        if home.where:
            kernel.write(q, k, v, home.where, into)
    with aside:
        axis.after_sends()
        place_own(other, room, (k, v))
        coming.wait()
        kernel.write(q, *room, other.where, into)
    aside.join()
    return kernel.written(into, [step.where for step in steps if step.where], start), room


def backward_once(
    q: Tensor, held: Sequence[Tensor], came: Sequence[Tensor], rows: Rows, dq: Total, axis: Axis, steps: Sequence[Step],
    score: Score, narrow: bool,
) -> Sequence[Total]:  # fmt: skip
    """`of_round` in two steps of which no query has keys in both; the keys of the second perhaps `came` in forward.

    The second begins as soon as its keys are here, and its gradients return while the first fills what it leaves. If
    they run in turn, the recipe puts it first, and its gradients return during the other.
    """
    home, other = steps if steps[1].brought else steps[::-1]
    kernel = score.once
    assert kernel  # the recipe asked
    into, sums = q.new_empty(q.shape), Home(axis, narrow, score.kernel.fills, *held)
    room, trip = (came, NOTHING) if came else room_for(other, *held)

    def grads_of(step: Step, keys: Sequence[Tensor], number: int) -> Sequence[Any]:
        grads = kernel.backward((q, *keys), step.where, rows, into) if step.where else NONE[1:]
        sums.send(step, grads, f"gradients of step {number} of 2", EVERY[1])
        return grads

    if steps[0] is other:
        grads = grads_of(other, room, 1)
        grads_of(home, held, 2)
    else:
        aside = Aside(q.device)
        with axis.sharing(*trip, "keys of step 2 of 2, backward", score.kernel.fills) as coming:
            grads_of(home, held, 1)
        with aside:
            if not came:
                axis.after_sends()
                place_own(other, room, held)
            coming.wait()
            grads = grads_of(other, room, 2)
        aside.join()
    sums.keep(other, grads)
    sums.settle(last=True)
    kernel.clear(into, [step.where for step in steps if step.where])
    dq.add(into)
    return sums.own


def backward(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, axis: Axis, rounds: Sequence[Round], score: Score, narrow: bool,
    came: Sequence[Tensor] = (),
) -> tuple[Total, Total, Total]:  # fmt: skip
    """(dq, dk, dv) of this rank; `narrow`: gradients travel in the dtype of the inputs.

    `came` are the keys and values of the step that brings some, if they are here since forward.
    """
    dq = Total(q)
    held: Sequence[Tensor] = (k, v)
    own: Sequence[Total] = ()  # the gradients of this rank's keys and values
    arriving: Pending = Done()
    returning: list[tuple[Ranges, Pending]] = []
    for i, round_ in enumerate(rounds, start=1):
        label = f"round {i} of {len(rounds)}, backward"
        flight = carry(axis, held, round_.hop, f"keys after {label}")
        run = backward_once if round_.steps[0].only else of_round
        totals = run(q, held, came, rows, dq, axis, round_.steps, score, narrow)
        if i == 1:
            own = totals
        else:  # sums of another rank's block: add those of its last holder, and pass them on
            for total, x in zip(totals, arriving.wait() or (), strict=False):
                total.add(x)
            sums = [total.tensor(total.exact) for total in totals] if round_.hop or round_.home else []
            arriving = carry(axis, sums, round_.hop, f"gradients after {label}")
            if round_.home:
                returning.append((round_.home.into, carry(axis, sums, round_.home, f"gradients home after {label}")))
        held = flight.wait() or held
    for ranges, transfer in returning:
        add_at(own, transfer.wait() or (), ranges)
    return dq, own[0], own[1]


def of_round(
    q: Tensor, held: Sequence[Tensor], came: Sequence[Tensor], rows: Rows, dq: Total, axis: Axis, steps: Sequence[Step],
    score: Score, narrow: bool,
) -> Sequence[Total]:  # fmt: skip
    """dk and dv of the held block, from all ranks that read it; this rank's dq is added to `dq`.

    A step's gradients of other ranks' keys travel while it computes the rest. If keys `came` in forward, they are those
    of the first step.
    """
    home, parted = Home(axis, narrow, score.kernel.fills, *held), score.kernel.parted
    halves = steps[0].heads is not None
    count = len(steps) - halves
    here: Sequence[Tensor] = came
    if not came:
        here, trip = room_for(steps[0], *held)
        with axis.sharing(*trip, f"keys of step 1 of {count}, backward") as coming:
            pass  # nothing to compute yet
        coming.wait()
    for i, (step, following) in enumerate(with_next(steps), start=1 - halves):
        if parted:  # gradients travelled during the other half of this step; else they may during the next
            home.settle()
        given = inputs(step, q, here, rows) if step.where else None
        grads: Sequence[Any] = NONE
        room, trip = room_for(following, *held)
        with axis.sharing(*trip, f"keys of step {i + 1} of {count}, backward", score.kernel.fills) as coming:
            if given:
                grads = score.backward(*given, OF_KEYS if parted else ALL, (dq.running, None, None))
        queries, heads = step.heads or EVERY
        home.send(step, grads[1:], f"gradients of step {i} of {count}", heads)
        if given and parted:
            grads = score.backward(*given, OF_QUERIES, (dq.running, None, None))
        dq.add(grads[0], heads=queries)
        dq.fold()
        coming.wait()
        here = room
        del given, grads  # frees what is used up before memory for the next step is allocated
    home.settle(last=True)
    return home.own


def add_at(totals: Sequence[Total], grads: Sequence[Tensor], ranges: Ranges) -> None:
    """Add tensors that hold these ranges of rows."""
    for total, x in zip(totals, grads, strict=False):
        at = 0
        for r in joined(ranges):
            total.add(x[:, at : at + len(r)], rows=slice(r.start, r.stop))
            at += len(r)


def carry(axis: Axis, tensors: Sequence[Tensor], hop: Hop | None, what: str) -> Pending:
    """This rank's part in a hop; what comes is contiguous, or None."""
    if hop is None or not (hop.send or hop.recv):
        return Done()
    n, there, here = sum(map(len, hop.into)), (axis.rank + hop.shift) % axis.size, (axis.rank - hop.shift) % axis.size
    room = [x.new_empty(x.shape[0], n, *x.shape[2:]) for x in tensors] if hop.recv else None
    pieces = [[x[:, r.start : r.stop] for r in hop.out] for x in tensors]
    out = {there: [x[0] if len(x) == 1 else torch.cat(x, 1) for x in pieces]} if hop.send else {}
    return Then(axis.hop(out, {here: room} if room else {}, what), lambda _: room)


def inputs(
    step: Step, q: Tensor, here: Sequence[Tensor], rows: Rows
) -> tuple[tuple[Tensor, Tensor, Tensor], Any, Rows]:
    """What a kernel's backward takes for a step."""
    k, v = here
    if step.heads is None:
        return (q, k, v), step.where, rows
    queries, heads = step.heads
    return (q[:, :, queries], k[:, :, heads], v[:, :, heads]), step.where, rows.heads(queries)


def with_next(steps: Sequence[Step]) -> Iterable[tuple[Step, Step | None]]:
    """Each step and the one that follows."""
    return zip(steps, [*steps[1:], None], strict=True)


def room_for(step: Step | None, *own: Tensor) -> tuple[tuple[Tensor, ...], Trip]:
    """Memory for what a step brings, and the transfer that fills it."""
    if step is None:
        return own, NOTHING
    room = tuple(x.new_empty(x.shape[0], step.length, *x.shape[2:]) for x in own) if step.brought else own
    into = {source: Slices(room, *places) for source, places in step.brought.items()}
    shown = {ranges: Slices(own, ranges) for ranges in step.shown.values()}  # the same object for all that read it
    return room, ({reader: shown[ranges] for reader, ranges in step.shown.items()}, into)


def place_own(step: Step, room: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Copy what a step takes of this rank's block, if anything, beside what it brings."""
    if step.own:
        to, of = (Slices(x, places) for x, places in ((room, step.by_block[step.held]), (held, step.own)))
        torch._foreach_copy_([*to], [*of])


class Aside:
    """`with aside:` work on a GPU that only waits for what was launched before this was made.

    It comes before other work that is not on the GPU's multiprocessors yet. What is launched after `join` waits for it.
    """

    def __init__(self, device: torch.device):
        self.stream = second_stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.main = torch.cuda.current_stream(device)
            self.stream.wait_stream(self.main)
            self.entered = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self.entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.entered.__exit__(*error)

    def join(self) -> None:
        if self.stream is not None:
            self.main.wait_stream(self.stream)


@lru_cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class Home:
    """The gradients of this rank's own tensors: its own part, and the parts that their readers send back.

    `narrow`: parts are sent in the tensors' dtype; else in the dtype of sums. `fills`: as in `Axis.move`.
    """

    def __init__(self, axis: Axis, narrow: bool, fills: bool, *like: Tensor):
        self.axis, self.fills, self.like = axis, fills, like
        self.dtypes = [x.dtype if narrow else accumulator(x) for x in like]
        self.own = tuple(Total(x) for x in like)
        self.coming: Sequence[tuple[Ranges, Sequence[Tensor]]] = ()  # what each reader sends: of which rows, and those
        self.flight: Pending = Done()

    def send(self, step: Step, grads: Sequence[Any], what: str, heads: slice) -> None:
        """Send the gradients of the blocks that a step brought to their owners, and receive those of this rank's."""
        if not step.brought and not step.shown:  # nothing travelled: the step worked on its own block, if at all
            for total, grad in zip(self.own, grads, strict=True):  # None without work
                total.add(grad, heads=heads)
            return
        self.settle()
        kinds = list(zip(self.like, self.dtypes, strict=True))
        self.coming, into = [], {}
        for reader, rows in step.shown.items():
            n, at = sum(map(len, rows)), places([(r,) for r in rows])
            room = [x.new_empty(x.shape[0], n, *x.shape[2:], dtype=dtype) for x, dtype in kinds]
            self.coming.append((rows, room))
            into[reader] = Slices(room, at)
        out = {s: self.parcel(grads, places.at) for s, places in step.brought.items()}
        self.flight = self.axis.move(out, into, what, self.fills)

    def keep(self, step: Step, grads: Sequence[Any]) -> None:
        """Add the gradients of this rank's keys that a step took beside those that it brought."""
        for total, grad, dtype in zip(self.own, grads, self.dtypes, strict=True):
            for at, r in zip(step.by_block.get(step.held, ()), step.own, strict=True):
                x = grad.rows_at(at, dtype) if isinstance(grad, Total) else grad[:, at.start : at.stop]
                total.add(x, rows=slice(r.start, r.stop))

    def settle(self, last: bool = False) -> None:
        """Add what arrived, always in the same order. Unless it is the `last` time, fold totals of many parts."""
        self.flight.wait()
        for rows, grads in self.coming:
            add_at(self.own, grads, rows)
        for total in () if last else self.own:
            total.fold()
        self.coming, self.flight = (), Done()

    def parcel(self, grads: Sequence[Any], places: tuple[range, ...]) -> Sequence[Tensor]:
        """The ranges `places` of each gradient."""
        if isinstance(grads[0], Total):
            return [x.rows_at(at, dtype) for x, dtype in zip(grads, self.dtypes, strict=True) for at in places]
        return Slices([x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)], places)
