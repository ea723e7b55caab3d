"""Decoding over a cache that is spread over ranks, and prefill of a prompt at once and in chunks.

A decoded token reads keys and values once: its floor is a copy that reads and writes as many bytes as a rank holds of
them, timed in the same run.

    decode   one call after a pause, the ranks starting together: what a first token waits for
    row      calls one after the other, without waiting for any: what a Python loop reaches
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
from ringattn.launch.bench import Row, over_ranks
from ringattn.launch.bench.timing import copy_rate, draws, dtype_on, median_ms, memory_from_now, together
from ringattn.launch.words import option

COLUMNS = ["tokens", "ranks", "transport", "way", "moves", "ms", "floor_ms", "ratio", "peak_mib"]
WAYS = ("decode", "row", "graph", "ring", "whole", "chunks")
DECODED = WAYS[:3]
CALLS = 20  # in a row, and replays


@dataclass
class Options:
    tokens: list[int] = option([131072], "cached tokens of a decode, and of a prompt")
    ways: list[str] = option(list(WAYS), "which of them", among=WAYS)
    chunk: int = option(8192, "tokens a chunk")
    moves: list[str] = option(["auto"], "what travels in chunks; each is timed", among=("auto", "queries", "keys"))
    new: int = option(1, "new tokens a decode")
    batch: int = option(1, "batch rows of a decode")
    ranks: int = option(4, "ranks")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    repeats: int = option(20, "timed runs")
    timeout: float = option(600.0, "seconds for all")

    def __post_init__(self) -> None:
        if "chunks" in self.ways and (bad := [n for n in self.tokens if n > self.chunk and n % self.chunk]):
            raise ValueError(f"chunk={self.chunk} does not divide tokens={bad[0]}; this benchmark takes whole chunks")


def run(options: Options) -> Iterator[Row]:
    rings: dict[tuple[Any, ...], float] = {}
    for row in over_ranks(measured, options, "ms", "floor_ms", "peak_mib"):
        case = row["tokens"], row["transport"]
        if row["way"] == "ring":
            rings[case] = row["ms"]
        elif row["way"] not in DECODED:
            row["floor_ms"] = rings.get(case)
        yield row | {"ratio": row["floor_ms"] / row["ms"] if row["floor_ms"] else None}


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length through every transport, in every way."""
    mesh = ra.init_mesh(ring=options.ranks, device_type=options.device)
    ways = [way for way in WAYS if way in options.ways and (way != "graph" or options.device == "cuda")]
    rate = copy_rate(options.device) if {*ways} & {*DECODED} else 0.0
    nbytes = 2 * options.batch * options.kv_heads * options.head_dim * dtype_on(options.device).itemsize  # of a token
    for tokens, transport, way in product(options.tokens, options.transports, ways):
        for move in options.moves if way == "chunks" else ["auto"]:
            row: Row = {"tokens": tokens, "transport": transport, "way": way, "moves": None, "peak_mib": None}
            by = ra.Transport(by=transport)
            if way in DECODED:
                step = steps(options, ra.plan(mesh, seq_len=1, transport=by), tokens)
                calls = 1 if way == "decode" else CALLS
                row["ms"] = median_ms(step, options.repeats, graph=way == "graph", calls=calls)
                yield row | {"floor_ms": nbytes * tokens / options.ranks / rate * 1e3}
                continue
            chunk = min(options.chunk, tokens) if way == "chunks" else tokens
            plan = ra.plan(mesh, seq_len=chunk, transport=by)
            yield row | {"floor_ms": None, **prefilled(options, plan, way, move, tokens)}


def cache_of(options: Any, plan: Any, max_len: int, batch: int = 1) -> Any:
    """An empty cache for the heads of the options."""
    return ra.KVCache.allocate(
        plan, batch=batch, max_len=max_len, kv_heads=options.kv_heads, head_dim=options.head_dim,
        dtype=dtype_on(options.device),
    )  # fmt: skip


def steps(options: Options, plan: Any, tokens: int) -> Callable[[], Any]:
    """A call that decodes the next token, on a cache that already holds `tokens` random ones."""
    cache = cache_of(options, plan, tokens + 2 * (2 + options.repeats) * CALLS * options.new, options.batch)
    cache.k.normal_()
    cache.v.normal_()
    cache.lengths = cache.lengths + tokens
    torch.manual_seed(0)  # new tokens are the same on every rank
    q, k, v = draws(options, options.new, batch=options.batch)
    return lambda: ra.decode(q, k, v, cache)


def prefilled(options: Options, plan: Any, way: str, move: str, tokens: int) -> Row:
    """Time and peak of a prompt; `moves` says what travelled for the first and the last chunk."""
    prompt = [draws(options, plan.local_len) for _ in range(tokens // plan.seq_len)]  # this rank's part of each chunk
    times = []

    @torch.no_grad()
    def whole() -> None:
        for q, k, v in prompt:
            if way == "ring":
                ra.attention(q, k, v, plan)
                continue
            moved.append(cache.moves(plan, q.shape[2]).way if move == "auto" else move)
            ra.prefill(q, k, v, plan, cache, move=moved[-1])

    for _ in range(1 + options.repeats):  # the first one warms up
        cache, moved = cache_of(options, plan, tokens), list[str]()
        memory = memory_from_now(options.device)
        times.append(together(whole))
    ends = dict.fromkeys([*moved[:1], *moved[-1:]])
    ms = statistics.median(times[1:]) * 1e3
    return {"ms": ms, "peak_mib": memory.grown() / 2**20, "moves": "-".join(ends) or "keys"}
