"""N ranks in one process, one thread each: for tests, and for trying things out without starting anything.

>>> from ringattn.comms.local import run
>>> run(lambda mesh: mesh.axis("ring").rank, ring=4)
[0, 1, 2, 3]

What a rank hands over is copied at once, and at `wait()` the original must be as it was: a buffer that was written
while it was in flight is an AssertionError here instead of silent corruption on a network.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Parcels, Pending, Then
from ringattn.comms.messages import plain
from ringattn.comms.moves import Moves


class Board:
    """Where ranks leave things for each other. One failed rank wakes and fails all the others."""

    def __init__(self, timeout: float = 60.0):
        self.items: dict[tuple[Any, ...], Any] = {}
        self.changed = threading.Condition()
        self.failed: BaseException | None = None
        self.timeout = timeout

    def put(self, key: tuple[Any, ...], value: Any) -> None:
        with self.changed:
            self.items[key] = value
            self.changed.notify_all()

    def take(self, key: tuple[Any, ...]) -> Any:
        with self.changed:
            ready = self.changed.wait_for(lambda: key in self.items or self.failed is not None, self.timeout)
            if key in self.items:
                return self.items.pop(key)
            if ready:
                raise ConnectionError("another rank failed") from self.failed
            raise TimeoutError(f"nothing arrived within {self.timeout} s for {key}")

    def check_empty(self) -> None:
        """Everything that was sent must have been taken: on a network it would meet a later call, or never leave."""
        left = [f"{name} rank {source} -> {to} (its transfer {number})" for name, _, source, to, number in self.items]
        assert not left, f"{len(left)} transfers were sent and never received: {', '.join(left[:8])}"

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


class Letters:
    """Copies on their way; `wait` takes what arrived and checks that nobody wrote to what was sent."""

    def __init__(self, axis: "LocalAxis", keys: Sequence[tuple[Any, ...]], sent: Sequence[Tensor]):
        self.axis, self.keys = axis, keys
        self.sent = [(t, version(t)) for t in sent]

    def wait(self) -> list[Any]:
        self.axis.open -= 1
        arrived = [self.axis.board.take(key) for key in self.keys]
        assert all(version(t) == before for t, before in self.sent), "a buffer was written while it was in flight"
        return arrived


def version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


class LocalAxis(Moves):
    """One thread's place on an axis. `sent` counts the bytes this rank has handed to others."""

    by, cheap_words = "threads", True

    def __init__(self, board: Board, name: str, group: tuple[Any, ...], size: int, rank: int, hosts: int = 1):
        self.board, self.name, self.group, self.size, self.rank, self.hosts = board, name, group, size, rank, hosts
        self.sent = 0
        self.counts: Counter[tuple[str, int, int]] = (
            Counter()
        )  # letters so far from one rank to another: they keep order
        self.open = 0  # transfers that nobody has waited for yet

    def swap(self, letters: dict[int, Any], sources: Sequence[int]) -> Letters:
        """Post one letter a destination; the handle gives those of the sources."""
        self.open += 1
        tensors = [t for letter in letters.values() for t in leaves(letter)]
        for destination, letter in letters.items():
            if destination != self.rank:
                self.sent += sum(t.nbytes for t in leaves(letter))
            self.board.put(self.address(self.rank, destination, "out"), copied(letter))
        return Letters(self, [self.address(source, self.rank, "in") for source in sources], tensors)

    def address(self, source: int, destination: int, way: str) -> tuple[Any, ...]:
        """The next letter from one rank to another, as the sender and the receiver both number it."""
        self.counts[way, source, destination] += 1
        return self.name, self.group, source, destination, self.counts[way, source, destination]

    def move(self, out: Parcels, into: Parcels, what: str = "") -> Pending:
        letters = self.swap({rank: tuple(tensors) for rank, tensors in out.items()}, list(into))
        return Then(letters, lambda arrived: unpack(arrived, into))

    def exchange_words(self, words: Any) -> list[Any]:
        everyone = range(self.size)
        return self.swap(dict.fromkeys(everyone, plain(words)), everyone).wait()

    def over(self, transport: str) -> "LocalAxis":
        return self


def unpack(arrived: Sequence[tuple[Tensor, ...]], into: Parcels) -> None:
    for letter, tensors in zip(arrived, into.values(), strict=True):
        for found, x in zip(letter, tensors, strict=True):
            assert found.shape == x.shape, f"{tuple(found.shape)} arrived where {tuple(x.shape)} was expected"
            x.copy_(found)


def leaves(letter: Any) -> list[Tensor]:
    if isinstance(letter, Tensor):
        return [letter]
    return [t for t in letter if isinstance(t, Tensor)] if isinstance(letter, tuple) else []


def copied(letter: Any) -> Any:
    if isinstance(letter, Tensor):
        return letter.detach().clone()
    return tuple(copied(t) for t in letter) if isinstance(letter, tuple) else letter


class LocalMesh:
    """One thread's view of a mesh: axes by name, the last one innermost, as in a DeviceMesh."""

    def __init__(self, board: Board, sizes: dict[str, int], rank: int, device_type: str = "cpu", hosts: int = 1):
        self.board, self.sizes, self.rank, self.device_type, self.hosts = board, sizes, rank, device_type, hosts
        self.axis_names = tuple(sizes)
        self.coordinates: dict[str, int] = {}
        for name in reversed(sizes):
            rank, self.coordinates[name] = divmod(rank, sizes[name])
        self.made: dict[Any, Any] = {}  # one object an axis: it counts the letters

    def axis(self, name: str) -> Any:
        if name not in self.made:
            group = (self.axis_names, *(c for n, c in self.coordinates.items() if n != name))
            place = self.sizes[name], self.coordinates[name]
            self.made[name] = LocalAxis(self.board, name, group, *place, self.hosts)
        return self.made[name]

    def check_finished(self) -> None:
        """Every transfer must have been waited for: a handle that is dropped may never be sent on a network."""
        for made in self.made.values():
            if isinstance(made, LocalMesh):
                made.check_finished()
            else:
                assert made.open == 0, f"{made.open} transfers on {made} were started and never waited for"

    def split(self, name: str, sizes: dict[str, int]) -> "LocalMesh":
        """The same ranks with axis `name` cut into these axes, the last one innermost."""
        key = (name, *sizes.items())
        if key not in self.made:
            cut = {old: sizes if old == name else {old: size} for old, size in self.sizes.items()}
            pairs = {n: s for part in cut.values() for n, s in part.items()}
            self.made[key] = LocalMesh(self.board, pairs, self.rank, self.device_type, self.hosts)
        return self.made[key]


def run(
    function: Callable[..., Any], timeout: float = 60.0, device: str = "cpu", hosts: int = 1, **sizes: int
) -> list[Any]:
    """`function(mesh)` on every rank of a mesh with axes of these sizes (ring=4, ulysses=2), all in this process.

    Returns the ranks' results in order. The first error of any rank stops all and is raised. With device="cuda" all
    ranks share one GPU. `hosts` is on how many the ranks are
    said to lie, which plans go by.
    """
    board, count = Board(timeout), prod(sizes.values())
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):  # a backward pass runs in its own rank's thread
                mesh = LocalMesh(board, sizes, rank, device, hosts)
                results[rank] = function(mesh)
                mesh.check_finished()
        except BaseException as error:
            board.fail(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if board.failed is not None:
        raise board.failed
    board.check_empty()
    return results
