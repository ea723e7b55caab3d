"""The order of the devices of a flat TPU slice in which each hop of a ring goes to a neighbour.

On v5e slices of 32 chips and more a transfer can run beside a kernel only if each of its pairs of devices stands in one
row or one column, 1, 2, 4 or 8 links apart, and no link closes a row: the compiler makes every other permute
synchronous. JAX's own order goes along rows, so the hop from the end of a row is no such pair. A closed path is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def ring_order(devices: Sequence[Any], ring: int, ulysses: int) -> Any:
    """The devices as [data, ring, ulysses], or None: they are no flat slice, or no ring of more than two fits in it.

    The devices of a Ulysses group are a block, so a hop of the ring is as long as a block is.
    """
    grid = flat_slice(devices)
    if grid is None or ring < 3:
        return None
    best, shortest = None, np.inf
    for block in rectangles(ulysses):
        for path in rectangles(ring):
            hop, order = closed_path(*path)
            longest = hop * max(block)
            if longest < shortest and all(n % (b * p) == 0 for n, b, p in zip(grid.shape, block, path, strict=True)):
                best, shortest = (block, path, order), longest
    if best is None:
        return None
    (bx, by), (px, py), order = best
    places = grid.reshape(-1, px, bx, grid.shape[1] // (py * by), py, by).transpose(0, 3, 1, 4, 2, 5)
    return places.reshape(-1, ring, ulysses)[:, order]


def flat_slice(devices: Sequence[Any]) -> Any:
    """The devices of a TPU slice by their coordinates [x, y]; None if they fill no rectangle, or are several slices."""
    first = devices[0]
    if first.platform != "tpu" or len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        return None
    at = {tuple(device.coords): device for device in devices}
    corner, end = np.min(list(at), axis=0), np.max(list(at), axis=0) + 1
    if end[2] - corner[2] > 1 or not len(devices) == len(at) == np.prod(end - corner):
        return None
    grid = np.empty((end - corner)[:2], dtype=object)
    for place, device in at.items():
        grid[tuple(np.subtract(place, corner)[:2])] = device
    return grid


def rectangles(count: int) -> Iterator[tuple[int, int]]:
    """All pairs of sides whose product is `count`."""
    return ((n, count // n) for n in range(1, count + 1) if count % n == 0)


def closed_path(width: int, height: int) -> tuple[float, list[int]]:
    """(the longest step, the places of a width x height grid in an order whose last place is near its first one)."""
    places = np.arange(width * height).reshape(width, height)
    if 1 in (width, height):  # there by every second place, and back by the others
        line = places.ravel()
        return 2, [*line[::2], *line[1::2][::-1]]
    if width % 2:
        places = places.T
    if len(places) % 2:
        return np.inf, []
    columns = (column[:0:-1] if i % 2 else column[1:] for i, column in enumerate(places))
    return 1, [*places[::-1, 0], *(place for column in columns for place in column)]
