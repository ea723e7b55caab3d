"""What all Triton kernels share: whether they can run here, and launches with less work for the host.

Triton inspects every argument of every launch to find the compiled kernel, which takes longer than a small kernel runs.
Here a `Launch` is a kernel with all of its arguments but the tensors. It is made once and cached by its caller; what
is left for each launch is to look at the addresses.
"""

import contextvars
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import count
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from ringattn.kernels import Problem

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

Grid = tuple[int, int, int]
Start = Callable[[Grid, tuple[Any, ...]], None]
ON_AMD = torch.version.hip is not None
current_gpu = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # asks without setting CUDA up

KINDS: dict[Any, int] = {}  # a number for each kind of launch
NUMBERS = count()  # not the length of KINDS: two threads could read the same one, for two kinds
COMPILED: dict[Any, Start | None] = {}  # by kind, or kind and addresses; None: Triton decides on each launch
COMPILING = Lock()  # one thread at a time compiles, or interprets: the interpreter has one state for all threads


class Launch:
    """kernel[grid](*tensors, *others, **options), for tensors on one device.

    `kind` must differ wherever the compiled kernel may: in dtypes, constants, and `kind_of` strides and dims. Arguments
    in `do_not_specialize` can be left out. What the compiler sees of addresses is added in each launch: whether 16
    divides them, and on AMD whether offsets fit into 32 bits. `descriptors`: the kernel makes tensor descriptors (TMA).
    """

    def __init__(
        self, kernel: Any, grid: Grid, device: torch.device, others: tuple[Any, ...], kind: Any,
        descriptors: bool = False, **options: Any,
    ):  # fmt: skip
        self.kernel, self.grid, self.device, self.others, self.options = kernel, grid, device, others, options
        self.kind = KINDS.setdefault((id(kernel), device, kind, *options.items()), next(NUMBERS))
        self.gpu = device.index if device.type == "cuda" else None
        self.empty = 0 in grid
        self.memory = memory_on(device) if descriptors else None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch by addresses: of a tensor Triton would ask the driver whether a GPU can read it, once an argument."""
        if self.empty:
            return
        if self.gpu is not None and self.gpu != current_gpu():  # Triton uses the current device
            with torch.cuda.device(self.device):
                return self(*tensors)
        addresses = [x.data_ptr() for x in tensors]
        kind: Any = self.kind
        if ON_AMD or any([at % 16 for at in addresses]):
            kind = kind, *[at % 16 for at in addresses]
        if ON_AMD:
            kind = *kind, *[x.untyped_storage().size() > 2147483647 for x in tensors]
        start = COMPILED.get(kind)
        if start is not None:
            start(self.grid, (*addresses, *self.others))
        else:
            self.compile(kind, tensors)

    def compile(self, kind: Any, tensors: tuple[Tensor, ...]) -> None:
        """Launch as Triton does, which compiles the kernel, and keep what it found for later launches of this kind."""
        launch = partial(self.kernel[self.grid], *tensors, *self.others, **self.options)
        with COMPILING:
            compiled = launch() if self.memory is None else self.memory.copy().run(launch)
        COMPILED[kind] = None if compiled is None else start_of(compiled, self.device, self.memory)


@lru_cache
def memory_on(device: torch.device) -> contextvars.Context:
    """A context in which Triton allocates what kernels need beside their arguments, as those with descriptors do.

    Launches run in a copy of it, so that an allocator of the caller stays as it was, and threads do not meet.
    """
    context = contextvars.Context()
    context.run(triton.set_allocator, lambda size, _align, _stream: torch.empty(size, dtype=torch.int8, device=device))
    return context


def start_of(compiled: Any, device: torch.device, memory: contextvars.Context | None = None) -> Start:
    """A function that launches a compiled kernel on the current stream, without what Triton does for profilers."""
    compiled[1, 1, 1]  # loads it
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, runtime, index = triton.runtime.driver.active.get_current_stream, knobs.runtime, device.index

    def start(grid: Grid, args: tuple[Any, ...]) -> None:
        hook = runtime.launch_enter_hook
        if hook is not None and getattr(hook, "calls", True):  # a profiler listens
            compiled[grid](*args)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *args)

    if memory is None:
        return start
    copy = memory.copy
    return lambda grid, args: copy().run(start, grid, args)


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


class Kept(dict[Any, Any]):
    """A cache of launches, emptied when it has too many."""

    def keep(self, key: Any, launch: Any) -> Any:
        if len(self) >= LAUNCHES:
            self.clear()
        self[key] = launch
        return launch


LAUNCHES = 4096  # that are kept
READY = Kept()  # by kernel, programs, tile sizes, numbers and dtypes


def launch(
    kernel: Any, programs: tuple[int, ...], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], config: Any = None,
    **sizes: Any,
) -> None:  # fmt: skip
    """kernel[programs](*tensors, *numbers, **sizes) with the warps, stages and registers of `config`."""
    dtypes = tuple([x.dtype for x in tensors])
    same = id(kernel), programs, tensors[0].device, config, numbers, dtypes, *sizes.values()
    start = READY.get(same)
    if start is None:
        start = READY.keep(same, ready(kernel, programs, tensors[0].device, dtypes, numbers, config, **sizes))
    start(*tensors)


def ready(
    kernel: Any, programs: tuple[int, ...], device: torch.device, dtypes: tuple[torch.dtype, ...],
    numbers: tuple[Any, ...], config: Any = None, **sizes: Any,
) -> Launch:  # fmt: skip
    """A launch of `kernel` on tensors of these dtypes, with the warps, stages and registers of `config`."""
    constants = tuple([sizes[name] for name in kernel.arg_names[len(dtypes) + len(numbers) :]])
    kind = dtypes, kind_of(numbers), constants
    options: dict[str, Any] = {"descriptors": sizes.get("TMA", False)}
    if config is not None:
        options |= {"num_warps": config.warps, "num_stages": config.stages}
        if registers := getattr(config, "registers", None):
            options["maxnreg"] = registers
    x, y, z = (*programs, 1, 1)[:3]
    return Launch(kernel, (x, y, z), device, (*numbers, *constants), kind, **options)


@triton.jit
def cells(
    ptr, first, stop, column, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The addresses of the tile that starts at (first, column), and which of them lie inside a matrix of COLS columns.

    The tile's own offset takes 64 bits.
    """
    rows = tl.arange(0, ROWS)
    cols = column + tl.arange(0, WIDTH)
    at = ptr + tl.cast(first, tl.int64) * stride_row + rows[:, None] * stride_row + cols[None, :] * stride_col
    inside = (first + rows < stop)[:, None]
    if COLS % WIDTH != 0:
        inside = inside & (cols < COLS)[None, :]
    return at, inside


@lru_cache
def architecture(device: torch.device) -> str:
    """The GPU family whose entries this device uses; "cpu" is Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return "gfx942"
    return {9: "sm90", 10: "sm100"}.get(torch.cuda.get_device_capability(device)[0], "sm80")


def cannot_run(problem: Problem) -> str | None:
    """Why no Triton kernel can serve the problem's device or dtype, or None."""
    if problem.device not in ("cuda", "cpu"):
        return f"Triton has no backend for device {problem.device!r}"
    if problem.device == "cpu" and isinstance(tl.cdiv, JITFunction):  # decided when triton is imported
        return "Triton runs on GPUs, and on a CPU only in its interpreter (TRITON_INTERPRET=1), for tests"
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return f"takes float16, bfloat16 and float32, not {problem.dtype}"
    return None
