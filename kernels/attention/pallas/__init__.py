"""The kernels for JAX arrays, and which of them serves a problem."""

from ringattn import kernels
from ringattn.kernels import Kernel, Problem

__all__ = ["TABLE", "Kernel", "Problem", "select"]

# The order is the order of preference.
TABLE = (
    Kernel("splash", "ringattn.kernels.attention.pallas.splash", skipped_on=("cpu", "cuda")),
    Kernel(
        "cudnn",
        "ringattn.kernels.attention.libraries.jax_cudnn",
        skipped_on=("cpu", "tpu"),
        rectangles=True,
        low_precision=True,
    ),
    Kernel("reference", "ringattn.kernels.attention.reference:JAX"),
)


def select(problem: Problem, impl: str = "auto") -> Kernel:
    """`ringattn.kernels.select` from this table."""
    return kernels.select(problem, impl, TABLE)
