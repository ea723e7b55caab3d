"""Attention over ranks beside its floor: the same flops a rank, the same kernel, no communication.

The floor is one causal call on every rank at once, of tokens / sqrt(ranks) tokens: as many (query, key) pairs as a
rank has of the whole. `exposed` is the part of the time that the floor does not explain. Times are medians, of the
slowest rank.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringattn.launch.bench import table
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.words import option

COLUMNS = ["tokens", "ranks", "ulysses", "strategy", "layout", "mode", "ms", "floor_ms", "ratio", "tflops", "exposed"]


@dataclass
class Options:
    ranks: int = option(4, "ranks")
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([16384, 32768, 131072], "lengths of the whole sequence")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    strategy: str = option("auto", "ring, gather or ulysses")
    layout: str = option("auto", "contiguous, striped or zigzag")
    kernel: str = option("auto", "the kernel of every step, and of the floor")
    device: str = option("cuda", "cuda or cpu")
    repeats: int = option(10, "timed runs")
    timeout: float = option(900.0, "seconds for all")


def run(options: Options) -> list[dict[str, Any]]:
    backend = "nccl" if options.device == "cuda" else "gloo"
    ranks = run_ranks(measure, options.ranks, options, backend=backend, timeout=options.timeout)
    given = {k: v for k, v in asdict(options).items() if k not in ("tokens", "timeout", "strategy", "layout")}
    rows = []
    for measured in zip(*ranks, strict=True):
        ms, floor = (max(m[name] for m in measured) for name in ("ms", "floor_ms"))
        flops = measured[0]["flops"] / options.ranks
        rows.append({
            "suite": "ring", **given, **measured[0], "ms": ms, "floor_ms": floor, "ratio": floor / ms,
            "tflops": flops / ms / 1e9, "exposed": 1 - floor / ms,
        })  # fmt: skip
    print(table(rows, COLUMNS))
    return rows


def measure(options: Options) -> list[dict[str, Any]]:
    """One rank: every length, forward and forward + backward, over ranks and alone."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=options.ranks // options.ulysses, ulysses=options.ulysses, device_type=options.device)
    found = []
    for tokens in options.tokens:
        plan = ra.plan(
            mesh, seq_len=tokens, heads=(options.heads, options.kv_heads), head_dim=options.head_dim,
            strategy=options.strategy, layout=options.layout, kernel=options.kernel,
        )  # fmt: skip
        alone = ra.plan(seq_len=round(tokens / options.ranks**0.5), kernel=options.kernel)
        spread, local = calls(options, plan), calls(options, alone)
        pairs = tokens * (tokens + 1) / 2
        for mode, times in (("forward", 4), ("forward+backward", 14)):
            found.append({
                "tokens": tokens, "strategy": plan.strategy, "layout": plan.layout, "mode": mode,
                "ms": timed(spread[mode], options), "floor_ms": timed(local[mode], options),
                "flops": times * pairs * options.heads * options.head_dim,
            })  # fmt: skip
    return found


def calls(options: Options, plan: Any) -> dict[str, Callable[[], Any]]:
    """What is timed: one forward pass, and one with its backward, on random data."""
    import ringattn as ra

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    heads = (options.heads, options.kv_heads, options.kv_heads)
    q, k, v = (
        torch.randn(1, plan.local_len, h, options.head_dim, device=options.device, dtype=dtype, requires_grad=True)
        for h in heads
    )
    dout = torch.randn_like(q)

    def forward() -> None:
        with torch.no_grad():
            ra.attention(q, k, v, plan)

    def both() -> None:
        torch.autograd.grad(ra.attention(q, k, v, plan), (q, k, v), dout)

    return {"forward": forward, "forward+backward": both}


def timed(call: Callable[[], Any], options: Options) -> float:
    """The median in milliseconds, all ranks starting together."""
    for _ in range(2):
        call()
    times = []
    for _ in range(options.repeats):
        if options.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if options.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)
