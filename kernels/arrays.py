"""The few functions in which torch and jax.numpy differ, so that reference kernels are written once."""

import sys
from typing import Any

Array = Any  # a torch.Tensor or a jax.Array; neither framework is imported to find out which


def is_torch(x: Array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def namespace(x: Array) -> Any:
    """`torch` for a torch tensor, `jax.numpy` for a jax array: both take `axis=` and `keepdims=`."""
    if is_torch(x):
        return sys.modules["torch"]
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        import jax.numpy

        return jax.numpy
    raise TypeError(f"expected a torch tensor or a jax array, got {type(x).__name__}")


def is_floating(x: Array) -> bool:
    """Whether x holds floats."""
    xp = namespace(x)
    return bool(x.is_floating_point() if xp.__name__ == "torch" else xp.issubdtype(x.dtype, xp.floating))


def astype(x: Array, dtype: Any) -> Array:
    return x.to(dtype) if is_torch(x) else x.astype(dtype)


def accumulator(x: Array) -> Any:
    """The dtype of sums: float64 for float64 inputs, else float32."""
    xp = namespace(x)
    return xp.float64 if x.dtype == xp.float64 else xp.float32


def in_sums(tree: Any) -> Any:
    """The same tensor, or the same JAX arrays, in the dtypes of sums."""
    if is_torch(tree):
        return tree.to(accumulator(tree))
    import jax

    return jax.tree.map(lambda x: x.astype(accumulator(x)), tree)


def sum_of(a: Any, b: Any) -> Any:
    """a + b of JAX arrays, or of trees of them, in the dtypes of sums."""
    import jax

    return jax.tree.map(lambda x, y: x + y, in_sums(a), in_sums(b))


def fine(x: Array) -> Any:
    """The dtype of an lse: float64 for float64 inputs, and in torch for float32 inputs too; else float32.

    A merge weighs two sides by exp(the difference of their lse), and float32 rounds an lse of 1e4 by 5e-4. With 16-bit
    inputs other rounding errors are far larger.
    """
    xp = namespace(x)
    wide = (xp.float32, xp.float64) if xp.__name__ == "torch" else (xp.float64,)
    return xp.float64 if x.dtype in wide else xp.float32


def arange(n: int, like: Array) -> Array:
    xp = namespace(like)
    return xp.arange(n, device=like.device) if is_torch(like) else xp.arange(n)


def full(shape: tuple[int, ...], value: float, dtype: Any, like: Array) -> Array:
    xp = namespace(like)
    if is_torch(like):
        return xp.full(shape, value, dtype=dtype, device=like.device)
    return xp.full(shape, value, dtype=dtype)
