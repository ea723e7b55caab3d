"""Prefill of a whole prompt at once beside prefill in chunks: time and a rank's peak memory.

Ranks are processes of this machine (gloo on CPUs, NCCL on GPUs). The peak is above the inputs and the cache, which
both ways have: what grows with the prompt in one and with the chunk in the other.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ringattn.launch.bench import table
from ringattn.launch.bench.memory import CudaMeter, ResidentMeter
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.words import option

COLUMNS = ["tokens", "chunk", "ranks", "ms", "peak_mb", "over_whole"]


@dataclass
class Options:
    tokens: list[int] = option([512, 2048, 8192], "prompt lengths")
    chunk: int = option(512, "tokens a chunk")
    ranks: int = option(2, "ranks")
    heads: int = option(8, "query heads")
    kv_heads: int = option(2, "key heads")
    head_dim: int = option(64, "head dim")
    repeats: int = option(3, "timed runs, of which the median counts")
    device: str = option("cpu", "cpu or cuda")
    timeout: float = option(600.0, "seconds for all")


def run(options: Options) -> list[dict[str, Any]]:
    backend = "nccl" if options.device == "cuda" else "gloo"
    ranks = run_ranks(measure, options.ranks, options, backend=backend, timeout=options.timeout)
    rows: list[dict[str, Any]] = []
    for measured in zip(*ranks, strict=True):
        worst = {**measured[0], "ms": max(m["ms"] for m in measured), "peak_mb": max(m["peak_mb"] for m in measured)}
        whole = next((r for r in rows if r["tokens"] == worst["tokens"]), worst)
        given = {k: v for k, v in asdict(options).items() if k not in ("tokens", "chunk", "timeout", "repeats")}
        rows.append({"suite": "prefill", **given, **worst, "over_whole": worst["ms"] / whole["ms"]})
    print(table(rows, COLUMNS))
    return rows


def measure(options: Options) -> list[dict[str, Any]]:
    """One rank: every prompt whole, then in chunks."""
    import ringattn as ra

    mesh = ra.init_mesh(ring=options.ranks, device_type=options.device)
    found = []
    for tokens in options.tokens:
        for chunk in (tokens, min(options.chunk, tokens)):
            plan = ra.plan(mesh, seq_len=chunk)
            prompt = local_prompt(options, plan, tokens, chunk)
            times = []
            for _ in range(1 + options.repeats):  # the first one warms up
                cache = new_cache(options, plan, tokens, prompt[0][0].dtype)
                meter = CudaMeter() if options.device == "cuda" else ResidentMeter()
                start = now(options.device)
                for q, k, v in prompt:
                    ra.prefill(q, k, v, plan.for_length(min(chunk, tokens)), cache)
                times.append(now(options.device) - start)
                peak = meter.peak()
            ms = sorted(times[1:])[len(times[1:]) // 2] * 1e3
            found.append({"tokens": tokens, "chunk": chunk, "ms": ms, "peak_mb": peak / 2**20})
    return found


def local_prompt(options: Options, plan: Any, tokens: int, chunk: int) -> list[list[torch.Tensor]]:
    """This rank's part of every chunk; the length is a multiple of the chunk."""
    if tokens % chunk:
        raise ValueError(f"chunk={chunk} does not divide tokens={tokens}; this benchmark takes whole chunks")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    heads = (options.heads, options.kv_heads, options.kv_heads)
    return [
        [torch.randn(1, plan.local_len, h, options.head_dim, device=options.device, dtype=dtype) for h in heads]
        for _ in range(tokens // chunk)
    ]


def new_cache(options: Options, plan: Any, tokens: int, dtype: torch.dtype) -> Any:
    import ringattn as ra

    return ra.KVCache.allocate(
        plan, batch=1, max_len=tokens, kv_heads=options.kv_heads, head_dim=options.head_dim, dtype=dtype
    )


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
