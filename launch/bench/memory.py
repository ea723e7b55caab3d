"""The peak memory of a rank, forward and backward, at several numbers of ranks and the same total length.

Ranks are processes of this machine (gloo on CPUs, NCCL on GPUs). On a CPU the peak is the process's resident memory
above what it had before its inputs were made; `minimal_mib` is q, k, v, out, their gradients and the lse of its tokens.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks
from ringattn.launch.bench.timing import attention_passes, dtype_on
from ringattn.launch.train import metrics
from ringattn.launch.words import option

COLUMNS = ["ranks", "strategy", "layout", "tokens", "local", "peak_mib", "minimal_mib", "ratio"]


@dataclass
class Options:
    ranks: list[int] = option([1, 2, 4, 8], "numbers of ranks")
    tokens: int = option(32768, "tokens of the whole sequence")
    heads: int = option(8, "query heads")
    kv_heads: int = option(2, "key heads")
    head_dim: int = option(64, "head dim")
    window: int | None = option(2048, "attend to this many keys: less to compute, the same memory; none for all")
    strategy: str = option("ring", "ring, gather or ulysses")
    layout: str = option("zigzag", "contiguous, striped or zigzag")
    device: str = option("cpu", "where it runs", among=("cpu", "cuda"))
    timeout: float = option(600.0, "seconds for each number of ranks")


def run(options: Options) -> Iterator[Row]:
    return over_ranks(measured, options, "peak_mib", "ratio")


def measured(options: Options) -> Iterator[Row]:
    """One rank: the peak of one forward and backward pass, after one that warmed everything up."""
    ranks = dist.get_world_size()
    sizes = {"ulysses" if options.strategy == "ulysses" else "ring": ranks}
    mesh = ra.init_mesh(**sizes, device_type=options.device)
    how: dict[str, Any] = {"strategy": options.strategy, "layout": options.layout}
    spec = ra.AttentionSpec(window=options.window)
    attention_passes(options, ra.plan(mesh, seq_len=512, **how), spec=spec)["forward+backward"]()
    plan = ra.plan(mesh, seq_len=options.tokens, **how)
    memory = held(options.device)
    attention_passes(options, plan, spec=spec)["forward+backward"]()
    peak, local = memory.grown() / 2**20, -(-options.tokens // ranks)
    per_token = 4 * options.head_dim * (options.heads + options.kv_heads) * dtype_on(options.device).itemsize
    minimal = local * (per_token + 4 * options.heads) / 2**20
    yield {"ranks": ranks, "local": local, "peak_mib": peak, "minimal_mib": minimal, "ratio": peak / minimal}


def held(device: str) -> metrics.Memory:
    """What is held from here on; on a CPU freed tensors go back to the system at once."""
    if device == "cpu":
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    memory = metrics.Memory(torch.device(device))
    memory.reset()
    return memory
