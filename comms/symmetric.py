"""An axis over GPUs that see each other's memory: copies by the copy engines, signals instead of barriers.

Every rank has a window of memory that all others can read and write: some slots for each of them, some for what many
read, and for each slot and other rank two flags. What is sent goes through the slots piece by piece, so a window is
small whatever travels:

    sender      waits until the slot is free, copies a piece into it, sets the receiver's flag: it is full
    receiver    waits until it is full, copies the piece out over the link, sets the sender's flag: it is free

A flag goes from 0 to 1 by the other side and back to 0 by the side that waits, so it needs no numbers, and a captured
CUDA graph may be replayed. Both sides count their pieces, so both know which slot is next. All of it is put on two
streams of this device, in the same order on every rank: no host waits, and no order can block (even if both streams
were one).

What goes over a link takes no multiprocessor. A copy within a GPU does: it would wait until a kernel that fills all of
them lets some go. So work that is launched after a move begins when its first pieces, all that its slots have room for,
are in their slots (and those of earlier moves that had more).
"""

import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms.axis import Axis, Done, Parcels, Parts, Pending
from ringattn.comms.engines import AID, IN, OUT, CopyEngines, End, Lanes
from ringattn.comms.moves import Moves
from ringattn.comms.process_group import hosts_of, with_first_loss

T = TypeVar("T")

SLOT = 16 * 2**20  # bytes
SLOTS = 12  # for all other ranks together, and at least two for each
SHARED = 4  # for what several ranks read
HEAD = 4096  # bytes for the flags: up to 85 ranks
APART = 2**48  # bytes: more than a tensor has
MANY = 8  # pieces: a tensor of more is packed first, which takes the host less time than as many copies

KEPT: list[Any] = []  # windows live as long as the process: others see them

Piece = tuple[int, int]  # address, bytes


