"""Memory that all ranks of a host can read and write, and the two sides of the protocol of its slots.

Every rank has a window: some slots for each other rank, some for what many read, and for each slot and other rank two
flags. What is sent goes through the slots piece by piece, so a window is small whatever travels:

    sender      waits until the slot is free, copies a piece into it, sets the receiver's flag: it is full
    receiver    waits until it is full, copies the piece out over the link, sets the sender's flag: it is free

A flag goes from 0 to 1 by the other side and back to 0 by the side that waits, so it needs no numbers, and a captured
CUDA graph may be replayed. Both sides count their pieces, so both know which slot is next.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ringattn.comms import memory
from ringattn.comms.engines import IN, OUT, Lanes
from ringattn.comms.memory import Piece

SLOTS = 12  # for all other ranks together, and at least two for each
SHARED = 4  # for what several ranks read
HEAD = 4096  # bytes for the flags: up to 85 ranks


class Window:
    """Where things lie: every rank's window as it is seen from here, by its first address."""

    def __init__(self, bases: Sequence[int], rank: int):
        self.bases, self.rank = bases, rank
        self.own = slots_of(len(bases))  # how many slots each other rank has for itself
        self.slots = SHARED + self.own

    @staticmethod
    def bytes(size: int) -> int:
        return HEAD + (SHARED + (size - 1) * slots_of(size)) * memory.SLOT

    def slot(self, owner: int, receiver: int, slot: int) -> int:
        """Where a slot for that receiver lies; the first ones are shared, and the same for all."""
        place = (receiver - owner - 1) % len(self.bases)  # nobody has one for itself
        return self.bases[owner] + HEAD + (slot + (place * self.own if slot >= SHARED else 0)) * memory.SLOT

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
            for address, size, rows, pitch in put.pieces:
                self.lanes.copy(OUT, to, address, size, rows, size, pitch)
                to += rows * size
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
        for address, size, rows, pitch in pieces:
            self.lanes.copy(IN, address, source, size, rows, pitch, size)
            source += rows * size
        self.lanes.set(IN, self.window.free(peer, self.rank, slot))
        told(IN, peer)
