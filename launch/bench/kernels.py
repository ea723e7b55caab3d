"""One GPU: our kernels beside cuDNN, FlashAttention 2 and 4 and FlexAttention, in one run on the same inputs.

Useful work is what the mask lets through, 2 (D + V) H sum(end - begin) flops forward and 2.5 times that backward; a
decode moves its keys and values once, and is held against a copy of the same run. Medians; random inputs. `cases`
takes beginnings: cases=causal_32k,decode runs three. With tokens= a case is called by that length.
"""

import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch

from ringattn import kernels
from ringattn.bands import bounds
from ringattn.kernels.attention import reference
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.launch.bench import Row, contest
from ringattn.launch.bench.contest import DTYPES
from ringattn.launch.bench.masks import SHORT, mixed
from ringattn.launch.bench.peers import CONTESTANTS, Inputs, of_table
from ringattn.launch.bench.timing import captured, copy_rate, elapsed_ms, steady_ms
from ringattn.launch.words import option
from ringattn.spec import AttentionSpec, Docs

IMPLS = ("triton", "flex", "cudnn", "flash", "fa4")
CPU_IMPLS = ("sdpa_cpu", "tiled")
GRADIENTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """What is measured, by the function below that `kind` names."""

    mask: str  # causal, full, window, docs
    tokens: int
    dim: int = 128
    batch: int = 1
    kind: str = "attention"
    mix: bool = False  # the documents of `bench ring mask=short`

    @property
    def window(self) -> int | None:
        return self.tokens // 16 if self.mask == "window" else None


CASES = {
    "causal_32k": Case("causal", 32768),
    "causal_32k_d64": Case("causal", 32768, dim=64),
    "causal_8k": Case("causal", 8192),
    "causal_8k_d64": Case("causal", 8192, dim=64),
    "full_16k": Case("full", 16384),
    "full_8k": Case("full", 8192),
    "window_64k": Case("window", 65536),
    "docs_64k": Case("docs", 65536),
    "docs_128k_mix": Case("docs", 131072, mix=True),
    "decode_128k": Case("full", 131072, kind="decode"),
    "decode_8x64k": Case("full", 65536, batch=8, kind="decode"),
    "errors_4k": Case("causal", 4096, kind="errors"),
}


@dataclass
class Options:
    cases: list[str] = option(list(CASES), "which cases, or how their names begin")
    impls: list[str] | None = option(None, "which contestants (triton,flex,cudnn,flash,fa4; on a CPU sdpa_cpu,tiled)")
    tokens: int | None = option(None, "another length for every case")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    device: str | None = option(None, "where it runs; the GPU if there is one", among=("cuda", "cpu"))
    dtype: str | None = option(None, "bfloat16 on a GPU and float32 on a CPU by default", among=DTYPES)
    backward: bool = option(True, "time the backward as well")
    rep: int = option(200, "milliseconds of repetitions for each median")

    def __post_init__(self) -> None:
        contest.settle(self, CASES, CONTESTANTS)
        self.impls = self.impls or list(IMPLS if self.device == "cuda" else CPU_IMPLS)


def run(options: Options) -> Iterator[Row]:
    """Every chosen case, printed as it is done."""
    kinds = {"attention": attention, "decode": decode, "errors": errors}
    about = lambda case: {"tokens": case.tokens}  # noqa: E731
    base: dict[str, float] = {}
    for row in contest.each(chosen(options), lambda case: kinds[case.kind](case, options), about):
        if row.get("impl") == "triton" and row["case"] == "causal_32k":
            base[row["pass"]] = row["tflops"]
        if row.get("impl") == "triton" and row.get("pass") in base and row["case"] in ("window_64k", "docs_64k"):
            row["of_causal_32k"] = row["tflops"] / base[row["pass"]]
            print(f"{row['case']} {row['pass']}: {row['of_causal_32k']:.3f} of causal_32k's useful TFLOP/s")
        yield row


def chosen(options: Options) -> dict[str, Case]:
    """The cases to run, each by the length that it has here: of two that tokens= makes one, one."""
    by_name: dict[str, Case] = {}
    for name, case in contest.sized(options, CASES).items():
        shown = str(case.tokens) if case.tokens % 1024 else f"{case.tokens // 1024}k"
        by_name[re.sub(r"\d+k", shown, name)] = case
    return by_name


def attention(case: Case, options: Options) -> list[Row]:
    """Time, useful TFLOP/s and peak memory of each contestant, forward and backward."""
    given = inputs(case, options)
    amounts = {"forward": useful_flops(given) / 1e9, "backward": 2.5 * useful_flops(given) / 1e9}

    def rows(name: str) -> list[Row]:
        passes = CONTESTANTS[name](given)
        passes = passes if options.backward else {"forward": passes["forward"]}
        return contest.timed(passes, options, "tflops", amounts)

    ours = "triton" if options.device == "cuda" else "tiled"
    return contest.with_ratios(contest.side_by_side(options.impls, rows), ours)


