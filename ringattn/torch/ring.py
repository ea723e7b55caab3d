"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

On the direct route every block comes from its owner, several small ones at a step, and its gradients return straight
to it: no transfer waits for another. On the relay route blocks go from rank to rank, over the shortest links, and
their gradients follow one hop behind. What goes where is decided in `ringattn.schedule` and only carried out here.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, Done, Parcels, Parts, Pending
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial, empty
from ringattn.torch.steps import Level, Run, Score, Stop, carried_in

Rows = tuple[Tensor, Tensor, Tensor]  # dout, the lse over all keys, delta
Pair = tuple[Tensor, ...]  # keys and values, or their gradients
Halves = tuple[Callable[[], Any], Callable[[], Any]]  # one gives (dk, dv), the other dq
END = Stop(None, (), {}, (), ())
LONG = 64 * 2**20  # bytes: a hop of so many takes longer than launching a kernel more


def direct_forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, start: Partial | None,
    ends: bool = True,
) -> Partial:  # fmt: skip
    """Attention of this rank's queries over all ranks' keys. The next step's keys fly while this one computes.

    Accumulates in float32 from `start`; `out` of the result has the dtype of `q` unless no step had work, or the
    attention does not end here.
    """
    part: Partial | None = start
    keys: Pair = (k, v)
    last = max((i for i, stop in enumerate(run) if stop.where), default=-1)
    for i, (stop, following) in enumerate(with_next(run)):
        work: Callable[[], Partial | None] = partial(as_it_was, part)
        if stop.where:
            dtype = carried_in(q, score, stop.where, part, ends and i == last)
            work = partial(score.attend, q, *keys, stop.where, carry=part, out_dtype=dtype)
        keys, trip = room_for(following, k, v)
        part, hop = axis.share(*trip, work, f"keys of step {i + 2} of {len(run)}, forward")
        hop.wait()
    return part or empty(q, v.shape[-1])


def direct_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, rows: Rows,
    dq: Tensor | None = None, ends: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv). A step's part of other ranks' gradients is on its way while its dq is computed.

    dq is added to the one that is given, in float32; dk and dv are in float32 too, unless they end here.
    """
    home, order, parts = Home(axis, k, v), in_order(run, score), halves_of_heads(run, score, q, k, v)
    if parts:
        order, home.own = (run[0], *order), zeros(k, v)
        dq = zero(q) if dq is None else dq
    keys, trip = room_for(order[0], k, v)
    made, hop = axis.share(*trip, partial(score.prepare, q, *rows), f"keys of step 1 of {len(run)}, backward")
    hop.wait()
    for i, (stop, following) in enumerate(with_next(order), start=0 if parts else 1):
        if score.parted:  # what came has flown beside dq; else it may still fly beside this step
            home.settle()
        work: Halves = partial(as_it_was, (None, None)), partial(as_it_was, dq)
        if parts and stop is run[0]:
            work = at_home(score, parts[min(i, 1)], (q, k, v), stop.where, made, (dq, *(home.own or ())))
        elif stop.where:
            work = score.halves(q, *keys, stop.where, *made, dq=dq)
        keys, trip = room_for(following, k, v)
        grads, hop = axis.share(*trip, work[0], f"keys of step {i + 1} of {len(run)}, backward")
        if grads:
            home.send(stop, grads, f"gradients of step {i} of {len(run)}")
        dq = work[1]()
        hop.wait()
        del work, grads  # they hold what has been used, while room is made for what comes
    home.settle(last=ends)
    own = home.own or zeros(k, v)
    return zero(q) if dq is None else dq, own[0], own[1]


def queries_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_backward` the other way round: queries and their rows travel, and dq comes home; keys stay.

    Fewer bytes where there are as many key heads as query heads: dq alone is in float32, not dk and dv.
    """
    dk, dv = zeros(k, v)
    home, order = Home(axis, q), in_order(run, score)
    own = tuple(x.contiguous() for x in (q, *rows))
    here, trip = room_for(order[0], *own)
    axis.share(*trip, nothing, f"queries of step 1 of {len(run)}, backward")[1].wait()
    for i, (stop, following) in enumerate(with_next(order)):
        if score.parted:
            home.settle()
        work: Halves = partial(as_it_was, (dk, dv)), partial(as_it_was, None)
        if stop.where:
            work = score.halves(here[0], k, v, stop.where, *score.prepare(*here), dk=dk, dv=dv)
        here, trip = room_for(following, *own)
        dq, hop = axis.share(*trip, work[1], f"queries of step {i + 2} of {len(run)}, backward")
        home.send(stop, (dq,), f"gradients of step {i + 1} of {len(run)}")
        dk, dv = work[0]()
        hop.wait()
        del work, dq
    home.settle(last=True)
    return home.own[0] if home.own else zero(q), dk, dv


