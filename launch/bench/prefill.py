"""Prefill of a whole prompt at once beside prefill in chunks: time and a rank's peak memory.

    ring     attention over the whole prompt, without a cache: what chunks are measured against
    whole    prefill in one chunk
    chunks   prefill in chunks of `chunk` tokens

Ranks are processes of this machine (gloo on CPUs, NCCL on GPUs). The peak is above the inputs and the cache, which all
ways have: what grows with the prompt in two of them and with the chunk in the third. `speed` is the ring's time over
this one's.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import ringattn as ra
from ringattn.launch.bench import Row, beside, over_ranks
from ringattn.launch.bench.folded import PROCESSES, folded, processes_of
from ringattn.launch.bench.memory import held
from ringattn.launch.bench.timing import cache_of, draws, together
from ringattn.launch.words import option

COLUMNS = ["tokens", "way", "chunk", "ranks", "ms", "peak_mib", "speed", "moved"]
WAYS = ("ring", "whole", "chunks")
MOVES = ("auto", "queries", "keys")


@dataclass
class Options:
    tokens: list[int] = option([512, 2048, 8192], "prompt lengths")
    chunk: int = option(512, "tokens a chunk")
    ways: list[str] = option(list(WAYS), "which of them", among=WAYS)
    moves: list[str] = option(["auto"], "what travels in chunks; each is timed", among=MOVES)
    transport: str = option("auto", "auto, symmetric or group")
    ranks: int = option(2, "ranks")
    processes: int = PROCESSES
    heads: int = option(8, "query heads")
    kv_heads: int = option(2, "key heads")
    head_dim: int = option(64, "head dim")
    repeats: int = option(3, "timed runs, of which the median counts")
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    timeout: float = option(600.0, "seconds for all")

    def __post_init__(self) -> None:
        processes_of(self)
        if bad := [tokens for tokens in self.tokens if tokens > self.chunk and tokens % self.chunk]:
            raise ValueError(f"chunk={self.chunk} does not divide tokens={bad[0]}; this benchmark takes whole chunks")


def run(options: Options) -> Iterator[Row]:
    rows = []
    for row in over_ranks(measured, options, "ms", "peak_mib"):
        rows.append(row)
        ring = beside(rows, row, "tokens", way="ring")
        row["speed"] = ring["ms"] / row["ms"] if ring else None
        yield row


def measured(options: Options) -> Iterator[Row]:
    """One rank: every prompt, in every way."""
    mesh = ra.init_mesh(ring=processes_of(options), device_type=options.device)
    ways = sorted(options.ways, key=lambda way: way != "ring")  # the others are held against it
    for tokens in options.tokens:
        for way, move in [(w, m) for w in ways for m in (options.moves if w == "chunks" else ["auto"])]:
            chunk = min(options.chunk, tokens) if way == "chunks" else tokens
            plan = folded(ra.plan(mesh, seq_len=chunk, transport=ra.Transport(by=options.transport)), options.ranks)
            prompt = [draws(options, plan.local_len) for _ in range(tokens // chunk)]  # this rank's part of every chunk
            times = []
            for _ in range(1 + options.repeats):  # the first one warms up
                cache, moved = cache_of(options, plan, tokens), list[str]()
                how = partial(at_once, prompt) if way == "ring" else partial(in_chunks, prompt, cache, move, moved)
                memory = held(options.device)
                times.append(together(partial(how, plan)))
            ends = dict.fromkeys([*moved[:1], *moved[-1:]])
            yield {
                "case": f"{tokens} tokens", "name": f"chunks of {chunk}" if way == "chunks" else way, "tokens": tokens,
                "way": way, "chunk": chunk, "ms": statistics.median(times[1:]) * 1e3,
                "peak_mib": memory.grown() / 2**20, "moved": "-".join(ends) or "keys",
            }  # fmt: skip


Prompt = list[list[torch.Tensor]]


def at_once(prompt: Prompt, plan: Any) -> None:
    [(q, k, v)] = prompt
    with torch.no_grad():
        ra.attention(q, k, v, plan)


def in_chunks(prompt: Prompt, cache: Any, move: str, moved: list[str], plan: Any) -> None:
    """Every chunk after the other; `moved` gets what travelled for each."""
    for q, k, v in prompt:
        moved.append(cache.moves(plan, q.shape[2]).way if move == "auto" else move)
        ra.prefill(q, k, v, plan, cache, move=moved[-1])
