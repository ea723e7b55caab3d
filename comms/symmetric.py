"""An axis over GPUs that see each other's memory: copies by the copy engines, signals instead of barriers.

Tensors go through the slots of a window (window.py), piece by piece (memory.py), and a thread names whoever is waited
for in vain (watch.py). All of it is put on two streams of this device, in the same order on every rank: no host waits,
and no order can block (even if both streams were one).

What goes over a link takes no multiprocessor. A copy within a GPU does: it would wait until a kernel that fills all of
them lets some go. So work that is launched after a move begins when its first pieces, all that its slots have room for,
are in their slots (and those of earlier moves that had more).
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms import messages
from ringattn.comms.axis import Axis, Done, Parcels, Parts, Pending
from ringattn.comms.engines import IN, OUT, CopyEngines, End, Lanes
from ringattn.comms.memory import Piece, batches, is_few, joined, located, weight
from ringattn.comms.moves import Moves
from ringattn.comms.process_group import alive, hosts_of
from ringattn.comms.watch import Watch
from ringattn.comms.window import HEAD, SHARED, Peers, Window

T = TypeVar("T")

KEPT: list[Any] = []  # windows live as long as the process: others see them
CONNECTED: Any = WeakKeyDictionary()  # by the group of all ranks, and then by the ranks of a group


class Laid(NamedTuple):
    """The pieces of some tensors in batches, and which of them lie elsewhere: (tensor, where it is packed)."""

    batches: list[list[Piece]]
    moved: list[tuple[Tensor, Tensor]]


class Flight:
    """A move in flight. What lanes read and fill must live until then, and what is packed or unpacked there too."""

    def __init__(self, lanes: Lanes, watch: Watch, *held: Any):
        self.lanes, self.watch, self.held = lanes, watch, list(held)
        self.end: End | None = None

    def launched(self) -> "Flight":
        """All of it: now there is something to wait for."""
        self.end = self.lanes.finish()
        return self

    def wait(self) -> None:
        self.watch.check()
        if self.end is not None:
            self.end.wait()
        self.held.clear()

    def __del__(self) -> None:
        """Nobody waited, for an error came first: the lanes are done with the memory before it is let go."""
        if self.held and not sys.is_finalizing():
            (self.end or self.lanes.finish()).settle()


class SymmetricAxis(Moves):
    """GPUs of one host in group order. Everything is made of moves; words go through the process group."""

    by, cheap_words, hosts = "symmetric memory", False, 1

    def __init__(
        self, peers: Peers, watch: Watch, words: Callable[[Any], list[Any]], name: str = "ring", group: Any = None
    ):
        self.peers, self.watch, self.words, self.name, self.group = peers, watch, words, name, group
        self.lanes, self.rank, self.size = peers.lanes, peers.rank, watch.size
        self.sent = 0

    def move(self, out: Parcels, into: Parcels, what: str = "") -> Pending:
        self.watch.check()
        if not out and not into:
            return Done()
        self.lanes.start()
        leaving = {id(tensors): self.laid(tensors, self.packed) for tensors in out.values()}  # once for all who get it
        sends = {r: leaving[id(tensors)].batches for r, tensors in out.items()}
        arriving = {r: self.laid(tensors, self.roomy) for r, tensors in into.items()}
        receives = {r: laid.batches for r, laid in arriving.items()}
        first, told = self.peers.window.own, partial(self.watch.expect, what=what)
        steps = sorted({(r - self.rank) % self.size for r in out} | {(self.rank - r) % self.size for r in into})
        pairs = [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in steps]
        self.peers.send([(there, sends[there][:first]) for there, _ in pairs if there in sends], told)
        self.lanes.precede(OUT)
        for there, here in pairs:  # the same order of pairs on every rank
            for outward, inward in zip_longest(sends.get(there, ())[first:], receives.get(here, ())):
                if inward is not None:
                    self.peers.receive(here, inward, told)
                if outward is not None:
                    self.peers.send([(there, [outward])], told)
        self.unpack(arriving)
        self.sent += sum(map(weight, sends.values()))
        return Flight(self.lanes, self.watch, out, into, leaving, arriving).launched()

    def share(
        self, tensors: Sequence[Tensor], readers: Sequence[int], into: Parcels, work: Callable[[], T], what: str = ""
    ) -> tuple[T, Pending]:
        """Shows what the slots have room for, lets the device work, and then fetches what others show."""
        self.watch.check()
        if not readers and not into:
            return work(), Done()
        self.lanes.start()
        leaving = self.laid(tensors, self.packed) if readers else Laid([], [])
        arriving = {r: self.laid(x, self.roomy) for r, x in sorted(into.items(), key=self.steps_from)}
        flight = Flight(self.lanes, self.watch, tensors, leaving, into, arriving)
        told = partial(self.watch.expect, what=what)
        if readers:
            self.peers.show(readers, 0, leaving.batches[:SHARED], told)
            self.lanes.precede(OUT)
        try:
            result = work()
        finally:  # what is shown is fetched even if the work fails: the next call would find it in the slots
            self.fetch(arriving, leaving.batches[SHARED:], readers, told)
            self.sent += weight(leaving.batches) * len(readers)
            flight.launched()
        return result, flight

    def fetch(self, arriving: Mapping[int, Laid], later: Sequence[Any], readers: Sequence[int], told: Any) -> None:
        """Fetches what others show, and shows what had no room: it waits until what is in its slots is fetched."""
        for i in range(max(len(later), *(len(laid.batches) for laid in arriving.values()), 0)):
            for source, laid in arriving.items():
                if i < len(laid.batches):
                    self.peers.see(source, i, laid.batches[i], told)
            if i < len(later):
                self.peers.show(readers, SHARED + i, [later[i]], told)
        self.unpack(arriving)

    def steps_from(self, parcel: tuple[int, Any]) -> int:
        """How far behind this rank the one is from whom a parcel comes."""
        return (self.rank - parcel[0]) % self.size

    def unpack(self, arriving: Mapping[int, Laid]) -> None:
        for laid in arriving.values():
            for x, y in laid.moved:
                self.lanes.fill(IN, x, y)

    def exchange_words(self, words: Any) -> list[Any]:
        return self.words(words)

    def over(self, transport: str) -> Axis:
        return self.group or self if transport == "group" else self

    def laid(self, tensors: Sequence[Tensor], elsewhere: Callable[[Tensor], Tensor]) -> Laid:
        """Where tensors lie; those that lie in many pieces, `elsewhere`."""
        known = located(tensors) if isinstance(tensors, Parts) else None
        if known is not None:
            return Laid(known, [])
        pairs = [(x, x if is_few(x) else elsewhere(x)) for x in tensors]
        return Laid(list(batches(joined([y for _, y in pairs]))), [(x, y) for x, y in pairs if x is not y])

    def packed(self, x: Tensor) -> Tensor:
        with self.lanes.apart(OUT):
            return x.contiguous()

    def roomy(self, x: Tensor) -> Tensor:
        with self.lanes.apart(IN):
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def shared_axis(group: dist.ProcessGroup, name: str, other: Axis | None = None) -> SymmetricAxis | None:
    """The axis of a group of GPU ranks that all see each other's memory; None for others. Every rank must ask.

    `other` is the axis over the group itself, for what goes sooner there.
    """
    if hosts_of(group) != 1:
        return None
    ranks, known = (*dist.get_process_group_ranks(group),), CONNECTED.setdefault(dist.group.WORLD, {})
    if ranks not in known:  # whichever of their groups asks: one more mesh has no more windows
        known[ranks] = connect(group)
    connection = known[ranks]
    if connection is None:
        return None
    peers, watch = connection
    return SymmetricAxis(peers, watch, partial(words_over, ref(group)), name, other)


def connect(group: dist.ProcessGroup) -> tuple[Peers, Watch] | None:
    """One window a rank, tried out and kept: memory for a few slots, whatever will travel."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    here = messages.gather([device.index, reaches_all()], group)
    shared = len({gpu for gpu, _ in here}) < size  # ranks that see one GPU each, or, as gloo lets them, share one
    if not all(reaches for _, reaches in here) or (shared and over_nccl(group)):
        return None
    window = attempt(group, lambda: symmetric.empty(Window.bytes(size), dtype=torch.uint8, device=device))
    if window is None:
        return None

    def meet() -> Any:
        handle = symmetric.rendezvous(window, group)
        flags = window[:HEAD].view(torch.int32)
        flags[::2], flags[1::2] = 0, 1  # nothing is full, everything is free
        torch.cuda.synchronize()
        return handle

    handle = attempt(group, meet)
    if handle is None:
        return None
    KEPT.append((window, handle))
    lanes, view = CopyEngines(device), Window([int(address) for address in handle.buffer_ptrs], rank)
    come = torch.zeros(2, size, dtype=torch.int32).pin_memory()
    peers, watch = Peers(lanes, view), Watch(lanes, view, size, come, timeout=20.0)
    if agreed(group, trial(SymmetricAxis(peers, watch, lambda words: [words]), device)):
        return None
    watch.timeout = group._get_backend(device).options._timeout.total_seconds()
    return peers, watch


