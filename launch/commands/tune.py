"""Measure kernel configurations on this GPU and write a table of the best, which `attend(..., table=load(path))` uses.

Every rank must be given the same file. One that does not compile, does not fit, or is wrong is left out.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from ringattn.launch.words import option


@dataclass(frozen=True)
class Options:
    out: str = option("tiles.json", "where the table is written; entries that are there already are kept")
    dims: list[int] = option([64, 128], "head dims to tune: 32, 64, 128, 256")
    dtype: str = option("bfloat16", "bfloat16, float16 or float32")
    tokens: int = option(16384, "tokens of the causal problem that is timed")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    rounds: int = option(5, "timed runs of each configuration, of which the median counts")


def run(options: Options) -> int:
    import torch

    if not torch.cuda.is_available():
        print("ringattn tune: no GPU here; the built-in table serves")
        return 1
    from pathlib import Path

    from ringattn.kernels.triton.table import load, save

    table = dict(load(options.out)) if Path(options.out).exists() else {}
    for dim in options.dims:
        table |= tune(options, dim)
        save(table, options.out)
    print(f"wrote {options.out}")
    return 0


def candidates(tma: bool) -> list[Any]:
    """Tiles worth a measurement; those that do not compile or fit are found out by trying."""
    from ringattn.kernels.triton.table import Tile

    narrow = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (32, 64, 4), (64, 32, 4)]
    shapes = [*narrow, (128, 64, 8), (64, 128, 8), (128, 128, 8)]
    return [
        Tile(queries, keys, warps, stages, tma, registers)
        for (queries, keys, warps), stages in product(shapes, (2, 3))
        for registers in ((None, 128) if warps == 8 else (None,))  # 128 let two programs share a multiprocessor
    ]


def tune(options: Options, dim: int) -> dict[str, Any]:
    """The fastest right tile of each of the three kernels, each tried with the other two as they are in the table."""
    import torch

    from ringattn.kernels.intervals import Intervals
    from ringattn.kernels.triton import attend, attend_backward, row_delta
    from ringattn.kernels.triton.table import architecture, entry

    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, options.dtype)
    arch, bits, T = architecture(device), dtype.itemsize * 8, options.tokens
    q, k, v, dout = (
        torch.randn(1, T, heads, dim, device=device, dtype=dtype)
        for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads)
    )
    end = torch.arange(1, T + 1, device=device, dtype=torch.int32)[None]
    where, best = Intervals(torch.zeros_like(end), end), entry(arch, bits, dim)
    key = f"{arch}/{bits}/{dim}"
    out, lse = attend(q, k, v, where, scale=dim**-0.5)
    delta = row_delta(out, dout)

    def forward(table: Any) -> list[torch.Tensor]:
        return [attend(q, k, v, where, scale=dim**-0.5, table=table).out]

    def backward(table: Any) -> list[torch.Tensor]:
        return list(attend_backward(q, k, v, where, dout, lse, delta, scale=dim**-0.5, table=table))

    right = {"forward": [out], "dq": backward(None)}
    right["dkdv"] = right["dq"]
    for name, work in (("forward", forward), ("dq", backward), ("dkdv", backward)):
        times = {}
        for tile in dict.fromkeys([getattr(best, name), *candidates(tma=arch in ("sm90", "sm100"))]):
            table = {key: best._replace(**{name: tile})}
            times[tile] = milliseconds(partial(work, table), right[name], options.rounds)
        fastest = min(times, key=lambda tile: times[tile])
        best = best._replace(**{name: fastest})
        print(f"{key} {name:<8} {tuple(fastest)}  {times[fastest]:.3f} ms")
    return {key: best}


def milliseconds(work: Callable[[], list[Any]], right: list[Any], rounds: int) -> float:
    """The median time of `work`, or infinity where it fails or its results are wrong."""
    import torch
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        found = work()
    except (OutOfResources, PTXASError, CompilationError):
        return float("inf")
    if not all((x - y).norm() <= 0.01 * y.norm() for x, y in zip(found, right, strict=True)):
        return float("inf")
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)
