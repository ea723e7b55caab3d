"""The candidates of plans over ranks, each run here: what was predicted and simulated of it, and what it took.

A setting is KERNEL/TOKENS/HEADS/KEY HEADS/MASK, say fa4/32768/32/8/causal. Its candidates are those of a plan that
chooses freely among all ranks, but for those predicted to take more than `within` times as long as the first. `off` is
the predicted time over the measured one, less 1, and `played` the same of the simulated time. The plan's own choice is
measured last; `of_best` is its time over that of the fastest candidate. `gib` is a rank's peak.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.launch.bench import Row, over_ranks
from ringattn.launch.bench.masks import case_of
from ringattn.launch.bench.timing import attention_passes, dtype_on, median_ms, memory_from_now
from ringattn.launch.words import option
from ringattn.plans.candidates import problem_of, rates_of
from ringattn.plans.explain import way_of
from ringattn.plans.machine import Machine, load, of_device
from ringattn.plans.simulation import play

COLUMNS = ["setting", "plan", "layout", "route", "mode", "ms", "predicted", "off", "simulated", "played", "gib",
           "predicted_gib", "pick", "of_best"]  # fmt: skip
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
MODES = ("forward", "forward+backward")


@dataclass
class Options:
    ranks: int = option(2, "ranks")
    settings: list[str] = option(SETTINGS, "KERNEL/TOKENS/HEADS/KEY HEADS/MASK, with the masks of bench ring")
    head_dim: int = option(128, "head dim")
    machine: str | None = option(None, "a description of the machine: a name or a file; by default the device's")
    within: float = option(1.4, "how much longer than the first candidate one may be predicted to take", least=1)
    seconds: float = option(0.3, "for the timed runs of a candidate, forward and backward; there are at least two")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    timeout: float = option(900.0, "seconds for all")

    def __post_init__(self) -> None:
        for word in self.settings:
            setting_of(word, self)


def setting_of(word: str, options: Any) -> SimpleNamespace:
    """What a word of `settings` says."""
    try:
        kernel, tokens, heads, kv_heads, mask = word.split("/")
        sizes = {"heads": int(heads), "kv_heads": int(kv_heads), "head_dim": options.head_dim}
        return SimpleNamespace(kernel=kernel, device=options.device, case=case_of(mask, int(tokens)), **sizes)
    except ValueError as error:
        raise ValueError(f"settings={word}: give KERNEL/TOKENS/HEADS/KEY HEADS/MASK ({error})") from None


def run(options: Options) -> Iterator[Row]:
    rows: list[Row] = []
    for row in over_ranks(measured, options, "ms", "gib"):
        rows.append(finished(row, rows))
        yield row
    print("\n".join(summary(rows)))


def finished(row: Row, before: list[Row]) -> Row:
    """The row with how far off it is, and the plan's own choice with its time over that of the fastest."""
    row |= {"off": row["predicted"] / row["ms"] - 1, "played": row["simulated"] / row["ms"] - 1}
    rivals = [r["ms"] for r in before if (r["setting"], r["mode"]) == (row["setting"], row["mode"])]
    row["of_best"] = row["ms"] / min([*rivals, row["ms"]]) if row["pick"] else None
    return row


def summary(rows: list[Row]) -> list[str]:
    """How many rows are how far off, and how many choices are how near to the fastest candidate."""
    lines = []
    for name, what in (("off", "predicted"), ("played", "simulated")):
        off = np.abs([row[name] for row in rows])
        shares = ", ".join(f"{np.mean(off <= most):.0%} within {most:.0%}" for most in (0.15, 0.2, 0.3))
        lines.append(f"{what} of {len(off)} rows: {shares}; the worst is {off.max():.0%} off")
    picks = [row["of_best"] for row in rows if row["pick"] and row["mode"] == MODES[-1]]
    near = ", ".join(f"{sum(x <= 1 + most for x in picks)} within {most:.0%}" for most in (0.05, 0.1))
    lines.append(f"of {len(picks)} choices {near} of the fastest candidate; the worst takes {max(picks):.2f} x as long")
    return lines


def measured(options: Options, machine: Machine | None = None) -> Iterator[Row]:
    """One rank: all candidates of all settings, as predicted on the machine."""
    machine = machine or (load(options.machine) if options.machine else of_device(options.device))
    whole = ra.init_mesh(sequence=options.ranks, device_type=options.device)
    meshes: dict[tuple[int, int], Any] = {}

    def candidates(word: str) -> Iterator[Row]:
        setting = setting_of(word, options)
        how = {"seq_len": setting.case.tokens, "heads": (setting.heads, setting.kv_heads), "machine": machine,
               "head_dim": setting.head_dim, "kernel": setting.kernel, **setting.case.asked}  # fmt: skip
        candidates = ra.plan(whole, **how).report.data["candidates"]
        for each in [x for x in candidates[::-1] if x["seconds"] <= options.within * candidates[0]["seconds"]]:
            sizes = each["ring"], each["ulysses"]
            if sizes not in meshes:
                meshes[sizes] = ra.init_mesh(ring=sizes[0], ulysses=sizes[1], device_type=options.device)
            named = {"strategy": each["strategy"], "layout": each["layout"], "transport": ra.Transport(each["route"])}
            plan = ra.plan(meshes[sizes], **named, **how)
            about = {"setting": word, "plan": way_of(plan), "layout": plan.layout, "route": plan.transport.route,
                     "kernel": each["kernel"], "pick": each is candidates[0]}  # fmt: skip
            for row in passes_of(plan, each, setting, machine, options.seconds):
                yield about | row

    for word in options.settings:
        try:
            yield from candidates(word)
        except NotImplementedError as error:  # on all ranks
            if dist.get_rank() == 0:
                print(f"{word}: {error}", flush=True)


def passes_of(plan: Any, predicted: Any, setting: Any, machine: Machine, seconds: float) -> list[Row]:
    """A row a mode of one candidate."""
    dtype = dtype_on(setting.device)
    shape, spec, docs = plan.shape(dtype.itemsize), setting.case.asked["spec"], setting.case.asked.get("docs")
    problem = problem_of(plan, shape, spec, str(dtype).removeprefix("torch."), docs, machine.arch)
    rates = rates_of(problem, plan, machine)[1]
    memory = memory_from_now(setting.device)
    calls = attention_passes(setting, plan, **setting.case.asked)
    count = int(min(10, max(2, seconds / predicted["seconds"])))  # the same on every rank
    rows, expected, played, before = [], 0.0, 0.0, 0.0
    for i, mode in enumerate(MODES):
        expected += machine.single(predicted[("forward", "backward")[i]]["seconds"], bool(i))
        both = play(plan, shape, spec, docs, machine, rates, backward=bool(i)).seconds
        played, before = played + machine.single(both - before, bool(i)), both
        ms = median_ms(calls[mode], count, warmup=1)
        rows.append({"mode": mode, "ms": ms, "predicted": expected * 1e3, "simulated": played * 1e3})
    del calls
    torch.cuda.empty_cache() if setting.device == "cuda" else None
    return [row | {"gib": memory.grown() / 2**30, "predicted_gib": predicted["memory"] / 2**30} for row in rows]
