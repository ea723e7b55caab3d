"""One GPU: what `kernel="auto"` runs and our kernels, beside cuDNN, FlashAttention 2 and 4 and FlexAttention, in turns.

`auto` is `ra.attention`; the others are kernels alone. Calls alternate, so all have the same clock; `over_NAME` is
NAME's time over ours. Useful work is what the mask lets through: 4 D H flops of a pair forward, 2.5 times that
backward. Of short calls the host takes all of the time. With rule=gated, delta or kimi it is linear attention, beside
flash-linear-attention: `triton` is the kernels alone, `auto` is `ra.linear_attention`; its figure is tokens a
microsecond. A decode is timed by `bench inference ranks=1`.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from ringattn.conf.keys import nearest
from ringattn.launch.bench import Row
from ringattn.launch.bench.masks import WORDS, Case, asked_by, case_of
from ringattn.launch.bench.peers import ATTENTION, LINEAR, OURS, Inputs, Passes, inputs, linear_inputs
from ringattn.launch.bench.timing import RULE, finish, held, in_turns
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "impl", "pass", "ms", "tflops", "tokens_per_us", "peak_gib"]
DEFAULT = {
    ("softmax", "cuda"): ["auto", "triton", "flex", "cudnn", "flash", "fa4"],
    ("softmax", "cpu"): ["auto", "sdpa_cpu", "tiled"],
    ("linear", "cuda"): ["auto", "triton", "fla"],
    ("linear", "cpu"): ["auto", "chunkwise"],
}
BACKWARD = 2.5  # times the flops of forward


@dataclass
class Options:
    tokens: list[int] = option([8192, 32768], "lengths")
    mask: list[str] = option(["causal"], WORDS)
    rule: str = RULE
    impls: list[str] | None = option(
        None, f"which contestants: {','.join(ATTENTION)}; of linear rules {','.join(LINEAR)}"
    )
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    device: str = option("cuda", "where it runs", among=("cuda", "cpu"))
    backward: bool = option(True, "time the backward as well")
    rounds: int = option(20, "rounds, in each of which every contestant runs once", least=1)

    def __post_init__(self) -> None:
        for mask in self.mask:
            asked_by(mask, max(self.tokens))
        there = self.contestants
        self.impls = self.impls or DEFAULT["softmax" if self.rule == "softmax" else "linear", self.device]
        for name in self.impls:
            if name not in there:
                raise ValueError(
                    f"impls={name}: no such contestant{nearest(name, there)}; there are {', '.join(there)}"
                )

    @property
    def contestants(self) -> dict[str, Callable[[Inputs], Passes]]:
        return ATTENTION if self.rule == "softmax" else LINEAR


def run(options: Options) -> Iterator[Row]:
    about = {"suite": "kernels", "rule": options.rule, "heads": options.heads, "head_dim": options.head_dim}
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        for row in rows_of(case, options):
            yield {**about, "kv_heads": options.kv_heads, "tokens": case.tokens, "mask": mask, **row}


def rows_of(case: Case, options: Options) -> list[Row]:
    """A row a contestant and pass: medians over the rounds of its time, the figure, and its peak memory.

    In our rows `over_NAME` is the median of NAME's time over ours: above 1, ours is faster.
    """
    softmax = options.rule == "softmax"
    given = (inputs if softmax else linear_inputs)(case, options)
    contestants = entered(options, given)
    work = 4 * options.head_dim * options.heads * case.pairs / 1e9 if softmax else case.tokens / 1e3
    more = BACKWARD if softmax else 1.0
    amounts = {"forward": work, "backward": more * work, "both": (1 + more if softmax else 1.0) * work}
    rows = []
    for what in amounts if options.backward else ["forward"]:
        calls = {name: passes[what] for name, passes in contestants.items()}
        times = in_turns(calls, options.rounds, options.device)
        for name, own in times.items():
            ms = statistics.median(own)
            figure = {"tflops" if softmax else "tokens_per_us": amounts[what] / ms}
            row = {"impl": name, "pass": what, "ms": ms, **figure, "peak_gib": peak_gib(contestants[name][what])}
            for other in times if name in OURS else ():
                if other != name:
                    ratios = [x / y for x, y in zip(times[other], own, strict=True)]
                    row[f"over_{other}"] = statistics.median(ratios)
            rows.append(row)
    return rows


def entered(options: Options, given: Inputs) -> dict[str, Passes]:
    """The passes of every contestant; if one refuses, or a peer's own code fails, the reason is printed instead."""
    there = {}
    for name in options.impls or ():
        try:
            passes = options.contestants[name](given)
            passes["both"] = partial(both, passes)
            passes["both" if options.backward else "forward"]()
            there[name] = passes
        except NotImplementedError as error:
            print(f"{name}: {error}", file=sys.stderr)
        except Exception as error:
            if name in OURS:
                raise
            print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return there


def both(passes: Passes) -> None:
    passes["forward"]()
    passes["backward"]()


def peak_gib(function: Callable[[], Any]) -> float | None:
    """What a call allocates at its peak, beyond its inputs."""
    if not torch.cuda.is_available():
        return None
    finish()
    memory = held("cuda")
    function()
    finish()
    return memory.grown() / 2**30
