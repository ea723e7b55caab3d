"""Linear attention over ranks beside its floor: each rank's tokens alone on one device, no communication.

Every way in which states can travel is timed. `MB` is what the busiest rank sends in a call; it does not depend on the
number of tokens. Times are medians, of the slowest rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ringattn as ra
from ringattn.launch.bench import Row, linear, over_ranks
from ringattn.launch.bench.folded import PROCESSES, folded, processes_of
from ringattn.launch.bench.timing import IN_A_ROW, median_ms, passes
from ringattn.launch.words import option

COLUMNS = ["ranks", "tokens", "layout", "scan", "mode", "ms", "floor_ms", "ratio", "MB"]


@dataclass
class Options:
    ranks: int = option(4, "ranks")
    processes: int = PROCESSES
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([8192, 32768, 131072], "tokens of a rank")
    batch: int = option(1, "sequences")
    heads: int = option(16, "heads")
    key_dim: int = option(128, "key dim")
    value_dim: int = option(128, "value dim")
    rule: str = option("gated", "the update of the state", among=("gated", "delta"))
    key_heads: int | None = option(None, "heads of q and k (as many as heads)")
    gate: str = option("channel", "what has a gate of its own", among=("channel", "head", "none"))
    layout: list[str] = option(["zigzag"], "contiguous or zigzag")
    scan: list[str] = option(["auto", "gather", "ring", "pipeline"], "how states travel")
    kernel: str = option("auto", "auto, triton or chunkwise")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    calls: int = IN_A_ROW
    repeats: int = option(10, "timed runs")
    timeout: float = option(900.0, "seconds for all")


def run(options: Options) -> Iterator[Row]:
    for row in over_ranks(measured, options, "ms", "floor_ms", "MB"):
        yield {**row, "ratio": row["floor_ms"] / row["ms"]}


def measured(options: Options) -> Iterator[Row]:
    """One rank: every length, alone and then every layout and way, forward and forward + backward."""
    ring = options.ranks // options.ulysses
    mesh = ra.init_mesh(
        ring=processes_of(options) // options.ulysses, ulysses=options.ulysses, device_type=options.device
    )
    for tokens in options.tokens:
        single = passes_of(options, ra.plan(seq_len=tokens), "auto")
        floors = {mode: timed(call, options) for mode, call in single.items()}
        for layout in options.layout:
            plan = folded(ra.plan(mesh, seq_len=tokens * options.ranks, layout=layout), ring)
            for scan in options.scan:
                for mode, call in passes_of(options, plan, scan).items():
                    before = sent(plan)
                    call()
                    row = {"tokens": tokens, "layout": layout, "scan": scan, "mode": mode, "floor_ms": floors[mode]}
                    yield {**row, "MB": (sent(plan) - before) / 1e6, "ms": timed(call, options)}


def timed(call: Callable[[], Any], options: Options) -> float:
    return median_ms(call, options.repeats, calls=options.calls)


def passes_of(options: Options, plan: Any, scan: str) -> dict[str, Callable[[], Any]]:
    """What is timed: one forward pass, and one with its backward, on random data with gates as a layer makes them."""
    case = linear.Case(
        plan.local_len, options.batch, options.heads, options.key_dim, options.value_dim, options.gate,
        beta=options.rule == "delta", key_heads=options.key_heads,
    )  # fmt: skip
    given = linear.inputs(case, linear.Options(device=options.device, gate_dtype="float32"))
    q, k, v, g, beta = leaves = given.leaves

    def attend() -> Any:
        return ra.linear_attention(q, k, v, g, plan, beta=beta, scan=scan, kernel=options.kernel, check=False)

    return passes(attend, [x for x in leaves if x is not None], given.dout)


def sent(plan: Any) -> int:
    return sum(getattr(axis, "sent", 0) for axis in (plan.ring_axis, plan.ulysses_axis))
