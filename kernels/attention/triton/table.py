"""Tile sizes for each architecture, dtype and width: plain data, the same on every rank; nothing is tuned at import.

The key of an entry is "arch/bits/width", where width is the larger of head dim and value dim, rounded up to a power of
two. The sm90 entries were measured on an H200. The others were only compiled for their GPU (no spills, shared memory
within its limit). `ringattn tune` measures on the present GPU and writes a table that `load` reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

WIDEST = 256


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
TABLE: Table = {f"cpu/{bits}/{width}": INTERPRETED for bits in (16, 32) for width in (32, 64, 128, 256)} | {
    "sm90/16/32": Tiles(Tile(64, 128, 4, 2, True), Tile(128, 64, 8, 3, True), Tile(64, 64, 4, 3, True)),
    "sm90/16/64": Tiles(Tile(64, 128, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(128, 64, 4, 2, True)),
    "sm90/16/128": Tiles(Tile(128, 64, 8, 2, True, 128), Tile(128, 64, 8, 3, True), Tile(64, 64, 4, 2, True)),
    "sm90/16/256": Tiles(Tile(128, 64, 8, 2, True), Tile(64, 64, 8, 2, True), Tile(32, 32, 8, 2, True)),
    "sm90/32/32": Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    "sm90/32/64": Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "sm90/32/128": Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    "sm90/32/256": Tiles(Tile(16, 16, 4, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    "sm80/16/32": Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    "sm80/16/64": Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    "sm80/16/128": Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    "sm80/16/256": Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 32, 4, 1)),
    "sm80/32/32": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    "sm80/32/64": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    "sm80/32/128": Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    "sm80/32/256": Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    "sm100/16/32": Tiles(Tile(128, 64, 8, 2, True), Tile(128, 64, 8, 3, True), Tile(64, 128, 8, 2, True)),
    "sm100/16/64": Tiles(Tile(128, 64, 8, 2, True), Tile(128, 64, 8, 3, True), Tile(64, 128, 8, 2, True)),
    "sm100/16/128": Tiles(Tile(128, 64, 8, 2, True), Tile(128, 64, 8, 3, True), Tile(64, 128, 8, 2, True)),
    "sm100/16/256": Tiles(Tile(64, 32, 4, 2, True), Tile(64, 64, 4, 2, True), Tile(32, 64, 4, 2, True)),
    "sm100/32/32": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    "sm100/32/64": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    "sm100/32/128": Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    "sm100/32/256": Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    "gfx942/16/32": Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 128, 4, 1)),
    "gfx942/16/64": Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 128, 4, 1)),
    "gfx942/16/128": Tiles(Tile(128, 64, 4, 1), Tile(128, 32, 4, 1), Tile(32, 128, 4, 1)),
    "gfx942/16/256": Tiles(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
    "gfx942/32/32": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    "gfx942/32/64": Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    "gfx942/32/128": Tiles(Tile(32, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    "gfx942/32/256": Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


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
    try:
        table = {key: Tiles(**{name: Tile(*tile) for name, tile in tiles.items()}) for key, tiles in rows.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a table of tiles, as `ringattn tune` writes it") from error
    wrong = [(key, tile) for key, tiles in table.items() for tile in tiles if not is_tile(tile)]
    if wrong:
        key, tile = wrong[0]
        raise ValueError(f"{path}: {key} has {tile}; expected powers of 2, at least 16 queries and keys and 1 stage")
    return table


def is_tile(tile: Tile) -> bool:
    """Whether a kernel can be compiled for these sizes."""
    numbers = [*tile[:4], 1 if tile.registers is None else tile.registers]
    if not all(type(n) is int and n > 0 for n in numbers) or type(tile.tma) is not bool:
        return False
    sizes = [2**i for i in range(4, 11)]
    return tile.queries in sizes and tile.keys in sizes and tile.warps in (1, 2, 4, 8, 16, 32)
