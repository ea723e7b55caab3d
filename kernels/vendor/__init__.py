"""Other people's kernels behind our signature: a step cut into full and causal tiles, one vendor call a tile.

A file is a vendor. It says which problems it refuses, and brings `forward` and `backward` of one tile; `tiles.py` runs
the tiles and merges what they give. Conventions differ (which dim is which, what an empty row's lse is) and end here.
"""

from ringattn.kernels import Problem


def gpu_refusal(problem: Problem, name: str, oldest: tuple[int, int], largest: int) -> str | None:
    """What every GPU vendor here refuses: other devices and dtypes, softcap, unknown tiles, dims it has no code for."""
    if problem.device != "cuda":
        return f"{name} runs on CUDA devices, not on {problem.device}"
    if problem.arch is not None and problem.arch < oldest:
        return f"{name} needs compute capability {oldest[0]}.{oldest[1]}, this is {problem.arch[0]}.{problem.arch[1]}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{name} takes bfloat16 and float16, not {problem.dtype}"
    if problem.softcap:
        return f"{name} has no softcap"
    for dim in (problem.head_dim, problem.value_dim):
        if dim % 8 or dim > largest:
            return f"{name} takes head dims that 8 divides, up to {largest}, got {dim}"
    return None if problem.tiles else "these intervals are not known to be a few full or causal rectangles"


def cudnn_refusal(problem: Problem) -> str | None:
    """What cuDNN's fused attention refuses, whichever framework calls it."""
    return gpu_refusal(problem, "cuDNN", (8, 0), 256 if problem.arch is None or problem.arch >= (9, 0) else 128)


def equal_dims(problem: Problem, name: str) -> str | None:
    if problem.head_dim == problem.value_dim:
        return None
    return f"{name} needs equal dims, got head_dim={problem.head_dim}, value_dim={problem.value_dim}"
