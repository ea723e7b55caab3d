"""Many small copies within a GPU as one kernel: the driver takes longer to start a small copy than that takes."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

MOST = 32  # copies of one launch
WORDS = 2048  # of 8 bytes, which a program copies
Copy = tuple[int, int, int]  # to, source, and bytes: 16 divides them
COMPILED: dict[tuple[torch.device, int], Any] = {}  # by how many copies; Triton itself would look at every number


@triton.jit
def copy_kernel(copies, N: tl.constexpr, WORDS: tl.constexpr):
    """A program copies a part of one copy. The last number of each is 16 times that of the programs up to its end."""
    program, first = tl.program_id(0), 0
    for i in tl.static_range(N):
        end = copies[4 * i + 3] // 16
        if (program >= first) & (program < end):
            to = tl.multiple_of(copies[4 * i].to(tl.pointer_type(tl.int64)), 16)
            source = tl.multiple_of(copies[4 * i + 1].to(tl.pointer_type(tl.int64)), 16)
            at = (program - first) * WORDS + tl.arange(0, WORDS)
            here = at < copies[4 * i + 2] // 16 * 2  # two words at once
            tl.store(to + at, tl.load(source + at, mask=here), mask=here)
        first = end


def copy_all(copies: Sequence[Copy], device: torch.device) -> None:
    """Launch the copies on the current stream. The compiler sees of each the same: 16 divides its numbers."""
    for start in range(0, len(copies), MOST):
        some = copies[start : start + MOST]
        numbers: list[int] = []
        count, end = 1 << (len(some) - 1).bit_length(), 0
        for to, source, size in some:
            end += -(-size // (8 * WORDS))
            numbers += [to, source, size, 16 * end]
        numbers += numbers[-4:] * (count - len(some))  # with no program
        given, kernel = (tuple(numbers), count, WORDS), COMPILED.get((device, count))
        if kernel is None:
            COMPILED[device, count] = copy_kernel[(end,)](*given)  # None in Triton's interpreter
        else:
            kernel[end, 1, 1](*given)
