"""The candidates of plans over ranks, each run here: what was predicted of it, and what it took.

A setting is KERNEL/TOKENS/HEADS/KEY HEADS/MASK, say fa4/32768/32/8/causal. Its candidates are those of a plan that
chooses freely among all ranks, but for those predicted to take more than `within` times as long as the first. `off` is
the predicted time over the measured one, less 1. The plan's own choice is measured last; `of_best` is its time over
that of the fastest candidate. `gib` is a rank's peak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks
from ringattn.launch.bench.masks import case_of
from ringattn.launch.bench.timing import FLOPS, TIMEOUT, Heads, median_ms, memory_from_now, passes_of
from ringattn.launch.words import option
from ringattn.plans.explain import way_of
from ringattn.plans.machine import Machine, load, of_device

COLUMNS = ["setting", "plan", "layout", "route", "mode", "ms", "predicted", "off", "gib", "pick", "of_best"]
SETTINGS = [
    f"{kernel}/{1024 * int(length)}/{heads}/{mask}"
    for kernel, rest in {
        "fa4": "8 32/8 causal, 16 32/8 causal, 32 32/8 causal, 128 32/8 causal, 128 32/8 long, 128 32/8 short, "
               "64 32/8 4096, 256 32/8 1024, 512 32/8 4096",
        "cudnn": "8 32/8 causal, 64 32/8 causal, 16 32/8 full, 32 64/8 causal, 128 64/8 causal, 32 32/32 causal, "
                 "512 8/1 causal, 8 8/1 causal",
        "triton": "8 32/32 causal, 32 32/32 causal, 64 32/8 causal, 64 64/8 4096, 128 64/8 long, 64 32/32 short, "
                  "256 8/1 causal",
    }.items()
    for length, heads, mask in (each.split() for each in rest.split(","))
]  # fmt: skip
MODES = tuple(FLOPS)


@dataclass
class Options:
    ranks: int = option(2, "ranks")
    settings: list[str] = option(SETTINGS, "KERNEL/TOKENS/HEADS/KEY HEADS/MASK, with the masks of bench ring")
    head_dim: int = option(128, "head dim")
    machine: str | None = option(None, "a description of the machine: a name or a file; by default the device's")
    within: float = option(1.4, "how much longer than the first candidate one may be predicted to take", least=1)
    seconds: float = option(0.3, "for the timed runs of a candidate, forward and backward; there are at least two")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        for word in self.settings:
            setting_of(word, self)


@dataclass
class Setting(Heads):
    kernel: str = "auto"
    case: Any = None


def setting_of(word: str, options: Any) -> Setting:
    """What a word of `settings` says."""
    try:
        kernel, tokens, heads, kv_heads, mask = word.split("/")
        case = case_of(mask, int(tokens))
        return Setting(int(heads), int(kv_heads), options.head_dim, options.device, kernel=kernel, case=case)
    except ValueError as error:
        raise ValueError(f"settings={word}: give KERNEL/TOKENS/HEADS/KEY HEADS/MASK ({error})") from None


def run(options: Options) -> Iterator[Row]:
    rows: list[Row] = []
    for row in over_ranks(measured, options, "ms", "gib"):
        rows.append(finished(row, rows))
        yield row
    print(summary(rows))


def finished(row: Row, before: list[Row]) -> Row:
    """The row with how far off it is, and the plan's own choice with its time over that of the fastest."""
    row["off"] = row["predicted"] / row["ms"] - 1
    rivals = [r["ms"] for r in before if (r["setting"], r["mode"]) == (row["setting"], row["mode"])]
    row["of_best"] = row["ms"] / min([*rivals, row["ms"]]) if row["pick"] else None
    return row


def summary(rows: list[Row]) -> str:
    """How many rows are how far off, and how many choices are how near to the fastest candidate."""
    off = np.abs([row["off"] for row in rows])
    shares = ", ".join(f"{np.mean(off <= most):.0%} within {most:.0%}" for most in (0.15, 0.2, 0.3))
    picks = [row["of_best"] for row in rows if row["pick"] and row["mode"] == MODES[-1]]
    near = ", ".join(f"{sum(x <= 1 + most for x in picks)} within {most:.0%}" for most in (0.05, 0.1))
    return (f"predicted of {len(off)} rows: {shares}; the worst is {off.max():.0%} off\nof {len(picks)} choices {near} "
            f"of the fastest candidate; the worst takes {max(picks):.2f} x as long")  # fmt: skip


def measured(options: Options, machine: Machine | None = None) -> Iterator[Row]:
    """One rank: all candidates of all settings, as predicted on the machine."""
    machine = machine or (load(options.machine) if options.machine else of_device(options.device))
    whole = ra.init_mesh(sequence=options.ranks, device_type=options.device)
    mesh_of = cache(lambda ring, ulysses: ra.init_mesh(ring=ring, ulysses=ulysses, device_type=options.device))
    for word in options.settings:
        setting = setting_of(word, options)
        how = {"seq_len": setting.case.tokens, "machine": machine, "kernel": setting.kernel, **setting.sizes}
        how |= setting.case.asked
        try:
            candidates = ra.plan(whole, **how).report()[1]["candidates"]
        except NotImplementedError as error:  # on all ranks
            if dist.get_rank() == 0:
                print(f"{word}: {error}", flush=True)
            continue
        for each in [x for x in candidates[::-1] if x["seconds"] <= options.within * candidates[0]["seconds"]]:
            mesh, by = mesh_of(each["ring"], each["ulysses"]), ra.Transport(each["route"])
            plan = ra.plan(mesh, strategy=each["strategy"], layout=each["layout"], transport=by, **how)
            about = {"setting": word, "plan": way_of(plan), "layout": plan.layout, "route": plan.transport.route,
                     "kernel": each["kernel"], "pick": each is candidates[0]}  # fmt: skip
            for row in rows_of(plan, each, setting, options.seconds):
                yield about | row


def rows_of(plan: Any, predicted: Any, setting: Setting, seconds: float) -> list[Row]:
    """A row a mode of one candidate, with the memory to itself."""
    memory, rows, expected = memory_from_now(setting.device), list[Row](), 0.0
    calls = passes_of(setting, plan, setting.case.asked)
    count = int(min(10, max(2, seconds / predicted["seconds"])))  # the same on every rank
    for name, mode in zip(("forward", "backward"), MODES, strict=True):
        expected += predicted[name]["seconds"]
        rows.append({"mode": mode, "ms": median_ms(calls[mode], count), "predicted": expected * 1e3})
    del calls
    torch.cuda.empty_cache()
    return [row | {"gib": memory.grown() / 2**30} for row in rows]
