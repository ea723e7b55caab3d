"""The symmetric axis without a GPU: its lanes are threads that copy and signal in memory all ranks share."""

import ctypes
import random
import struct
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from ringattn.comms import engines, memory, script, symmetric, watch
from ringattn.comms.axis import Slices
from ringattn.comms.engines import IN, OUT, RELEASE, Copy, Lanes, Signal
from ringattn.comms.local import Board, LocalAxis, LocalMesh
from ringattn.comms.outbox import HEAD, SHARED, Outbox, Peers, copies_between
from ringattn.comms.symmetric import SymmetricAxis
from ringattn.comms.watch import Watch
from ringattn.launch.verify import oracle
from tests.cases import FEATURES, passes
from tests.cases import errors as errors_of
from tests.test_comms import exercise


class Lane(threading.Thread):
    """Does what it is handed, one thing after the other."""

    def __init__(self):
        super().__init__(daemon=True)
        self.queue = SimpleQueue()
        self.start()

    def run(self):
        while True:
            self.queue.get()()


class ThreadLanes:
    """`Lanes` on the CPU. With `one` both lanes are one queue, as two streams of a GPU may be."""

    def __init__(self, one_lane: bool = False):
        first = Lane()
        self.lanes = {OUT: first, IN: first if one_lane else Lane(), RELEASE: Lane()}

    def now(self):
        pass

    def start(self, since):
        pass

    def put(self, lane, work):
        self.lanes[lane].queue.put(work)

    def copy(self, lane, copy):
        to, source, size, rows, to_pitch, source_pitch = copy

        def work():
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, source + row * source_pitch, size)

        self.put(lane, work)

    def signal_all(self, lane, signals, count):
        signals = [struct.unpack("<IIQQIIQQ", bytes(signals)[48 * i : 48 * i + 48]) for i in range(count)]

        def work():
            for kind, _, address, number, until, *_ in signals:
                word = ctypes.c_int32.from_address(address)
                if kind == Signal.WRITE:
                    word.value = number
                else:
                    assert (kind, until) == (Signal.WAIT, Signal.UNTIL_EQUAL)
                    while word.value != number:
                        time.sleep(1e-5)

        self.put(lane, work)

    set = Lanes.set

    def precede(self, lane):
        end = threading.Event()
        self.put(lane, end.set)
        assert end.wait(30), "what comes before some work never ended"

    def fill(self, lane, to, source):
        self.put(lane, lambda: to.copy_(source))

    def finish(self):
        ends = [threading.Event() for _ in (OUT, IN)]
        for lane, end in zip((OUT, IN), ends, strict=True):
            self.put(lane, end.set)
        return Ends(ends)

    def on(self, lane):
        return nullcontext()

    def capturing(self):
        return False

    def attach(self): ...

    def precede_graph(self):
        self.finish().wait()

    def follow_graph(self, flag, value):
        self.set(OUT, flag, value)


class Ends:
    def __init__(self, events):
        self.events = events

    def wait(self):
        for event in self.events:
            assert event.wait(20), "a lane never came to its end"

    settle = wait


class SharedMesh(LocalMesh):
    """A mesh of threads whose ring is this axis."""

    def __init__(self, ring: SymmetricAxis):
        super().__init__(Board(), {"ring": ring.size}, ring.rank)
        self.made["ring"] = ring


class NothingCopied(ThreadLanes):
    """Lanes of an outbox that does not work."""

    def copy(self, lane, copy):
        pass


class NothingAwaited(ThreadLanes):
    """The host goes on before a lane ends, as it does on a GPU."""

    precede = ThreadLanes.start


