"""Linear attention and the delta rule on one device: `maps.py` says what a kernel computes, and of what."""

from dataclasses import dataclass

from ringattn import kernels
from ringattn.kernels import Kernel


@dataclass(frozen=True)
class LinearProblem(kernels.Problem):
    """The properties of a call of linear attention; heads and kv_heads are its value and key heads."""

    beta: bool = False  # the delta rule


TABLE = (
    Kernel("triton", "ringattn.kernels.linear.triton.delta", named=("cpu",)),
    Kernel("chunkwise", "ringattn.kernels.linear.chunkwise"),
)


def select(problem: LinearProblem, impl: str = "auto") -> Kernel:
    """`ringattn.kernels.select` from this table."""
    return kernels.select(problem, impl, TABLE)
