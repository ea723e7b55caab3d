"""Memory that all ranks of a host can read and write, and the protocol by which senders and receivers share its slots.

Every rank has an outbox: slots for each other rank, shared slots for tensors with several readers, and two flags for
each slot and other rank. Tensors go through the slots in batches, so an outbox stays small:

    sender      waits until the slot is free, copies a batch into it, and sets the receiver's flag: it is full
    receiver    waits until the slot is full, copies the batch out over the link, and sets the sender's flag: it is free

The other side sets a flag to 1, and the side that waits for it sets it back to 0. No flag counts, so a captured CUDA
graph can be replayed. Both sides count their batches, so both know which slot is next.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

from ringattn.comms import memory
from ringattn.comms.engines import IN, OUT, Copy
from ringattn.comms.memory import Kind, Parcel, Piece, Run, batches, weight
from ringattn.comms.script import Script

SLOTS = 12  # for all other ranks together, but at least two for each
SHARED = 8  # slots for tensors with several readers
MAX_SCRIPTS = 256  # that are cached
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


Batches = Sequence[Sequence[Piece]]
Put = tuple[int, Sequence[Piece], int, Sequence[int]]  # a slot's address and what goes there; its number and readers
Arrival = tuple[int, Batches, int | None]  # a rank, batches of it, and the number of the first one if it shares them


class Peers:
    """Both sides of the protocol: writes scripts, and counts batches sent to and received from each other rank."""

    def __init__(self, outbox: Outbox):
        self.outbox, self.rank, self.size = outbox, outbox.rank, len(outbox.bases)
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.written = lru_cache(maxsize=MAX_SCRIPTS)(self.write)

    def next_scripts(self, kind: Kind) -> tuple[Script, ...]:
        """The scripts of an exchange, whose batches count as sent and received from now on."""
        private, slots = self.outbox.private, list[int]()
        if not kind.shared:
            slots += [self.sent[parcel.rank] % private for parcel in kind.out]
            slots += [self.received[parcel.rank] % private for parcel in kind.into]
        scripts = self.written(kind, *slots)
        for script in scripts:
            self.sent.update(script.sent)
            self.received.update(script.received)
        return scripts

    def write(self, kind: Kind, *slots: int) -> tuple[Script, ...]:
        """The scripts of an exchange; `slots`: the next ones of a move to each rank, and then from each."""
        cut = {parcel: list(batches(kind.runs(parcel))) for parcel in (*kind.out, *kind.into)}
        local = copies_between(*map(kind.runs, kind.local)) if kind.local else []
        return self.write_shared(kind, cut, local) if kind.shared else (self.write_move(kind, cut, local, slots),)

    def write_move(
        self, kind: Kind, cut: Mapping[Parcel, Batches], local: Sequence[Copy], slots: Sequence[int]
    ) -> Script:
        """Each rank first sends all that there are slots for. Work after the move waits for that, and for no more."""
        script, private, n = Script(kind.persistent), self.outbox.private, self.outbox.wave[1]
        sends, receives = ({parcel.rank: cut[parcel] for parcel in side} for side in (kind.out, kind.into))
        to, source = dict(zip(sends, slots, strict=False)), dict(zip(receives, slots[len(sends) :], strict=True))
        steps = sorted({(r - self.rank) % self.size for r in sends} | {(self.rank - r) % self.size for r in receives})
        pairs = [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in steps]
        self.send(script, to, [(there, sends[there][:private]) for there, _ in pairs if there in sends])
        script.copy_all(OUT, local)
        script.precede(OUT)
        for i in range(0, max(0, *map(len, (*sends.values(), *receives.values()))), n):  # alike on every rank
            arrivals = [(r, receives[r][i : i + n], None) for _, r in pairs if i < len(receives.get(r, ()))]
            self.receive(script, source, arrivals)
            later = [(r, sends[r][private + i :][:n]) for r, _ in pairs if private + i < len(sends.get(r, ()))]
            self.send(script, to, later)
        script.sent.update({r: len(each) for r, each in sends.items()})
        script.received.update({r: len(each) for r, each in receives.items()})
        script.bytes = sum(map(weight, sends.values()))
        return script.ended()

    def write_shared(self, kind: Kind, cut: Mapping[Parcel, Batches], local: Sequence[Copy]) -> tuple[Script, ...]:
        """Put as many batches as there are shared slots, then fetch those of other ranks, and put the later ones.

        Two scripts, if persistent work comes between; else one.
        """
        put, n = Script(kind.persistent), self.outbox.wave[0]
        fetch = Script(kind.persistent) if kind.persistent else put
        readers: dict[int, list[int]] = {}  # by what they read
        for parcel in kind.out:
            readers.setdefault(parcel.which, []).append(parcel.rank)
        leaving = {parcel.which: cut[parcel] for parcel in kind.out}
        shared = [(pieces, readers[which]) for which, each in leaving.items() for pieces in each]
        nearest_first = sorted(kind.into, key=lambda parcel: (self.rank - parcel.rank) % self.size)
        if shared:
            self.put_shared(put, 0, shared[:SHARED])
        if kind.persistent and kind.out:
            put.precede(OUT)
        fetch.copy_all(OUT, local)
        later, ends = shared[SHARED:], [parcel.first + len(cut[parcel]) for parcel in kind.into]
        for i in range(0, max(len(later), 0, *ends), n):
            arrivals = []
            for parcel in nearest_first:
                begin, every = parcel.first, cut[parcel]
                first, end = max(i, begin), min(i + n, begin + len(every))
                if first < end:
                    arrivals.append((parcel.rank, every[first - begin : end - begin], first))
            self.receive(fetch, {}, arrivals)
            if i < len(later):
                self.put_shared(fetch, SHARED + i, later[i : i + n])
        fetch.bytes = sum([weight([pieces]) * len(ranks) for pieces, ranks in shared])
        return (put.ended(), fetch.ended()) if kind.persistent else (put.ended(),)

    def send(self, script: Script, slots: dict[int, int], batches: Iterable[tuple[int, Batches]]) -> None:
        """Send batches to ranks, to each no more than it has slots; `slots`: the next ones."""
        puts = []
        for peer, sent in batches:
            for pieces in sent:
                slot = SHARED + slots[peer] % self.outbox.private
                slots[peer] += 1
                script.wait(OUT, self.outbox.free(self.rank, peer, slot))
                puts.append((self.outbox.slot(self.rank, peer, slot), pieces, slot, (peer,)))
            script.expect(OUT, peer)
        if puts:
            self.put(script, puts)

    def put_shared(self, script: Script, first: int, batches: Iterable[tuple[Sequence[Piece], Sequence[int]]]) -> None:
        """Put batches, each with its readers, into shared slots, from slot `first` on.

        Waits until the slots are free for all ranks, readers now or not, and frees them at once for those that are not.
        """
        slots = [(i % SHARED, *batch) for i, batch in enumerate(batches, first)]
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            for slot, _, readers in slots:
                script.wait(OUT, self.outbox.free(self.rank, peer, slot))
                if peer not in readers:
                    script.set(OUT, self.outbox.free(self.rank, peer, slot))
            script.expect(OUT, peer)
        self.put(script, [(self.outbox.slot(self.rank, self.rank, slot), pieces, slot, readers)
                          for slot, pieces, readers in slots])  # fmt: skip

    def put(self, script: Script, puts: Sequence[Put]) -> None:
        """All copies first, then all signals: a signal between two copies would take longer than a copy."""
        script.copy_all(OUT, [copy for to, pieces, *_ in puts for copy in copies_of(to, pieces)])
        for *_, slot, readers in puts:
            for peer in readers:
                script.set(OUT, self.outbox.full(peer, self.rank, slot))

    def receive(self, script: Script, slots: dict[int, int], batches: Iterable[Arrival]) -> None:
        """Receive batches: all waits, all copies, all signals.

        Each rank sends its batches of one wave before it waits for those of others, so this cannot deadlock.
        """
        taken = []
        for peer, some, number in batches:
            for i, pieces in enumerate(some):
                slot = SHARED + slots[peer] % self.outbox.private if number is None else (number + i) % SHARED
                if number is None:
                    slots[peer] += 1
                script.wait(IN, self.outbox.full(self.rank, peer, slot))
                taken.append((peer, slot, copies_of(self.outbox.slot(peer, self.rank, slot), pieces, back=True)))
            script.expect(IN, peer)  # after its waits, so that the peer is named for which a lane really waits
        script.copy_all(IN, [copy for _, _, copies in taken for copy in copies])
        for peer, slot, _ in taken:
            script.set(IN, self.outbox.free(peer, self.rank, slot))


def copies_of(slot: int, pieces: Iterable[Piece], back: bool = False) -> list[Copy]:
    """The copies of pieces into the slot at this address, one behind the other; `back`: from there to the pieces."""
    copies = []
    for at, size, rows, pitch in pieces:
        copies.append(Copy(at, slot, size, rows, pitch, size) if back else Copy(slot, at, size, rows, size, pitch))
        slot += rows * size
    return copies


def copies_between(sources: Sequence[Run], places: Sequence[Run]) -> list[Copy]:
    """The copies of the bytes of pieces into others, which have as many. A longer row is cut into shorter ones."""
    copies, left, todo = [], [x for x, _ in reversed(sources)], [x for x, _ in reversed(places)]
    while todo:
        to, source = todo.pop(), left.pop()
        size = min(to.size, source.size)
        rows = min([x.size * (x.rows if x.size == size else 1) for x in (to, source)]) // size
        [to], later = to.split(rows * size)
        todo += reversed(later)
        [source], later = source.split(rows * size)
        left += reversed(later)
        pitches = (x.pitch if x.rows > 1 else size for x in (to, source))
        copies.append(Copy(to.address, source.address, size, rows, *pitches))
    return copies