def axes(
    size: int, one_lane: bool = False, timeout: float = 60.0, kind: type[ThreadLanes] = ThreadLanes
) -> list[SymmetricAxis]:
    outboxes = [torch.full((Outbox.bytes(size),), 255, dtype=torch.uint8) for _ in range(size)]
    for m in outboxes:
        flags = m[:HEAD].view(torch.int32)
        flags[::2], flags[1::2] = 0, 1
    results, board = [], Board()
    for rank in range(size):
        outbox = Outbox([m.data_ptr() for m in outboxes], rank)
        lanes = kind(one_lane)
        come = torch.zeros(3, size, dtype=torch.int32)
        words = LocalAxis(board, "words", (), size, rank)
        axis = SymmetricAxis(Peers(outbox), Watch(lanes, outbox, size, come, timeout), words.exchange_words)
        axis.outboxes = outboxes  # held: others see it
        results.append(axis)
    return results


def on_ranks(function, axes):
    """`function(axis)` on a thread a rank; the first error is raised."""
    results, errors = [None] * len(axes), []

    def work(rank):
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(axes[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(axes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank never came to its end"
    return results


def one_by_one(lane, copies):
    """The copies of a kernel: a CPU has none."""
    return lambda *given: [script.by_driver(lane, copy, *given) for copy in copies]


@pytest.fixture(autouse=True)
def no_kernels(request, monkeypatch):
    if "kernel" not in request.node.name:
        monkeypatch.setattr(script, "InKernel", one_by_one)


def nothing():
    pass


def sharing(axis, tensors, readers, into, work=nothing, what="", persistent=True):
    with axis.sharing(dict.fromkeys(readers, tensors), into, what, persistent) as coming:
        work()
    coming.wait()


@pytest.fixture(params=[64, 2**20], ids=lambda slot: f"slot={slot}")
def slot(request, monkeypatch):
    """Slots so small that everything goes in many pieces, and slots that hold all of it."""
    monkeypatch.setattr(memory, "SLOT", request.param)
    return request.param


@pytest.mark.parametrize("one_lane", [False, True], ids=["two_lanes", "one_lane"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_keeps_its_promise(size, one_lane, slot):
    for _ in range(3):
        every = axes(size, one_lane)
        on_ranks(exercise, every)
        for axis in every:  # a recorded call may be replayed: nothing is full, everything is free
            axis.lanes.finish().settle()
        for m in every[0].outboxes:
            flags = m[:HEAD].view(torch.int32)
            assert flags[::2].eq(0).all() and flags[1::2].eq(1).all()


@pytest.mark.parametrize("persistent", [True, False])
def test_work_that_fails_beside_what_is_shared_leaves_that_to_the_others(slot, persistent):
    def fail():
        raise KeyError("lost")

    def one_rank(axis):
        x, room = torch.arange(40.0) + axis.rank, torch.zeros(40)
        if axis.rank == 0:
            with pytest.raises(KeyError):
                sharing(axis, [x[:24]], [1], {}, fail, persistent=persistent)  # no more than there are slots
        else:
            sharing(axis, [x], [], {0: [room[:24]]}, persistent=persistent)
            assert torch.equal(room[:24], x[:24] - 1)

    on_ranks(one_rank, axes(2))


@pytest.mark.parametrize("lane", [OUT, IN])
def test_many_small_copies_are_one_kernel(lane, monkeypatch):
    """Bytes that are not 16 times as many are left to the driver. So are few copies and large ones, but not those
    within a GPU that no kernel fills; and beside one that does, all copies over a link.
    """
    pytest.importorskip("triton")
    monkeypatch.setitem(script.PROGRAMS, IN, 5)  # which loop
    driven, lanes = [], object.__new__(Lanes)
    lanes.device, lanes.streams = torch.device("cpu"), (None, None, None)
    monkeypatch.setattr(lanes, "copy", lambda lane, copy: driven.append(copy), raising=False)
    room = torch.zeros(1 << 26, dtype=torch.uint8)  # malloc maps it: Triton's interpreter fails at 32 bits of address
    source, to, expected = room[: 1 << 18].random_(), room[1 << 22 : 2 << 22], room[2 << 22 : 3 << 22]
    random_, copies, at = random.Random(0), [], 0
    for _ in range(40):  # more than one launch takes, and some that take several programs
        start, size, rows = 16 * random_.randrange(1 << 12), 16 * random_.randrange(1, 1500), random_.choice([1, 1, 3])
        copies.append(Copy(to.data_ptr() + at, source.data_ptr() + start, size, rows, size + 32, size + 16))
        for row in range(rows):
            expected[at : at + size] = source[start + row * (size + 16) :][:size]
            at += size + 32

    def launch(lane, copies, persistent):
        """From a script in which the room is tensor 0."""
        written, off = script.Script(persistent), memory.STRIDE - room.data_ptr()
        written.copy_all(lane, [c._replace(to=c.to + off, source=c.source + off) for c in copies])
        written.launch(lanes, [room.data_ptr()])

    launch(lane, copies, False)
    assert torch.equal(to, expected) and not driven
    fields = (field for field in Copy._fields if field != "rows")
    driver = [([c._replace(**{field: getattr(c, field) + 8}) for c in copies[:3]], False) for field in fields]
    large = [copy._replace(size=2**23) for copy in copies[:3]]
    few, within = [copies[0]._replace(rows=1)], lane == OUT
    for others, persistent in [*driver, (few, within), (large, within), *[(copies, True)] * (not within)]:
        launch(lane, others, persistent)
        assert driven == others
        driven.clear()
    to.zero_()
    launch(OUT, few, False)
    launch(OUT, copies[1:], True)
    assert to[: few[0].size].equal(expected[: few[0].size]) and to.count_nonzero() > few[0].size and not driven
    to.zero_()
    launch(IN, [large[0], *copies], False)  # copy engines take the large one, a kernel all others
    assert torch.equal(to, expected) and driven == large[:1] and script.are_one(IN, large, None)


def test_lanes_wait_for_a_graph_that_worked_in_their_place_once_and_it_for_them(monkeypatch):
    """Graphs of one stream follow each other by themselves."""
    streams, log, driven = {}, [], []
    monkeypatch.setattr(engines, "current_stream", lambda device: streams["now"])
    monkeypatch.setattr(Lanes, "capturing", lambda self: streams["now"] == "captures")

    class Stream(str):
        cuda_stream = 7

        def record_event(self):
            return f"end of {self}"

        def wait_event(self, event):
            log.append((self, event))

    lanes = Lanes.__new__(Lanes)
    lanes.device, lanes.after, lanes.driver = None, None, lambda *given: driven.append(given)
    lanes.streams = tuple(map(Stream, ("out", "in", "release")))

    def told(stream, work, *given):
        streams["now"], log[:] = Stream(stream), []
        work(*given)
        return log[:]

    assert told("a", lanes.precede_graph) == [("a", "end of out"), ("a", "end of in")]
    lanes.follow_graph(64, 5)
    assert driven == [("cuStreamBatchMemOp_v2", 7, 1, engines.signal(Signal.WRITE, 64, 5), 0)]
    assert told("a", lanes.precede_graph) == []
    assert told("b", lanes.precede_graph) == [("b", "end of a")]
    assert told("captures", lanes.start, "before") == [("out", "before"), ("in", "before")]
    both = [(lane, end) for lane in ("out", "in") for end in ("before", "end of a")]
    assert told("b", lanes.start, "before") == both
    assert told("b", lanes.start, "before") == both[::2]
    assert told("a", lanes.precede_graph) == [("a", "end of out"), ("a", "end of in")]
    lanes.follow_graph(64, 6)
    assert told("a", lanes.start, "before") == both[::2]  # which comes after the graph


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_is_of_all_bits_however_tensors_lie(seed):
    draw = random.Random(seed)
    dtype = draw.choice([torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.complex128])
    shape = [draw.choice([1, 2, 3, 8, 16]) for _ in range(draw.randint(1, 4))]

    def made():
        room = [n + draw.choice([0, 1, 8]) for n in shape]
        order = draw.sample(range(len(shape)), len(shape))
        bits = torch.randint(256, (*[room[i] for i in order], dtype.itemsize), dtype=torch.uint8)
        x = bits.view(dtype)[..., 0].permute(*[order.index(i) for i in range(len(shape))])
        return x[tuple(slice(r - n, None) for r, n in zip(room, shape, strict=True))]

    to, source = made(), made()
    memory.copy(to, source)
    to, packed, source = (x.contiguous().view(torch.uint8) for x in (to, memory.packed(source), source))
    assert to.equal(source) and packed.equal(source)


def test_numbers_of_a_launch_lie_where_the_driver_says(monkeypatch):
    """Two addresses of 8 bytes and two numbers of 4 for each copy, a gap, and two addresses that are not used."""
    copies, launched = pytest.importorskip("ringattn.comms.copies"), []
    places = [(0, 8), (8, 8), (16, 4), (20, 4), (32, 8), (40, 8), (48, 4), (52, 4), (56, 8), (64, 8)]

    def driver(name, function, *given):
        if name == "cuLaunchKernel":
            size = ctypes.c_size_t.from_address(given[-1][3]).value
            launched.append((*given[:9], ctypes.string_at(given[-1][1], size)))
        elif given[0].value == len(places):
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        else:
            given[1]._obj.value, given[2]._obj.value = places[given[0].value]

    monkeypatch.setattr(copies, "driver", lambda: driver)
    about = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, num_ctas=1, shared=0)
    triton = MagicMock(function=7, metadata=about)
    numbers = [1 << 40, 2 << 40, 16, 32, 3 << 40, 4 << 40, 48, 64]
    copies.packed(triton, 8)(5, numbers, 99)
    ((*shape, stream, _, memory),) = launched
    assert shape == [5, 1, 1, 32 * copies.WARPS, 1, 1, 0] and stream == 99
    assert struct.unpack("<qqii8xqqii16x", memory) == (*numbers,)
    copies.packed(triton, 12)(5, numbers, 99)  # more numbers than the driver knows of, as an old one knows of none
    about.global_scratch_size = 8
    copies.packed(triton, 8)(5, numbers, 99)
    by_triton = triton.__getitem__.return_value.call_args_list
    assert by_triton == [call((*numbers,), n, copies.UNITS, stream=99) for n in (1, 1)] and len(launched) == 1


def test_work_that_fails_on_all_ranks_leaves_nothing_for_the_next_call(slot):
    """As memory that runs out does, on every rank alike."""

    def fail():
        raise torch.OutOfMemoryError("out of memory")

    def one_rank(axis):
        others, results = [r for r in range(3) if r != axis.rank], []
        for turn in range(5):
            room = {r: [torch.full((40,), -1.0)] for r in others}
            mine = torch.full((40,), 10.0 * turn + axis.rank)
            try:
                sharing(axis, [mine], others, room, fail if turn == 1 else nothing)
                results.append([room[r][0].unique().tolist() for r in others])
            except torch.OutOfMemoryError:
                pass
        assert results == [[[10.0 * turn + r] for r in others] for turn in (0, 2, 3, 4)]

    on_ranks(one_rank, axes(3, kind=NothingAwaited))


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_that_come_again_move_the_tensors_of_today(seed, slot, monkeypatch):
    """Of a few kinds, in any order, with tensors that lie elsewhere each time."""
    draw = random.Random(seed)
    choose, dtypes = draw.choice, [torch.float32, torch.bfloat16, torch.uint8]
    size = choose([2, 3])
    monkeypatch.setattr(memory, "MIN_ROW", choose([1, memory.MIN_ROW]))
    kinds = [(i % 2 > 0, choose([True, False, None]), choose(dtypes), choose([1, 2]), choose([1, 8]),
              choose([0, 0, 1, 4]), draw.random() < 0.3, draw.random() < 0.3) for i in range(4)]  # fmt: skip
    turns = [draw.randrange(4) for _ in range(16)]

    def one_rank(axis):
        for turn, (shared, persistent, dtype, batch, width, shift, itself, apart) in enumerate(kinds[i] for i in turns):

            def tensor(value, rows, width=width, batch=batch, dtype=dtype, shift=shift, apart=apart):
                x = torch.full((shift + batch * rows * 2 * width,), value, dtype=dtype)[shift:]
                x = x.view(batch, rows, 2 * width)
                return x[..., :width] if apart else x

            ranks = [r for r in range(size) if itself or r != axis.rank]
            places = (range(3), range(5, 12))
            mine = Slices([tensor(10 * axis.rank + turn, 14) for _ in range(2)], places)
            rooms = {r: [tensor(99, 11) for _ in range(2)] for r in ranks}
            into = {r: Slices(x, (range(1, 11),)) for r, x in rooms.items()}
            if shared:
                sharing(axis, mine, ranks, into, persistent=persistent)
            else:
                axis.move(dict.fromkeys(ranks, mine), into, persistent=persistent).wait()
            for r, both in rooms.items():
                for x in both:
                    assert x[:, 1:].eq(10 * r + turn).all() and x[:, :1].eq(99).all(), (turn, r)
        assert axis.peers.written.cache_info().hits > 0

    on_ranks(one_rank, axes(size))


def test_a_move_holds_what_a_caller_lets_go_until_it_is_waited_for():
    """A lane may read it, to pack it, long after the call: its memory must not be given to what comes next.

    What nobody waits for is waited for when it is let go.
    """

    def one_rank(axis):
        other = 1 - axis.rank
        x, room = torch.rand(64, 4).T, torch.empty(64, 4).T  # more pieces than are moved one by one
        held = weakref.ref(x), weakref.ref(room)
        flight = axis.move({other: [x]}, {other: [room]})
        del x, room
        assert all(ref() is not None for ref in held)
        flight.wait()
        assert all(ref() is None for ref in held)
        room = torch.zeros(4)
        axis.move({other: [torch.ones(4)]}, {other: [room]})
        assert room.eq(1).all()

    on_ranks(one_rank, axes(2))


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("name", ["all_at_once", "causal", "docs_rows", "window"])
def test_attention_equals_dense_float64(name, together, slot):
    case = replace(next(c for c in FEATURES if c.name == name), ring=4)
    given = oracle.inputs(case, torch.float32)
    truth = oracle.dense(case, given)

    def one_rank(axis):
        mesh = SharedMesh(axis)
        return errors_of(case, mesh, passes(case, mesh, given, together=together), truth)

    for rank, errors in enumerate(on_ranks(one_rank, axes(4))):
        assert max(errors.values()) < 2e-6, f"rank {rank}: {errors}"


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_the_bytes_of_their_tensors_in_order(seed, monkeypatch):
    """Slot by slot, however many rows a piece has: what one side stacks the other may not."""
    draw = random.Random(seed)
    monkeypatch.setattr(memory, "SLOT", draw.choice([1, 7, 64, 200, 2**20]))
    shape = draw.randint(1, 3), 12, 2
    kept = [torch.randint(256, (*shape, draw.randint(1, 5)), dtype=torch.uint8) for _ in "kv"]
    pair = [draw.choice([x, x, x[:, :, 1], x[..., :1]]) for x in kept]
    starts, size, step = sorted(draw.sample(range(9), 2)), draw.randint(1, 3), draw.choice([1, 1, 2])
    slices = Slices(pair, tuple(range(start, start + size + draw.choice([0, 0, 1]), step) for start in starts))
    whole = b"".join(x.contiguous().numpy().tobytes() for x in slices)
    slots = [whole[i : i + memory.SLOT] for i in range(0, len(whole), memory.SLOT)]
    assert memory.are_scattered(slices) == any(memory.count_pieces(x) > memory.MAX_PIECES for x in slices)
    for each in (slices, list(slices)):
        kind, addresses = memory.described(False, True, 0, {1: each}, {}, {})
        results = [[at(piece, addresses) for piece in batch] for batch in memory.batches(kind.runs(kind.out[0]))]
        assert [b"".join(map(read, batch)) for batch in results] == slots
        assert memory.weight(results) == len(whole)
    mine, room = torch.zeros(2, 6, 8)[..., :4], torch.zeros(2, 12, 4)[:, 6:]  # of two batch rows, as Ulysses has them
    assert len(copies_between(memory.joined([mine]), memory.joined([room]))) == 2


def at(piece, addresses):
    """A piece of tensor i where that lies."""
    i, offset = divmod(piece.address, memory.STRIDE)
    return piece._replace(address=addresses[i - 1] + offset)


def read(piece):
    return b"".join(ctypes.string_at(piece.address + i * piece.pitch, piece.size) for i in range(piece.rows))


def test_a_trial_distinguishes_an_outbox_that_works_from_one_that_does_not(slot):
    works, fails = (
        on_ranks(lambda axis: symmetric.trial(axis, torch.device("cpu")), axes(3, kind=kind))
        for kind in (ThreadLanes, NothingCopied)
    )
    assert works == [None] * 3 and all("received {" in message for message in fails)


def test_waits_are_over_in_order_after_2_to_the_31_too():
    """Lanes write 32 bits of their numbers."""
    counts = torch.tensor([[2**31 - 1, -(2**31)]], dtype=torch.int32)
    found = Watch(None, None, 2, counts, timeout=1.0)
    for at, number, over in ((0, 2**31 - 1, 1), (0, 2**31, 0), (1, 2**31 - 1, 1), (1, 2**31, 1), (1, 2**31 + 1, 0)):
        found.open = [(0.0, found.done_counts, (0, at), number, None)]
        assert found.done() == over, (at, number)


@pytest.mark.parametrize("together", [False, True])
def test_a_rank_that_never_comes_is_named_in_time(together):
    """Also if a kernel is to fetch what it sends `together` with what another rank sent in time."""

    def one_rank(axis):
        if axis.rank == 2:
            return None
        start = time.monotonic()
        others = [r for r in range(3) if r != axis.rank]
        mine, rooms = [torch.ones(4) for _ in range(3)], {r: [torch.ones(4) for _ in range(3)] for r in others}
        with pytest.raises(ConnectionError, match=r"rank 2 within 0.5 s \(the keys of step 2\); it died"):
            while time.monotonic() - start < 20:
                axis.move(dict.fromkeys(others, mine), rooms, "the keys of step 2", persistent=not together).wait()
        return time.monotonic() - start

    results = on_ranks(one_rank, axes(3, timeout=0.5))
    assert max(results[:2]) < 10


def test_a_rank_that_is_lost_during_long_work_is_named_and_nobody_hangs(monkeypatch):
    """What is asked of the lanes after the others were released is released too."""
    monkeypatch.setattr(memory, "SLOT", 64)
    monkeypatch.setattr(watch, "with_first_loss", lambda mine: f"{mine}; the first loss: that one")

    def one_rank(axis):
        if axis.rank == 1:
            return
        x = torch.zeros(16 * 4 * SHARED)  # four times as much as the slots for all hold
        sharing(axis, [x[:4]], [1], {})  # never taken
        with pytest.raises(ConnectionError, match=r"taken by rank 1 within 0.5 s \(keys\).*; the first loss: that one"):
            sharing(axis, [x], [1], {1: [x.clone()]}, lambda: time.sleep(2), "keys")
        axis.lanes.finish().settle()

    on_ranks(one_rank, axes(2, timeout=0.5))