def in_order(run: Sequence[Stop], score: Score) -> Sequence[Stop]:
    """Parted kernels: home first, to hide the first hop.

    Others: home last, to hide the last gradients, which are twice the bytes.
    """
    return run if score.parted else (*run[1:], run[0])


def halves_of_heads(
    run: Sequence[Stop], score: Score, q: Tensor, k: Tensor, v: Tensor
) -> Sequence[tuple[slice, slice]]:
    """Query and key heads in two halves, of which one at home hides the first hop; none where that is not worth it."""
    half = k.shape[2] // 2
    if score.parted or len(run) == 1 or not run[0].where or not half:
        return ()
    if run[1].length * (k.nbytes + v.nbytes) < LONG * k.shape[1]:
        return ()
    cut = half * (q.shape[2] // k.shape[2])
    return (slice(cut), slice(half)), (slice(cut, None), slice(half, None))


def at_home(
    score: Score, heads: tuple[slice, slice], tensors: Sequence[Tensor], where: Any, rows: Any, totals: Sequence[Any]
) -> Halves:
    """`score.halves` of some heads, added to what is there of (dq, dk, dv); nothing is left to be sent."""
    of_queries, of_keys = heads
    mine = [x[:, :, at] for x, at in zip(tensors, (of_queries, of_keys, of_keys), strict=True)]
    places = [x[:, :, at] for x, at in zip(totals, (of_queries, of_keys, of_keys), strict=True)]
    dout, lse, delta = (some_heads(x, of_queries) for x in rows)
    keys, queries = score.halves(*mine, where, dout, lse, delta, **dict(zip(("dq", "dk", "dv"), places, strict=True)))

    def add_keys() -> None:
        for place, found in zip(places[1:], keys(), strict=True):
            put(found, place)

    def add_queries() -> Tensor:
        put(queries(), places[0])
        return totals[0]

    return add_keys, add_queries


def some_heads(rows: Any, at: slice) -> Any:
    """Those heads of a tensor, or of each one of several."""
    return rows[:, :, at] if isinstance(rows, Tensor) else type(rows)(*(some_heads(x, at) for x in rows))


def put(found: Tensor, place: Tensor) -> None:
    """Many a kernel has added it up there already."""
    if found.data_ptr() != place.data_ptr():
        place.copy_(found)


def with_next(run: Sequence[Stop]) -> Iterable[tuple[Stop, Stop]]:
    """Each stop and the one that follows."""
    return zip(run, [*run[1:], END], strict=True)


def as_it_was(x: Any) -> Any:
    return x


def nothing() -> None: ...


class Trip(NamedTuple):
    """What `Axis.share` is told: what this rank shares with whom for their same stop, and what is filled."""

    tensors: Parts
    readers: tuple[int, ...]
    into: Parcels


def room_for(stop: Stop, *own: Tensor) -> tuple[tuple[Tensor, ...], Trip]:
    """Memory for what a stop brings, and how it comes."""
    room = tuple(x.new_empty(x.shape[0], stop.length, *x.shape[2:]) for x in own) if stop.brought else own
    into = {source: Parts(room, places) for source, places in stop.brought.items()}
    return room, Trip(Parts(own, stop.own), stop.readers, into)


class Home:
    """The gradients of this rank's own tensors: its own part, and what the ranks that had them send back."""

    def __init__(self, axis: Axis, *like: Tensor):
        self.axis, self.like = axis, like
        self.own: tuple[Tensor, ...] | None = None
        self.coming = many(0, *like)  # what each of some ranks sends, one after the other
        self.flight: Pending = Done()

    def send(self, stop: Stop, grads: tuple[Tensor, ...], what: str) -> None:
        """Send the gradients of what a stop brought to their owners, and make room for what comes from the others."""
        if not stop.brought and not stop.readers:  # nothing moved: it worked on what is at home, if at all
            if stop.where:
                more = self.own or [None] * len(grads)
                self.own = tuple(x if y is None else add_up(x, y[None], None) for x, y in zip(grads, more, strict=True))
            return
        self.settle()
        self.coming = many(len(stop.readers), *self.like)
        into = {r: Parts(each, stop.own) for r, *each in zip(stop.readers, *self.coming, strict=True)}
        out = {s: Parts(grads, places) for s, places in stop.brought.items()}
        self.flight = self.axis.move(out, into, what=what)

    def settle(self, last: bool = False) -> None:
        """Add up what has come, always in the same order; the `last` time into the dtype of the tensors."""
        self.flight.wait()
        if len(self.coming[0]):
            own = self.own or [None] * len(self.like)
            dtypes = [x.dtype if last else None for x in self.like]
            self.own = tuple(add_up(*each) for each in zip(own, self.coming, dtypes, strict=True))
        self.coming, self.flight = many(0, *self.like), Done()


def many(count: int, *like: Tensor) -> tuple[Tensor, ...]:
    """Memory for so many gradients of each tensor, stacked."""
    return tuple(x.new_empty(count, *x.shape, dtype=accumulator(x)) for x in like)


def add_up(own: Tensor | None, more: Tensor, dtype: torch.dtype | None) -> Tensor:
    """own + more[0] + more[1] + ..., in that order; in place unless another dtype is asked for."""
    if own is None:
        own, more = more[0], more[1:]
    dtype = dtype or own.dtype
    if own.is_cuda and own.is_contiguous() and own.dtype == torch.float32:
        from ringattn.kernels.triton.gradients import add_up as in_one_pass  # comes with every torch that has a GPU

        return in_one_pass(own, more, dtype)
    for x in more:
        own.add_(x)
    return own.to(dtype)


def levels_forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Level], score: Score, start: Partial | None
) -> Partial:
    """`direct_forward` host by host: a rank holds a block of each in turn, whose next hop flies during all of them."""
    part: Partial | None = start
    held: Any = (k, v)
    for i, (stops, hop, _) in enumerate(run):
        what = f"keys of round {i + 2} of {len(run)}, forward"
        flight = axis.rotate(held, hop.shift, hop.send, hop.recv, what) if hop else Done()
        part = direct_forward(q, held[0], held[1], axis, stops, score, part, ends=i == len(run) - 1)
        held = flight.wait() or (k, v)
    return part or empty(q, v.shape[-1])


