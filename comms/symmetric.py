"""An axis over GPUs that see each other's memory: copies by the copy engines, signals instead of barriers.

Tensors go through the slots of an outbox (outbox.py) in batches of pieces (memory.py), and a thread reports a rank that
others wait for in vain (watch.py). All copies and signals are launched on two streams of this device, in the same order
on every rank. So no host waits, and nothing can deadlock, even if both streams were one.

A copy over a link takes no multiprocessor, but a copy within a GPU does: it would wait until a kernel that fills all of
them releases some. So work that is launched after a move starts when the first batches of the move, as many as it has
slots, are in their slots (and the rest of earlier moves). Kernels whose blocks come and go are launched first. Beside
those, copies into slots are a kernel (copies.py), which starts soon, while the driver's would start when the other
kernel has ended; and so are several small copies over links, from all ranks at once.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms import memory, messages
from ringattn.comms.axis import NOTHING_SHARED, Afterwards, Axis, ByRank, Done, Pending, Sharing, Slices
from ringattn.comms.engines import IN, OUT, Copy, Events, Lanes
from ringattn.comms.memory import MAX_PIECES, count_pieces
from ringattn.comms.moves import Moves
from ringattn.comms.outbox import HEAD, Outbox, Peers
from ringattn.comms.process_group import alive, hosts_of
from ringattn.comms.script import Script
from ringattn.comms.watch import Record, Watch

OUTBOXES: list[Any] = []  # outboxes, which live as long as the process, because other processes map them
CONNECTED: Any = WeakKeyDictionary()  # connections by the group of all ranks, then by the ranks of a group


class Flight:
    """A move in flight. It holds all tensors that the lanes read and write, so that their memory lives until then."""

    def __init__(self, lanes: Lanes, watch: Watch, *tensors: Any):
        self.lanes, self.watch, self.tensors = lanes, watch, list(tensors)
        self.end: Events | None = None

    def launched(self) -> "Flight":
        """Call it when all copies are launched; returns this flight, which can now be waited for."""
        self.end = self.lanes.finish()
        return self

    def wait(self) -> None:
        self.watch.check()
        if self.end is not None:
            self.end.wait()
        self.tensors.clear()

    def __del__(self) -> None:
        """Without a wait, since an error came first: the memory is released when the lanes are done with it."""
        if self.tensors and not sys.is_finalizing():
            with suppress(RuntimeError):  # of a capture that failed
                (self.end or self.lanes.finish()).settle()


class SymmetricAxis(Moves):
    """GPUs of one host in group order. All transfers are moves; words go through the process group."""

    by, cheap_words, hosts, replayable = "symmetric memory", False, 1, True

    def __init__(
        self, peers: Peers, watch: Watch, words: Callable[[Any], list[Any]], name: str = "ring", group: Any = None
    ):
        self.peers, self.watch, self.words, self.name, self.group = peers, watch, words, name, group
        self.lanes, self.rank, self.size = watch.lanes, peers.rank, watch.size
        self.sent = 0

    def move(self, out: ByRank, into: ByRank, what: str = "", persistent: bool | None = True) -> Pending:
        self.watch.check()
        if not out and not into:
            return Done()
        return self.begin(False, out, into, what, self.lanes.now(), persistent)()

    def sharing(self, out: ByRank, into: ByRank, what: str = "", persistent: bool = True) -> Sharing:
        self.watch.check()
        if not out and not into:
            return NOTHING_SHARED
        given = True, out, into, what, self.lanes.now(), persistent
        if not persistent:  # spares the body's kernel the time that the host takes for it
            return Afterwards(lambda: self.begin(*given)())
        return Afterwards(self.begin(*given))

    def begin(
        self, shared: bool, out: ByRank, into: ByRank, what: str, since: Any, persistent: bool | None
    ) -> Callable[[], Flight]:
        """Launch the first script of an exchange; returns a function that launches what is left."""
        self.lanes.start(since)
        firsts = {r: batches_before(each) if shared else 0 for r, each in into.items()}
        packed = {id(each): self.dense(each, OUT, memory.packed) for each in out.values()}  # once for all readers
        leaving = {r: packed[id(each)] for r, each in out.items()}
        lane_of = {r: OUT if r == self.rank else IN for r in into}  # of what arrives
        arriving = {r: self.dense(each, lane_of[r], memory.whole) for r, each in into.items()}
        flight = Flight(self.lanes, self.watch, out, into, leaving, arriving)
        kind, addresses = memory.described(shared, persistent, self.rank, leaving, arriving, firsts)
        scripts, expect = self.peers.next_scripts(kind), partial(self.watch.expect, what)
        scripts[0].launch(self.lanes, addresses, expect)

        def rest() -> Flight:
            for script in scripts[1:]:
                script.launch(self.lanes, addresses, expect)
            for r, each in arriving.items():
                for x, y in zip(into[r], each, strict=True) if each is not into[r] else ():
                    if x is not y:
                        self.lanes.fill(lane_of[r], x, y)
            self.sent += scripts[-1].bytes
            return flight.launched()

        return rest

    def dense(self, each: Sequence[Tensor], lane: int, make: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        """The same tensors, or for those of many pieces what `make` gives, on a lane."""
        if not memory.are_scattered(each):
            return each
        with self.lanes.on(lane):
            return [make(x) if count_pieces(x) > MAX_PIECES else x for x in each]

    @contextmanager
    def recording(self, record: Record) -> Iterator[None]:
        """While a graph is captured. Its transfers use the slots that are next, as on all ranks, but happen later."""
        sent, received, self.watch.record = self.peers.sent.copy(), self.peers.received.copy(), record
        try:
            self.lanes.start(self.lanes.now())
            for lane in (OUT, IN):
                self.lanes.set(lane, record.address + 4 * lane, 0)
            yield
        finally:
            self.peers.sent, self.peers.received, self.watch.record = sent, received, None
            with suppress(RuntimeError):  # of a capture that is broken, whose end says so
                self.lanes.finish().wait()  # a capture can only end with all streams that take part

    @contextmanager
    def replaying(self, record: Record) -> Iterator[None]:
        """While a graph is launched: after all transfers so far, whatever their stream, and before all later ones."""
        self.watch.check()
        self.lanes.precede_graph()
        record.replays += 1
        self.watch.follow(record.counts, 2, record.replays, record)  # now: the body may wait for the device
        try:
            yield
        finally:
            self.lanes.follow_graph(record.address + 8, record.replays)

    def exchange_words(self, words: Any) -> list[Any]:
        return self.words(words)

    def over(self, transport: str) -> Axis:
        return self.group or self if transport == "group" else self


def batches_before(tensors: Sequence[Tensor]) -> int:
    """How many batches their rank shares before those that these tensors receive."""
    if not isinstance(tensors, Slices) or not tensors.after:
        return 0
    row = sum([x.nbytes // x.shape[1] for x in tensors.tensors])
    return sum([-(-n * row // memory.SLOT) for n in tensors.after])


def shared_axis(group: dist.ProcessGroup, name: str, other: Axis | None = None) -> SymmetricAxis | None:
    """The axis of a group of GPU ranks that all see each other's memory, or None. A collective: all ranks must call it.

    `other` is the axis over the group itself, for transfers that are faster there.
    """
    if hosts_of(group) != 1:
        return None
    ranks, connections = (*dist.get_process_group_ranks(group),), CONNECTED.setdefault(dist.group.WORLD, {})
    if ranks not in connections:  # one connection for all groups of the same ranks
        connections[ranks] = connect(group)
    connection = connections[ranks]
    if connection is None:
        return None
    peers, watch = connection
    group_ref = ref(group)
    return SymmetricAxis(peers, watch, lambda words: messages.gather(words, alive(group_ref)), name, other)


def connect(group: dist.ProcessGroup) -> tuple[Peers, Watch] | None:
    """Allocate an outbox on every rank, exchange their addresses and try a few transfers; None if a rank fails."""
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]  # that this process sees
    reaches_all = all(torch.cuda.can_device_access_peer(device, i) for i in others)
    ranks = messages.gather([device.index, reaches_all], group)
    shared = len({gpu for gpu, _ in ranks}) < size  # ranks that see one GPU each, or share one, which gloo allows
    if not all(reaches for _, reaches in ranks) or (shared and over_nccl(group)):
        return None
    outbox = attempt(group, lambda: symmetric.empty(Outbox.bytes(size), dtype=torch.uint8, device=device))
    if outbox is None:
        return None

    def meet() -> Any:
        """Also compiles the kernel of several copies, for which no rank is to wait in the trial."""
        handle = symmetric.rendezvous(outbox, group)
        OUTBOXES.append((outbox, handle))
        flags = outbox[:HEAD].view(torch.int32)
        flags[::2], flags[1::2] = 0, 1  # no slot is full, every slot is free
        lanes, rows = Lanes(device), torch.zeros(6, 4, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
        script = Script(persistent=False)
        script.copy_all(OUT, [Copy(rows[i].data_ptr(), rows[3 + i].data_ptr(), 16) for i in range(3)])
        script.launch(lanes)
        torch.cuda.synchronize()
        return handle, lanes

    met = attempt(group, meet)
    if met is None:
        return None
    handle, lanes = met
    view = Outbox([int(address) for address in handle.buffer_ptrs], rank)
    counts = torch.zeros(3, size, dtype=torch.int32).pin_memory()
    peers, watch = Peers(view), Watch(lanes, view, size, counts, timeout=20.0)
    if agreed(group, trial(SymmetricAxis(peers, watch, lambda words: [words]), device)):
        return None
    watch.timeout = group._get_backend(device).options._timeout.total_seconds()
    return peers, watch


def attempt(group: dist.ProcessGroup, make: Callable[[], Any]) -> Any:
    """The result of `make()`, or None on all ranks if it fails on one: a container may forbid to share memory."""
    made = problem = None
    try:
        made = make()
    except Exception as error:  # Triton's compiler has its own
        problem = (str(error) or repr(error)).splitlines()[0]
    return None if agreed(group, problem) else made


def agreed(group: dist.ProcessGroup, problem: str | None) -> bool:
    """Whether any rank has a problem; then all ranks warn of it."""
    problems = [p for p in messages.gather(problem, group) if p]
    if problems:
        instead = "NCCL is used instead" if over_nccl(group) else "and gloo cannot move GPU memory"
        warnings.warn(f"these ranks cannot share GPU memory, {instead}: {problems[0]}", stacklevel=3)
    return bool(problems)


def trial(axis: SymmetricAxis, device: torch.device) -> str | None:
    """The problem of a trial, or None: more batches than slots between all ranks, in copies of every kind.

    The driver copies one row that is not contiguous, and a kernel copies three tensors.
    """

    def row(value: int) -> list[Tensor]:
        return [torch.full((4,), value, dtype=torch.int32, device=device)[::2]]

    def three(value: int) -> list[Tensor]:
        return [torch.full((4,), value, dtype=torch.int32, device=device) for _ in range(3)]

    others = [rank for rank in range(axis.size) if rank != axis.rank]
    try:
        for made in (row, three) * (axis.peers.outbox.private + 1):
            mine = dict.fromkeys(others, made(axis.rank))
            moved, shared = ({r: made(-1) for r in others} for _ in range(2))
            axis.move(mine, moved, persistent=made is row).wait()
            with axis.sharing(mine, shared, persistent=made is row) as coming:
                pass
            coming.wait()
            for arrived in (moved, shared):
                numbers = {r: torch.cat(tensors).unique().tolist() for r, tensors in arrived.items()}
                if numbers != {r: [r] for r in others}:
                    return f"rank {axis.rank} received {numbers}"
    except (RuntimeError, ConnectionError) as error:
        return str(error).splitlines()[0]
    return None


def over_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend(group)  # it may also name gloo, for CPUs
