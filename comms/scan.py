"""A scan from rank to rank.

It uses only `rotate`, so it works on every axis whose ranks run programs of their own. The single program of a JAX mesh
uses `ringattn.comms.jax.relay` instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ringattn.comms.axis import Axis, Done, Pending


class Relay:
    """An exclusive scan: `wait()` gives `start` after the steps of all earlier ranks, in their order.

    The value may be cut into pieces: `steps[i]` turns piece i into what the next rank gets, while piece i + 1 arrives,
    so that ranks work on different pieces at the same time. `start` counts on the first rank only; what arrives on the
    others has the shape and dtype of `like`. `reverse` begins at the last rank.
    """

    def __init__(
        self, axis: Axis, start: Sequence[Any], steps: Sequence[Callable[[Any], Any]], reverse: bool, like: Any
    ):
        self.axis, self.start, self.steps = axis, start, steps
        self.shift = -1 if reverse else 1
        turn = axis.size - 1 - axis.rank if reverse else axis.rank
        self.first, self.last = turn == 0, turn == axis.size - 1
        if self.first:  # it waits for no other rank
            onward = [] if self.last else [step(x) for step, x in zip(steps, start, strict=True)]
            self.hops = [self.move(x, send=True) for x in onward]
        else:
            self.hops = [self.move(like, recv=True)]

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
