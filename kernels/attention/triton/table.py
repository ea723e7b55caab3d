"""Tile sizes for each architecture, dtype and width: plain data, the same on every rank; nothing is tuned at import.

The key of an entry is "arch/bits/width", where width is the larger of head dim and value dim, rounded up to a power of
two. Of `tiles.json` the sm90 entries were measured on an H200. The others were only compiled for their GPU (no spills,
shared memory within its limit). `benchmarks/tune.py` measures on the present GPU and writes a table that `load` reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MAX_DIM = 256


class Tile(NamedTuple):
    """Sizes of one kernel: queries and keys of a tile, warps, pipeline stages, loads by TMA, a limit of registers."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None


class Tiles(NamedTuple):
    """The sizes of the three kernels of one entry."""

    forward: Tile
    dq: Tile
    dkdv: Tile


Table = Mapping[str, Tiles]

INTERPRETED = Tiles(*[Tile(64, 64, 4, 1)] * 3)


def entry(arch: str, bits: int, width: int, described: bool = True, table: Table | None = None) -> Tiles:
    """The tiles for an architecture, dtype and width: from `table` if it has them, else from the built-in table.

    Tensors that cannot have descriptors (`described` is False) use the entry of sm80, which has no TMA.
    """
    key = f"{arch}/{bits}/{width}"
    tiles = table[key] if table and key in table else TABLE[key]
    return tiles if described or not any(tile.tma for tile in tiles) else TABLE[f"sm80/{bits}/{width}"]


def save(table: Table, path: str | Path) -> None:
    rows = {key: {name: list(tile) for name, tile in tiles._asdict().items()} for key, tiles in table.items()}
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def load(path: str | Path) -> Table:
    """A table that `save` wrote."""
    rows = json.loads(Path(path).read_text())
    return {key: Tiles(**{name: Tile(*tile) for name, tile in tiles.items()}) for key, tiles in rows.items()}


TABLE: Table = {
    **{f"cpu/{bits}/{width}": INTERPRETED for bits in (16, 32) for width in (32, 64, 128, 256)},
    **load(Path(__file__).with_name("tiles.json")),
}
