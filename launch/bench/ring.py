"""Attention over ranks beside its floor: the same flops a rank, the same kernel, no communication.

The floor of a causal or full mask is one call on every rank at once, of tokens / sqrt(ranks) tokens: as many (query,
key) pairs as a rank has of the whole. The floor of other masks is the whole sequence on one device, divided by the
ranks. Only pairs that the mask leaves count as flops. `overhead` is the part of the time that the floor does not
explain; what a trace calls exposed is communication. The floor is the mean of its times before and after, since a GPU
may slow down as it warms up. Times are medians: of the slowest rank in the table, of rank 0 in the lines that come
before it. Where ranks are played, `by_rank` has the times of all of them, and a trace is of the slowest. `peak` is the
memory of forward and backward over q, k, v, out, their gradients and lse. `peers` are torch's own context_parallel with
cuDNN, by how it rotates: allgather, alltoall.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ringattn as ra
from ringattn.choosing import elsewhere
from ringattn.comms import messages
from ringattn.launch.bench import Row, over_ranks, timeline
from ringattn.launch.bench.folded import PROCESSES, folded, processes_of
from ringattn.launch.bench.masks import WORDS, Case, asked_by, cases
from ringattn.launch.bench.timing import IN_A_ROW, attention_passes, draws, median_ms, passes
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "who", "strategy", "layout", "mode", "ms", "floor_ms", "ratio", "tflops",
           "overhead", "against", "peak"]  # fmt: skip
FLOPS = {"forward": 4, "forward+backward": 14}  # flops of a pair, a head and a dim


@dataclass
class Options:
    ranks: int = option(4, "ranks")
    processes: int = PROCESSES
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([16384, 32768, 131072], "lengths of the whole sequence")
    mask: list[str] = option(["causal"], WORDS)
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: list[str] = option(["auto"], "contiguous, striped, zigzag or balanced")
    route: str = option("auto", "auto, direct, relay or levels")
    together: int = option(0, "blocks a step; 0: as many as are small")
    groups: int = option(0, "groups of heads through Ulysses and gather; 0: as many as save time")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    peers: list[str] = option([], "torch's context_parallel beside ours", among=("allgather", "alltoall"))
    kernel: str = option("auto", "the kernel of every step, and of the floor")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    floor: bool = option(True, "whether to time the floor too")
    modes: list[str] = option(list(FLOPS), "which passes", among=tuple(FLOPS))
    graphs: bool = option(False, "capture each call in a CUDA graph and time its replays, the floor's too")
    calls: int = IN_A_ROW
    warmup: int = option(2, "runs that are not timed", least=0)
    repeats: int = option(10, "timed runs")
    trace: str = option(
        "", "a file name for a trace (.json) and a picture (.svg) of each first length and mode", bare="trace.json"
    )
    timeout: float = option(900.0, "seconds for all")

    def __post_init__(self) -> None:
        if self.ranks % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} does not divide ranks={self.ranks}")
        if processes_of(self) != self.ranks and (self.peers or self.strategy == "ulysses"):
            raise ValueError(f"processes={self.processes} plays the ranks of a ring; leave out peers and Ulysses")
        for mask in self.mask:
            asked_by(mask, max(self.tokens))


def run(options: Options) -> Iterator[Row]:
    rows = []
    for row in over_ranks(measured, options, "ms", "floor_ms", "peak"):
        rows.append(row)
        row["tflops"] = row["flops"] / options.ranks / row["ms"] / 1e9
        if row["floor_ms"] is not None:
            row["ratio"] = row["floor_ms"] / row["ms"]
            row["overhead"] = 1 - row["ratio"]
        same = [r for r in rows if all(r[n] == row[n] for n in ("tokens", "mask", "mode"))]
        theirs = [r["ms"] for r in same if r["who"].startswith("torch")]
        if theirs and not row["who"].startswith("torch"):
            row["against"] = min(theirs) / row["ms"]  # how much faster than the fastest peer, measured before
        if spans := row.pop("spans", None):
            name = " ".join(str(row[n]) for n in ("who", "tokens", "mode"))
            print(timeline.save(spans, Path(options.trace), name))
        yield row


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length, forward and forward + backward, over ranks and alone; with the spans of a trace."""
    ring = processes_of(options) // options.ulysses
    mesh = ra.init_mesh(ring=ring, ulysses=options.ulysses, device_type=options.device)
    for number, (mask, case) in enumerate(cases(options.mask, options.tokens)):
        tokens = case.tokens
        rows: list[Row] = []
        before = floor(options, case) if options.floor else {}
        for who, about, calls in contestants(options, mesh, case):
            for mode in options.modes:
                if options.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                times = [timed(each[mode], options) for each in calls]  # of all ranks, if they are played
                flops = FLOPS[mode] * case.pairs * options.heads * options.head_dim
                row = {"tokens": tokens, "mask": mask, "who": who, **about, "mode": mode, "flops": flops}
                row |= {"ms": max(times)} | ({"by_rank": " ".join(f"{ms:.4g}" for ms in times)} if times[1:] else {})
                rows.append(row | {"peak": peak(options, tokens, mode)})
                if options.trace and not number:
                    rows[-1]["spans"] = timeline.record(calls[slowest(times)][mode])
            del calls
        after = floor(options, case) if options.floor else {}
        for row in rows:
            both = [each[str(row["mode"])] for each in (before, after) if each]
            yield row | {"floor_ms": sum(both) / len(both) if both else None}


