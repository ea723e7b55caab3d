"""One axis of a mesh of ranks, and what can be sent along it. Moves bytes, knows no mathematics.

Every operation starts at once and returns a handle; `handle.wait()` gives the result. Between the two the tensors that
were handed over are in flight: they may be read, never written.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Tensors = tuple[Any, ...]


class Pending(Protocol):
    """A transfer in flight."""

    def wait(self) -> Any:
        """Finish the transfer and return what arrived."""


class Done:
    """A transfer with nothing to wait for."""

    def __init__(self, result: Any = None):
        self.result = result

    def wait(self) -> Any:
        return self.result


class Then:
    """`pending`, and a function of what arrived."""

    def __init__(self, pending: Pending, finish: Callable[[Any], Any]):
        self.pending, self.finish = pending, finish

    def wait(self) -> Any:
        return self.finish(self.pending.wait())


class Axis(Protocol):
    """`size` ranks in a line that closes to a ring; this process is number `rank`."""

    name: str
    size: int
    rank: int
    cheap_words: bool  # whether exchange_words costs little beside a call

    def rotate(self, tensors: Sequence[Any], shift: int = 1, send: bool = True, recv: bool = True) -> Pending:
        """Send to rank + shift what rank - shift sends here; the handle gives what arrived (None if not `recv`).

        A rank that only receives also hands over tensors: what arrives has their shapes and dtypes.
        """

    def all_to_all(self, x: Any, split: int, join: int) -> Pending:
        """Cut `x` into `size` pieces along dim `split`, give piece i to rank i, join what arrives along dim `join`."""

    def all_gather(self, x: Any, dim: int = 0) -> Pending:
        """Every rank's `x`, in rank order, joined along `dim`."""

    def reduce_scatter(self, x: Any, dim: int = 0) -> Pending:
        """The sum over ranks of their `x`, of which each rank gets its own piece along `dim`."""

    def exclusive_scan(
        self, state: Sequence[Any], combine: Callable[..., Sequence[Any]], reverse: bool = False
    ) -> Pending:
        """The states of all earlier ranks, combined in order (in reverse: of all later ones); else None."""

    def exchange_words(self, words: Any) -> list[Any]:
        """Every rank's small Python value, in rank order. Blocks: for checks, not for data."""


class Chain:
    """exclusive_scan by a relay: each rank receives from its neighbour, adds its own state and passes it on."""

    def __init__(self, axis: Axis, state: Sequence[Any], combine: Callable[..., Sequence[Any]], reverse: bool):
        self.axis, self.state, self.combine, self.reverse = axis, tuple(state), combine, reverse
        self.shift = -1 if reverse else 1
        place = axis.size - 1 - axis.rank if reverse else axis.rank
        self.first, self.last = place == 0, place == axis.size - 1
        self.sent: Pending = Done()
        self.arriving: Pending = Done()
        if self.first:
            self.sent = self.hop(self.state, send=not self.last)
        else:
            self.arriving = self.hop(self.state, recv=True)

    def hop(self, state: Sequence[Any], send: bool = False, recv: bool = False) -> Pending:
        return self.axis.rotate(state, self.shift, send=send, recv=recv) if send or recv else Done()

    def wait(self) -> Tensors | None:
        if self.first:
            self.sent.wait()
            return None
        before = self.arriving.wait()
        if not self.last:
            total = self.combine(self.state, before) if self.reverse else self.combine(before, self.state)
            self.hop(total, send=True).wait()
        return before


class Solo:
    """An axis of one rank: everything arrives where it was."""

    size, rank, cheap_words = 1, 0, True

    def __init__(self, name: str = "ring"):
        self.name = name

    def rotate(self, tensors: Sequence[Any], shift: int = 1, send: bool = True, recv: bool = True) -> Pending:
        return Done(tuple(tensors) if recv else None)

    def all_to_all(self, x: Any, split: int, join: int) -> Pending:
        return Done(x)

    def all_gather(self, x: Any, dim: int = 0) -> Pending:
        return Done(x)

    def reduce_scatter(self, x: Any, dim: int = 0) -> Pending:
        return Done(x)

    def exclusive_scan(
        self, state: Sequence[Any], combine: Callable[..., Sequence[Any]], reverse: bool = False
    ) -> Pending:
        return Done(None)

    def exchange_words(self, words: Any) -> list[Any]:
        return [words]
