"""The kernels for JAX arrays."""

from ringattn.kernels import Kernel

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