class Window:
    """Where things lie: every rank's window as it is seen from here, by its first address."""

    def __init__(self, bases: Sequence[int], rank: int):
        self.bases, self.rank = bases, rank
        self.own = slots_of(len(bases))  # how many slots each other rank has for itself
        self.slots = SHARED + self.own

    @staticmethod
    def bytes(size: int) -> int:
        return HEAD + (SHARED + (size - 1) * slots_of(size)) * SLOT

    def slot(self, owner: int, receiver: int, slot: int) -> int:
        """Where a slot for that receiver lies; the first ones are shared, and the same for all."""
        place = (receiver - owner - 1) % len(self.bases)  # nobody has one for itself
        return self.bases[owner] + HEAD + (slot + (place * self.own if slot >= SHARED else 0)) * SLOT

    def full(self, receiver: int, sender: int, slot: int) -> int:
        return self.bases[receiver] + 8 * (sender * self.slots + slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        return self.bases[sender] + 8 * (receiver * self.slots + slot) + 4


def slots_of(size: int) -> int:
    """How many slots a rank of so many has for each other one alone."""
    return max(2, SLOTS // max(1, size - 1))


Told = Callable[[int, int], None]  # that a lane has been asked to wait for a peer


class Put(NamedTuple):
    """What is copied into a slot, and who is told that it is full."""

    to: int
    pieces: Sequence[Piece]
    readers: Sequence[int]
    slot: int


class Peers:
    """The two sides of the protocol, and how many pieces have gone between this rank and each other alone so far."""

    def __init__(self, lanes: Lanes, window: Window):
        self.lanes, self.window, self.rank = lanes, window, window.rank
        self.size = len(window.bases)
        self.gone: Counter[int] = Counter()
        self.come: Counter[int] = Counter()

    def send(self, batches: Iterable[tuple[int, Sequence[Sequence[Piece]]]], told: Told) -> None:
        """To each of some ranks some batches for it alone, no more than it has slots."""
        puts = []
        for peer, sent in batches:
            for pieces in sent:
                slot = SHARED + self.gone[peer] % self.window.own
                self.gone[peer] += 1
                self.lanes.wait(OUT, self.window.free(self.rank, peer, slot))
                puts.append(Put(self.window.slot(self.rank, peer, slot), pieces, (peer,), slot))
            told(OUT, peer)
        self.put(puts)

    def show(self, readers: Sequence[int], first: int, batches: Iterable[Sequence[Piece]], told: Told) -> None:
        """To some ranks at once. All others must be done with the slot; those that do not read it now are again."""
        slots = [(i % SHARED, pieces) for i, pieces in enumerate(batches, first)]
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            for slot, _ in slots:
                self.lanes.wait(OUT, self.window.free(self.rank, peer, slot))
                if peer not in readers:
                    self.lanes.set(OUT, self.window.free(self.rank, peer, slot))
            told(OUT, peer)
        self.put([Put(self.window.slot(self.rank, self.rank, slot), pieces, readers, slot) for slot, pieces in slots])

    def put(self, puts: Sequence[Put]) -> None:
        """All copies one after the other: each signal between two of them would take longer than they do."""
        for put in puts:
            to = put.to
            for address, size in put.pieces:
                self.lanes.copy(OUT, to, address, size)
                to += size
        for put in puts:
            for peer in put.readers:
                self.lanes.set(OUT, self.window.full(peer, self.rank, put.slot))

    def receive(self, peer: int, pieces: Sequence[Piece], told: Told) -> None:
        slot = SHARED + self.come[peer] % self.window.own
        self.come[peer] += 1
        self.take(peer, slot, pieces, told)

    def see(self, peer: int, piece: int, pieces: Sequence[Piece], told: Told) -> None:
        """What that rank shows."""
        self.take(peer, piece % SHARED, pieces, told)

    def take(self, peer: int, slot: int, pieces: Sequence[Piece], told: Told) -> None:
        source = self.window.slot(peer, self.rank, slot)
        self.lanes.wait(IN, self.window.full(self.rank, peer, slot))
        for address, size in pieces:
            self.lanes.copy(IN, address, source, size)
            source += size
        self.lanes.set(IN, self.window.free(peer, self.rank, slot))
        told(IN, peer)


def pieces_of(x: Tensor) -> list[Piece]:
    """The runs of memory that a tensor is, in order."""
    if x.is_contiguous():
        return [(x.data_ptr(), x.nbytes)] if x.nbytes else []
    return [piece for part in x for piece in pieces_of(part)]


def weight(groups: Iterable[Sequence[Piece]]) -> int:
    return sum(size for group in groups for _, size in group)


def is_few(x: Tensor) -> bool:
    """Whether a tensor lies in so few pieces that they are moved as they are; others are packed first."""
    return x.is_contiguous() or count_pieces(x) <= MANY


def count_pieces(x: Tensor) -> int:
    return 1 if x.is_contiguous() else len(x) * count_pieces(x[0])


class Laid(NamedTuple):
    """The pieces of some tensors in batches, and which of them lie elsewhere: (tensor, where it is packed)."""

    batches: list[list[Piece]]
    moved: list[tuple[Tensor, Tensor]]


def located(parts: Parts) -> list[list[Piece]] | None:
    """The pieces of ranges in batches; None where some are too many. Cut once for tensors of the same shape."""
    layout = layout_of(tuple([(x.dtype, x.shape, x.stride()) for x in parts.tensors]), parts.places, SLOT)
    if layout is None:
        return None
    starts = [x.data_ptr() for x in parts.tensors]
    return [[(starts[i] + at, size) for i, at, size in batch] for batch in layout]


@lru_cache(maxsize=1024)
def layout_of(kinds: tuple[Any, ...], places: tuple[range, ...], slot: int) -> list[list[tuple[int, int, int]]] | None:
    """The batches of ranges of tensors like these as (tensor, bytes from its start, bytes)."""
    found: list[Piece] = []
    for i, (dtype, shape, stride) in enumerate(kinds):
        parts = Parts([torch.empty_strided(shape, stride, dtype=dtype, device="meta")], places)
        if not all(map(is_few, parts)):
            return None
        found += [(i * APART + at, size) for at, size in joined(parts)]  # a meta tensor begins at 0
    return [[(*divmod(at, APART), size) for at, size in batch] for batch in batches(found)]


def batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces, cut and grouped so that each group fills at most a slot."""
    group: list[Piece] = []
    room = SLOT
    for address, size in pieces:
        while size >= room:
            yield [*group, (address, room)]
            address, size, group, room = address + room, size - room, [], SLOT
        if size:
            group.append((address, size))
            room -= size
    if group:
        yield group


def joined(tensors: Sequence[Tensor]) -> list[Piece]:
    """The pieces of some tensors; one that goes on where the last one ended makes one with it.

    But for those of two allocations: a copy may not run from one into another, even where they lie side by side.
    """
    found: list[Piece] = []
    end, last = -1, None
    for x in tensors:
        for address, size in pieces_of(x):
            if address == end and allocation(x) == allocation(last):
                found[-1] = found[-1][0], found[-1][1] + size
            else:
                found.append((address, size))
            end, last = address + size, x
    return found


def allocation(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


class Watch:
    """Names the rank that others wait for in vain: a thread that sees how far the lanes have come.

    Lanes cannot be interrupted. When a wait takes too long all flags are set, so that whoever waits for the device may
    go on; whatever arrived is void then, and every later use of the axis is an error.
    """

    def __init__(self, lanes: Lanes, window: Window, size: int, come: Tensor, timeout: float):
        self.lanes, self.window, self.size, self.timeout = lanes, window, size, timeout
        self.come = come.numpy()  # [2, size] in memory that lanes write and this process reads: counts of transfers
        self.address = come.data_ptr()
        self.asked: Counter[tuple[int, int]] = Counter()
        self.open: deque[tuple[float, int, int, int, str]] = deque()
        self.error: str | None = None
        self.thread: threading.Thread | None = None

    def expect(self, lane: int, peer: int, what: str) -> None:
        """The lane has been asked to wait for that peer; here it will say that it did."""
        if self.lanes.recorded():
            return
        self.asked[lane, peer] += 1
        number = self.asked[lane, peer]
        self.lanes.set(lane, self.address + 4 * (lane * self.size + peer), number)
        self.open.append((time.monotonic() + self.timeout, lane, peer, number, what))
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()

    def check(self) -> None:
        if self.error:
            raise ConnectionError(self.error)

    def run(self) -> None:
        """Never ends: whoever was at work when a rank was lost may still ask the lanes for something."""
        turn = min(0.2, self.timeout / 10)
        while self.error is None:
            time.sleep(turn)
            while self.open and self.done():
                self.open.popleft()
            if self.open and time.monotonic() > self.open[0][0]:
                _, lane, peer, _, what = self.open[0]
                way = "nothing came from" if lane == IN else "nothing was taken by"
                mine = (
                    f"rank {self.window.rank} of {self.size}: {way} rank {peer} within {self.timeout:g} s"
                    f"{what and f' ({what})'}; it died, hangs, or makes another call"
                )
                if lane == IN:  # that rank may be waiting for the one that is lost: it speaks first
                    time.sleep(2 * turn)
                self.error = in_time(partial(with_first_loss, mine), 5 * turn) or mine
        print(self.error, file=sys.stderr, flush=True)
        self.lanes.attach()
        while True:
            if self.open:
                self.release()
            time.sleep(0.01)
            while self.open and self.done():
                self.open.popleft()

    def done(self) -> bool:
        _, lane, peer, number, _ = self.open[0]
        return int(self.come[lane, peer]) >= number

    def release(self) -> None:
        for peer in range(self.size):
            for slot in range(self.window.slots):
                self.lanes.set(AID, self.window.full(self.window.rank, peer, slot))
                self.lanes.set(AID, self.window.free(self.window.rank, peer, slot))


def in_time(ask: Callable[[], T], seconds: float) -> T | None:
    """What `ask` gives within so many seconds; None if that takes longer or fails."""
    answers: list[T] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


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
        flight = Flight(self.lanes, self.watch, tensors, leaving)
        told = partial(self.watch.expect, what=what)
        if readers:
            self.peers.show(readers, 0, leaving.batches[:SHARED], told)
            self.lanes.precede(OUT)
        result = work()
        arriving = {r: self.laid(x, self.roomy) for r, x in sorted(into.items(), key=self.steps_from)}
        flight.held += into, arriving
        later = leaving.batches[SHARED:]
        for i in range(max(len(later), *(len(laid.batches) for laid in arriving.values()), 0)):
            for source, laid in arriving.items():  # piece by piece: what is shown later waits for these
                if i < len(laid.batches):
                    self.peers.see(source, i, laid.batches[i], told)
            if i < len(later):
                self.peers.show(readers, SHARED + i, [later[i]], told)
        self.unpack(arriving)
        self.sent += weight(leaving.batches) * len(readers)
        return result, flight.launched()

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
    connection = connect(group)
    return connection and SymmetricAxis(*connection, partial(gather_words, group), name, other)


@lru_cache
def connect(group: dist.ProcessGroup) -> tuple[Peers, Watch] | None:
    """One window a rank and group, made once, tried out and kept: memory for a few slots, whatever will travel."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    here = gather_words(group, (device.index, reaches_all()))
    shared = len({gpu for gpu, _ in here}) < size  # ranks that see one GPU each, or, as gloo lets them, share one
    if not all(reaches for _, reaches in here) or (shared and over_nccl(group)):
        return None
    problem = None
    try:
        window = symmetric.empty(Window.bytes(size), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(window, group)
        flags = window[:HEAD].view(torch.int32)
        flags[::2], flags[1::2] = 0, 1  # nothing is full, everything is free
        torch.cuda.synchronize()
    except RuntimeError as error:  # a container may forbid what sharing memory needs
        problem = str(error).splitlines()[0]
    if agreed(group, problem):
        return None
    KEPT.append((window, handle))
    lanes, view = CopyEngines(device), Window([int(address) for address in handle.buffer_ptrs], rank)
    come = torch.zeros(2, size, dtype=torch.int32).pin_memory()
    peers, watch = Peers(lanes, view), Watch(lanes, view, size, come, timeout=20.0)
    if agreed(group, trial(SymmetricAxis(peers, watch, lambda words: [words]), device)):
        return None
    watch.timeout = group._get_backend(device).options._timeout.total_seconds()
    return peers, watch


def agreed(group: dist.ProcessGroup, problem: str | None) -> bool:
    """Whether some rank has a problem, which all are told."""
    problems = [p for p in gather_words(group, problem) if p]
    if problems:
        instead = "NCCL moves everything" if over_nccl(group) else "nothing can be moved"
        warnings.warn(f"{instead}, since GPU memory cannot be shared here: {problems[0]}", stacklevel=3)
    return bool(problems)


def trial(axis: SymmetricAxis, device: torch.device) -> str | None:
    """More pieces than slots from each rank to each other, and some for all; what is wrong with what comes."""
    turns = axis.peers.window.own + 1
    mine = torch.full((turns, 2), axis.rank, dtype=torch.int32, device=device)
    others = [rank for rank in range(axis.size) if rank != axis.rank]
    try:
        for i in range(turns):
            arrived = axis.all_gather(mine[i]).wait()
            shown = [mine[i].new_zeros(2) if r != axis.rank else mine[i] for r in range(axis.size)]
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


def gather_words(group: dist.ProcessGroup, words: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, words, group=group)
    return said
