"""Flash attention over intervals in Triton, for NVIDIA and AMD GPUs, and for CPUs in Triton's interpreter."""

from ringattn.kernels import Problem
from ringattn.kernels.attention.triton.backward import flash_backward
from ringattn.kernels.attention.triton.forward import attend
from ringattn.kernels.attention.triton.stats import prepare, row_delta
from ringattn.kernels.attention.triton.table import MAX_DIM
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.triton import cannot_run

__all__ = ["KERNEL", "attend", "refuses", "row_delta"]


def refuses(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem, or None when they can."""
    if (reason := cannot_run(problem)) is not None:
        return reason
    if max(problem.head_dim, problem.value_dim) > MAX_DIM:
        return f"takes dims up to {MAX_DIM}, got head_dim={problem.head_dim}, value_dim={problem.value_dim}"
    return None


KERNEL = TorchKernel(attend, flash_backward, refuses, prepare, separable=True)
