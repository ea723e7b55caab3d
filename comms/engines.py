"""Copies and signals in order, without a waiting host: what `symmetric` is made of."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from ringattn.comms.axis import Pending

OUT, IN = 0, 1  # the two lanes
AID = 2  # a third one, which ends the waiting of the others


class End(Pending, Protocol):
    """When lanes are done: `wait` has the device wait for that, `settle` the host."""

    def settle(self) -> None: ...


class Lanes(Protocol):
    """Two queues of copies and signals, each done in its order."""

    def start(self) -> None:
        """Let nothing that follows start before all that was launched so far."""

    def copy(
        self, lane: int, to: int, source: int, size: int, rows: int = 1, to_pitch: int = 0, source_pitch: int = 0
    ) -> None:
        """Copy rows of `size` bytes; a pitch is how far a row begins after the one before it."""

    def wait(self, lane: int, flag: int) -> None:
        """Wait until the flag at this address is 1, and make it 0."""

    def set(self, lane: int, flag: int, value: int = 1) -> None: ...

    def precede(self, lane: int) -> None:
        """Let work that is launched from here on wait for all that was asked of the lane."""

    def fill(self, lane: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor that lies in one piece into one that lies in many."""

    def finish(self) -> "End":
        """What waits for all that was started."""

    def apart(self, lane: int) -> Any:
        """A context in which torch's own work goes to this lane."""

    def recorded(self) -> bool:
        """Whether what is launched now is recorded to be run later, as often as somebody likes."""

    def attach(self) -> None:
        """Make this thread one that may use the lanes."""


class CopyEngines:
    """Lanes on a GPU: streams, and the driver's copies and memory operations.

    Signals that follow each other go to the driver in one call. Before a lane waits, what the other one has to say is
    said: so no order of the calls can block, even where the GPU makes one queue of both streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = tuple(torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self.handles = [stream.cuda_stream for stream in self.streams]
        self.unsaid: tuple[list[bytes], ...] = ([], [], [])
        self.driver = driver()

    def start(self) -> None:
        now = current_stream(self.device).record_event()
        for stream in self.streams[:AID]:
            stream.wait_event(now)

    def copy(
        self, lane: int, to: int, source: int, size: int, rows: int = 1, to_pitch: int = 0, source_pitch: int = 0
    ) -> None:
        self.say(lane)
        if rows == 1:
            self.driver("cuMemcpyAsync", to, source, size, self.handles[lane])
        else:
            asked = strided_copy(to, source, size, rows, to_pitch, source_pitch)
            self.driver("cuMemcpy2DAsync_v2", asked, self.handles[lane])

    def wait(self, lane: int, flag: int) -> None:
        self.say(1 - lane)
        self.unsaid[lane].extend((signal(WAIT, flag, 1, UNTIL_EQUAL), signal(WRITE, flag, 0)))

    def set(self, lane: int, flag: int, value: int = 1) -> None:
        self.unsaid[lane].append(signal(WRITE, flag, value))
        if lane == AID:
            self.say(AID)

    def fill(self, lane: int, to: torch.Tensor, source: torch.Tensor) -> None:
        self.say(lane)
        with self.apart(lane):
            to.copy_(source)

    def precede(self, lane: int) -> None:
        self.say(lane)
        current_stream(self.device).wait_event(self.streams[lane].record_event())

    def say(self, lane: int) -> None:
        unsaid = self.unsaid[lane]
        for i in range(0, len(unsaid), AT_ONCE):
            said = unsaid[i : i + AT_ONCE]
            self.driver("cuStreamBatchMemOp_v2", self.handles[lane], len(said), b"".join(said), 0)
        unsaid.clear()

    def finish(self) -> "Events":
        for lane in (OUT, IN):
            self.say(lane)
        return Events([stream.record_event() for stream in self.streams[:AID]], self.device)

    def apart(self, lane: int) -> Any:
        return torch.cuda.stream(self.streams[lane])

    def recorded(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def attach(self) -> None:
        torch.cuda.set_device(self.device)
        self.streams[AID].query()  # the first call of a thread gives it the device's context


WAIT, WRITE = 1, 2  # the driver's numbers of its memory operations
UNTIL_EQUAL = 1
AT_ONCE = 255  # memory operations that the driver takes in one call


@lru_cache(maxsize=4096)
def signal(kind: int, address: int, value: int, flags: int = 0) -> bytes:
    """One memory operation as the driver reads it: 48 bytes."""
    return struct.pack("<IIQQIIQQ", kind, 0, address, value, flags, 0, 0, 0)


ANYWHERE = 4  # the driver's number of memory that it looks for itself: here or at a peer


def strided_copy(to: int, source: int, size: int, rows: int, to_pitch: int, source_pitch: int) -> bytes:
    """A CUDA_MEMCPY2D as the driver reads it: 128 bytes.

    Each side is an offset in a row and in rows, the kind of memory, its address there if on the host, on a device, in
    an array, and its pitch.
    """
    there, here = (0, 0, ANYWHERE, 0, to, 0, to_pitch), (0, 0, ANYWHERE, 0, source, 0, source_pitch)
    return struct.pack("<QQI4xQQQQQQI4xQQQQQQ", *here, *there, size, rows)


class Events:
    """What the current stream waits for."""

    def __init__(self, events: Sequence[Any], device: torch.device):
        self.events, self.device = events, device

    def wait(self) -> None:
        stream = current_stream(self.device)
        for event in self.events:
            stream.wait_event(event)

    def settle(self) -> None:
        for event in self.events:
            event.synchronize()


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's, which looks a device up slowly and a number at once."""
    return torch.cuda.current_stream(device.index)


@lru_cache
def driver() -> Callable[..., None]:
    """The CUDA driver's functions by name; an error raises."""
    library = ctypes.CDLL("libcuda.so.1")
    word = ctypes.c_uint64
    library.cuMemcpyAsync.argtypes = [word, word, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint]

    def call(name: str, *args: Any) -> None:
        error = getattr(library, name)(*args)
        if error:
            said = ctypes.c_char_p()
            library.cuGetErrorName(error, ctypes.byref(said))
            raise RuntimeError(f"{name}: {(said.value or b'error').decode()} ({error})")

    return call
