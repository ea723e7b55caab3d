"""What travels for the steps of a ring: keys and values to where they are read, and their gradients back."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis, ByRank, Done, Pending, Slices, Then
from ringattn.kernels.total import Total, in_dtype
from ringattn.steps.rank import Hop, Step
from ringattn.steps.table import Ranges

Exchange = tuple[ByRank, ByRank]  # the arguments of `Axis.sharing`: what this rank sends, and what it receives
NOTHING: Exchange = {}, {}
DONE: Pending = Done()
EVERY = slice(None)


def exchange_for(
    axis: Axis, step: Step | None, block: Sequence[Tensor], kept: Sequence[Tensor] = ()
) -> tuple[Any, Exchange]:
    """The keys and values of a step, and the exchange in which they arrive; `kept` have arrived in forward."""
    if step is None or not step.travels:
        return block, NOTHING
    if kept:
        return kept, NOTHING
    keys = [x.new_empty(x.shape[0], step.length, *x.shape[2:]) for x in block] if step.receive else block
    out: dict[int, Any] = {}
    for ranges, readers in step.shared:
        out.update(dict.fromkeys(readers, Slices(block, ranges)))  # the same object for all that read it
    into = {source: Slices(keys, *places) for source, places in step.receive.items()}
    if step.local:  # this rank's own keys, beside those that arrive
        out[axis.rank], into[axis.rank] = Slices(block, step.local), Slices(keys, step.local_at)
    return keys, (out, into)


def receive(axis: Axis, step: Step, block: Sequence[Tensor], kept: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    """The keys and values of a step before which there is nothing to compute."""
    keys, exchange = exchange_for(axis, step, block, kept)
    if exchange is not NOTHING:
        with axis.sharing(*exchange, what) as receiving:
            pass
        receiving.wait()
    return keys


def send(axis: Axis, tensors: Sequence[Tensor], hop: Hop | None, what: str) -> Pending:
    """This rank's part in a hop; what arrives is contiguous, or None."""
    if hop is None or not (hop.send or hop.receive):
        return DONE
    n, (to, source) = sum(map(len, hop.receive)), [(axis.rank + way * hop.shift) % axis.size for way in (1, -1)]
    arrived = [x.new_empty(x.shape[0], n, *x.shape[2:]) for x in tensors] if hop.receive else None
    pieces = [[x[:, r.start : r.stop] for r in hop.send] for x in tensors]
    out = {to: [x[0] if len(x) == 1 else torch.cat(x, 1) for x in pieces]} if hop.send else {}
    return Then(axis.hop(out, {source: arrived} if arrived else {}, what), lambda _: arrived)


class Sums:
    """The gradients of a block's keys and values: this rank's own parts, and those that their readers return.

    `low`: parts are sent in the tensors' dtype; else in the dtype of sums. `fills`: as in `Axis.move`.
    """

    def __init__(self, axis: Axis, low: bool, fills: bool, *block: Tensor):
        self.axis, self.fills, self.block = axis, fills, block
        self.totals = [Total(x) for x in block]
        self.dtypes = [x.dtype if low else total.exact for x, total in zip(block, self.totals, strict=True)]
        self.arriving: list[tuple[Ranges, Sequence[Tensor]]] = []  # what each reader returns: of which rows, and those
        self.receiving = DONE

    def add(self, step: Step, grads: Sequence[Any], what: str) -> None:
        """Add a step's gradients of this rank's block, and exchange those of keys that travelled."""
        if not step.travels:
            heads = EVERY if step.heads is None else step.heads[1]
            for total, grad in zip(self.totals, grads, strict=True):  # None without work
                total.add(grad, heads=heads)
            return
        self.settle()
        into: dict[int, Any] = {}
        for reader, n, at, rows in step.returned:
            arrived = [
                x.new_empty(x.shape[0], n, *x.shape[2:], dtype=dtype)
                for x, dtype in zip(self.block, self.dtypes, strict=True)
            ]
            self.arriving.append((rows, arrived))
            into[reader] = Slices(arrived, at)
        out = self.parcels(step, grads) if step.receive else {}
        self.receiving = self.axis.move(out, into, what, self.fills)

    def parcels(self, step: Step, grads: Sequence[Any]) -> ByRank:
        """The gradients that this rank returns, by source of their keys. Those of its own keys are added."""
        pairs = list(zip(grads, self.dtypes, strict=True))
        if isinstance(grads[0], Total):
            out: ByRank = {
                source: [x.rows_at(r, dtype) for x, dtype in pairs for r in places.at]
                for source, places in step.receive.items()
            }
        else:
            sent = [in_dtype(*pair) for pair in pairs]
            out = {source: Slices(sent, places.at) for source, places in step.receive.items()}
        if step.local:
            for total, (x, dtype) in zip(self.totals, pairs, strict=True):
                for at, r in zip(step.local_at, step.local, strict=True):
                    local = x.rows_at(at, dtype) if isinstance(x, Total) else x[:, at.start : at.stop]
                    total.add(local, rows=slice(r.start, r.stop))
        return out

    def settle(self, last: bool = False) -> None:
        """Add what arrived, always in the same order. Unless it is the `last` time, fold totals of many parts."""
        self.receiving.wait()
        for rows, grads in self.arriving:
            self.add_at(rows, grads)
        for total in () if last else self.totals:
            total.fold()
        self.arriving, self.receiving = [], DONE

    def add_at(self, ranges: Ranges, grads: Sequence[Tensor]) -> None:
        """Add tensors that hold these ranges of rows."""
        for total, x in zip(self.totals, grads, strict=False):
            at = 0
            for r in ranges:
                total.add(x[:, at : at + len(r)], rows=slice(r.start, r.stop))
                at += len(r)

    def tensors(self) -> Sequence[Tensor]:
        return [total.tensor(total.exact) for total in self.totals]


class Side:
    """A GPU's side stream: `with side.on:` its work waits only for what was launched before this was made.

    It comes before other work that is not on the GPU's multiprocessors yet. What is launched after `join` waits for it.
    """

    def __init__(self, device: torch.device):
        self.stream = side_stream(device) if device.type == "cuda" else None
        self.on: Any = MAIN
        if self.stream is not None:
            self.main = torch.cuda.current_stream(device)
            self.stream.wait_stream(self.main)
            self.on = torch.cuda.stream(self.stream)

    def join(self) -> None:
        if self.stream is not None:
            self.main.wait_stream(self.stream)


MAIN = nullcontext()  # the stream that is current


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
