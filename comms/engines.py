"""Queues of copies and signals that run in order without the host: the base of `symmetric`."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ringattn.comms import memory

OUT, IN = 0, 1  # the two lanes
RELEASE = 2  # a third lane, which sets the flags that the others wait for in vain


class Copy(NamedTuple):
    """Rows of `size` bytes; a pitch is the distance between the starts of two rows."""

    to: int
    source: int
    size: int
    rows: int = 1
    to_pitch: int = 0
    source_pitch: int = 0


class Lanes:
    """Queues of copies and signals, each in order: streams, and the driver's copies and memory operations."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = tuple(torch.cuda.Stream(device, priority=-1) for _ in range(3))
        self.handles = [stream.cuda_stream for stream in self.streams]
        self.driver = driver()
        self.after: torch.cuda.Stream | None = None  # where a graph was launched, with which no lane had work since

    def now(self) -> Any:
        """The end of the work that the current stream has so far, for `start`."""
        return current_stream(self.device).record_event()

    def start(self, since: Any) -> None:
        """Make both lanes wait for that work."""
        ends = [since]
        if self.after is not None and not self.capturing():
            ends += [] if self.after == current_stream(self.device) else [self.after.record_event()]
            self.after = None
        for stream in self.streams[:RELEASE]:
            for end in ends:
                stream.wait_event(end)

    def precede_graph(self) -> None:
        """Make the current stream wait for all work of the lanes so far, and for graphs that work in their place."""
        stream = current_stream(self.device)
        if self.after is None:
            self.finish().wait()
        elif self.after != stream:
            stream.wait_event(self.after.record_event())

    def follow_graph(self, flag: int, value: int) -> None:
        """Set the flag when the current stream comes here, and let later work of the lanes come after that."""
        self.after = current_stream(self.device)
        self.driver("cuStreamBatchMemOp_v2", self.after.cuda_stream, 1, signal(Signal.WRITE, flag, value), 0)

    def copy(self, lane: int, copy: Copy) -> None:
        if copy.rows == 1:
            self.driver("cuMemcpyAsync", *copy[:3], self.handles[lane])
        else:
            self.driver("cuMemcpy2DAsync_v2", strided_copy(copy), self.handles[lane])

    def signal_all(self, lane: int, signals: Any, count: int) -> None:
        """Signals that lie one behind the other in memory."""
        for first in range(0, count, Signal.MOST):
            some = signals if count <= Signal.MOST else signals[Signal.SIZE * first :][: Signal.SIZE * Signal.MOST]
            self.driver("cuStreamBatchMemOp_v2", self.handles[lane], min(Signal.MOST, count - first), some, 0)

    def set(self, lane: int, flag: int, value: int = 1) -> None:
        self.signal_all(lane, signal(Signal.WRITE, flag, value), 1)

    def fill(self, lane: int, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous tensor into one that is not."""
        with self.on(lane):
            memory.copy(to, source)

    def precede(self, lane: int) -> None:
        """Make work launched from now on wait for the lane's work so far."""
        current_stream(self.device).wait_event(self.streams[lane].record_event())

    def finish(self) -> "Events":
        """The end of all work of both lanes so far."""
        return Events([stream.record_event() for stream in self.streams[:RELEASE]], self.device)

    def on(self, lane: int) -> Any:
        """A context in which torch launches its work on this lane."""
        return torch.cuda.stream(self.streams[lane])

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def attach(self) -> None:
        """Let this thread use the lanes."""
        torch.cuda.set_device(self.device)
        self.streams[RELEASE].query()  # the first call of a thread attaches the device's context


class Signal:
    """What the driver calls memory operations: CUstreamBatchMemOpParams."""

    WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32
    UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
    SIZE, ADDRESS = 48, 8  # bytes of one, and the place of its address, which its number follows
    MOST = 255  # in one call


@lru_cache(maxsize=4096)
def signal(kind: int, address: int, number: int, flags: int = 0) -> bytes:
    return struct.pack("<IIQQIIQQ", kind, 0, address, number, flags, 0, 0, 0)


UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds out where the address lies


def strided_copy(copy: Copy) -> bytes:
    """A CUDA_MEMCPY2D: 128 bytes.

    Each side has an offset in bytes and in rows, the kind of memory, three addresses (on the host, on a device, of an
    array), and a pitch.
    """
    to, source, size, rows, to_pitch, source_pitch = copy
    sides = (0, 0, UNIFIED, 0, source, 0, source_pitch, 0, 0, UNIFIED, 0, to, 0, to_pitch)
    return struct.pack("<QQI4xQQQQQQI4xQQQQQQ", *sides, size, rows)


class Events:
    """The end of some work: `wait` makes the current stream wait for it, `settle` the host."""

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
    """torch's current stream, by the device's number, which is faster to look up than the device."""
    return torch.cuda.current_stream(device.index)


@lru_cache
def driver() -> Callable[..., None]:
    """The CUDA driver's functions by name; an error raises."""
    library = ctypes.CDLL("libcuda.so.1")
    word = ctypes.c_uint64
    library.cuMemcpyAsync.argtypes = [word, word, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.cuLaunchKernel.argtypes = [word, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint]

    def call(name: str, *args: Any) -> None:
        error = getattr(library, name)(*args)
        if error:
            text = ctypes.c_char_p()
            library.cuGetErrorName(error, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({error})")

    return call
