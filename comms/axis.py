"""One axis of a mesh of ranks, and what can be sent along it. Moves bytes, knows no mathematics.

Every operation starts at once and returns a handle; `handle.wait()` gives the result. Between the two the tensors that
were handed over are in flight: they may be read, never written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import count
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
Parcels = Mapping[int, Sequence[Any]]  # tensors to or from each of some ranks

TRANSPORTS = ("auto", "symmetric", "group")


class Parts(Sequence[Any]):
    """Ranges of dim 1 of some tensors, tensor by tensor: views that are cut once, when somebody asks for them."""

    def __init__(self, tensors: Sequence[Any], places: tuple[range, ...]):
        self.tensors, self.places = tensors, places
        self.views: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.tensors) * len(self.places)

    def __getitem__(self, i: Any) -> Any:
        if self.views is None:
            self.views = [x[:, at.start : at.stop : at.step] for x in self.tensors for at in self.places]
        return self.views[i]


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


class All:
    """Several transfers as one: a list of what each brought."""

    def __init__(self, *pending: Pending):
        self.pending = pending

    def wait(self) -> list[Any]:
        return [p.wait() for p in self.pending]


class Axis(Protocol):
    """`size` ranks in a line that closes to a ring; this process is number `rank`."""

    name: str
    size: int
    rank: int
    by: str  # what carries the bytes, in words
    cheap_words: bool  # whether exchange_words costs little beside a call
    hosts: int  # on how many hosts the ranks lie, as many on each, in order; 0: nobody knows

    def move(self, out: Parcels, into: Parcels, what: str = "") -> Pending:
        """Send the tensors of `out` to their ranks, and fill those of `into` from theirs.

        What rank a sends to b and what b fills from a have the same shapes in the same order. `what` names it in the
        error of a rank whose peer is lost.
        """

    def share(
        self, tensors: Sequence[Any], readers: Sequence[int], into: Parcels, work: Callable[[], T], what: str = ""
    ) -> tuple[T, Pending]:
        """`work()`, and a move that flies beside it, of the same tensors to all who read them.

        Those of `into` are filled from what their ranks share, at the same turn of theirs.
        """

    def rotate(
        self, tensors: Sequence[Any], shift: int = 1, send: bool = True, recv: bool = True, what: str = ""
    ) -> Pending:
        """Send to rank + shift what rank - shift sends here; the handle gives what arrived (None if not `recv`).

        A rank that only receives also hands over tensors: what arrives has their shapes and dtypes.
        """

    def all_to_all(self, x: Any, split: int, join: int) -> Pending:
        """Cut `x` into `size` pieces along dim `split`, give piece i to rank i, join what arrives along dim `join`."""

    def all_gather(self, x: Any, dim: int = 0) -> Pending:
        """Every rank's `x`, in rank order, joined along `dim`."""

    def reduce_scatter(self, x: Any, dim: int = 0) -> Pending:
        """The sum over ranks of their `x`, of which each rank gets its own piece along `dim`."""

    def exchange_words(self, words: Any) -> list[Any]:
        """Every rank's small Python value, in rank order. Blocks: for checks, not for data."""

    def over(self, transport: str) -> "Axis":
        """The same ranks over that transport, if this axis has more than one: "symmetric" or "group"."""


class Ranks:
    """Where a plan runs: the framework, the kind of device and the two axes; and what was bound and agreed on there.

    What is kept goes when the ranks go. `here` is False for ranks that a plan is only drawn up for.
    """

    def __init__(self, ring: Any, ulysses: Any, framework: str = "torch", device: str = "cpu", here: bool = True):
        self.ring, self.ulysses = ring, ulysses
        self.framework, self.device, self.here = framework, device, here
        self.calls: dict[Any, Any] = {}  # bound calls, by what they are
        self.agreed: dict[Any, set[Any]] = {}  # by plan, the kinds of calls that all ranks agreed on
        self.kept: dict[str, Any] = {}  # what a framework notes
        self.plans: dict[str, Any] = {}  # those that compiled graphs asked for, by their text
        self.number = next(NUMBERS)
        LIVE[self.number] = self

    @cached_property
    def place(self) -> tuple[Any, ...]:
        """What makes plans differ: in JAX the devices, since programs are kept by their plans; in torch nothing."""
        axes = [tuple(vars(axis).items()) for axis in self] if self.framework == "jax" and self.here else []
        return (self.framework, *([self.device] if axes else []), *axes)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Ranks) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ring, self.ulysses))

    def __reduce__(self) -> Any:
        """Only a plan of one rank is pickled, or of ranks that are not here."""
        return (one_rank, (self.device,)) if self.here else (Ranks, (None, None, self.framework, self.device, False))


# A compiled graph holds numbers and strings, no objects: it finds the ranks it was made for by their number.
LIVE: "WeakValueDictionary[int, Ranks]" = WeakValueDictionary()
NUMBERS = count()
NOT_HERE = Ranks(None, None, here=False)


@cache
def one_rank(device: str = "cpu") -> Ranks:
    """One rank, the same for all plans of one device."""
    return Ranks(Solo("ring"), Solo("ulysses"), device=device)


def one_ahead(transfers: Iterable[Pending]) -> Iterator[Any]:
    """What each transfer brings, in order; the next one is under way before what came is handed over to be used.

    Chained, the work between two of them runs beside both: what it needs next is coming, what it gave last is leaving.
    """
    flying: deque[Pending] = deque()
    for one in transfers:
        flying.append(one)
        if len(flying) > 1:
            yield flying.popleft().wait()
    if flying:
        yield flying.popleft().wait()


class Solo:
    """An axis of one rank: everything arrives where it was."""

    size, rank, by, cheap_words, hosts = 1, 0, "nothing", True, 1

    def __init__(self, name: str = "ring"):
        self.name = name

    def move(self, out: Parcels, into: Parcels, what: str = "") -> Pending:
        return Done()

    def share(
        self, tensors: Sequence[Any], readers: Sequence[int], into: Parcels, work: Callable[[], T], what: str = ""
    ) -> tuple[T, Pending]:
        return work(), Done()

    def rotate(
        self, tensors: Sequence[Any], shift: int = 1, send: bool = True, recv: bool = True, what: str = ""
    ) -> Pending:
        return Done(tuple(tensors) if recv else None)

    def all_to_all(self, x: Any, split: int, join: int) -> Pending:
        return Done(x)

    def all_gather(self, x: Any, dim: int = 0) -> Pending:
        return Done(x)

    def reduce_scatter(self, x: Any, dim: int = 0) -> Pending:
        return Done(x)

    def exchange_words(self, words: Any) -> list[Any]:
        return [words]

    def over(self, transport: str) -> "Solo":
        return self
