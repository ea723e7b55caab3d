"""Decoding over a cache that is spread over ranks, and prefill of a prompt at once and in chunks.

A decoded token reads keys and values once: its floor is a copy that reads and writes as many bytes as a rank has of
them, timed in the same run.

    decode   the next token; with calls=20 as a Python loop does it, without waiting for any
    graph    a captured call, replayed: the lengths live on the device, so every replay decodes one more token
    ring     attention over the whole prompt, without a cache: the floor of the two below
    whole    prefill in one chunk
    chunks   prefill in chunks of `chunk` tokens

Times are medians, of the slowest rank, until it is done; `ratio` is the floor over the time. The peak is above the
inputs and the cache, which all ways of prefill have. With ranks=1 one device holds the whole cache.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks, timing
from ringattn.launch.bench.timing import CALLS, TIMEOUT, Heads
from ringattn.launch.words import option

COLUMNS = ["tokens", "ranks", "transport", "way", "move", "ms", "floor_ms", "ratio", "peak_mib"]
WAYS = ("decode", "graph", "ring", "whole", "chunks")


@dataclass
class Options(Heads):
    tokens: list[int] = option([131072], "cached tokens of a decode, and of a prompt")
    ways: list[str] = option(list(WAYS), "which of them", among=WAYS)
    chunk: int = option(8192, "tokens a chunk")
    moves: list[str] = option(["auto"], "what travels in prefill; each is timed", among=("auto", "queries", "keys"))
    ranks: int = option(4, "ranks")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    calls: int = CALLS
    timeout: float = TIMEOUT


def run(options: Options) -> Iterator[Row]:
    rings: dict[tuple[Any, ...], float] = {}
    for row in over_ranks(measured, options, "ms", "floor_ms", "peak_mib"):
        case = row["tokens"], row["transport"]
        if row["way"] == "ring":
            rings[case] = row["ms"]
        elif row["way"] in ("whole", "chunks"):
            row["floor_ms"] = rings.get(case)
        yield row | {"ratio": row["floor_ms"] / row["ms"] if row["floor_ms"] else None}


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length through every transport, in every way."""
    mesh = ra.init_mesh(ring=options.ranks, device_type=options.device)
    ways = [way for way in WAYS if way in options.ways and (way != "graph" or options.device == "cuda")]
    rate = timing.copy_rate(options.device) if {*ways} & {"decode", "graph"} else 0.0
    nbytes = 2 * options.kv_heads * options.head_dim * timing.dtype_on(options.device).itemsize  # of a token
    for tokens, transport, way in product(options.tokens, options.transports, ways):
        row: Row = {"tokens": tokens, "transport": transport, "way": way}
        by = ra.Transport(by=transport)
        if way in ("decode", "graph"):
            step = steps(options, ra.plan(mesh, seq_len=1, transport=by), tokens)
            row["ms"] = timing.median_ms(step, options.repeats, way == "graph", options.calls)
            yield row | {"floor_ms": nbytes * tokens / options.ranks / rate * 1e3, "peak_mib": None}
            continue
        chunk = min(options.chunk, tokens) if way == "chunks" else tokens
        if tokens % chunk:
            raise ValueError(f"chunk={chunk} does not divide tokens={tokens}; this benchmark takes whole chunks")
        plan = ra.plan(mesh, seq_len=chunk, transport=by)
        for move in options.moves if way != "ring" else ["keys"]:
            yield row | {"move": move, "floor_ms": None, **prefilled(options, plan, way, move, tokens)}


def cache_of(options: Options, plan: Any, max_len: int) -> Any:
    """An empty cache for the heads of the options."""
    return ra.KVCache.allocate(
        plan, batch=1, max_len=max_len, kv_heads=options.kv_heads, head_dim=options.head_dim,
        dtype=timing.dtype_on(options.device),
    )  # fmt: skip


def steps(options: Options, plan: Any, tokens: int) -> Callable[[], Any]:
    """A call that decodes the next token, on a cache that already holds `tokens` random ones."""
    cache = cache_of(options, plan, tokens + 4 + (1 + options.repeats) * options.calls)
    cache.k.normal_()
    cache.v.normal_()
    cache.lengths = cache.lengths + tokens
    torch.manual_seed(0)  # new tokens are the same on every rank
    q, k, v = timing.draws(options, 1)
    return lambda: ra.decode(q, k, v, cache)


def prefilled(options: Options, plan: Any, way: str, move: str, tokens: int) -> Row:
    """Time and peak of a prompt."""
    chunks = [timing.draws(options, plan.local_len) for _ in range(tokens // plan.seq_len)]
    times = []

    @torch.no_grad()
    def whole() -> None:
        for q, k, v in chunks:
            if way == "ring":
                ra.attention(q, k, v, plan)
            else:
                ra.prefill(q, k, v, plan, cache, move=move)

    for _ in range(1 + options.repeats):  # the first one warms up
        cache, memory = cache_of(options, plan, tokens), timing.memory_from_now(options.device)
        times.append(timing.together(whole))
    return {"ms": statistics.median(times[1:]) * 1e3, "peak_mib": memory.grown() / 2**20}