def slowest(times: list[float]) -> int:
    """The played rank that takes longest, by the clock of the first process: all must play the same."""
    return int(messages.gather(times.index(max(times)))[0])


def floor(options: Options, case: Case) -> dict[str, float]:
    """Milliseconds of each mode with as many pairs as a rank has, and no communication."""
    length, share = (round(case.tokens / options.ranks**0.5), 1) if case.plain else (case.tokens, options.ranks)
    calls = attention_passes(options, ra.plan(seq_len=length, kernel=options.kernel), **case.asked)
    return {mode: timed(calls[mode], options) / share for mode in options.modes}


def contestants(options: Options, mesh: Any, case: Case) -> Iterator[tuple[str, dict[str, str], list[Any]]]:
    """(who, what about it, what is timed), one after the other: each has the memory to itself; peers come first."""
    ring, u = options.ranks // options.ulysses, options.ulysses
    played = processes_of(options) != options.ranks
    strategy = "ring" if played and options.strategy == "auto" else options.strategy
    target = elsewhere(options.device, [(ring, u)], gpus=options.ranks) if played else mesh
    for method in options.peers:
        with torch_context_parallel(mesh["ring"], options.ranks, method, options.device):
            about = {"strategy": "ring", "layout": "zigzag", "route": method}
            yield f"torch {method}", about, [theirs(options, case.tokens)]
    for transport in options.transports:
        axes = ra.plan(mesh, seq_len=ring, transport=ra.Transport(by=transport)).axes
        for layout in options.layout:
            plan = ra.plan(
                target, seq_len=case.tokens, heads=(options.heads, options.kv_heads), head_dim=options.head_dim,
                strategy=strategy, layout=layout, kernel=options.kernel, **case.asked,
                transport=ra.Transport(
                    options.route, together=options.together or None, groups=options.groups or None, by=transport
                ),
            )  # fmt: skip
            plans = [folded(plan, ring, rank, axes) for rank in range(ring)] if played else [plan]
            about = {"strategy": plan.strategy, "layout": plan.layout, "route": plan.transport.route}
            axis = axes.ring if plan.ring > 1 else axes.ulysses
            yield axis.by, about, [attention_passes(options, each, **case.asked) for each in plans]


def theirs(options: Options, tokens: int) -> dict[str, Callable[[], Any]]:
    """The same through torch's own attention, within its context_parallel."""
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tensors = draws(options, tokens // options.ranks, "qkvo")
    q, k, v, dout = (x.transpose(1, 2).contiguous().requires_grad_() for x in tensors)

    def attend() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return passes(attend, (q, k, v), dout.detach())


@contextmanager
def torch_context_parallel(mesh: Any, ranks: int, method: str, device: str) -> Iterator[None]:
    from torch.distributed.tensor.experimental import _attention, context_parallel

    _attention.set_rotate_method(method)
    with context_parallel(mesh, buffers=[torch.zeros(1, 1, 2 * ranks, 1, device=device)], buffer_seq_dims=[2]):
        yield


def peak(options: Options, tokens: int, mode: str) -> float | None:
    """The most memory that was used at once, over q, k, v, out, the gradients of all four, and lse."""
    if options.device != "cuda" or mode == "forward":
        return None
    local = tokens // options.ranks
    tensors = 4 * local * (options.heads + options.kv_heads) * options.head_dim * 2  # two bytes
    return torch.cuda.max_memory_allocated() / (tensors + 4 * local * options.heads)


def timed(call: Callable[[], Any], options: Options) -> float:
    return median_ms(call, options.repeats, options.warmup, options.graphs, options.calls)
