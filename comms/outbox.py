"""Memory that all ranks of a host can read and write, and the protocol by which senders and receivers share its slots.

Every rank has an outbox: slots for each other rank, shared slots for tensors with several readers, and two flags for
each slot and other rank. Tensors go through the slots batch by batch, so an outbox stays small:

    sender      waits until the slot is free, copies a batch into it, and sets the receiver's flag: it is full
    receiver    waits until the slot is full, copies the batch out over the link, and sets the sender's flag: it is free

The other side sets a flag to 1, and the side that waits for it sets it back to 0. No flag counts, so a captured CUDA
graph can be replayed. Both sides count their batches, so both know which slot is next.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ringattn.comms import memory
from ringattn.comms.engines import IN, OUT, Lanes
from ringattn.comms.memory import Piece

SLOTS = 12  # for all other ranks together, but at least two for each
SHARED = 4  # slots for tensors with several readers
HEAD = 4096  # bytes for the flags: up to 85 ranks


class Outbox:
    """The addresses of slots and flags, from the address of each rank's outbox as this rank sees it."""

    def __init__(self, bases: Sequence[int], rank: int):
        self.bases, self.rank = bases, rank
        self.own = slots_of(len(bases))  # how many slots there are for each other rank alone
        self.slots = SHARED + self.own

    @staticmethod
    def bytes(size: int) -> int:
        return HEAD + (SHARED + (size - 1) * slots_of(size)) * memory.SLOT

    def slot(self, owner: int, receiver: int, slot: int) -> int:
        """The address of a slot of `owner` for `receiver`; the first SHARED slots are the same for all receivers."""
        place = (receiver - owner - 1) % len(self.bases)  # a rank has no slots for itself
        return self.bases[owner] + HEAD + (slot + (place * self.own if slot >= SHARED else 0)) * memory.SLOT

    def full(self, receiver: int, sender: int, slot: int) -> int:
        return self.bases[receiver] + 8 * (sender * self.slots + slot)

    def free(self, sender: int, receiver: int, slot: int) -> int:
        return self.bases[sender] + 8 * (receiver * self.slots + slot) + 4


def slots_of(size: int) -> int:
    """How many slots a rank has for each other rank alone, with `size` ranks."""
    return max(2, SLOTS // max(1, size - 1))


Expect = Callable[[int, int], None]  # notes that a lane waits for a peer: `Watch.expect`


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

    def send(self, batches: Iterable[tuple[int, Sequence[Sequence[Piece]]]], expect: Expect) -> None:
        """Send batches to ranks, to each no more than it has slots."""
        puts = []
        for peer, sent in batches:
            for pieces in sent:
                slot = SHARED + self.sent[peer] % self.outbox.own
                self.sent[peer] += 1
                self.lanes.wait(OUT, self.outbox.free(self.rank, peer, slot))
                puts.append(Put(self.outbox.slot(self.rank, peer, slot), pieces, (peer,), slot))
            expect(OUT, peer)
        self.put(puts)

    def put_shared(self, first: int, batches: Iterable[tuple[Sequence[Piece], Sequence[int]]], expect: Expect) -> None:
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
                  for slot, pieces, readers in slots])  # fmt: skip

    def put(self, puts: Sequence[Put]) -> None:
        """All copies first, then all signals: a signal between two copies would take longer than a copy."""
        plain = []
        for put in puts:
            to = put.to
            for address, size, rows, pitch in put.pieces:
                if rows == 1:
                    plain.append((to, address, size))
                else:
                    self.lanes.copy(OUT, to, address, size, rows, size, pitch)
                to += rows * size
        self.lanes.copy_all(OUT, plain)
        for put in puts:
            for peer in put.readers:
                self.lanes.set(OUT, self.outbox.full(peer, self.rank, put.slot))

    def receive(self, peer: int, pieces: Sequence[Piece], expect: Expect) -> None:
        slot = SHARED + self.received[peer] % self.outbox.own
        self.received[peer] += 1
        self.take(peer, slot, pieces, expect)

    def take_shared(self, peer: int, piece: int, pieces: Sequence[Piece], expect: Expect) -> None:
        """Receive a batch from a shared slot of that rank."""
        self.take(peer, piece % SHARED, pieces, expect)

    def take(self, peer: int, slot: int, pieces: Sequence[Piece], expect: Expect) -> None:
        source = self.outbox.slot(peer, self.rank, slot)
        self.lanes.wait(IN, self.outbox.full(self.rank, peer, slot))
        for address, size, rows, pitch in pieces:
            self.lanes.copy(IN, address, source, size, rows, pitch, size)
            source += rows * size
        self.lanes.set(IN, self.outbox.free(peer, self.rank, slot))
        expect(IN, peer)
