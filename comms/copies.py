"""Several copies as one kernel: the driver starts one after the other, which takes longer than a small copy does.

Beside another kernel each of the driver's copies within a GPU also waits for multiprocessors anew; these wait once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

COPIES_A_LAUNCH = 32  # copies of one launch
WORDS, WARPS = 8192, 8  # of 8 bytes, which a program copies at once, and its warps
COMPILED: dict[tuple[torch.device, int], Any] = {}  # by how many copies; Triton itself would look at every number


@triton.jit
def copy_kernel(copies, N: tl.constexpr, WORDS: tl.constexpr):
    """Copies are cut into chunks of WORDS words, which are numbered over all. Of n programs each copies every n-th.

    The last number of a copy is 16 times that of the chunks up to its end.
    """
    program, n, first = tl.program_id(0), tl.num_programs(0), 0
    for i in tl.static_range(N):
        end = copies[4 * i + 3] // 16
        to = tl.multiple_of(copies[4 * i].to(tl.pointer_type(tl.int64)), 16)
        source = tl.multiple_of(copies[4 * i + 1].to(tl.pointer_type(tl.int64)), 16)
        words = copies[4 * i + 2] // 16 * 2  # two words at once
        chunk = first + (program - first % n + n) % n
        while chunk < end:
            at = (chunk - first) * WORDS + tl.arange(0, WORDS)
            tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)
            chunk += n
        first = end


def copy_all(copies: Sequence[tuple[int, int, int]], device: torch.device, programs: int) -> None:
    """Launch copies (to, source, bytes) on the current stream, with so many programs at most.

    The compiler sees of each copy the same: 16 divides its numbers.
    """
    for start in range(0, len(copies), COPIES_A_LAUNCH):
        some = copies[start : start + COPIES_A_LAUNCH]
        numbers: list[int] = []
        count, end = 1 << (len(some) - 1).bit_length(), 0
        for to, source, size in some:
            end += -(-size // (8 * WORDS))
            numbers += [to, source, size, 16 * end]
        numbers += numbers[-4:] * (count - len(some))  # with no chunks
        given, kernel = (tuple(numbers), count, WORDS), COMPILED.get((device, count))
        grid = min(end, programs), 1, 1
        if kernel is None:
            COMPILED[device, count] = copy_kernel[grid](*given, num_warps=WARPS)  # None in Triton's interpreter
        else:
            kernel[grid](*given)