def levels_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Level], score: Score, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_backward` host by host: gradients add up where the block is held, and cross the hosts once each."""
    dq: Tensor | None = None
    own: Any = None
    held: Any = (k, v)
    returning: Pending = Done()
    for i, (stops, hop, home) in enumerate(run):
        what = f"round {i + 1} of {len(run)}, backward"
        flight = axis.rotate(held, hop.shift, hop.send, hop.recv, what) if hop else Done()
        dq, *grads = direct_backward(q, held[0], held[1], axis, stops, score, rows, dq, ends=False)
        own = add_into(own, returning.wait()) if i else grads
        returning = axis.rotate(grads, home.shift, home.send, home.recv, what) if home else Done()
        held = flight.wait() or (k, v)
    own = add_into(own, returning.wait())
    return dq if dq is not None else zero(q), own[0], own[1]


def relay_forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Run, score: Score, start: Partial | None
) -> Partial:
    """`direct_forward` by way of the neighbours. The next hop flies while this step computes."""
    part: Partial | None = start
    keys: Any = (k, v)
    last = max((i for i, (step, _) in enumerate(run) if step.work), default=-1)
    for i, (step, where) in enumerate(run):
        what = f"keys of step {i + 2} of {len(run)}, forward"
        hop = axis.rotate(keys, step.hop.shift, step.hop.send, step.hop.recv, what) if step.hop else Done()
        if step.work:
            dtype = carried_in(q, score, where, part, i == last)
            part = score.attend(q, *keys, where, carry=part, out_dtype=dtype)
        keys = hop.wait() or (k, v)
    return part or empty(q, v.shape[-1])


def relay_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Run, score: Score, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_backward` by way of the neighbours.

    At home a block's gradient adds up in `own`; while it travels, every rank adds its part to what arrives, and the
    last rank that sees the block sends its gradient straight home.
    """
    dq: Tensor | None = None
    rows = score.prepare(q, *rows)
    own: Pair = zeros(k, v)
    keys: Any = (k, v)
    arriving: Pending = Done()
    returning: list[Pending] = []
    for i, (step, where) in enumerate(run):
        what = f"step {i + 1} of {len(run)}, backward"
        hop = axis.rotate(keys, step.hop.shift, step.hop.send, step.hop.recv, what) if step.hop else Done()
        if i == 0:
            if step.work:
                dq, *own = score.attend_backward(q, *keys, where, *rows, dq=dq, dk=own[0], dv=own[1])
        else:
            grads: Any = None
            if step.work:
                dq, *grads = score.attend_backward(q, *keys, where, *rows, dq=dq)
            grads = add_into(arriving.wait(), grads) or (zeros(k, v) if step.here else own)
            arriving = axis.rotate(grads, step.hop.shift, step.hop.send, step.hop.recv, what) if step.hop else Done()
            if step.home:
                returning.append(axis.rotate(grads, step.home.shift, step.home.send, step.home.recv, what))
        keys = hop.wait() or (k, v)
    for transfer in returning:  # this rank's own block comes home in one of them; the others only sent
        own = add_into(own, transfer.wait())
    return zero(q) if dq is None else dq, own[0], own[1]


def zeros(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return zero(k), zero(v)


def zero(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape, dtype=accumulator(x))


def add_into(a: Any, b: Any) -> Any:
    """The sum of two (dk, dv), in the first one, of which either may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))
