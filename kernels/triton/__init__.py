"""Flash attention in Triton: one kernel family over intervals, for GPUs of several makers, and for CPUs interpreted."""

from ringattn.kernels import Problem
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.triton.backward import attend_backward, halves, rounded, row_delta
from ringattn.kernels.triton.forward import attend
from ringattn.kernels.triton.table import WIDEST

__all__ = ["KERNEL", "attend", "attend_backward", "refuses", "row_delta"]


def refuses(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem, or None when they can."""
    if (reason := cannot_run(problem)) is not None:
        return reason
    if max(problem.head_dim, problem.value_dim) > WIDEST:
        return f"head dim {problem.head_dim}, value dim {problem.value_dim}: at most {WIDEST}"
    return None


def cannot_run(problem: Problem) -> str | None:
    """Why no Triton kernel serves the problem's device or dtype, or None."""
    if problem.device not in ("cuda", "cpu"):
        return f"no Triton backend for device {problem.device!r}"
    if problem.device == "cpu" and not interpreting():
        return "Triton runs on GPUs; on a CPU only its interpreter does (TRITON_INTERPRET=1), for tests"
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return f"dtype {problem.dtype}: float16, bfloat16 or float32"
    return None


def interpreting() -> bool:
    """Whether these kernels were made for Triton's interpreter, which was settled when triton was imported."""
    from triton.runtime.jit import JITFunction

    from ringattn.kernels.triton.forward import forward_kernel

    return not isinstance(forward_kernel, JITFunction)


KERNEL = TorchKernel(attend, attend_backward, refuses, row_delta, rounded, halves)
