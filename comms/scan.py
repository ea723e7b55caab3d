"""Values that go along an axis from rank to rank: a scan, and sending to all and adding up from all by trees.

All three are made of `rotate` alone, so every kind of axis has them on which each rank runs a program of its own; for
the one program of a JAX mesh there is `ringattn.comms.jax.relay`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ringattn.comms.axis import Axis, Done, Pending


class Relay:
    """An exclusive scan: `wait()` gives what all earlier ranks made of `start`, each in its turn.

    What travels may be cut into pieces: `steps[i]` makes of piece i what goes on, while piece i + 1 arrives, so that
    the ranks of a long line work on different pieces at the same time. The values of `start` count on the first rank
    only; elsewhere they say what a piece looks like. `reverse` begins at the last rank.
    """

    def __init__(self, axis: Axis, start: Sequence[Any], steps: Sequence[Callable[[Any], Any]], reverse: bool):
        self.axis, self.start, self.steps = axis, start, steps
        self.shift = -1 if reverse else 1
        place = axis.size - 1 - axis.rank if reverse else axis.rank
        self.first, self.last = place == 0, place == axis.size - 1
        if self.first:  # it waits for nobody
            onward = [] if self.last else [step(x) for step, x in zip(steps, start, strict=True)]
            self.hops = [self.move(x, send=True) for x in onward]
        else:
            self.hops = [self.move(start[0], recv=True)]

    def move(self, x: Any, send: bool = False, recv: bool = False) -> Pending:
        return self.axis.rotate((x,), self.shift, send=send, recv=recv) if send or recv else Done()

    def wait(self) -> list[Any]:
        if self.first:
            for hop in self.hops:
                hop.wait()
            return list(self.start)
        before, (hop,) = [], self.hops
        for i, step in enumerate(self.steps):
            (x,) = hop.wait()
            before.append(x)
            hop = self.move(x if self.last else step(x), send=not self.last, recv=i + 1 < len(self.steps))
        hop.wait()
        return before


def broadcast(axis: Axis, x: Any, source: int) -> Any:
    """`source`'s tensor on every rank, in log2(size) steps; the others' say what it looks like."""
    place, reach = (axis.rank - source) % axis.size, 1
    while reach < axis.size:
        sends, receives = place < reach and place + reach < axis.size, reach <= place < 2 * reach
        arrived = axis.rotate((x,), reach, send=sends, recv=receives).wait()
        x = arrived[0] if arrived else x
        reach *= 2
    return x


def add_up(axis: Axis, x: Any, target: int) -> Any:
    """The sum of every rank's tensor on `target`, in log2(size) steps; of no meaning elsewhere."""
    place, reach = (axis.rank - target) % axis.size, 1
    while 2 * reach < axis.size:
        reach *= 2
    while reach and axis.size > 1:
        sends, receives = reach <= place < 2 * reach, place < reach and place + reach < axis.size
        arrived = axis.rotate((x,), -reach, send=sends, recv=receives).wait()
        x = x + arrived[0] if arrived else x
        reach //= 2
    return x
