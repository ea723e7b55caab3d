"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

A run is rounds of visits (`ringattn.schedule` decides who sees which block; this file carries it out). A rank sends the
block that it holds to the next holder during a whole round, and receives the next visit's blocks during one visit. In
backward each visit's gradients go to the rank that holds the block. They add up there, move on with the block, and go
home at the end.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ringattn.comms.axis import Axis, ByRank, Done, Pending, Slices
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.rows import EVERY as ALL
from ringattn.kernels.rows import NONE, OF_KEYS, OF_QUERIES, Rows
from ringattn.kernels.total import Total
from ringattn.schedule import Hop, Ranges
from ringattn.torch.attention.steps import Run, Score, Stop, places

S = TypeVar("S")
Trip = tuple[ByRank, ByRank]  # the arguments of `Axis.sharing`: what each rank reads here, and where this one receives
Step = tuple[tuple[Tensor, ...], Any, Rows]  # q, k and v, intervals, rows: the arguments of a kernel's backward
END = Stop(None, (), {}, {})
EVERY = slice(None)
LONG = 8192  # queries of a rank: from here on half of its heads take longer than the host takes to launch them


def forward(q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Run, score: Score, start: Partial | None) -> Partial:
    """Attention of this rank's queries over all ranks' keys. The next visit's keys travel while this one computes.

    Accumulates in float32 from `start`; `out` of the result has the dtype of `q` unless no step had work.
    """
    part: Partial | None = start
    held: Sequence[Tensor] = (k, v)
    left = sum(stop.where is not None for leg in run for stop in leg.stops)
    for i, leg in enumerate(run, start=1):
        flight, here = rotate(axis, held, leg.hop, f"keys of round {i + 1} of {len(run)}, forward"), held
        for j, (stop, following) in enumerate(with_next(leg.stops, END), start=2):
            room, trip = room_for(following, *held)
            with axis.sharing(*trip, f"keys of step {j} of {len(leg.stops)}, forward", score.kernel.fills) as coming:
                if stop.where:
                    left -= 1
                    rounded = part is None and score.kernel.rounds(stop.where)
                    dtype = q.dtype if rounded or not left else None
                    part = score.attend(q, *here, stop.where, carry=part, out_dtype=dtype)
            coming.wait()
            here = room
        held = flight.wait() or held
    return part or empty(q, v.shape[-1])


def backward(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, axis: Axis, run: Run, score: Score, narrow: bool
) -> tuple[Total, Total, Total]:
    """(dq, dk, dv) of this rank; `narrow`: gradients travel in the dtype of the inputs."""
    dq = Total(q)
    held: Sequence[Tensor] = (k, v)
    own: Sequence[Total] = ()  # the gradients of this rank's keys and values
    arriving: Pending = Done()
    returning: list[Pending] = []
    for i, leg in enumerate(run, start=1):
        label = f"round {i} of {len(run)}, backward"
        flight = rotate(axis, held, leg.hop, f"keys after {label}")
        found = visit(q, held, rows, dq, axis, leg.stops, score, narrow)
        if i == 1:
            own = found
        else:  # sums of another rank's block: add those of its last holder, and pass them on
            add_to(found, arriving.wait())
            sums = [total.tensor(total.exact) for total in found] if leg.hop or leg.home else []
            arriving = rotate(axis, sums, leg.hop, f"gradients after {label}")
            returning.append(rotate(axis, sums, leg.home, f"gradients home after {label}"))
        held = flight.wait() or held
    for transfer in returning:  # one of them brings the gradients of this rank's own block; the others only send
        add_to(own, transfer.wait())
    return dq, own[0], own[1]


def visit(
    q: Tensor, held: Sequence[Tensor], rows: Rows, dq: Total, axis: Axis, stops: Sequence[Stop], score: Score,
    narrow: bool,
) -> Sequence[Total]:  # fmt: skip
    """dk and dv of the held block, from all ranks that read it; this rank's dq is added to `dq`.

    A step's gradients of other ranks' keys travel while it computes the rest.
    """
    parted = score.kernel.parted
    home, turns, steps = Home(axis, narrow, *held), turns_of(stops, q, held[0], parted), len(stops)
    here, trip = room_for(turns[0].stop, *held)
    with axis.sharing(*trip, f"keys of step 1 of {steps}, backward") as coming:
        pass  # nothing to compute yet
    coming.wait()
    for i, (turn, following) in enumerate(with_next(turns, LAST), start=1 + steps - len(turns)):
        if parted:  # gradients travelled during the other half of this step; else they may during the next
            home.settle()
        step = inputs(turn, q, here, rows) if turn.stop.where else None
        grads: Sequence[Any] = NONE
        room, trip = room_for(following.stop, *held)
        with axis.sharing(*trip, f"keys of step {i + 1} of {steps}, backward", score.kernel.fills) as coming:
            if step:
                grads = score.backward(*step, OF_KEYS if parted else ALL, (dq.place, None, None))
        home.send(turn.stop, grads[1:], f"gradients of step {i} of {steps}", turn.keys)
        if step and parted:
            grads = score.backward(*step, OF_QUERIES, (dq.place, None, None))
        dq.add(grads[0], heads=turn.queries)
        dq.fold()
        coming.wait()
        here = room
        del step, grads  # frees what is used up before memory for the next step is allocated
    home.settle(last=True)
    return home.own


def add_to(totals: Sequence[Total], found: Sequence[Tensor] | None) -> None:
    for total, x in zip(totals, found or (), strict=False):
        total.add(x)


