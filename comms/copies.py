"""Many small copies within a GPU as one kernel: the driver takes longer to start a small copy than that takes."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ringattn.kernels.triton import Launch, cdiv, kind_of, power_of_2

MOST = 32  # copies of one launch
WORDS = 2048  # of 8 bytes, which a program copies
Copy = tuple[int, int, int]  # to, source, and bytes: 16 divides them


@triton.jit
def copy_kernel(copies, N: tl.constexpr, WORDS: tl.constexpr):
    """A program finds its copy among all by the last numbers of each: 16 times how many programs end with it."""
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
    """Launch the copies on the current stream. None of their numbers tells the compiler more than that of any other."""
    for start in range(0, len(copies), MOST):
        some = copies[start : start + MOST]
        count, numbers, end = power_of_2(len(some)), [], 0
        for to, source, size in some:
            end += cdiv(size, 8 * WORDS)
            numbers += [to, source, size, 16 * end]
        numbers += numbers[-4:] * (count - len(some))  # with no program
        given = tuple(numbers), count, WORDS
        Launch(copy_kernel, (end, 1, 1), device, given, (kind_of(numbers), count))()
