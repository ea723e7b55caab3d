"""The ring: keys travel, queries stay, partials merge; the keys' gradients travel back to them and add up.

On the direct route every block comes from its owner, several small ones at a step, and its gradients return straight
to it: no transfer waits for another. On the relay route blocks go from rank to rank, over the shortest links, and
their gradients follow one hop behind. What goes where is decided in `ringattn.schedule` and only carried out here.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ringattn.comms.axis import Axis, Done, Parcels, Parts, Pending
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.total import Total
from ringattn.torch.steps import Level, Run, Score, Stop, carried_in

S = TypeVar("S")
Rows = tuple[Tensor, Tensor, Tensor]  # dout, the lse over all keys, delta (or, for tiles, the out over all keys)
Pair = tuple[Tensor, ...]  # keys and values, or their gradients
Work = tuple[Callable[[], Any], Callable[[], Any]]  # one gives (dk, dv), the other dq
NOTHING: Work = (lambda: (None, None), lambda: None)
END = Stop(None, (), {}, (), ())
EVERY = slice(None)
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
    for i, (stop, following) in enumerate(with_next(run, END)):
        work: Callable[[], Partial | None] = partial(as_it_was, part)
        if stop.where:
            dtype = carried_in(q, score, stop.where, part, ends and i == last)
            work = partial(score.attend, q, *keys, stop.where, carry=part, out_dtype=dtype)
        keys, trip = room_for(following, k, v)
        part, hop = axis.share(*trip, work, f"keys of step {i + 2} of {len(run)}, forward")
        hop.wait()
    return part or empty(q, v.shape[-1])


def direct_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in the dtypes of their tensors."""
    dq = Total(q)
    dk, dv = visits_backward(q, k, v, axis, run, score, rows, dq)
    return dq.tensor(q.dtype), dk.tensor(k.dtype), dv.tensor(v.dtype)


def visits_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, rows: Rows, dq: Total
) -> Sequence[Total]:
    """(dk, dv), and dq where it adds up. A step's part of other ranks' gradients is on its way while dq is computed."""
    home, turns = Home(axis, score.narrow, k, v), turns_of(run, score, q, k, v)
    keys, trip = room_for(turns[0].stop, k, v)
    made, hop = axis.share(*trip, partial(score.prepare, q, *rows), f"keys of step 1 of {len(run)}, backward")
    hop.wait()
    for i, (turn, following) in enumerate(with_next(turns, LAST), start=len(run) + 1 - len(turns)):
        if score.parted:  # what came has flown beside dq; else it may still fly beside this step
            home.settle()
        stop, of_queries, of_keys = turn
        work = NOTHING
        if stop.where:
            tensors = some_heads(q, of_queries), *some_heads(keys, of_keys)
            work = score.halves(*tensors, stop.where, *some_heads(made, of_queries), dq=dq.place)
        keys, trip = room_for(following.stop, k, v)
        grads, hop = axis.share(*trip, work[0], f"keys of step {i + 1} of {len(run)}, backward")
        home.send(stop, grads, f"gradients of step {i} of {len(run)}", of_keys)
        dq.add(work[1](), heads=of_queries)
        dq.fold()
        hop.wait()
        del work, grads  # they hold what has been used, while room is made for what comes
    home.settle(last=True)
    return home.own


