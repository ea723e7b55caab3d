"""One GPU: what `kernel="auto"` runs and our kernel, beside cuDNN, FlashAttention 2 and 4 and FlexAttention, in turns.

`auto` is `ra.attention`; the others are kernels alone. Calls alternate, so all have the same clock; `over_NAME` is
NAME's time over ours. Useful work is what the mask lets through, 2 (D + V) H sum(end - begin) flops forward and 2.5
times that backward; a decode moves its keys and values once, and is held against a copy of the same run.

`square` is a step of a zigzag ring: a causal square, above queries that see all keys. `host` is a call so short that
the host takes all of the time. `cases` takes beginnings: cases=causal_32k,decode runs four. With tokens= a case is
called by that length.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn import kernels
from ringattn.kernels.attention import reference
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.launch.bench import Row, contest
from ringattn.launch.bench.contest import DTYPES, Passes
from ringattn.launch.bench.masks import SHORT, mixed
from ringattn.launch.bench.peers import CONTESTANTS, Inputs, heads_first, of_table
from ringattn.launch.bench.timing import captured, copy_rate, passes, together
from ringattn.launch.words import option
from ringattn.masks.bands import bounds
from ringattn.masks.spec import AttentionSpec, Docs

IMPLS = ("auto", "triton", "flex", "cudnn", "flash", "fa4")
CPU_IMPLS = ("auto", "sdpa_cpu", "tiled")
CALLS = 300  # of the host's mean


@dataclass(frozen=True)
class Case:
    """What is measured, by the function below that `kind` names."""

    mask: str  # causal, full, window, docs, square
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
    "causal_16k_d256": Case("causal", 16384, dim=256),
    "full_16k": Case("full", 16384),
    "full_16k_d64": Case("full", 16384, dim=64),
    "full_8k": Case("full", 8192),
    "window_64k": Case("window", 65536),
    "docs_64k": Case("docs", 65536),
    "docs_64k_d64": Case("docs", 65536, dim=64),
    "docs_128k_mix": Case("docs", 131072, mix=True),
    "square_16k": Case("square", 16384),
    "decode_128k": Case("full", 131072, kind="decode"),
    "decode_8x64k": Case("full", 65536, batch=8, kind="decode"),
    "errors_4k": Case("causal", 4096, kind="errors"),
    "host": Case("causal", 256, dim=64, kind="host"),
}


@dataclass
class Options:
    cases: list[str] = option(list(CASES), "which cases, or how their names begin")
    impls: list[str] | None = option(
        None, "which contestants (auto,triton,flex,cudnn,flash,fa4; on a CPU auto,sdpa_cpu,tiled)"
    )
    tokens: int | None = option(None, "another length for every case")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    device: str | None = option(None, "where it runs; the GPU if there is one", among=("cuda", "cpu"))
    dtype: str | None = option(None, "bfloat16 on a GPU and float32 on a CPU by default", among=DTYPES)
    backward: bool = option(True, "time the backward as well")
    rounds: int = contest.ROUNDS

    def __post_init__(self) -> None:
        contest.settle(self, CASES, CONTESTANTS)
        self.impls = self.impls or list(IMPLS if self.device == "cuda" else CPU_IMPLS)


def run(options: Options) -> Iterator[Row]:
    """Every chosen case, printed as it is done."""
    kinds = {"attention": attention, "decode": decode, "errors": errors, "host": host}
    about = lambda case: {"tokens": case.tokens}  # noqa: E731
    return contest.each(chosen(options), lambda case: kinds[case.kind](case, options), about)


def chosen(options: Options) -> dict[str, Case]:
    """The cases to run, each by the length that it has here: of two that tokens= makes one, one."""
    by_name: dict[str, Case] = {}
    for name, case in contest.sized(options, CASES).items():
        shown = str(case.tokens) if case.tokens % 1024 else f"{case.tokens // 1024}k"
        by_name[re.sub(r"\d+k", shown, name)] = case
    return by_name


def attention(case: Case, options: Options) -> list[Row]:
    """Time, useful TFLOP/s and peak memory of each contestant, forward, backward and both."""
    given = inputs(case, options)
    work = useful_flops(given) / 1e9
    amounts = {"forward": work, "backward": 2.5 * work, "both": 3.5 * work} if options.backward else {"forward": work}
    return contest.timed(options.impls or (), lambda name: CONTESTANTS[name](given), options, "tflops", amounts)


def decode(case: Case, options: Options) -> list[Row]:
    """One query a row over all keys: bytes of keys and values over time, beside a copy's bytes read and written."""
    copy = copy_rate(options.device or "") / 1e12
    sets = [inputs(case, options, queries=1, seed=seed) for seed in range(3)]  # more than any cache holds
    moved = sum(x.numel() * x.element_size() for x in (sets[0].k, sets[0].v))

    def enter(name: str) -> Passes:
        calls = 2 * [CONTESTANTS[name](given)["forward"] for given in sets]

        def all_calls() -> None:
            for call in calls:
                call()

        return {"forward": captured(all_calls) if options.device == "cuda" else all_calls}

    names = ["decode" if n == "triton" else n for n in options.impls or ()]
    rows = contest.timed(names, enter, options, "tb_per_s", {"forward": moved / 1e9}, calls=2 * len(sets))
    return [{**row, "copy_tb_per_s": copy, "of_copy": row["tb_per_s"] / copy} for row in rows]