def decode(case: Case, options: Options) -> list[Row]:
    """One query a row over all keys: bytes of keys and values over time, beside a copy's bytes read and written."""
    device = options.device or ""
    copy = copy_rate(device) / 1e12
    sets = [inputs(case, options, queries=1, seed=seed) for seed in range(3)]  # more than any cache holds
    moved = sum(x.numel() * x.element_size() for x in (sets[0].k, sets[0].v))

    def rows(name: str) -> list[Row]:
        functions = [CONTESTANTS[name](given)["forward"] for given in sets]
        turns = cycle(functions)
        without_graph = steady_ms(lambda: next(turns)(), device, options.rep)
        ms = graph_ms(functions) if device == "cuda" else without_graph
        rate = moved / ms / 1e9
        row = {"pass": "forward", "ms": ms, "ms_without_graph": without_graph, "tb_per_s": rate, "copy_tb_per_s": copy}
        return [{**row, "of_copy": rate / copy}]

    names = ["decode" if n == "triton" else n for n in options.impls or ()]
    return contest.with_ratios(contest.side_by_side(names, rows), "decode" if device == "cuda" else "tiled")


def errors(case: Case, options: Options) -> list[Row]:
    """Distance from float64 of out and of every gradient, |found - exact| / |exact|, on the same inputs for all."""
    given = inputs(case, options)
    truth = exact(given)

    def rows(name: str) -> list[Row]:
        passes = of_table(name)(given)
        (out, lse), grads = passes["forward"](), passes["backward"]()
        results = {n: x.to(given.q.dtype) for n, x in zip(GRADIENTS, (out, *grads), strict=True)}
        off = contest.errors(results, {n: truth[n] for n in GRADIENTS})
        return [{"error_lse": (lse - truth["lse"]).abs().max().item(), **off}]

    measured = contest.side_by_side([name for name in options.impls or () if name in kernels.BY_NAME], rows)
    return contest.with_error_ratios(measured, "cudnn", "over_cudnn", GRADIENTS)


def exact(given: Inputs) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk and dv in float64."""
    q, k, v, dout = (x.double() for x in (given.q, given.k, given.v, given.dout))
    partial = reference.attend(q, k, v, given.where, scale=given.scale)
    given_rows = dout, partial.lse, (partial.out * dout).sum(-1)
    grads = reference.attend_backward(q, k, v, given.where, *given_rows, scale=given.scale)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (*partial, *grads), strict=True))


def inputs(case: Case, options: Options, queries: int | None = None, seed: int = 0) -> Inputs:
    """Random tensors of the case, its intervals on host and device, and its rectangles."""
    dtype, T = getattr(torch, options.dtype or ""), queries or case.tokens
    generator = torch.Generator(device=options.device).manual_seed(seed)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        shape = (case.batch, tokens, heads, case.dim)
        return torch.randn(shape, generator=generator, device=options.device, dtype=dtype)

    lengths = mixed(SHORT, case.tokens) if case.mix else doc_lengths(case.tokens)
    docs = Docs.from_lengths(lengths) if case.mask == "docs" else None
    spec = AttentionSpec(causal=case.mask != "full", window=case.window)
    begin, end = (x.astype(np.int32) for x in bounds(spec, np.arange(T), case.tokens, docs=docs))
    device = [torch.from_numpy(x).to(options.device) for x in (begin, end)]
    where = Intervals(device[0], device[1], rectangles_of(begin, end), (begin, end))
    q, k, v, dout = draw(T, options.heads), *(draw(case.tokens, options.kv_heads) for _ in "kv"), draw(T, options.heads)
    return Inputs(q, k, v, dout, where, case.mask, case.window, None if docs is None else docs.starts[0])


def doc_lengths(tokens: int) -> list[int]:
    """Lengths from 100 to 16384 with a mean near 2048 (for 65536 tokens; in proportion for others), always the same."""
    unit = tokens / 65536
    rng = np.random.default_rng(1)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(max(1, int(np.clip(rng.lognormal(np.log(2048) - 0.6, 1.1), 100, 16384) * unit)))
    lengths[-1] -= sum(lengths) - tokens
    return lengths


def useful_flops(given: Inputs) -> float:
    begin, end = given.where.host
    pairs = float((end - begin).clip(0).sum()) * (given.q.shape[0] / begin.shape[0])
    return 2.0 * (given.q.shape[-1] + given.v.shape[-1]) * given.q.shape[2] * pairs


def graph_ms(functions: list[Callable[[], Any]]) -> float:
    """The time of one call when the functions, one after the other, are replayed as a CUDA graph."""

    def all_twice() -> None:
        for function in functions * 2:
            function()

    replay = captured(all_twice)
    return statistics.median([elapsed_ms(replay) for _ in range(20)][2:]) / (2 * len(functions))
