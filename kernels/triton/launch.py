"""Launching a kernel again.

Triton looks at every argument of every launch to find what it has compiled for it, which costs the host more than a
small kernel takes. A call of a kind that was seen before goes straight to the compiled kernel.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COMPILED: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor, ...], others: tuple[Any, ...],
    kind: tuple[Any, ...], **options: Any,
) -> None:  # fmt: skip
    """kernel[grid](*tensors, *others, **options) on their device. `kind` differs where the compiler might see it.

    That is dtypes, devices, constants, options, and `kind_of` strides and dims. What it sees of the memory is asked
    here: whether addresses are multiples of 16, and for AMD whether offsets fit 32 bits. Counts that it was told not to
    look at need not be said. A grid is three numbers.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, others, kind, **options)
    kind = id(kernel), kind, *[x.data_ptr() % 16 for x in tensors]
    if torch.version.hip:
        kind += tuple([x.untyped_storage().size() > 2147483647 for x in tensors])
    compiled = COMPILED.get(kind)
    if compiled is None:
        COMPILED[kind] = kernel[grid](*tensors, *others, **options)  # None in the interpreter, which compiles nothing
    else:
        compiled[grid](*tensors, *others)


def kind_of(numbers: Iterable[Any]) -> tuple[Any, ...]:
    """What the compiler may see of numbers and of tuples of them: of a whole one whether it is 1, whether 16 divides
    it, and whether it takes 64 bits.
    """
    return tuple([
        (1 if x == 1 else 2 if x % 16 else 0) + (4 if x > 2147483647 else 0) if type(x) is int
        else kind_of(x) if type(x) is tuple
        else type(x)
        for x in numbers
    ])  # fmt: skip


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least one that is not below n. (Triton's own functions of numbers take the host microseconds.)"""
    return 1 << (n - 1).bit_length()