def host(case: Case, options: Options) -> list[Row]:
    """Microseconds of short calls, with 8 query and 2 key heads: the best of five means of many calls."""
    given = inputs(case, replace(options, heads=8, kv_heads=2))
    q, k, v = leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
    q_BHTD, k_BHTD, v_BHTD = firsts = [heads_first(x.detach()).contiguous().requires_grad_() for x in leaves]
    shape: dict[str, Any] = {"seq_len": case.tokens, "heads": (8, 2), "head_dim": case.dim}
    docs = Docs.from_lengths([case.tokens * 2 // 5, case.tokens - case.tokens * 2 // 5])
    ours = partial(ra.attention, q, k, v)
    calls: Passes = {
        "torch": partial(scaled_dot_product_attention, q_BHTD, k_BHTD, v_BHTD, is_causal=True, enable_gqa=True),
        "no plan": ours,
        "a plan": partial(ours, ra.plan(**shape)),
        "documents": partial(ours, docs=docs),
    }
    named = [name for name in options.impls or () if name in kernels.BY_NAME]
    calls |= {name: partial(ours, ra.plan(**shape, kernel=name)) for name in named}
    count = CALLS if options.device == "cuda" else options.rounds

    def rows(name: str) -> list[Row]:
        inside = firsts if name == "torch" else leaves
        dout = heads_first(given.dout).contiguous() if name == "torch" else given.dout
        timed = passes(calls[name], inside, dout)
        least = {what: min([together(call, count) for _ in range(6)][1:]) for what, call in timed.items()}  # warm
        return [{"pass": what, "us": seconds * 1e6} for what, seconds in least.items()]

    return contest.side_by_side(calls, rows)


def errors(case: Case, options: Options) -> list[Row]:
    """Distance from float64 of out, lse and every gradient, on the same inputs for all."""
    given = inputs(case, options)
    truth = exact(given)

    def results(name: str) -> dict[str, torch.Tensor]:
        passes = of_table(name)(given)
        (out, lse), grads = passes["forward"](), passes["backward"]()
        out, *grads = (x.to(given.q.dtype) for x in (out, *grads))
        return dict(zip(truth, (out, lse, *grads), strict=True))

    names = [name for name in options.impls or () if name in kernels.BY_NAME]
    return contest.off(names, results, truth, "cudnn", "over_cudnn")


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
    if case.mask == "square":
        end[:, T // 2 :] = T
    device = [torch.from_numpy(x).to(options.device) for x in (begin, end)]
    where = Intervals(device[0], device[1], rectangles_of(begin, end), (begin, end), made={})
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
