"""Vendor kernels with our signature: a step is cut into full and causal rectangles, with one vendor call for each.

Each file is a vendor: which problems it refuses, and `forward` and `backward` of one rectangle. `rectangles.py` runs
them all and merges their results. Differences in conventions (order of dims, the lse of an empty row) end here.
"""

from ringattn.kernels import Problem


def gpu_refusal(problem: Problem, name: str, oldest: tuple[int, int], most: int, any_mask: bool = False) -> str | None:
    """What every GPU vendor here refuses: other devices and dtypes, unsupported dims; and softcap and all but a few
    rectangles, unless it takes `any_mask`.
    """
    if problem.device != "cuda":
        return f"{name} runs on CUDA devices, not on {problem.device}"
    if problem.arch is not None and problem.arch < oldest:
        return f"{name} needs compute capability {oldest[0]}.{oldest[1]}, got {problem.arch[0]}.{problem.arch[1]}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{name} takes bfloat16 and float16, not {problem.dtype}"
    if problem.softcap and not any_mask:
        return f"{name} does not support softcap"
    for dim in (problem.head_dim, problem.value_dim):
        if dim % 8 or dim > most:
            return f"{name} takes head dims that are multiples of 8 up to {most}, got {dim}"
    if problem.deterministic:
        return f"the bits of {name}'s gradients differ from run to run"
    if problem.rectangles or any_mask:
        return None
    return "it serves only full or causal rectangles, so no windows or documents"


def cudnn_refusal(problem: Problem) -> str | None:
    """What cuDNN's fused attention refuses, in both frameworks."""
    return gpu_refusal(problem, "cuDNN", (8, 0), 256 if problem.arch is None or problem.arch >= (9, 0) else 128)


def equal_dims(problem: Problem, name: str) -> str | None:
    if problem.head_dim == problem.value_dim:
        return None
    return f"{name} needs equal dims, got head_dim={problem.head_dim}, value_dim={problem.value_dim}"
