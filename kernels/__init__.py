"""One device, no ranks: the implementations of `attend`, and which of them serves a problem.

`protocol.py` says what an implementation offers; each module of the table ends with one, called KERNEL.

`select` takes the first one of the table that does not refuse, and can say why the others did.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to run, as far as the choice between kernels depends on it."""

    device: str  # "cpu", "cuda", "tpu"
    dtype: str  # "float32", "bfloat16", ...
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    softcap: bool = False
    tiles: bool = False  # every step is a few full or causal rectangles, known before anything runs
    known: bool = True  # the intervals are known before anything runs, whatever they are
    arch: tuple[int, int] | None = None  # a GPU's compute capability
    queries: int | None = None  # how many a batch row has, where that is known

    def __str__(self) -> str:
        dims = f"{self.heads} query and {self.kv_heads} key heads of {self.head_dim}, values of {self.value_dim}"
        return f"{dims}, in {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Kernel:
    """An entry of the table. Its module is imported when it is needed; ":NAME" behind it names a value but KERNEL."""

    name: str
    module: str
    named: tuple[str, ...] = ()  # devices on which it runs only if it is named: it is slow there, or cannot run
    tiles: bool = False  # it runs full and causal rectangles only
    rounds: bool = False  # what it finds of a rectangle has the dtype of the inputs

    def load(self) -> Any:
        """Its functions: a TorchKernel, a JaxKernel or a LinearKernel, by the table it stands in."""
        module, _, name = self.module.partition(":")
        return getattr(import_module(module), name or "KERNEL")

    def refuses(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, or None when it can."""
        try:
            found = self.load()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        except Exception as error:  # one broken package is no reason that the others do not serve
            return f"cannot be imported: {type(error).__name__}: {error}"
        why: str | None = found.refuses(problem)
        return why


# The order is the order of preference. On an H200 (benchmarks/kernels-h200.jsonl) cuDNN is faster than ours on what is
# few rectangles, by 16 to 30% at head dim 128 and 1 to 15% at 64, and slower on packed documents, by 3 and 16%. A ring
# step pays a merge besides, and the backward three times the memory in passing: so auto takes ours, for every mask
# alike, and the vendors run when they are named.
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
    """Whether what every rank's kernel finds has the inputs' dtype, so that gradients travel as such: "auto" may differ
    from rank to rank.
    """
    return any(kernel.rounds and kernel.name == impl for kernel in TABLE)


def refusals(problem: Problem, table: tuple[Kernel, ...] = TABLE) -> dict[str, str | None]:
    """Every kernel of the table, with its reason to refuse this problem (None: it would serve)."""
    return {kernel.name: kernel.refuses(problem) for kernel in table}


@lru_cache(maxsize=1024)
def select(problem: Problem, impl: str = "auto", table: tuple[Kernel, ...] = TABLE) -> Kernel:
    """The kernel called `impl`, or with "auto" the first of the table that serves the problem and is not slow there."""
    if impl != "auto" and impl not in (k.name for k in table):
        raise ValueError(f"kernel={impl!r}: choose one of auto, {', '.join(k.name for k in table)}")
    asked = [k for k in table if k.name == impl or (impl == "auto" and problem.device not in k.named)]
    for kernel in asked:  # one after the other: what comes behind the chosen one is not even imported
        if kernel.refuses(problem) is None:
            return kernel
    reasons = refusals(problem, table)
    why = [f"{k.name}: {reasons[k.name]}" for k in asked]
    others = [k for k in table if reasons[k.name] is None]
    slow = " (slow on this device)"
    why += [f"kernel={k.name!r} would serve{slow * (problem.device in k.named)}" for k in others]
    raise NotImplementedError(f"no kernel serves {problem}: {'; '.join(why)}")
