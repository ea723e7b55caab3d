"""One device, no ranks: the kernels, and which of them serves a problem.

`protocol.py` defines what a kernel offers; each module of the table ends with one, called KERNEL. `select` returns the
first kernel of the table that does not refuse the problem. If all refuse, its error lists every reason.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Problem:
    """The properties of a call that the choice between kernels depends on."""

    device: str  # "cpu", "cuda", "tpu"
    dtype: str  # "float32", "bfloat16", ...
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    softcap: bool = False
    tiles: bool = False  # every step is a few full or causal rectangles, known before the program runs
    known: bool = True  # the intervals are known before the program runs
    arch: tuple[int, int] | None = None  # a GPU's compute capability, or a TPU's generation
    queries: int | None = None  # queries of a batch row, if known

    def __str__(self) -> str:
        dims = f"{self.heads} query and {self.kv_heads} key heads of {self.head_dim}, values of {self.value_dim}"
        return f"{dims}, in {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Kernel:
    """An entry of the table. Its module is imported on first use; ":NAME" after it names a value other than KERNEL."""

    name: str
    module: str
    named: tuple[str, ...] = ()  # devices on which "auto" skips it, since it is slow there or cannot run
    tiles: bool = False  # runs full and causal rectangles only
    rounds: bool = False  # the results for a rectangle have the dtype of the inputs

    def load(self) -> Any:
        """The kernel: a TorchKernel, a JaxKernel or a LinearKernel, depending on the table."""
        module, _, name = self.module.partition(":")
        return getattr(import_module(module), name or "KERNEL")

    def refuses(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, or None when it can."""
        try:
            found = self.load()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except Exception as error:  # a broken package must not break the other kernels
            return f"cannot be imported: {type(error).__name__}: {error}"
        why: str | None = found.refuses(problem)
        return why


# In order of preference. On an H200 (benchmarks/kernels-h200.jsonl) cuDNN is faster than our kernel for a few
# rectangles, by 16 to 30% at head dim 128 and 1 to 15% at 64, and slower for packed documents, by 3 and 16%. But a ring
# step with it needs a separate merge, and its backward three times the memory for a moment. So "auto" takes our kernel
# for every mask, and vendor kernels run if they are named.
TABLE = (
    Kernel("decode", "ringattn.kernels.triton.decode", named=("cpu",)),
    Kernel("triton", "ringattn.kernels.triton", named=("cpu",)),
    Kernel("cudnn", "ringattn.kernels.vendor.cudnn", named=("cpu",), tiles=True, rounds=True),
    Kernel("fa4", "ringattn.kernels.vendor.fa4", named=("cpu",), tiles=True, rounds=True),
    Kernel("flash", "ringattn.kernels.vendor.flash", named=("cpu",), tiles=True, rounds=True),
    Kernel("sdpa_cpu", "ringattn.kernels.vendor.sdpa_cpu", tiles=True),
    Kernel("tiled", "ringattn.kernels.tiled", named=("cuda",)),
    Kernel("reference", "ringattn.kernels.reference", named=("cuda",)),
)


def is_narrow(impl: str) -> bool:
    """Whether gradients have, and travel in, the dtype of the inputs on all ranks. Not with "auto", which may choose
    different kernels on different ranks.
    """
    return any(kernel.rounds and kernel.name == impl for kernel in TABLE)


def refusals(problem: Problem, table: tuple[Kernel, ...] = TABLE) -> dict[str, str | None]:
    """For each kernel of the table the reason why it refuses this problem, or None if it serves it."""
    return {kernel.name: kernel.refuses(problem) for kernel in table}


@lru_cache(maxsize=1024)
def select(problem: Problem, impl: str = "auto", table: tuple[Kernel, ...] = TABLE) -> Kernel:
    """The kernel called `impl`, or with "auto" the first of the table that serves the problem and is fast there."""
    if impl != "auto" and impl not in (k.name for k in table):
        raise ValueError(f"kernel={impl!r}: choose one of auto, {', '.join(k.name for k in table)}")
    candidates = [k for k in table if k.name == impl or (impl == "auto" and problem.device not in k.named)]
    for kernel in candidates:  # kernels after the chosen one are not imported
        if kernel.refuses(problem) is None:
            return kernel
    reasons = refusals(problem, table)
    why = [f"{k.name}: {reasons[k.name]}" for k in candidates]
    others = [k for k in table if reasons[k.name] is None]
    slow = " (slow on this device)"
    why += [f"kernel={k.name!r} would serve{slow * (problem.device in k.named)}" for k in others]
    raise NotImplementedError(f"no kernel serves {problem}: {'; '.join(why)}")
