"""Measure kernels on this GPU, and write the best configurations to a file: for whoever adds a GPU.

    python benchmarks/tune.py what=rates dims=64,128

what=tiles   the tile sizes of our kernels, as a table for `attend(..., table=load(path))`, with `load` of
             `ringattn.kernels.attention.triton.table`.
             Sizes that do not compile, do not fit, or give wrong results are left out.
what=rates   how fast each kernel is, from which "auto" chooses: `ringattn.kernels.rates.use(path)`

Give every rank the same file. Entries that it already has are kept.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringattn as ra
from ringattn.kernels import rates
from ringattn.kernels.intervals import Intervals
from ringattn.launch.bench.masks import drawn
from ringattn.launch.bench.timing import alone_ms, in_turns
from ringattn.launch.words import option, values
from ringattn.masks.bands import bounds_at, families


@dataclass(frozen=True)
class Options:
    what: str = option("tiles", "what is measured", among=("tiles", "rates"))
    out: str | None = option(None, "the file (by default WHAT.json)")
    dims: list[int] = option([64, 128], "head dims to tune: 32, 64, 128, 256")
    value_dim: int | None = option(None, "for rates: the value dim, if it is not the head dim")
    dtype: str = option("bfloat16", "bfloat16, float16 or float32")
    tokens: int = option(16384, "tokens of the causal problem that is timed")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    rounds: int = option(20, "timed runs of each configuration, of which the median counts")


def main(options: Options) -> None:
    from ringattn.kernels.attention.triton import table as tiles

    out = options.out or f"{options.what}.json"
    kind: Any = rates if options.what == "rates" else tiles
    table = dict(kind.load(out)) if Path(out).exists() else {}
    for dim in options.dims:
        table |= rates_of(options, dim, "cuda", ("triton", "cudnn", "fa4")) if kind is rates else tune(options, dim)
        kind.save(table, out)
    print(f"wrote {out}")


def rates_of(options: Options, dim: int, device: str, names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Useful TFLOP/s of every named kernel that serves, for the masks of `kernels/rates.py`."""
    arch = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    long = 4 * options.tokens
    V = options.value_dim or dim

    def documents(longest: int) -> ra.Docs:
        ends = np.cumsum(np.random.default_rng(1).integers(longest // 8, longest, 8 * long // longest))
        return ra.Docs.from_lengths(np.diff(np.unique([0, *np.minimum(ends, long).tolist(), long])).tolist())

    masks: dict[str, tuple[int, int | None, Any]] = {  # tokens, window, documents
        "rectangles": (2 * options.tokens, None, None),
        "packed": (long, None, ra.Docs.from_lengths(drawn(f"lognormal:{long // 58}:1.1", long, 1))),
        "long": (long, long // 8, documents(long // 2)),
        "short": (long, long // 64, documents(long // 32)),
    }
    table: dict[str, tuple[float, float]] = {}
    for mask, (tokens, window, docs) in masks.items():
        begin, end = bounds_at(*families(ra.AttentionSpec(window=window), tokens, docs=docs), np.arange(tokens))
        work = 2.0 * (dim + V) * options.heads * float((end - begin).sum())
        heads = (options.heads, options.kv_heads)
        draw = partial(torch.randn, device=device, dtype=getattr(torch, options.dtype))
        q, k, v, dout = (draw(1, tokens, *x) for x in ((heads[0], dim), (heads[1], dim), (heads[1], V), (heads[0], V)))
        for softcap, name in product((None, 30.0), names):
            spec = ra.AttentionSpec(window=window, softcap=softcap)
            key = rates.key_of(name, arch, mask, (dim, V), softcap is not None)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            try:
                shape: dict[str, Any] = {"seq_len": tokens, "heads": heads, "head_dim": dim, "value_dim": V}
                plan = ra.plan(**shape, spec=spec, docs=docs, kernel=name)
                out = ra.attention(leaves[0], leaves[1], leaves[2], plan, spec=spec, docs=docs)
            except NotImplementedError:
                continue
            forward = partial(ra.attention, q, k, v, plan, spec=spec, docs=docs)
            backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
            both = in_turns({"forward": forward, "backward": backward}, options.rounds, device)
            times = [statistics.median(x) for x in both.values()]
            table[key] = (float(f"{work / times[0] / 1e9:.4g}"), float(f"{2.5 * work / times[1] / 1e9:.4g}"))
            print("{:<40} {:>9} {:>9} TFLOP/s forward, backward".format(key, *table[key]), flush=True)
    return table


def candidates(tma: bool) -> list[Any]:
    """Tiles worth a measurement; those that do not compile or fit are found out by trying."""
    from ringattn.kernels.attention.triton.table import Tile

    narrow = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (32, 64, 4), (64, 32, 4)]
    shapes = [*narrow, (128, 64, 8), (64, 128, 8), (128, 128, 8)]
    return [
        Tile(queries, keys, warps, stages, tma, registers)
        for (queries, keys, warps), stages in product(shapes, (2, 3))
        for registers in ((None, 128) if warps == 8 else (None,))  # 128 let two programs share a multiprocessor
    ]


def tune(options: Options, dim: int) -> dict[str, Any]:
    """The fastest right tile of each of the three kernels, each tried with the other two as they are in the table."""
    from ringattn.kernels.attention.triton import KERNEL, attend, row_delta
    from ringattn.kernels.attention.triton.table import entry
    from ringattn.kernels.triton import architecture

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
        rows = KERNEL.prepare(dout, lse, delta, None)
        return list(KERNEL.backward((q, k, v), where, rows, scale=dim**-0.5, table=table))

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
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        results = work()
    except (OutOfResources, PTXASError, CompilationError):
        return float("inf")
    if not all((x - y).norm() <= 0.01 * y.norm() for x, y in zip(results, right, strict=True)):
        return float("inf")
    return alone_ms(work, rounds, "cuda")


if __name__ == "__main__":
    main(Options(**values(sys.argv[1:], Options)))
