"""Linear attention and the delta rule on one device: `maps.py` says what a kernel computes, and of what."""

from dataclasses import dataclass

from ringattn import kernels
from ringattn.kernels import Kernel
from ringattn.kernels.protocol import LinearKernel


@dataclass(frozen=True)
class LinearProblem(kernels.Problem):
    """The properties of a call of linear attention; heads and kv_heads are its value and key heads."""

    beta: bool = False  # the delta rule


TABLE = (
    Kernel("triton", "ringattn.kernels.linear.triton.delta", skipped_on=("cpu",)),
    Kernel("chunkwise", "ringattn.kernels.linear.chunkwise"),
)


def select(problem: LinearProblem, impl: str = "auto") -> LinearKernel:
    """The kernel of this table that `ringattn.kernels.select` takes, loaded: that of the problem's rule."""
    kernel: LinearKernel = kernels.select(problem, impl, TABLE).load()
    return kernel if problem.beta or kernel.gated is None else kernel.gated
