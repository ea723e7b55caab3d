"""Ranks as threads of one process: for tests, and for trying things out without starting processes.

>>> from ringattn.comms.local import run
>>> run(lambda mesh: mesh.axis("ring").rank, ring=4)
[0, 1, 2, 3]

What a rank sends is copied at once, and must be unchanged at `wait()`. So a buffer that is written while it is in
flight raises an AssertionError here, where a network would corrupt data silently.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import ByRank, Done, Pending, Then, split_sizes
from ringattn.comms.messages import plain
from ringattn.comms.moves import Moves


class Board:
    """The values that ranks have sent and not yet received. If one rank fails, all others fail too."""

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
            name, _, source, to, number = key
            raise TimeoutError(
                f"{name} rank {to} received nothing from rank {source} within {self.timeout} s (its transfer {number})"
            )

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


class LocalAxis(Moves):
    """One thread's place on an axis. `sent` counts the bytes that this rank has sent."""

    by, cheap_words = "threads", True

    def __init__(self, board: Board, name: str, group: tuple[Any, ...], size: int, rank: int, hosts: int = 1):
        self.board, self.name, self.group, self.size, self.rank, self.hosts = board, name, group, size, rank, hosts
        self.sent = 0
        self.counts: Counter[tuple[str, int, int]] = Counter()  # values so far, by direction, source and destination
        self.open = 0  # transfers without a wait so far

    def exchange(self, values: dict[int, Any], sources: Iterable[int], sent: Sequence[Tensor] = ()) -> Pending:
        """Send one value to each destination; the handle gives one from each source, and checks `sent` is unchanged."""
        for destination, value in values.items():
            self.board.put(self.address(self.rank, destination, "out"), value)
        self.open += 1
        keys = [self.address(source, self.rank, "in") for source in sources]
        versions = [x.is_inference() or x._version for x in sent]

        def arrived(_: Any) -> list[Any]:
            self.open -= 1
            values = [self.board.take(key) for key in keys]
            same = versions == [x.is_inference() or x._version for x in sent]
            assert same, "a buffer was written while it was in flight"
            return values

        return Then(Done(), arrived)

    def address(self, source: int, destination: int, way: str) -> tuple[Any, ...]:
        """The key of the next value from one rank to another; sender and receiver count alike."""
        self.counts[way, source, destination] += 1
        return self.name, self.group, source, destination, self.counts[way, source, destination]

    def move(self, out: ByRank, into: ByRank, what: str = "", persistent: bool | None = True) -> Pending:
        sent = [x for tensors in out.values() for x in tensors]
        self.sent += sum([x.nbytes for rank, tensors in out.items() for x in tensors if rank != self.rank])
        copies = [[x.detach().clone() for x in tensors] for tensors in out.values()]
        made = torch.cuda.current_stream().record_event() if any([x.is_cuda for x in sent]) else None
        values = {rank: (tensors, made) for rank, tensors in zip(out, copies, strict=True)}
        return Then(self.exchange(values, into, sent), lambda arrived: unpack(arrived, into))

    def exchange_words(self, words: Any) -> list[Any]:
        mine, others = plain(words), [rank for rank in range(self.size) if rank != self.rank]
        everyone: list[Any] = self.exchange(dict.fromkeys(others, mine), others).wait()
        everyone.insert(self.rank, mine)
        return everyone


def unpack(arrived: Sequence[tuple[Sequence[Tensor], Any]], into: ByRank) -> None:
    """Copy what arrived into its places. The streams of sender and receiver may be two."""
    for (value, made), tensors in zip(arrived, into.values(), strict=True):
        if made is not None:
            torch.cuda.current_stream().wait_event(made)
        for sent, x in zip(value, tensors, strict=True):
            assert sent.shape == x.shape, f"{tuple(sent.shape)} arrived where {tuple(x.shape)} was expected"
            x.copy_(sent)
            if made is not None:
                sent.record_stream(torch.cuda.current_stream())


class LocalMesh:
    """One thread's view of a mesh: axes by name, the last one innermost, as in a DeviceMesh."""

    def __init__(self, board: Board, sizes: dict[str, int], rank: int, device_type: str = "cpu", hosts: int = 1):
        self.board, self.sizes, self.rank, self.device_type, self.hosts = board, sizes, rank, device_type, hosts
        self.axis_names = tuple(sizes)
        self.coordinates: dict[str, int] = {}
        for name in reversed(sizes):
            rank, self.coordinates[name] = divmod(rank, sizes[name])
        self.made: dict[Any, Any] = {}  # one object for each axis, since it counts transfers
        self.kept: dict[Any, Any] = {}  # what others keep as long as the mesh lives

    def axis(self, name: str) -> Any:
        if name not in self.made:
            group = (self.axis_names, *(c for n, c in self.coordinates.items() if n != name))
            of_axis = self.sizes[name], self.coordinates[name]
            self.made[name] = LocalAxis(self.board, name, group, *of_axis, self.hosts)
        return self.made[name]

    def check_finished(self) -> None:
        """Check that every transfer was waited for: on a network it might otherwise never be sent."""
        for made in self.made.values():
            if isinstance(made, LocalMesh):
                made.check_finished()
            else:
                assert made.open == 0, f"{made.open} transfers on {made} were started and never waited for"

    def split(self, name: str, sizes: dict[str, int]) -> "LocalMesh":
        """The same ranks with axis `name` cut into these axes, the last one innermost."""
        key = (name, *sizes.items())
        if key not in self.made:
            split_axes = split_sizes(self.sizes, name, sizes)
            self.made[key] = LocalMesh(self.board, split_axes, self.rank, self.device_type, self.hosts)
        return self.made[key]


def run(
    function: Callable[..., Any], timeout: float = 60.0, device: str = "cpu", hosts: int = 1, **sizes: int
) -> list[Any]:
    """`function(mesh)` on every rank of a mesh with axes of these sizes (ring=4, ulysses=2), all in this process.

    Returns the ranks' results in order. The first error of any rank stops all ranks and is raised. With device="cuda"
    all ranks share one GPU. Plans treat the ranks as if they were on `hosts` hosts.
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
    left = [f"{name} rank {source} -> {to} (its transfer {number})" for name, _, source, to, number in board.items]
    assert not left, f"{len(left)} transfers were sent, never received: {', '.join(left[:8])}"  # senders would hang
    return results
