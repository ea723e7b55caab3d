"""One device, no ranks: the kernels, and which of them serves a problem.

`attention/` and `linear/` hold the kernels; what they are given and return stands here. `protocol.py` defines what a
kernel offers; each module of the table ends with one, called KERNEL. `select` returns the first kernel of the table
that does not refuse the problem. If all refuse, its error lists every reason.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from ringattn.kernels import rates


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
    rectangles: bool = False  # every step is a few full or causal rectangles, known before the program runs
    static: bool = True  # the intervals are known before the program runs
    arch: tuple[int, int] | None = None  # a GPU's compute capability, or a TPU's generation
    queries: int | None = None  # queries of a batch row, if known
    deterministic: bool = False  # the bits of all results must be the same in every run
    rows: int | None = None  # batch rows x queries x heads of the device, if known
    mask: str = "long"  # of `rates.py`, where the steps are not few rectangles

    def rate(self, kernel: str, backward: bool) -> float:
        """The measured rate of a kernel for this problem, 0 if there is none."""
        if self.arch is None:
            return 0.0
        mask, dims = "rectangles" if self.rectangles else self.mask, (self.head_dim, self.value_dim)
        either = (rates.key_of(kernel, self.arch, mask, each, self.softcap) for each in (dims, (max(dims),) * 2))
        return next((rates.RATES[key][backward] for key in either if key in rates.RATES), 0.0)

    def __str__(self) -> str:
        dims = f"{self.heads} query and {self.kv_heads} key heads of {self.head_dim}, values of {self.value_dim}"
        return f"{dims}, in {self.dtype} on {self.device}"


@dataclass(frozen=True)
class Kernel:
    """An entry of the table. Its module is imported on first use; ":NAME" after it names a value other than KERNEL."""

    name: str
    module: str
    skipped_on: tuple[str, ...] = ()  # devices on which "auto" skips it, since it is slow there or cannot run
    first: bool = False  # "auto" tries it before all others, whatever their rates
    rectangles: bool = False  # runs full and causal rectangles only
    low_precision: bool = False  # partials and gradients have the dtype of the inputs

    def load(self) -> Any:
        """The kernel: a TorchKernel, a JaxKernel or a LinearKernel, depending on the table."""
        module, _, name = self.module.partition(":")
        return getattr(import_module(module), name or "KERNEL")

    def refuses(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, or None when it can."""
        return lacking(self) or self.load().refuses(problem)


@lru_cache(maxsize=64)  # a failed import takes milliseconds, and each plan asks
def lacking(kernel: Kernel) -> str | None:
    """Why its module cannot be imported, or None when it can."""
    try:
        kernel.load()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken package must not break the other kernels
        return f"cannot be imported: {type(error).__name__}: {error}"
    return None


# In order of preference where no rates are known. Where they are (`rates.py`), "auto" takes the fastest.
TABLE = (
    Kernel("decode", "ringattn.kernels.attention.triton.decode", skipped_on=("cpu",), first=True),
    Kernel("triton", "ringattn.kernels.attention.triton", skipped_on=("cpu",)),
    Kernel(
        "cudnn", "ringattn.kernels.attention.libraries.cudnn", skipped_on=("cpu",), rectangles=True, low_precision=True
    ),
    Kernel("fa4", "ringattn.kernels.attention.libraries.fa4", skipped_on=("cpu",), low_precision=True),
    Kernel("sdpa_cpu", "ringattn.kernels.attention.libraries.sdpa_cpu", rectangles=True),
    Kernel("tiled", "ringattn.kernels.attention.tiled", skipped_on=("cuda",)),
    Kernel("reference", "ringattn.kernels.attention.reference", skipped_on=("cuda",)),
)
BY_NAME = {kernel.name: kernel for kernel in TABLE}


@lru_cache(maxsize=1024)
def select(problem: Problem, impl: str = "auto", table: tuple[Kernel, ...] = TABLE, backward: bool = False) -> Kernel:
    """The kernel called `impl`, or with "auto" the fastest that serves the problem, forward or backward."""
    candidates = [k for k in table if impl in ("auto", k.name)]
    if not candidates:
        raise ValueError(f"kernel={impl!r}: choose one of auto, {', '.join(k.name for k in table)}")
    if impl == "auto":
        candidates = [k for k in candidates if problem.device not in k.skipped_on]
        short = problem.rows is not None and problem.rows < rates.VENDOR_ROWS
        candidates.sort(key=lambda k: (not k.first, 0.0 if short else -problem.rate(k.name, backward)))
    for kernel in candidates:  # kernels after the chosen one are not imported
        if kernel.refuses(problem) is None:
            return kernel
    reasons = {kernel.name: kernel.refuses(problem) for kernel in table}
    why = [f"{k.name}: {reasons[k.name]}" for k in candidates]
    others = [k for k in table if reasons[k.name] is None]
    slow = " (slow on this device)"
    why += [f"kernel={k.name!r} would serve{slow * (problem.device in k.skipped_on)}" for k in others]
    raise NotImplementedError(f"no kernel serves {problem}: {'; '.join(why)}")


INSTALL = {"fa4": "pip install 'ringattn[fa4]'"}


def gain(missing: Kernel, problem: Problem, chosen: str) -> str | None:
    """What installing a kernel's package would gain over the chosen kernel, if both are measured and it is faster."""
    if missing.name not in INSTALL or "not installed" not in (lacking(missing) or ""):
        return None
    each = [[problem.rate(name, backward) for backward in (False, True)] for name in (missing.name, chosen)]
    if not all(map(all, each)):
        return None
    forward, backward = (theirs / mine for theirs, mine in zip(*each, strict=True))
    if max(forward, backward) < 1.05:
        return None
    how = f"{forward:.2f} x as fast forward, {backward:.2f} x backward"
    return f"not installed; {INSTALL[missing.name]} makes long sequences {how}"
