"""What lanes do in one kind of exchange, decided once: a later exchange of the kind launches it with other addresses.

A script is written copy by copy and signal by signal, as lanes are to do them. Tensors have no memory then: number i
begins at (i + 1) * STRIDE. Consecutive signals of a lane become one call of the driver, and small copies one kernel.
Before a lane waits, the signals of the other one are launched, so no order of the calls can deadlock, even if the GPU
runs both streams as one queue.
"""

import ctypes
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ringattn.comms.engines import IN, OUT, Copy, Lanes, Signal, signal
from ringattn.comms.memory import STRIDE

MIN_IN_KERNEL, MAX_IN_KERNEL = 3, 255  # so many copies over a link are one kernel,
MAX_AVERAGE = 8 * 2**20  # if they have fewer bytes than this on average
PROGRAMS = {OUT: 96, IN: 32}  # of the kernel, at most: as fast as more, and they leave multiprocessors to others

Expect = Callable[[int, int], tuple[int, int]]  # for a lane and the peer it waits for: an address and a number to write


class Script:
    """The calls of both lanes in order, and what they add to the counts of both sides.

    `persistent`: other work fills the GPU, for which a kernel would wait; None: there is no other work.
    """

    def __init__(self, persistent: bool | None = True) -> None:
        self.persistent = persistent
        self.calls: list[Callable[[Lanes, Sequence[int], Expect], None]] = []  # given the addresses of tensors
        self.signals: tuple[list[bytes], list[bytes]] = [], []  # of each lane, that are in no call yet
        self.waited: tuple[dict[int, int], dict[int, int]] = {}, {}  # the places among them where a wait is over
        self.sent: Counter[int] = Counter()  # batches by peer
        self.received: Counter[int] = Counter()
        self.bytes = 0  # that this rank sends

    def wait(self, lane: int, flag: int) -> None:
        """Wait until the flag at this address is 1, then set it to 0."""
        self.flush(1 - lane)
        self.signals[lane].extend((signal(Signal.WAIT, flag, 1, Signal.UNTIL_EQUAL), signal(Signal.WRITE, flag, 0)))

    def expect(self, lane: int, peer: int) -> None:
        """Write a number when the waits for this peer so far are over; launches say which number, and where."""
        self.waited[lane][len(self.signals[lane])] = peer
        self.signals[lane].append(signal(Signal.WRITE, 0, 0))

    def set(self, lane: int, flag: int) -> None:
        self.signals[lane].append(signal(Signal.WRITE, flag, 1))

    def copy_all(self, lane: int, copies: Sequence[Copy]) -> None:
        """Copies in any order."""
        if copies:
            self.flush(lane)
        beside = lane == IN and self.persistent is not None
        large = [copy for copy in copies if copy.size * copy.rows >= MAX_AVERAGE] if beside else []
        small = [copy for copy in copies if copy.size * copy.rows < MAX_AVERAGE] if large else copies
        one = are_one(lane, small, self.persistent)
        self.calls += [partial(by_driver, lane, copy) for copy in (large if one else copies)]
        if one:
            self.calls.append(InKernel(lane, small))

    def precede(self, lane: int) -> None:
        """Work that is launched from here on waits for the lane."""
        self.flush(lane)
        self.calls.append(lambda lanes, *_: lanes.precede(lane))

    def flush(self, lane: int) -> None:
        if self.signals[lane]:
            self.calls.append(Signals(lane, self.signals[lane], self.waited[lane]))
        self.signals[lane].clear()
        self.waited[lane].clear()

    def ended(self) -> "Script":
        for lane in (OUT, IN):
            self.flush(lane)
        return self

    def launch(self, lanes: Lanes, tensors: Sequence[int] = (), expect: Any = None) -> None:
        """`tensors`: their addresses; `expect` may be None if the script has no waits."""
        bases = 0, *tensors
        for call in self.calls:
            call(lanes, bases, expect)


class Signals:
    """Memory operations of a lane."""

    def __init__(self, lane: int, signals: Sequence[bytes], waited: dict[int, int]):
        self.lane, self.count, self.waited = lane, len(signals), tuple(waited.items())
        self.memory = ctypes.create_string_buffer(b"".join(signals), Signal.SIZE * self.count)

    def __call__(self, lanes: Lanes, bases: Sequence[int], expect: Expect) -> None:
        for place, peer in self.waited:
            struct.pack_into("<QQ", self.memory, Signal.SIZE * place + Signal.ADDRESS, *expect(self.lane, peer))
        lanes.signal_all(self.lane, self.memory, self.count)


def by_driver(lane: int, copy: Copy, lanes: Lanes, bases: Sequence[int], expect: Expect) -> None:
    (i, to), (j, source) = (divmod(side, STRIDE) for side in copy[:2])
    lanes.copy(lane, copy._replace(to=bases[i] + to, source=bases[j] + source))


class InKernel:
    """Copies by one kernel."""

    def __init__(self, lane: int, copies: Sequence[Copy]):
        from ringattn.comms.copies import launches  # triton is part of torch for GPUs

        self.lane = lane
        self.launches = [(programs, numbers, [(at, *divmod(n, STRIDE)) for at, n in enumerate(numbers) if n >= STRIDE])
                         for programs, numbers in launches(copies, PROGRAMS[lane])]  # fmt: skip

    def __call__(self, lanes: Lanes, bases: Sequence[int], expect: Expect) -> None:
        from ringattn.comms.copies import launch

        for programs, numbers, places in self.launches:
            for at, i, offset in places:
                numbers[at] = bases[i] + offset
            launch(programs, numbers, lanes.device, lanes.streams[self.lane])


def are_one(lane: int, copies: Sequence[Copy], persistent: bool | None) -> bool:
    """Whether one kernel makes these copies; `persistent` is that of the script.

    Over a link copy engines take no multiprocessor, but start each copy slowly. Within a GPU the driver's copies need
    multiprocessors too, and get them after a kernel that runs already, even if its blocks come and go; of rows they
    take twice as long.
    """
    if not 0 < len(copies) <= MAX_IN_KERNEL or any(
        [number % 16 for copy in copies for number in copy._replace(rows=0)]
    ):
        return False
    total = sum([copy.rows * copy.size for copy in copies])
    small = len(copies) >= MIN_IN_KERNEL and total < MAX_AVERAGE * len(copies)
    return small or not persistent if lane == OUT else persistent is None or (small and not persistent)
