"""One device, no ranks: the implementations of `attend`, and which of them serves a problem.

Every implementation has the same two functions, attend and attend_backward, with the signatures of `reference.py`,
and must equal it. `select` takes the first one of the table that does not refuse, and can say why the others did.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    arch: tuple[int, int] | None = None  # a GPU's compute capability


@dataclass(frozen=True)
class Kernel:
    """A name in the table; its module is imported only when it is asked."""

    name: str
    module: str

    def load(self) -> Any:
        return import_module(self.module)

    def refuses(self, problem: Problem) -> str | None:
        """Why this kernel cannot serve the problem, or None when it can."""
        try:
            module = self.load()
        except ImportError as error:
            return f"{error.name or error} is not installed"
        check: Callable[[Problem], str | None] | None = getattr(module, "refuses", None)
        return check(problem) if check else None


# The order is the order of preference.
TABLE = (
    Kernel("tiled", "ringattn.kernels.tiled"),
    Kernel("reference", "ringattn.kernels.reference"),
)


def refusals(problem: Problem) -> dict[str, str | None]:
    """Every kernel of the table, with its reason to refuse this problem (None: it would serve)."""
    return {kernel.name: kernel.refuses(problem) for kernel in TABLE}


def select(problem: Problem, impl: str = "auto") -> Kernel:
    """The kernel called `impl`, or with "auto" the first of the table that serves the problem."""
    named = [k for k in TABLE if impl in ("auto", k.name)]
    if not named:
        raise ValueError(f"kernel={impl!r}: choose one of auto, {', '.join(k.name for k in TABLE)}")
    reasons = {}
    for kernel in named:
        reason = kernel.refuses(problem)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    others = (
        ""
        if impl == "auto"
        else "".join(f"; {k.name} would serve" for k in TABLE if k.name != impl and k.refuses(problem) is None)
    )
    raise NotImplementedError(
        f"no kernel serves {problem}: " + "; ".join(f"{n}: {why}" for n, why in reasons.items()) + others
    )
