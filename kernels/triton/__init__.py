"""Flash attention over intervals in Triton, for NVIDIA and AMD GPUs, and for CPUs in Triton's interpreter."""

from ringattn.kernels import Problem
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.triton.backward import attend_backward, flash_backward, prepare, row_delta
from ringattn.kernels.triton.forward import attend
from ringattn.kernels.triton.table import WIDEST

__all__ = ["KERNEL", "attend", "attend_backward", "refuses", "row_delta"]


def refuses(problem: Problem) -> str | None:
    """Why these kernels cannot serve the problem, or None when they can."""
    if (reason := cannot_run(problem)) is not None:
        return reason
    if max(problem.head_dim, problem.value_dim) > WIDEST:
        return f"takes dims up to {WIDEST}, got head_dim={problem.head_dim}, value_dim={problem.value_dim}"
    return None


def cannot_run(problem: Problem) -> str | None:
    """Why no Triton kernel can serve the problem's device or dtype, or None."""
    if problem.device not in ("cuda", "cpu"):
        return f"Triton has no backend for device {problem.device!r}"
    if problem.device == "cpu" and not interpreting():
        return "Triton runs on GPUs, and on a CPU only in its interpreter (TRITON_INTERPRET=1), for tests"
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return f"takes float16, bfloat16 and float32, not {problem.dtype}"
    return None


def interpreting() -> bool:
    """Whether these kernels run in Triton's interpreter, which is decided when triton is imported."""
    from triton.runtime.jit import JITFunction

    from ringattn.kernels.triton.forward import forward_kernel

    return not isinstance(forward_kernel, JITFunction)


KERNEL = TorchKernel(attend, flash_backward, refuses, prepare, parted=True)