def rotate(axis: Axis, tensors: Sequence[Tensor], hop: Hop | None, what: str) -> Pending:
    """The rotation of a round, if there is one."""
    return axis.rotate(tensors, hop.shift, hop.send, hop.recv, what) if hop else Done()


class Turn(NamedTuple):
    """A stop and the heads that are computed: all of them, or some query heads and their key heads."""

    stop: Stop
    queries: slice = EVERY
    keys: slice = EVERY


LAST = Turn(END)


def turns_of(run: Sequence[Stop], q: Tensor, k: Tensor, parted: bool) -> list[Turn]:
    """The order of a round's stops: where to put home, the stop that needs no transfer, so that it hides most.

    With parted kernels home is first and hides the first hop. With others it is last and hides the last gradients; if
    that is worth another launch, half of home's heads are first and the other half last.
    """
    home, *others = map(Turn, run)
    if parted:
        return [home, *others]
    if others and home.stop.where and q.shape[1] >= LONG:
        heads, kv_heads = q.shape[2], k.shape[2]
        half = kv_heads // 2
        cut = half * (heads // kv_heads)
        if half:
            first, last = Turn(run[0], slice(cut), slice(half)), Turn(run[0], slice(cut, None), slice(half, None))
            return [first, *others, last]
    return [*others, home]


def inputs(turn: Turn, q: Tensor, here: Sequence[Tensor], rows: Rows) -> Step:
    """What a kernel's backward takes for a turn."""
    tensors = some_heads(q, turn.queries), *some_heads(here, turn.keys)
    return tensors, turn.stop.where, rows if turn.queries == EVERY else rows.heads(turn.queries)


def some_heads(x: Any, at: slice) -> Any:
    """The heads `at` of a tensor, or of each tensor in a list."""
    if at == EVERY or x is None:
        return x
    if isinstance(x, Tensor):
        return x[:, :, at]
    return [some_heads(y, at) for y in x]


def with_next(run: Sequence[S], end: S) -> Iterable[tuple[S, S]]:
    """Each stop (or turn) and the one that follows."""
    return zip(run, [*run[1:], end], strict=True)


def room_for(stop: Stop, *own: Tensor) -> tuple[tuple[Tensor, ...], Trip]:
    """Memory for what a stop brings, and the transfer that fills it."""
    room = tuple(x.new_empty(x.shape[0], stop.length, *x.shape[2:]) for x in own) if stop.brought else own
    into = {source: Slices(room, *places) for source, places in stop.brought.items()}
    shown = {ranges: Slices(own, ranges) for ranges in stop.readers.values()}  # the same object for all that read it
    return room, ({reader: shown[ranges] for reader, ranges in stop.readers.items()}, into)


def joined(ranges: Ranges) -> Ranges:
    """Ranges, of which those that touch are one."""
    found: list[range] = []
    for r in ranges:
        found.append(range(found.pop().start, r.stop) if found and found[-1].stop == r.start else r)
    return tuple(found)


class Home:
    """The gradients of this rank's own tensors: its own part, and the parts that their readers send back.

    `narrow`: parts are sent in the tensors' dtype; else in the dtype of sums.
    """

    def __init__(self, axis: Axis, narrow: bool, *like: Tensor):
        self.axis, self.like = axis, like
        self.dtypes = [x.dtype if narrow else accumulator(x) for x in like]
        self.own = tuple(Total(x) for x in like)
        self.coming: Sequence[tuple[Ranges, Sequence[Tensor]]] = ()  # what each reader sends: of which rows, and those
        self.flight: Pending = Done()

    def send(self, stop: Stop, grads: Sequence[Any], what: str, heads: slice = EVERY) -> None:
        """Send the gradients of the blocks that a stop brought to their owners, and receive those of this rank's."""
        if not stop.brought and not stop.readers:  # nothing travelled: the stop worked on its own block, if at all
            for total, found in zip(self.own, grads, strict=True):  # None without work
                total.add(found, heads=heads)
            return
        self.settle()
        kinds = list(zip(self.like, self.dtypes, strict=True))
        self.coming, into = [], {}
        for reader, rows in stop.readers.items():
            n, at = sum(map(len, rows)), places([(r,) for r in rows])
            found = [x.new_empty(x.shape[0], n, *x.shape[2:], dtype=dtype) for x, dtype in kinds]
            self.coming.append((rows, found))
            into[reader] = Slices(found, at)
        out = {s: self.parcel(grads, places.at) for s, places in stop.brought.items()}
        self.flight = self.axis.move(out, into, what=what)

    def settle(self, last: bool = False) -> None:
        """Add what arrived, always in the same order. Unless it is the `last` time, fold totals of many parts."""
        self.flight.wait()
        for rows, each in self.coming:
            for total, found in zip(self.own, each, strict=True):
                at = 0
                for r in joined(rows):
                    total.add(found[:, at : at + len(r)], rows=slice(r.start, r.stop))
                    at += len(r)
        for total in () if last else self.own:
            total.fold()
        self.coming, self.flight = (), Done()

    def parcel(self, grads: Sequence[Any], places: tuple[range, ...]) -> Sequence[Tensor]:
        """The ranges `places` of each gradient."""
        if isinstance(grads[0], Total):
            return [x.rows_at(at, dtype) for x, dtype in zip(grads, self.dtypes, strict=True) for at in places]
        return Slices([x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)], places)
