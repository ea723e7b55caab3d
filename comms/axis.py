"""One axis of a mesh of ranks, and the transfers along it. Moves bytes, knows no mathematics.

Every operation starts at once and returns a handle; `handle.wait()` gives the result. Until then the tensors that were
passed are in flight: they may be read, but not written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol

ByRank = Mapping[int, Sequence[Any]]  # the tensors to send to, or to receive from, each of some ranks

TRANSPORTS = ("auto", "symmetric", "group")
ROLES = ("ring", "ulysses", "sequence", "batch", "heads")  # that axes of a mesh play for a plan


def mesh_sizes(
    data: int, ring: int, ulysses: int, sequence: int | None, have: int | None, ranks: str, instead: str = ""
) -> dict[str, int]:
    """The axes of a mesh over `have` ranks (None: as many as it needs); `ranks` is what an error calls them."""
    sizes = {"data": data, "ring": ring, "ulysses": ulysses}
    if sequence is not None:
        if (ring, ulysses) != (1, 1):
            raise ValueError(
                f"sequence={sequence} leaves ring and ulysses to the plan; leave out ring={ring}, ulysses={ulysses}"
            )
        sizes = {"data": data, "sequence": sequence}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r}: the number of {ranks} along {name}, a whole number of at least 1")
    need = prod(sizes.values())
    if have not in (None, need):
        product = " x ".join(f"{n}={s}" for n, s in sizes.items())
        raise ValueError(
            f"{product} needs {need} {ranks}, and there are {have}; make the product {have} "
            f"(ring={have} alone){instead}"
        )
    return sizes


def split_sizes(sizes: Mapping[str, int], name: str, parts: Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh with the axis `name` cut into these parts, the last one innermost."""
    return {n: s for old, size in sizes.items() for n, s in (parts if old == name else {old: size}).items()}


def roles(axes: Mapping[str, Any] | None, names: Sequence[str], framework: str) -> dict[str, tuple[str, ...]]:
    """The axes of a mesh that play each role, from {"ring": "cp", "batch": ("data", "fsdp")}; others have no entry.

    A role that is not given is played by the mesh's axis of that name, if no other role has it. JAX takes several axes
    for a role, the last one innermost.
    """
    given = {role: (of,) if isinstance(of, str) else tuple(of) for role, of in (axes or {}).items()}
    taken = [name for of in given.values() for name in of]
    for role, of in given.items():
        if role not in ROLES:
            raise ValueError(f"axes={axes!r}: there is no role {role!r}; choose from {', '.join(ROLES)}")
        if framework != "jax" and role in ("batch", "heads"):
            raise ValueError(f"axes={axes!r}: {role!r} is for JAX; in torch each rank has its own batch and heads")
        if len(of) > 1 and (framework != "jax" or role == "sequence"):
            raise ValueError(f"axes={axes!r}: {role!r} takes one axis; flatten those of the mesh first")
        if missing := set(of) - set(names):
            raise ValueError(f"axes={axes!r}: the mesh has axes {tuple(names)}, not {sorted(missing)}")
    if len(set(taken)) < len(taken) or ("sequence" in given and {"ring", "ulysses"} & set(given)):
        raise ValueError(
            f"axes={axes!r}: each axis has one role, and 'sequence' stands for 'ring' and 'ulysses', which the plan "
            "makes of it"
        )
    implied = [] if "sequence" in given else ["ring", "ulysses"]
    implied += [] if {"ring", "ulysses"} & set(given) else ["sequence"]
    return {**{role: (role,) for role in implied if role in names and role not in taken}, **given}


class Slices(Sequence[Any]):
    """Slices of tensors along dim 1: all ranges of the first tensor, then of the next. Views, made on first use.

    `after`, of slices that receive what is shared: how long the other slices are that their rank shares before these.
    """

    def __init__(self, tensors: Sequence[Any], places: tuple[range, ...], after: tuple[int, ...] = ()):
        self.tensors, self.places, self.after = tensors, places, after
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


Sharing = AbstractContextManager[Pending]  # a transfer beside the work of a `with` statement


class Done:
    """A transfer with nothing to wait for."""

    def __init__(self, result: Any = None):
        self.result = result

    def wait(self) -> Any:
        return self.result


class Then:
    """A transfer whose result is passed through a function."""

    def __init__(self, pending: Pending, finish: Callable[[Any], Any]):
        self.pending, self.finish = pending, finish

    def wait(self) -> Any:
        return self.finish(self.pending.wait())


