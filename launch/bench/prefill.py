"""Prefill of a whole prompt at once beside prefill in chunks: time and a rank's peak memory.

    ring     attention over the whole prompt, without a cache: what chunks are measured against
    whole    prefill in one chunk
    chunks   prefill in chunks of `chunk` tokens

Ranks are processes of this machine (gloo on CPUs, NCCL on GPUs). The peak is above the inputs and the cache, which all
ways have: what grows with the prompt in two of them and with the chunk in the third. `speed` is the ring's time over
this one's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ringattn.launch.bench import draws, finish, given, meet, on_ranks, reported, slowest, table
from ringattn.launch.bench.folded import PROCESSES, folded, processes_of
from ringattn.launch.bench.memory import held
from ringattn.launch.words import option

COLUMNS = ["tokens", "way", "chunk", "ranks", "ms", "peak_mib", "speed", "moved"]
WAYS = ("ring", "whole", "chunks")
MOVES = ("auto", "queries", "keys")


@dataclass
class Options:
    tokens: list[int] = option([512, 2048, 8192], "prompt lengths")
    chunk: int = option(512, "tokens a chunk")
    ways: list[str] = option(list(WAYS), "which of them", among=WAYS)
    moves: list[str] = option(["auto"], "what travels in chunks: auto, queries, keys; each is timed", among=MOVES)
    transport: str = option("auto", "auto, symmetric or group")
    ranks: int = option(2, "ranks")
    processes: int = PROCESSES
    heads: int = option(8, "query heads")
    kv_heads: int = option(2, "key heads")
    head_dim: int = option(64, "head dim")
    repeats: int = option(3, "timed runs, of which the median counts")
    device: str = option("cpu", "cpu or cuda", among=("cpu", "cuda"))
    timeout: float = option(600.0, "seconds for all")


def run(options: Options) -> list[dict[str, Any]]:
    if bad := [tokens for tokens in options.tokens if tokens > options.chunk and tokens % options.chunk]:
        raise ValueError(f"chunk={options.chunk} does not divide tokens={bad[0]}; this benchmark takes whole chunks")
    ranks = on_ranks(measure, processes_of(options), options.device, options.timeout, options)
    rows: list[dict[str, Any]] = []
    for worst in slowest(ranks, "ms", "peak_mib"):
        rows.append({"suite": "prefill", **given(options, "tokens", "chunk", "ways", "moves"), **worst})
    for row in rows:
        ring = next((r for r in rows if r["way"] == "ring" and r["tokens"] == row["tokens"]), None)
        row["speed"] = ring["ms"] / row["ms"] if ring else None
    print(table(rows, COLUMNS))
    return rows


def measure(options: Options) -> list[dict[str, Any]]:
    """One rank: every prompt, in every way."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=processes_of(options), device_type=options.device)
    found = []
    for tokens in options.tokens:
        for way, move in [(w, m) for w in options.ways for m in (options.moves if w == "chunks" else ["auto"])]:
            chunk = min(options.chunk, tokens) if way == "chunks" else tokens
            plan = folded(ra.plan(mesh, seq_len=chunk, transport=ra.Transport(by=options.transport)), options.ranks)
            prompt = [draws(options, plan.local_len) for _ in range(tokens // chunk)]  # this rank's part of every chunk
            call = one_shot if way == "ring" else partial(in_chunks, move=move)
            ms, peak, moved = timed(call, prompt, plan, tokens, options)
            name = f"chunks of {chunk}" if way == "chunks" else way
            row = {"case": f"{tokens} tokens", "name": name, "tokens": tokens, "way": way, "chunk": chunk}
            found.append(reported({**row, "ms": ms, "peak_mib": peak, "moved": moved}))
    return found


Prompt = list[list[torch.Tensor]]


def timed(
    call: Callable[..., str], prompt: Prompt, plan: Any, tokens: int, options: Options
) -> tuple[float, float, str]:
    """The median in milliseconds, the peak in MiB, and what travelled."""
    import ringattn as ra

    times = []
    for _ in range(1 + options.repeats):  # the first one warms up
        cache = ra.KVCache.allocate(
            plan, batch=1, max_len=tokens, kv_heads=options.kv_heads, head_dim=options.head_dim,
            dtype=prompt[0][0].dtype,
        )  # fmt: skip
        meet()
        memory, start = held(options.device), time.perf_counter()
        moved = call(prompt, plan, cache)
        finish()
        times.append(time.perf_counter() - start)
        peak = memory.grown()
    return statistics.median(times[1:]) * 1e3, peak / 2**20, moved


@torch.no_grad()
def one_shot(prompt: Prompt, plan: Any, cache: Any) -> str:
    import ringattn as ra

    [(q, k, v)] = prompt
    ra.attention(q, k, v, plan)
    return "keys"


def in_chunks(prompt: Prompt, plan: Any, cache: Any, move: str = "auto") -> str:
    """Every chunk after the other; which way the first and the last of them moved."""
    import ringattn as ra

    moved = []
    for q, k, v in prompt:
        moved.append(cache.moves(plan, q.shape[2]).way if move == "auto" else move)
        ra.prefill(q, k, v, plan, cache, move=moved[-1])
    return "-".join(dict.fromkeys((moved[0], moved[-1])))
