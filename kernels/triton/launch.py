"""Launches kernels with less work for the host.

Triton inspects every argument of every launch to find the compiled kernel, which takes longer than a small kernel runs.
Here compiled kernels are cached, and found by what the caller knows of the arguments.
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
    """kernel[grid](*tensors, *others, **options) on the device of the tensors; a grid has three numbers.

    `kind` must differ wherever the compiled kernel may: in dtypes, device, constants, options, and `kind_of` strides
    and dims. Arguments in `do_not_specialize` can be left out. What the compiler sees of addresses is added here:
    whether 16 divides them, and on AMD whether offsets fit into 32 bits.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton uses the current device
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, others, kind, **options)
    kind = id(kernel), kind, *[x.data_ptr() % 16 for x in tensors]
    if torch.version.hip:
        kind += tuple([x.untyped_storage().size() > 2147483647 for x in tensors])
    compiled = COMPILED.get(kind)
    if compiled is None:
        COMPILED[kind] = kernel[grid](*tensors, *others, **options)  # None in the interpreter
    else:
        compiled[grid](*tensors, *others)


def kind_of(numbers: Iterable[Any]) -> tuple[Any, ...]:
    """What the compiler specializes on, for numbers and tuples of numbers: of an int, whether it is 1, whether 16
    divides it, and whether it needs 64 bits; else the type.
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
    """The smallest power of two that is at least n. Triton's own function takes the host microseconds."""
    return 1 << (n - 1).bit_length()