class All:
    """Several transfers as one; its result is the list of their results."""

    def __init__(self, *pending: Pending):
        self.pending = pending

    def wait(self) -> list[Any]:
        return [p.wait() for p in self.pending]


class Afterwards:
    """A transfer that is launched after the body of a `with`, and can be waited for from then on.

    It is launched even if the body fails, since peers expect it, and the next call would receive it or send to it. If
    both fail, the error of the body is raised.
    """

    def __init__(self, launch: Callable[[], Pending]):
        self.launch = launch
        self.pending: Pending = Done()

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        launch, self.launch = self.launch, Done  # the tensors are the transfer's, which lets go of them
        try:
            self.pending = launch()
        except Exception:
            if error is None:
                raise

    def wait(self) -> Any:
        return self.pending.wait()


NOTHING_SHARED: Sharing = nullcontext(Done())


class Axis(Protocol):
    """`size` ranks in a ring; this process is number `rank`. The bodies are those of `Solo`, an axis of one rank."""

    name: str
    size: int
    rank: int
    by: str  # the transport, for people to read
    replayable: bool = False  # whether graphs with its transfers can be replayed, and a rank that is lost then named
    cheap_words: bool  # whether exchange_words is cheap compared with a call
    hosts: int  # the number of hosts, if each holds equally many consecutive ranks; else, or if unknown, 0

    def move(self, out: ByRank, into: ByRank, what: str = "", persistent: bool | None = True) -> Pending:
        """Send the tensors of `out` to their ranks, and receive those of `into` from their ranks.

        The tensors that rank a sends to b and those that b receives from a have the same shapes in the same order; what
        a rank sends to itself is copied. If a rank is lost, the error of its peer names the transfer with `what`.
        `persistent`: kernels that run meanwhile may occupy the device until they end, so the transfer launches none.
        None: no kernel runs meanwhile, so a transfer's own may take the device.
        """
        return Done()

    def sharing(self, out: ByRank, into: ByRank, what: str = "", persistent: bool = True) -> Sharing:
        """`with axis.sharing(...) as coming`: a move beside the work of the body.

        Readers that get the same object in `out` may read it from one place. Objects are shared in the order of `out`,
        and a receiver knows how long those before its part are (`Slices.after`). Wait for `coming` after the body: a
        transfer may be launched before the body or after it, whichever the transport hides better. `persistent`: as in
        `move`, for the body's kernels; what they would delay is launched before them.
        """
        return NOTHING_SHARED

    def hop(self, out: ByRank, into: ByRank, what: str) -> Pending:
        """A move that may cross from host to host, and is not to delay those within a host."""
        return Done()

    def rotate(
        self, tensors: Sequence[Any], shift: int = 1, send: bool = True, recv: bool = True, what: str = ""
    ) -> Pending:
        """Send tensors to rank + shift and receive from rank - shift; the handle gives the latter, or None.

        What arrives has the shapes and dtypes of `tensors`, so a rank that only receives passes tensors too.
        """
        return Done(tuple(tensors) if recv else None)

    def all_to_all(self, tensors: Sequence[Any], split: int, join: int, persistent: bool | None = True) -> Pending:
        """Cut each tensor into `size` pieces along dim `split`, send piece i of each to rank i, all in one move.

        The handle gives the list of what arrives for each tensor, joined along dim `join`.
        """
        return Done(list(tensors))

    def all_gather(self, x: Any, dim: int = 0) -> Pending:
        """The `x` of all ranks, joined along `dim` in rank order."""
        return Done(x)

    def reduce_scatter(self, x: Any, dim: int = 0) -> Pending:
        """The sum of the `x` of all ranks, of which rank i gets piece i along `dim`."""
        return Done(x)

    def exchange_words(self, words: Any) -> list[Any]:
        """The small Python values of all ranks, in rank order. It blocks: for checks, not for data."""
        return [words]

    def over(self, transport: str) -> "Axis":
        """The same ranks over the transport "symmetric" or "group", if this axis has more than one."""
        return self


class Solo(Axis):
    """An axis of one rank, where every transfer returns its input."""

    size, rank, by, cheap_words, hosts = 1, 0, "nothing", True, 1

    def __init__(self, name: str = "ring"):
        self.name = name


def one_ahead(transfers: Iterable[Pending]) -> Iterator[Any]:
    """The results of the transfers, in order; each next transfer is started before a result is yielded.

    Two of these in a chain let the work between them overlap with both: with what arrives next and what left last.
    """
    flying: deque[Pending] = deque()
    for transfer in transfers:
        flying.append(transfer)
        if len(flying) > 1:
            yield flying.popleft().wait()
    if flying:
        yield flying.popleft().wait()
