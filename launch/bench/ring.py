"""Attention over ranks beside its floor: the same flops a rank, the same kernel, no communication.

The floor of a causal or full mask is one call on every rank at once, of tokens / sqrt(ranks) tokens: as many (query,
key) pairs as a rank has of the whole. The floor of other masks is the whole sequence on one device, divided by the
ranks. Only pairs that the mask leaves count as flops. The floor is the mean of its times before and after, since a GPU
may slow down as it warms up. Times are medians, of the slowest rank. `peak` is the memory of forward and backward over
q, k, v, out, their gradients and lse, and `MB` what the busiest rank sends in a call, in millions of bytes. With
rule=gated, delta or kimi it is linear attention, whose floor is a rank's tokens alone, and whose states travel as
`scan` says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks, timing
from ringattn.launch.bench.masks import WORDS, Case, asked_by, case_of
from ringattn.launch.bench.timing import IN_A_ROW, RULE, Passes
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "who", "strategy", "layout", "route", "mode", "ms", "floor_ms", "ratio", "tflops",
           "peak", "MB"]  # fmt: skip
FLOPS = {"forward": 4, "forward+backward": 14}  # flops of a pair, a head and a dim


@dataclass
class Options:
    ranks: int = option(4, "ranks")
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([16384, 32768, 131072], "lengths of the whole sequence")
    mask: list[str] = option(["causal"], WORDS)
    rule: str = RULE
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: list[str] = option(["auto"], "contiguous, striped, zigzag or balanced")
    route: str = option("auto", "auto, direct, relay or levels")
    scan: list[str] = option(["auto"], "how states of linear attention travel: auto, gather, ring, pipeline")
    together: int = option(0, "blocks a step; 0: as many as are small")
    groups: int = option(0, "groups of heads through Ulysses and gather; 0: as many as save time")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    kernel: str = option("auto", "the kernel of every step, and of the floor")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    floor: bool = option(True, "whether to time the floor too")
    modes: list[str] = option(list(FLOPS), "which passes", among=tuple(FLOPS))
    graphs: bool = option(False, "capture each call in a CUDA graph and time its replays, the floor's too")
    calls: int = IN_A_ROW
    warmup: int = option(2, "runs that are not timed", least=0)
    repeats: int = option(10, "timed runs")
    timeout: float = option(900.0, "seconds for all")

    def __post_init__(self) -> None:
        if self.ranks % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} does not divide ranks={self.ranks}")
        for mask in self.mask:
            asked_by(mask, max(self.tokens))


def run(options: Options) -> Iterator[Row]:
    for row in over_ranks(measured, options, "ms", "floor_ms", "peak", "MB"):
        row["tflops"] = row["flops"] / options.ranks / row["ms"] / 1e9 if row["flops"] else None
        row["ratio"] = row["floor_ms"] / row["ms"] if row["floor_ms"] else None
        yield row


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length, forward and forward + backward, over ranks and alone."""
    mesh = ra.init_mesh(ring=options.ranks // options.ulysses, ulysses=options.ulysses, device_type=options.device)
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        rows: list[Row] = []
        before = floor(options, case) if options.floor else {}
        for about, plan, calls in contestants(options, mesh, case):
            for mode in options.modes:
                flops = FLOPS[mode] * case.pairs * options.heads * options.head_dim
                row = {"tokens": case.tokens, "mask": mask, **about, "mode": mode}
                row |= {"flops": flops if options.rule == "softmax" else None, "ms": timed(calls[mode], options)}
                rows.append(row | counted(options, case, mode, plan, calls[mode]))
            del calls
        after = floor(options, case) if options.floor else {}
        for row in rows:
            both = [each[str(row["mode"])] for each in (before, after) if each]
            yield row | {"floor_ms": sum(both) / len(both) if both else None}


def floor(options: Options, case: Case) -> dict[str, float]:
    """Milliseconds of each mode with as much work as a rank has, and no communication."""
    share = 1
    if options.rule != "softmax":
        calls = timing.linear_passes(options, ra.plan(seq_len=case.tokens // options.ranks), options.kernel)
    else:
        length = round(case.tokens / options.ranks**0.5) if case.plain else case.tokens
        share = 1 if case.plain else options.ranks
        calls = timing.attention_passes(options, ra.plan(seq_len=length, kernel=options.kernel), **case.asked)
    return {mode: timed(calls[mode], options) / share for mode in options.modes}


def contestants(options: Options, mesh: Any, case: Case) -> Iterator[tuple[Row, Any, Passes]]:
    """(what about it, its plan, what is timed), each with the memory to itself."""
    softmax = options.rule == "softmax"
    sizes: dict[str, Any] = {"heads": (options.heads, options.kv_heads), "head_dim": options.head_dim}
    sizes["kernel"] = options.kernel if softmax else "auto"
    for transport, layout in product(options.transports, options.layout):
        how = ra.Transport(
            options.route, together=options.together or None, groups=options.groups or None, by=transport
        )
        plan = ra.plan(
            mesh, seq_len=case.tokens, strategy=options.strategy, layout=layout, transport=how, **sizes, **case.asked
        )
        axis = plan.axes.ring if plan.ring > 1 else plan.axes.ulysses
        about = {"who": axis.by, "strategy": plan.strategy, "layout": plan.layout, "route": plan.transport.route}
        if softmax:
            yield about, plan, timing.attention_passes(options, plan, **case.asked)
            continue
        for scan in options.scan:
            calls = timing.linear_passes(options, plan, options.kernel, scan, case.asked.get("docs"))
            yield {**about, "strategy": options.rule, "route": scan}, plan, calls


def counted(options: Options, case: Case, mode: str, plan: Any, call: Callable[[], Any]) -> Row:
    """One call more: the millions of bytes that this rank sends, and the most memory that is used at once, over what
    q, k, v, out, the gradients of all four and lse take.
    """
    axes = plan.ring_axis, plan.ulysses_axis
    before, memory = sum(getattr(axis, "sent", 0) for axis in axes), timing.memory_from_now(options.device)
    call()
    timing.finish()
    row: Row = {"MB": (sum(getattr(axis, "sent", 0) for axis in axes) - before) / 1e6, "peak": None}
    if mode != "forward" and options.rule == "softmax":
        local, size = case.tokens // options.ranks, timing.dtype_on(options.device).itemsize
        inputs = 2 * local * (options.heads + options.kv_heads) * options.head_dim * size
        row["peak"] = (inputs + memory.grown()) / (2 * inputs + 4 * local * options.heads)
    return row


def timed(call: Callable[[], Any], options: Options) -> float:
    return timing.median_ms(call, options.repeats, options.warmup, options.graphs, options.calls)
