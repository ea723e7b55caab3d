"""Which keys each query sees, as a kernel is told it."""

from typing import Any, NamedTuple

from ringattn.kernels.arrays import Array


class Tile(NamedTuple):
    """A rectangle of a step that a vendor kernel can run: all pairs, or the causal half of a square."""

    queries: slice
    keys: slice
    causal: bool


class Intervals(NamedTuple):
    """Query t of row b sees the keys [begin[b, t], end[b, t]): int32, [B or 1, T], both never decreasing along t.

    `begin >= end` is an empty row. `tiles` says the same as rectangles where that is possible, and is None where it is
    not. `host` holds (begin, end) as numpy arrays where the host made them, so that nobody reads the device to plan.
    """

    begin: Array
    end: Array
    tiles: tuple[Tile, ...] | None = None
    host: Any = None
