"""Attention of one layer, forward and backward, over more and more ranks: predicted, simulated, and measured here.

Each number of ranks holds `tokens` a rank, or with `seq_len` a part of the same sequence. The plan is the one that is
predicted to be the fastest on the described machine. `exposed` is the share of the time in which the mean rank does
not compute; `gib` is a rank's peak, measured above what the process held. With picture=FILE.svg speed, exposed
communication and memory are drawn over the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ringattn.launch.bench import Row, memory, over_ranks
from ringattn.launch.bench.timing import attention_passes, median_ms
from ringattn.launch.commands import simulate
from ringattn.launch.words import option, writable
from ringattn.plans.candidates import compared, rates_of
from ringattn.plans.explain import way_of
from ringattn.plans.machine import load, of_device
from ringattn.plans.simulation import play

COLUMNS = ["ranks", "by", "plan", "layout", "tokens", "ms", "tflops", "exposed", "gib"]
BY = {"predicted": "#4477aa", "simulated": "#ee6677", "measured": "#228833"}


@dataclass
class Options:
    ranks: list[int] = option([1, 2, 4, 8, 16, 32, 64, 128, 256], "numbers of ranks that are predicted and simulated")
    measured: list[int] = option([], "numbers of ranks that run here too")
    tokens: int = option(8192, "tokens of a rank")
    seq_len: int | None = option(None, "tokens of the whole sequence, instead")
    machine: str | None = option(None, "a description of the machine: a name or a file; by default the device's")
    heads: int = option(64, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    strategy: str = option("auto", "auto, ring, gather or ulysses")
    layout: str = option("auto", "auto, contiguous, striped or zigzag")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    warmup: int = option(1, "runs that are not timed", least=0)
    repeats: int = option(5, "timed runs")
    picture: str | None = option(None, "an SVG file for the picture")
    timeout: float = option(600.0, "seconds for each number of ranks that is measured")


def run(options: Options) -> Iterator[Row]:
    picture = writable(Path(options.picture)) if options.picture else None
    rows = []
    predicted = (row for ranks in options.ranks for row in described(options, ranks))
    for row in chain(predicted, over_ranks(measured, options, "ms", "gib")):
        row["tflops"] = row["flops"] / row["ranks"] / row["ms"] / 1e9
        rows.append(row)
        yield row
    if picture:
        draw(rows, picture)


def described(options: Options, ranks: int) -> Iterator[Row]:
    """What is predicted and what is simulated of the plan that is chosen for so many ranks."""
    machine = load(options.machine) if options.machine else of_device(options.device)
    tokens = options.seq_len or options.tokens * ranks
    asked = simulate.asked_of(
        simulate.Options(
            ranks=ranks, heads=(options.heads, options.kv_heads), head_dim=options.head_dim,
            strategy=options.strategy, layout=options.layout,
        ),
        machine, tokens,
    )  # fmt: skip
    best = compared(asked)[0]
    plan, cost, shape, problem = best.plan, best.cost, asked.shape, asked.problem(best.plan)
    assert shape is not None and problem is not None
    row = {"suite": "scaling", "machine": machine.name, "ranks": ranks, "tokens": tokens, "layout": plan.layout,
           "plan": way_of(plan) if ranks > 1 else "one rank", "flops": flops(options, tokens)}  # fmt: skip
    yield row | {"by": "predicted", "ms": cost.seconds * 1e3, "exposed": cost.exposed / cost.seconds,
                 "gib": cost.memory / 2**30}  # fmt: skip
    played = play(plan, shape, asked.spec, None, machine, rates_of(problem, plan, machine)[1])
    yield row | {"by": "simulated", "ms": played.seconds * 1e3, "exposed": max(0.0, 1 - played.working), "gib": None}


def measured(options: Options) -> Iterator[Row]:
    """One rank of those that run here."""
    import torch.distributed as dist

    import ringattn as ra

    ranks = dist.get_world_size()
    tokens = options.seq_len or options.tokens * ranks
    plan = ra.plan(
        ra.init_mesh(sequence=ranks, device_type=options.device), seq_len=tokens, strategy=options.strategy,
        heads=(options.heads, options.kv_heads), head_dim=options.head_dim, layout=options.layout,
    )  # fmt: skip
    call = attention_passes(options, plan)["forward+backward"]
    ms = median_ms(call, options.repeats, options.warmup)
    held = memory.held(options.device)
    call()
    yield {
        "ranks": ranks, "by": "measured", "plan": way_of(plan) if ranks > 1 else "one rank", "layout": plan.layout,
        "tokens": tokens, "ms": ms, "flops": flops(options, tokens), "exposed": None, "gib": held.grown() / 2**30,
    }  # fmt: skip


def flops(options: Options, tokens: int) -> float:
    """Of a causal layer, forward and backward."""
    return 14 * options.heads * options.head_dim * tokens * (tokens + 1) / 2


def draw(rows: list[Row], path: Path) -> None:
    """Speed, exposed communication and memory over the ranks; by what a point is known is its colour."""
    import matplotlib

    from ringattn.launch.commands.plot import STYLE, panels, save

    figures = {"tflops": "TFLOP/s a rank", "exposed": "share of the time exposed", "gib": "memory of a rank, GiB"}
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(1, 3, 11, 3.2, wspace=0.3)
        for ax, (name, title) in zip(axes[0], figures.items(), strict=True):
            for by, color in BY.items():
                points: list[tuple[Any, Any]] = sorted(
                    (row["ranks"], row[name]) for row in rows if row["by"] == by and row[name] is not None
                )
                if points:
                    wide = 5 if by == "predicted" else 1.5  # where both agree, one lies on the other
                    ax.plot(*zip(*points, strict=True), "o-", color=color, label=by, markersize=4, linewidth=wide)
            ax.set(title=title, xlabel="ranks", ylim=(0, None))
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
        axes[0][0].legend()
        save(figure, path)
