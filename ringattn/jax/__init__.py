"""The JAX side: `mesh = ringattn.jax.init_mesh(ring=4, ulysses=2)`, then the same public functions as everywhere.

`ringattn.jax.nn` has layers for Flax, `ringattn.jax.layers` what any other library's layers need.
"""

from importlib import import_module
from typing import Any

from ringattn.comms.jax import init_mesh
from ringattn.extras import naming_extras
from ringattn.jax.attention.function import attention

__all__ = ["attention", "init_mesh"]


def __getattr__(name: str) -> Any:
    if name not in ("layers", "nn"):
        raise AttributeError(f"module 'ringattn.jax' has no attribute {name!r}")
    with naming_extras(f"ringattn.jax.{name}"):
        return import_module(f"ringattn.jax.{name}")
