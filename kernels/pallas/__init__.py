"""The implementations of `attend` for JAX arrays, and which of them serves a problem."""

from ringattn.kernels import Kernel, Problem

__all__ = ["TABLE", "Kernel", "Problem", "refusals", "select"]

# The order is the order of preference.
TABLE = (
    Kernel("splash", "ringattn.kernels.pallas.splash", told=("cpu", "cuda")),
    Kernel("reference", "ringattn.kernels.reference"),
)


def refusals(problem: Problem) -> dict[str, str | None]:
    """Every kernel of the table, with its reason to refuse this problem (None: it would serve)."""
    return {kernel.name: kernel.refuses(problem) for kernel in TABLE}


def select(problem: Problem, impl: str = "auto") -> Kernel:
    """The kernel called `impl`, or with "auto" the first of the table that serves the problem and is not slow there."""
    if impl != "auto" and impl not in (k.name for k in TABLE):
        raise ValueError(f"kernel={impl!r}: for JAX arrays choose one of auto, {', '.join(k.name for k in TABLE)}")
    reasons = refusals(problem)
    asked = [k for k in TABLE if k.name == impl or (impl == "auto" and problem.device not in k.told)]
    for kernel in asked:
        if reasons[kernel.name] is None:
            return kernel
    why = [f"{k.name}: {reasons[k.name]}" for k in asked]
    why += [f"kernel={k.name!r} would serve" for k in TABLE if reasons[k.name] is None]
    raise NotImplementedError(f"no kernel serves {problem}: {'; '.join(why)}")
