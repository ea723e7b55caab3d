"""Several copies as one kernel: the driver starts one after the other, which takes longer than a small copy does.

Beside another kernel each of the driver's copies within a GPU also waits for multiprocessors anew; these wait once.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl

from ringattn.comms.engines import Copy, driver

COPIES_A_LAUNCH = 32  # copies of one launch
UNITS, WARPS = 4096, 8  # of 16 bytes, which a program copies at once, and its warps
BUFFER_END, BUFFER, BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
Launch = Callable[[int, Sequence[int], int], None]  # of so many programs, with these numbers, on this stream
COMPILED: dict[tuple[torch.device, int], Launch] = {}  # by how many copies


@triton.jit
def copy_kernel(copies, N: tl.constexpr, UNITS: tl.constexpr):
    """Copies are cut into chunks of UNITS units, which are numbered over all. Of n programs each copies every n-th.

    The numbers of a copy: to, source, bytes of a row and of all rows, both pitches, and 16 times that of the chunks up
    to its end.
    """
    program, n, first = tl.program_id(0), tl.num_programs(0), 0
    for i in tl.static_range(N):
        end, width, units = copies[7 * i + 6] // 16, copies[7 * i + 2] // 16, copies[7 * i + 3] // 16
        to = tl.multiple_of(copies[7 * i].to(tl.pointer_type(tl.int64)), 16)
        source = tl.multiple_of(copies[7 * i + 1].to(tl.pointer_type(tl.int64)), 16)
        both = tl.arange(0, 2)[None, :]  # a unit is two words
        chunk = first + (program - first % n + n) % n
        while chunk < end:
            at = (chunk - first) * UNITS + tl.arange(0, UNITS)
            row, column = (at // width).to(tl.int64), 2 * (at % width)
            from_ = source + (row * (copies[7 * i + 5] // 16 * 2) + column)[:, None] + both
            place = to + (row * (copies[7 * i + 4] // 16 * 2) + column)[:, None] + both
            tl.store(place, tl.load(from_, mask=(at < units)[:, None]), mask=(at < units)[:, None])
            chunk += n
        first = end


def launches(copies: Sequence[Copy], programs: int) -> Iterator[tuple[int, list[int]]]:
    """The launches of copies: of each how many programs it has, up to those given, and its numbers.

    The compiler sees of each copy the same: 16 divides its numbers.
    """
    for start in range(0, len(copies), COPIES_A_LAUNCH):
        some = copies[start : start + COPIES_A_LAUNCH]
        numbers: list[int] = []
        count, end = 1 << (len(some) - 1).bit_length(), 0
        for to, source, size, rows, to_pitch, source_pitch in some:
            end += -(-rows * size // (16 * UNITS))
            numbers += [to, source, size, rows * size, to_pitch, source_pitch, 16 * end]
        yield min(end, programs), numbers + numbers[-7:] * (count - len(some))  # with no chunks


def launch(programs: int, numbers: Sequence[int], device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """Launch copies on a stream, or on the current one."""
    count = len(numbers) // 7
    compiled = COMPILED.get((device, count))
    if compiled is not None and stream is not None and torch.cuda.current_device() == device.index:
        compiled(programs, numbers, stream.cuda_stream)
        return
    with torch.cuda.stream(stream):  # None leaves the current one
        kernel = copy_kernel[programs, 1, 1](tuple(numbers), count, UNITS, num_warps=WARPS)
    if kernel is not None:  # as in Triton's interpreter
        COMPILED[device, count] = packed(kernel, 7 * count)


def packed(kernel: Any, count: int) -> Launch:
    """A function that launches a compiled kernel with so many numbers: Triton looks at each, which takes 40 to 80 us.

    They lie as the driver says, before addresses that the kernel does not use. If it does not say so, Triton launches.
    """
    about, launch, offset, size = kernel.metadata, driver(), ctypes.c_size_t(), ctypes.c_size_t()
    kinds, found = "<", 0
    with suppress(RuntimeError, AttributeError):  # past the last one; by an old driver
        while True:
            launch("cuFuncGetParamInfo", ctypes.c_uint64(kernel.function), ctypes.c_size_t(found),
                   ctypes.byref(offset), ctypes.byref(size))  # fmt: skip
            kinds += f"{offset.value - struct.calcsize(kinds)}x"
            kinds += f"{size.value}x" if found >= count else "q" if size.value == 8 else "i"
            found += 1
    if found < count or about.global_scratch_size or getattr(about, "profile_scratch_size", 0) or about.num_ctas > 1:
        return lambda grid, numbers, stream: kernel[grid, 1, 1](tuple(numbers), count // 7, UNITS, stream=stream)
    layout = struct.Struct(kinds)
    total, place = ctypes.c_size_t(layout.size), ctypes.addressof

    def launch_packed(programs: int, numbers: Sequence[int], stream: int) -> None:
        memory = ctypes.create_string_buffer(layout.pack(*numbers), layout.size)
        extra = (ctypes.c_void_p * 5)(BUFFER, place(memory), BUFFER_SIZE, place(total), BUFFER_END)
        launch("cuLaunchKernel", kernel.function, programs, 1, 1, 32 * WARPS, 1, 1, about.shared, stream, None, extra)

    return launch_packed