def attempt(group: dist.ProcessGroup, make: Callable[[], Any]) -> Any:
    """What it makes; None on all ranks if it fails on one: a container may forbid what sharing memory needs."""
    made = problem = None
    try:
        made = make()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    return None if agreed(group, problem) else made


def agreed(group: dist.ProcessGroup, problem: str | None) -> bool:
    """Whether some rank has a problem, which all are told."""
    problems = [p for p in messages.gather(problem, group) if p]
    if problems:
        instead = "NCCL moves everything" if over_nccl(group) else "nothing can be moved"
        warnings.warn(f"{instead}, since GPU memory cannot be shared here: {problems[0]}", stacklevel=3)
    return bool(problems)


def trial(axis: SymmetricAxis, device: torch.device) -> str | None:
    """More pieces than slots from each rank to each other, and some for all, in rows that lie apart.

    What is wrong with what comes.
    """
    turns = axis.peers.window.own + 1
    mine = torch.full((turns, 4), axis.rank, dtype=torch.int32, device=device)[:, ::2]
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    try:
        for i in range(turns):
            arrived = axis.all_gather(mine[i]).wait()
            shown = [mine[i].new_zeros(4)[::2] if r != axis.rank else mine[i] for r in range(axis.size)]
            axis.share([mine[i]], others, {r: [shown[r]] for r in others}, lambda: None)[1].wait()
            for rows in (arrived.view(-1, 2).tolist(), [x.tolist() for x in shown]):
                if rows != [[r, r] for r in range(axis.size)]:
                    return f"rank {axis.rank} was sent {rows}"
    except (RuntimeError, ConnectionError) as error:
        return str(error).splitlines()[0]
    return None


def reaches_all() -> bool:
    """Whether this process's GPU can read the memory of all others that are here."""
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(here, i) for i in range(count) if i != here)


def over_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend(group)  # it may also have gloo, for CPUs


def words_over(known: Any, words: Any) -> list[Any]:
    """Every rank's words, by a group that this axis does not keep alive."""
    return messages.gather(words, alive(known))
