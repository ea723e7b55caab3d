"""Decoding over ranks, beside its floor and beside one device that holds the whole cache.

The floor is the time in which a plain copy, measured in the same run, moves the bytes of keys and values that a rank
holds. Each of three modes ends with the merged output on every rank:

    call    one call at a time, the ranks starting together: what a first token waits for
    row     calls one after the other, without waiting for any: what a Python loop reaches
    graph   a captured call, replayed: the lengths live on the device, so every replay decodes one more token

`us` is that of the slowest rank, the median over repeats; `limit_us` is 1.25 times the floor and 25 us.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import ringattn as ra
from ringattn.launch.bench import Row, beside, over_ranks
from ringattn.launch.bench.timing import cache_of, captured, copy_rate, draws, dtype_on, elapsed_ms, meet
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
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    repeats: int = option(20, "timed runs")
    timeout: float = option(300.0, "seconds for all")


def run(options: Options) -> Iterator[Row]:
    rows = []
    for row in over_ranks(measured, options, "us", "floor_us"):
        rows.append(row)
        single = beside(rows, row, "tokens", "mode", ranks=1)
        row |= {"over_floor": row["us"] / row["floor_us"], "limit_us": 1.25 * row["floor_us"] + 25}
        row["faster"] = single["us"] / row["us"] if single else None
        yield row


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length, alone and then over all ranks, in every mode."""
    mesh = ra.init_mesh(ring=options.ranks, device_type=options.device)
    rate = copy_rate(options.device)
    for tokens in options.tokens:
        plans = [(t, ra.plan(mesh, seq_len=1, transport=ra.Transport(by=t))) for t in options.transports]
        for transport, plan in [*[("none", ra.plan(seq_len=1))] * options.alone, *plans]:
            step = steps(options, plan, tokens)
            nbytes = (
                2 * options.batch * tokens * options.kv_heads * options.head_dim * dtype_on(options.device).itemsize
            )
            about = {"tokens": tokens, "ranks": plan.ring, "transport": transport, "copy_tb_per_s": rate / 1e12}
            about["floor_us"] = nbytes / plan.ring / rate * 1e6
            for mode in ("call", "row", "graph") if options.device == "cuda" else ("call", "row"):
                us = timed(captured(step) if mode == "graph" else step, 1 if mode == "call" else CALLS, options)
                yield {**about, "mode": mode, "us": us}


def steps(options: Options, plan: Any, tokens: int) -> Callable[[], Any]:
    """A call that decodes the next token, on a cache that already holds `tokens` random ones."""
    calls = 3 * (2 + options.repeats) * CALLS * options.new
    cache = cache_of(options, plan, tokens + calls, options.batch)
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
        times.append(elapsed_ms(call, calls, options.device) * 1e3)
    return statistics.median(times[2:])
