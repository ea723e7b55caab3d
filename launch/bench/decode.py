"""Decoding over ranks, beside its floor and beside one device that holds the whole cache.

The floor is the time in which a plain copy, measured in the same run, moves the bytes of keys and values that a rank
holds. Each of three modes ends with the merged output on every rank:

    call    one call at a time, the ranks starting together: what a first token waits for
    row     calls one after the other, without waiting for any: what a Python loop reaches
    graph   a captured call, replayed: the lengths live on the device, so every replay decodes one more token

`us` is that of the slowest rank, the median over repeats; `limit_us` is 1.25 times the floor and 25 us.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ringattn.launch.bench import captured, draws, given, meet, on_ranks, reported, slowest, table
from ringattn.launch.words import option

COLUMNS = ["tokens", "ranks", "transport", "new", "mode", "us", "floor_us", "over_floor", "limit_us", "faster"]
CALLS = 20  # in a row, and replays


@dataclass
class Options:
    ranks: int = option(4, "ranks")
    tokens: list[int] = option([1 << 20], "cached tokens a batch row")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    batch: int = option(1, "batch rows")
    new: int = option(1, "new tokens a call")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    alone: bool = option(True, "also on one device that holds the whole cache")
    device: str = option("cuda", "cuda or cpu", among=("cuda", "cpu"))
    repeats: int = option(20, "timed runs")
    timeout: float = option(300.0, "seconds for all")


def run(options: Options) -> list[dict[str, Any]]:
    ranks = on_ranks(measure, options.ranks, options.device, options.timeout, options)
    rows: list[dict[str, Any]] = []
    for worst in slowest(ranks, "us", "floor_us"):
        bounds = {"over_floor": worst["us"] / worst["floor_us"], "limit_us": 1.25 * worst["floor_us"] + 25}
        rows.append({"suite": "decode", **given(options, "tokens", "ranks", "transports", "alone"), **worst, **bounds})
    for row in rows:
        one = next(
            (r for r in rows if r["ranks"] == 1 and (r["tokens"], r["mode"]) == (row["tokens"], row["mode"])), None
        )
        row["faster"] = one["us"] / row["us"] if one else None
    print(table(rows, COLUMNS))
    return rows


def measure(options: Options) -> list[dict[str, Any]]:
    """One rank: every length, over all ranks and alone, in every mode."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=options.ranks, device_type=options.device)
    rate = copy_rate(options.device)
    found = []
    for tokens in options.tokens:
        plans = [(t, ra.plan(mesh, seq_len=1, transport=ra.Transport(by=t))) for t in options.transports]
        for transport, plan in [*plans, *[("none", ra.plan(seq_len=1))] * options.alone]:
            ranks = plan.ring
            nbytes = 2 * options.batch * tokens * options.kv_heads * options.head_dim * itemsize(options.device)
            step = steps(options, plan, tokens)
            for mode in ("call", "row", "graph") if options.device == "cuda" else ("call", "row"):
                us = timed(captured(step) if mode == "graph" else step, 1 if mode == "call" else CALLS, options)
                row = {"tokens": tokens, "ranks": ranks, "transport": transport, "mode": mode, "us": us}
                more = {"copy_tb_per_s": rate / 1e12, "floor_us": nbytes / ranks / rate * 1e6}
                found.append(reported({**row, **more}))
    return found


def steps(options: Options, plan: Any, tokens: int) -> Callable[[], Any]:
    """A call that decodes the next token, on a cache that already holds `tokens` random ones."""
    import ringattn as ra

    calls = 3 * (2 + options.repeats) * CALLS * options.new
    cache = ra.KVCache.allocate(
        plan, batch=options.batch, max_len=tokens + calls, kv_heads=options.kv_heads, head_dim=options.head_dim,
        dtype=torch.bfloat16 if options.device == "cuda" else torch.float32,
    )  # fmt: skip
    cache.k.normal_()
    cache.v.normal_()
    cache.lengths = cache.lengths + tokens
    torch.manual_seed(0)  # new tokens are the same on every rank
    q, k, v = draws(options, options.new, batch=options.batch)
    return lambda: ra.decode(q, k, v, cache)


def timed(call: Callable[[], Any], calls: int, options: Options) -> float:
    """Microseconds of one of `calls` calls in a row, the median over repeats; all ranks start together."""
    times = []
    for _ in range(2 + options.repeats):
        meet()
        times.append(elapsed(call, calls, options.device) / calls)
    return statistics.median(times[2:])


def elapsed(call: Callable[[], Any], calls: int, device: str) -> float:
    """Microseconds from the first call to the end of what the last one started."""
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a plain copy of half a GiB."""
    a = torch.empty(1 << 29, dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / statistics.median(elapsed(lambda: b.copy_(a), 4, device) / 4 for _ in range(10)) * 1e6


def itemsize(device: str) -> int:
    return 2 if device == "cuda" else 4
