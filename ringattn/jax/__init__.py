"""The JAX side: `mesh = ringattn.jax.init_mesh(ring=4, ulysses=2)`, then the same public functions as everywhere."""

from ringattn.comms.jax import init_mesh
from ringattn.jax.attention.function import attention

__all__ = ["attention", "init_mesh"]
