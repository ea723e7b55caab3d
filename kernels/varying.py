"""Along which mesh axes a value varies, inside shard_map; none outside of it, or with check_vma=False."""

from typing import Any

import jax
from jax import lax


def axes_of(*values: Any) -> frozenset[str]:
    """The mesh axes along which at least one of the values varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(values)))


def vary(value: Any, axes: frozenset[str]) -> Any:
    """The same values, marked as varying along these axes: the type of a loop's carry must not change."""

    def varied(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(varied, value)