def queries_backward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, run: Sequence[Stop], score: Score, rows: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_backward` the other way round: queries and their rows travel, and dq comes home; keys stay.

    Fewer bytes where there are as many key heads as query heads: dq alone comes back, not dk and dv.
    """
    dk, dv = Total(k), Total(v)
    home, turns = Home(axis, score.narrow, q), turns_of(run, score)
    own = tuple(x.contiguous() for x in (q, *rows))
    here, trip = room_for(turns[0].stop, *own)
    axis.share(*trip, nothing, f"queries of step 1 of {len(run)}, backward")[1].wait()
    for i, ((stop, *_), following) in enumerate(with_next(turns, LAST)):
        if score.parted:
            home.settle()
        work = NOTHING
        if stop.where:
            work = score.halves(here[0], k, v, stop.where, *score.prepare(*here), dk=dk.place, dv=dv.place)
        here, trip = room_for(following.stop, *own)
        dq, hop = axis.share(*trip, work[1], f"queries of step {i + 2} of {len(run)}, backward")
        home.send(stop, (dq,), f"gradients of step {i + 1} of {len(run)}")
        for total, found in zip((dk, dv), work[0](), strict=True):
            total.add(found)
            total.fold()
        hop.wait()
        del work, dq, found
    home.settle(last=True)
    return home.own[0].tensor(q.dtype), dk.tensor(k.dtype), dv.tensor(v.dtype)


class Turn(NamedTuple):
    """A stop, and which of its heads have their turn: all of them, or some of the queries' and their keys'."""

    stop: Stop
    queries: slice = EVERY
    keys: slice = EVERY


LAST = Turn(END)


def turns_of(run: Sequence[Stop], score: Score, *tensors: Tensor) -> list[Turn]:
    """Parted kernels: home first, to hide the first hop.

    Others: home last, to hide the last gradients; or half of its heads, where the other half is worth being first to
    hide the first hop of these (q, k, v).
    """
    home, *others = map(Turn, run)
    if score.parted:
        return [home, *others]
    if tensors and others and home.stop.where and hop_bytes(others[0].stop, *tensors[1:]) >= LONG:
        heads, kv_heads = (x.shape[2] for x in tensors[:2])
        half = kv_heads // 2
        cut = half * (heads // kv_heads)
        if half:
            first, last = Turn(run[0], slice(cut), slice(half)), Turn(run[0], slice(cut, None), slice(half, None))
            return [first, *others, last]
    return [*others, home]


def hop_bytes(stop: Stop, *own: Tensor) -> float:
    """How much a stop brings, of tensors like these."""
    return stop.length * sum(x.nbytes / max(1, x.shape[1]) for x in own)


def some_heads(x: Any, at: slice) -> Any:
    """Those heads of a tensor, or of each one of several."""
    if at == EVERY:
        return x
    if isinstance(x, Tensor):
        return x[:, :, at]
    found = [some_heads(y, at) for y in x]
    return type(x)(*found) if hasattr(x, "_fields") else found


def with_next(run: Sequence[S], end: S) -> Iterable[tuple[S, S]]:
    """Each stop (or turn) and the one that follows."""
    return zip(run, [*run[1:], end], strict=True)


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
    """The gradients of this rank's own tensors: its own part, and what the ranks that had them send back.

    `narrow`: they come as they were found, in the tensors' dtype; else in that of sums.
    """

    def __init__(self, axis: Axis, narrow: bool, *like: Tensor):
        self.axis, self.like = axis, like
        self.dtypes = [x.dtype if narrow else accumulator(x) for x in like]
        self.own = tuple(Total(x) for x in like)
        self.coming: Sequence[Sequence[Tensor]] = ()  # what each of some ranks sends
        self.flight: Pending = Done()

    def send(self, stop: Stop, grads: Sequence[Any], what: str, heads: slice = EVERY) -> None:
        """Send the gradients of what a stop brought to their owners, and make room for what comes from the others."""
        if not stop.brought and not stop.readers:  # nothing moved: it worked on what is at home, if at all
            for total, found in zip(self.own, grads, strict=True):
                total.add(found, heads=heads)
            return
        self.settle()
        kinds = list(zip(self.like, self.dtypes, strict=True))
        self.coming = [[x.new_empty(x.shape, dtype=dtype) for x, dtype in kinds] for _ in stop.readers]
        into = {r: Parts(each, stop.own) for r, each in zip(stop.readers, self.coming, strict=True)}
        out = {s: self.parcel(grads, places) for s, places in stop.brought.items()}
        self.flight = self.axis.move(out, into, what=what)

    def settle(self, last: bool = False) -> None:
        """Add what has come, always in the same order; but for the `last` time, make one sum of much."""
        self.flight.wait()
        for each in self.coming:
            for total, found in zip(self.own, each, strict=True):
                total.add(found)
        for total in () if last else self.own:
            total.fold()
        self.coming, self.flight = (), Done()

    def parcel(self, grads: Sequence[Any], places: tuple[range, ...]) -> Sequence[Tensor]:
        """Those ranges of each gradient."""
        if isinstance(grads[0], Total):
            return [x.rows_at(at, dtype) for x, dtype in zip(grads, self.dtypes, strict=True) for at in places]
        return Parts([x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)], places)


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
    dq = Total(q)
    own: Any = None
    held: Any = (k, v)
    returning: Pending = Done()
    for i, (stops, hop, home) in enumerate(run):
        what = f"round {i + 1} of {len(run)}, backward"
        flight = axis.rotate(held, hop.shift, hop.send, hop.recv, what) if hop else Done()
        grads = [x.tensor(x.exact) for x in visits_backward(q, held[0], held[1], axis, stops, score, rows, dq)]
        own = add_into(own, returning.wait()) if i else grads
        returning = axis.rotate(grads, home.shift, home.send, home.recv, what) if home else Done()
        held = flight.wait() or (k, v)
    own = add_into(own, returning.wait())
    return dq.tensor(q.dtype), own[0], own[1]


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
