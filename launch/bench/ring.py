"""Attention over ranks beside its floor: the same flops a rank, the same kernel, no communication.

The floor of a causal or full mask is one call on every rank at once, of about tokens / sqrt(ranks) tokens: as many
(query, key) pairs as a rank has of the whole. The floor of other masks is the whole sequence on one device, divided by
the ranks. Only pairs that the mask leaves count as flops. The floor is the mean of its times before and after, since a
GPU may slow down as it warms up. Times are medians, of the slowest rank. `peak_mib` is what a call allocates, and `MB`
what the busiest rank sends in it, in millions of bytes. With rule=gated, delta or kimi it is linear attention, whose
floor is a rank's tokens alone, and whose states travel as `scan` says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks, timing
from ringattn.launch.bench.masks import WORDS, Case, case_of
from ringattn.launch.bench.timing import CALLS, FLOPS, RULES, TIMEOUT, Heads, Passes, passes_of
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "who", "strategy", "layout", "route", "mode", "ms", "floor_ms", "ratio", "tflops",
           "peak_mib", "MB"]  # fmt: skip


@dataclass
class Options(Heads):
    ranks: int = option(4, "ranks")
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([16384, 32768, 131072], "lengths of the whole sequence")
    mask: list[str] = option(["causal"], WORDS)
    rule: str = option(
        "softmax", "attention, or linear attention by this rule, whose heads are query heads", among=RULES
    )
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: list[str] = option(["auto"], "contiguous, striped, zigzag or balanced")
    route: str = option("auto", "auto, direct, relay or levels")
    scan: list[str] = option(["auto"], "how states of linear attention travel: auto, gather, ring, pipeline")
    groups: int = option(0, "groups of heads through Ulysses and gather; 0: as many as save time")
    transports: list[str] = option(["auto"], "auto, symmetric, group: each is timed")
    kernel: str = option("auto", "the kernel of every step, and of the floor")
    graphs: bool = option(False, "capture each call in a CUDA graph and time its replays, the floor's too")
    calls: int = CALLS
    timeout: float = TIMEOUT


def run(options: Options) -> Iterator[Row]:
    for row in over_ranks(measured, options, "ms", "floor_ms", "peak_mib", "MB"):
        row["tflops"] = row["flops"] / options.ranks / row["ms"] / 1e9 if row["flops"] else None
        yield row | {"ratio": row["floor_ms"] / row["ms"]}


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length, forward and forward + backward, over ranks and alone."""
    mesh = ra.init_mesh(ring=options.ranks // options.ulysses, ulysses=options.ulysses, device_type=options.device)
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        rows: list[Row] = []
        before = floor(options, case)
        for about, plan, calls in contestants(options, mesh, case):
            for mode in FLOPS:
                flops = FLOPS[mode] * case.pairs * options.heads * options.head_dim
                row = {"tokens": case.tokens, "mask": mask, **about, "mode": mode}
                row |= {"flops": flops if options.rule == "softmax" else None, "ms": timed(calls[mode], options)}
                rows.append(row | counted(options, plan, calls[mode]))
            del calls
        after = floor(options, case)
        for row in rows:
            mode = row["mode"]
            yield row | {"floor_ms": (before[mode] + after[mode]) / 2}


def floor(options: Options, case: Case) -> dict[str, float]:
    """Milliseconds of each mode with as much work as a rank has, and no communication."""
    less, linear = case.alone(options.ranks), options.rule != "softmax"
    share = 1.0 if linear else case.pairs / less.pairs / options.ranks
    tokens, kernel = (case.tokens // options.ranks, "auto") if linear else (less.tokens, options.kernel)
    calls = passes_of(options, ra.plan(seq_len=tokens, kernel=kernel), {} if linear else less.asked, options.kernel)
    return {mode: timed(calls[mode], options) * share for mode in FLOPS}


def contestants(options: Options, mesh: Any, case: Case) -> Iterator[tuple[Row, Any, Passes]]:
    """(what about it, its plan, what is timed), each with the memory to itself."""
    linear = options.rule != "softmax"
    how: dict[str, Any] = {**options.sizes, **case.asked, "kernel": "auto" if linear else options.kernel}
    for transport, layout, scan in product(options.transports, options.layout, options.scan):
        by = ra.Transport(options.route, groups=options.groups or None, by=transport)
        plan = ra.plan(mesh, seq_len=case.tokens, strategy=options.strategy, layout=layout, transport=by, **how)
        axis = plan.axes.ring if plan.ring > 1 else plan.axes.ulysses
        about = {"who": axis.by, "strategy": plan.strategy, "layout": plan.layout, "route": plan.transport.route}
        about |= {"strategy": options.rule, "route": scan} if linear else {}
        yield about, plan, passes_of(options, plan, case.asked, options.kernel, scan)


def counted(options: Options, plan: Any, call: Callable[[], Any]) -> Row:
    """One call more: the millions of bytes that this rank sends, and what it allocates at its peak."""
    axes = plan.ring_axis, plan.ulysses_axis
    before, memory = sum(getattr(axis, "sent", 0) for axis in axes), timing.memory_from_now(options.device)
    call()
    timing.finish()
    sent = sum(getattr(axis, "sent", 0) for axis in axes) - before
    return {"MB": sent / 1e6, "peak_mib": memory.grown() / 2**20}


def timed(call: Callable[[], Any], options: Options) -> float:
    return timing.median_ms(call, options.repeats, options.graphs, options.calls)
