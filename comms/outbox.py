"""Memory that all ranks of a host can read and write, and the protocol by which senders and receivers share its slots.

Every rank has an outbox: slots for each other rank, shared slots for tensors with several readers, and two flags for
each slot and other rank. Tensors go through the slots in batches, so an outbox stays small:

    sender      waits until the slot is free, copies a batch into it, and sets the receiver's flag: it is full
    receiver    waits until the slot is full, copies the batch out over the link, and sets the sender's flag: it is free

The other side sets a flag to 1, and the side that waits for it sets it back to 0. No flag counts, so a captured CUDA
graph can be replayed. Both sides count their batches, so both know which slot is next.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from ringattn.comms import memory
from ringattn.comms.engines import IN, OUT, Copy, Lanes
from ringattn.comms.memory import Piece

SLOTS = 12  # for all other ranks together, but at least two for each
SHARED = 8  # slots for tensors with several readers
HEAD = 8192  # bytes for the flags: up to 102 ranks


class Outbox:
    """The addresses of slots and flags, from the address of each rank's outbox as this rank sees it."""

    def __init__(self, bases: Sequence[int], rank: int):
        self.bases, self.rank = bases, rank
        self.private = slots_of(len(bases))  # how many slots there are for each other rank alone
        self.slots = SHARED + self.private
        assert 8 * len(bases) * self.slots <= HEAD, f"{len(bases)} ranks have more flags than there is room for"
        self.wave = SHARED // 2, max(1, self.private // 2)  # how many batches are received at once: of each kind half
        for name in ("slot", "full", "free"):  # every move needs the same few addresses again
            setattr(self, name, cache(getattr(self, name)))

    @staticmethod
    def bytes(size: int) -> int:
        return HEAD + (SHARED + (size - 1) * slots_of(size)) * memory.SLOT

    def slot(self, owner: int, receiver: int, slot: int) -> int:
        """The address of a slot of `owner` for `receiver`; the first SHARED slots are the same for all receivers."""
        place = (receiver - owner - 1) % len(self.bases)  # a rank has no slots for itself
        return self.bases[owner] + HEAD + (slot + (place * self.private if slot >= SHARED else 0)) * memory.SLOT

    def full(self, receiver: int, sender: int, slot: int) -> int:
        return self.bases[receiver] + 8 * (sender * self.slots + slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        return self.bases[sender] + 8 * (receiver * self.slots + slot) + 4


def slots_of(size: int) -> int:
    """How many slots a rank has for each other rank alone, with `size` ranks."""
    return max(2, SLOTS // max(1, size - 1))


Expect = Callable[[int, int], None]  # notes that a lane waits for a peer: `Watch.expect`
Batches = Sequence[Sequence[Piece]]
Arrival = tuple[int, Batches, int | None]  # a rank, batches of it, and the number of the first one if it shares them


class Put(NamedTuple):
    """A copy into a slot, and the readers whose flags are set after it."""

    to: int
    pieces: Sequence[Piece]
    readers: Sequence[int]
    slot: int


class Peers:
    """Both sides of the protocol, and how many batches this rank has sent to and received from each other rank."""

    def __init__(self, lanes: Lanes, outbox: Outbox):
        self.lanes, self.outbox, self.rank = lanes, outbox, outbox.rank
        self.size = len(outbox.bases)
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def send(self, batches: Iterable[tuple[int, Batches]], expect: Expect, persistent: bool) -> None:
        """Send batches to ranks, to each no more than it has slots."""
        puts = []
        for peer, sent in batches:
            for pieces in sent:
                slot = SHARED + self.sent[peer] % self.outbox.private
                self.sent[peer] += 1
                self.lanes.wait(OUT, self.outbox.free(self.rank, peer, slot))
                puts.append(Put(self.outbox.slot(self.rank, peer, slot), pieces, (peer,), slot))
            expect(OUT, peer)
        if puts:
            self.put(puts, persistent)

    def put_shared(
        self, first: int, batches: Iterable[tuple[Sequence[Piece], Sequence[int]]], expect: Expect, persistent: bool
    ) -> None:
        """Put batches, each with its readers, into shared slots, from slot `first` on.

        Waits until the slots are free for all ranks, readers now or not, and frees them at once for those that are not.
        """
        slots = [(i % SHARED, *batch) for i, batch in enumerate(batches, first)]
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            for slot, _, readers in slots:
                self.lanes.wait(OUT, self.outbox.free(self.rank, peer, slot))
                if peer not in readers:
                    self.lanes.set(OUT, self.outbox.free(self.rank, peer, slot))
            expect(OUT, peer)
        self.put([Put(self.outbox.slot(self.rank, self.rank, slot), pieces, readers, slot)
                  for slot, pieces, readers in slots], persistent)  # fmt: skip

    def put(self, puts: Sequence[Put], persistent: bool) -> None:
        """All copies first, then all signals: a signal between two copies would take longer than a copy."""
        self.lanes.copy_all(OUT, [copy for put in puts for copy in copies_of(put.to, put.pieces)], persistent)
        for put in puts:
            for peer in put.readers:
                self.lanes.set(OUT, self.outbox.full(peer, self.rank, put.slot))

    def receive(self, batches: Iterable[Arrival], expect: Expect, persistent: bool) -> None:
        """Receive batches: all waits, all copies, all signals. `persistent`: other work fills the GPU.

        Each rank sends its batches of one wave before it waits for those of others, so this cannot deadlock.
        """
        taken = []
        for peer, some, number in batches:
            for i, pieces in enumerate(some):
                slot = SHARED + self.received[peer] % self.outbox.private if number is None else (number + i) % SHARED
                self.received[peer] += number is None
                self.lanes.wait(IN, self.outbox.full(self.rank, peer, slot))
                taken.append((peer, slot, copies_of(self.outbox.slot(peer, self.rank, slot), pieces, back=True)))
            expect(IN, peer)  # after its waits, so that the peer is named for which a lane really waits
        self.lanes.copy_all(IN, [copy for _, _, copies in taken for copy in copies], persistent)
        for peer, slot, _ in taken:
            self.lanes.set(IN, self.outbox.free(peer, self.rank, slot))


def copies_of(slot: int, pieces: Iterable[Piece], back: bool = False) -> list[Copy]:
    """The copies of pieces into the slot at this address, one behind the other; `back`: from there to the pieces."""
    copies = []
    for at, size, rows, pitch in pieces:
        copies.append(Copy(at, slot, size, rows, pitch, size) if back else Copy(slot, at, size, rows, size, pitch))
        slot += rows * size
    return copies
