"""What travels for the steps of a ring: keys and values to where they are read, and their gradients back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, ByRank, Done, Pending, Slices, Then
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.total import Total
from ringattn.steps.rank import Hop, Step, joined, places
from ringattn.steps.table import Ranges

Exchange = tuple[ByRank, ByRank]  # the arguments of `Axis.sharing`: what other ranks read here, and what this one does
NOTHING: Exchange = {}, {}


def exchange_for(step: Step | None, held: Sequence[Tensor], kept: Sequence[Tensor] = ()) -> tuple[Any, Exchange]:
    """The tensors of a step's keys, and the exchange that fills them; `kept` are here since forward."""
    if step is None or not (step.receive or step.send):
        return held, NOTHING
    if kept:
        return kept, NOTHING
    remote = tuple(x.new_empty(x.shape[0], step.length, *x.shape[2:]) for x in held) if step.receive else held
    sent = {ranges: Slices(held, ranges) for ranges in step.send.values()}  # the same object for all that read it
    received = {source: Slices(remote, *places) for source, places in step.receive.items()}
    return remote, ({reader: sent[ranges] for reader, ranges in step.send.items()}, received)


def receive(axis: Axis, step: Step, held: Sequence[Tensor], kept: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    """The keys of a step before which there is nothing to compute."""
    remote, trip = exchange_for(step, held, kept)
    with axis.sharing(*trip, what) as coming:
        pass
    coming.wait()
    return remote


def copy_own(axis: Axis, step: Step | None, held: Sequence[Tensor], remote: Sequence[Tensor]) -> None:
    """Copy this rank's own keys of a step, if any, beside those that arrive."""
    axis.after_sends()
    if step is None or not step.own:
        return
    to, of = (Slices(x, ranges) for x, ranges in ((remote, step.own_at), (held, step.own)))
    torch._foreach_copy_([*to], [*of])


def send_on(axis: Axis, tensors: Sequence[Tensor], hop: Hop | None, what: str) -> Pending:
    """This rank's part in a hop; what arrives is contiguous, or None."""
    if hop is None or not (hop.send or hop.receive):
        return Done()
    n, (there, here) = sum(map(len, hop.receive)), [(axis.rank + way * hop.shift) % axis.size for way in (1, -1)]
    room = [x.new_empty(x.shape[0], n, *x.shape[2:]) for x in tensors] if hop.receive else None
    pieces = [[x[:, r.start : r.stop] for r in hop.send] for x in tensors]
    out = {there: [x[0] if len(x) == 1 else torch.cat(x, 1) for x in pieces]} if hop.send else {}
    return Then(axis.hop(out, {here: room} if room else {}, what), lambda _: room)


class Sums:
    """The gradients of the keys and values that a rank holds: its own parts, and those that their readers send back.

    `narrow`: parts are sent in the tensors' dtype; else in the dtype of sums. `fills`: as in `Axis.move`.
    """

    def __init__(self, axis: Axis, narrow: bool, fills: bool, *held: Tensor):
        self.axis, self.fills, self.held = axis, fills, held
        self.dtypes = [x.dtype if narrow else accumulator(x) for x in held]
        self.totals = [Total(x) for x in held]
        self.coming: Sequence[tuple[Ranges, Sequence[Tensor]]] = ()  # what each reader sends: of which rows, and those
        self.flight: Pending = Done()

    def add(self, step: Step, grads: Sequence[Any], what: str) -> None:
        """Add a step's gradients of the keys that are held, and exchange those of keys that travelled."""
        if not (step.receive or step.send):  # the step worked on the held block, if at all
            heads = slice(None) if step.heads is None else step.heads[1]
            for total, grad in zip(self.totals, grads, strict=True):  # None without work
                total.add(grad, heads=heads)
            return
        self.settle()
        self.coming, into = [], {}
        for reader, rows in step.send.items():
            n, at = sum(map(len, rows)), places([(r,) for r in rows])
            room = [x.new_empty(x.shape[0], n, *x.shape[2:], dtype=dtype) for x, dtype in self.pairs]
            self.coming.append((rows, room))
            into[reader] = Slices(room, at)
        out = {source: self.parcel(grads, there.at) for source, there in step.receive.items()}
        self.flight = self.axis.move(out, into, what, self.fills)
        for total, grad, dtype in zip(self.totals, grads, self.dtypes, strict=True):
            for here, r in zip(step.own_at, step.own, strict=True):
                x = grad.rows_at(here, dtype) if isinstance(grad, Total) else grad[:, here.start : here.stop]
                total.add(x, rows=slice(r.start, r.stop))

    @property
    def pairs(self) -> list[tuple[Tensor, torch.dtype]]:
        return list(zip(self.held, self.dtypes, strict=True))

    def parcel(self, grads: Sequence[Any], at: Ranges) -> Sequence[Tensor]:
        """These ranges of each gradient."""
        if isinstance(grads[0], Total):
            return [x.rows_at(r, dtype) for x, dtype in zip(grads, self.dtypes, strict=True) for r in at]
        return Slices([x.to(dtype) for x, dtype in zip(grads, self.dtypes, strict=True)], at)

    def settle(self, last: bool = False) -> None:
        """Add what arrived, always in the same order. Unless it is the `last` time, fold totals of many parts."""
        self.flight.wait()
        for rows, grads in self.coming:
            self.add_at(rows, grads)
        for total in () if last else self.totals:
            total.fold()
        self.coming, self.flight = (), Done()

    def add_at(self, ranges: Ranges, grads: Sequence[Tensor]) -> None:
        """Add tensors that hold these ranges of rows."""
        for total, x in zip(self.totals, grads, strict=False):
            at = 0
            for r in joined(ranges):
                total.add(x[:, at : at + len(r)], rows=slice(r.start, r.stop))
                at += len(r)

    def add_all(self, grads: Sequence[Tensor]) -> None:
        for total, x in zip(self.totals, grads, strict=False):
            total.add(x)

    def tensors(self) -> Sequence[Tensor]:
        return [total.tensor(total.exact) for total in self.totals]


class Side:
    """A GPU's side stream: `with on(side):` its work waits only for what was launched before this was made.

    It comes before other work that is not on the GPU's multiprocessors yet. What is launched after `join` waits for it.
    """

    def __init__(self, device: torch.device):
        self.stream = side_stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.main = torch.cuda.current_stream(device)
            self.stream.wait_stream(self.main)

    @staticmethod
    def of(step: Step | None, device: torch.device) -> "Side | None":
        """The side stream, if the step runs there."""
        return Side(device) if step is not None and step.side else None

    def join(self) -> None:
        if self.stream is not None:
            self.main.wait_stream(self.stream)


MAIN = nullcontext()


def on(side: Side | None) -> AbstractContextManager[Any]:
    """The side stream, or the stream that is current."""
    return MAIN if side is None or side.stream is None else torch.cuda.stream(side.stream)


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
