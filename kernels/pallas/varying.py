"""Which mesh axes a value differs along, inside shard_map; nothing outside of it, or where that is not tracked."""

from typing import Any

import jax
from jax import lax


def axes_of(*values: Any) -> frozenset[str]:
    """The axes along which one of the values differs from device to device."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(values)))


def vary(value: Any, axes: frozenset[str]) -> Any:
    """The same values, counted as different along these axes: what a loop carries must not change its kind."""

    def one(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, value)
