"""One GPU: what `kernel="auto"` runs, beside each kernel named and FlashAttention-4's own call, in turns.

In turns: the contestants' calls alternate, so all have the same clock. `auto_over` is the median over the rounds of a
contestant's time over auto's: above 1, auto is faster. `own` is FlashAttention-4 called directly.

`square` is a step of a zigzag ring: a causal square, above queries that see all keys. `host` is a call so short that
the host takes all of the time. `ring8` gives the errors of a ring of 8 ranks over those of one device.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn import kernels
from ringattn.comms.local import run as run_ranks
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.total import in_dtype
from ringattn.launch.bench import Row, contest, peers
from ringattn.launch.bench import kernels as bench_kernels
from ringattn.launch.bench.contest import Passes, distance, peak_gib
from ringattn.launch.bench.kernels import Case, useful_flops
from ringattn.launch.bench.peers import Inputs, heads_first
from ringattn.launch.bench.timing import in_turns, passes, together
from ringattn.launch.words import option
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch.attention.steps import problem_of

CASES = {
    **{name: case for name, case in bench_kernels.CASES.items() if case.kind == "attention"},
    "full_16k_d64": Case("full", 16384, dim=64),
    "docs_64k_d64": Case("docs", 65536, dim=64),
    "causal_16k_d256": Case("causal", 16384, dim=256),
    "square_16k": Case("causal", 16384, kind="square"),
    "host": Case("causal", 256, dim=64, kind="host"),
    "ring8_4k": Case("causal", 4096, kind="ring8"),
}
NAMED = {"cuda": ("triton", "cudnn", "fa4"), "cpu": ("sdpa_cpu", "tiled")}
CALLS = 300  # of the host's mean


@dataclass
class Options:
    cases: list[str] = option(list(CASES), "which cases, or how their names begin")
    tokens: int | None = option(None, "another length for every case")
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    device: str | None = option(None, "where it runs; the GPU if there is one", among=("cuda", "cpu"))
    rounds: int = option(20, "rounds, in which each contestant runs once", least=1)

    def __post_init__(self) -> None:
        contest.settle(self, CASES)

    @property
    def named(self) -> tuple[str, ...]:
        """auto, and the kernels beside it."""
        return ("auto", *NAMED[self.device or ""])


def run(options: Options) -> Iterator[Row]:
    """Every chosen case, printed as it is done."""
    kinds = {"attention": attention, "square": square, "host": host, "ring8": ring8}
    return contest.each(
        contest.sized(options, CASES),
        lambda case: kinds[case.kind](case, options),
        lambda case: {"tokens": case.tokens},
    )


def drawn(case: Case, options: Options, *heads: int) -> Inputs:
    """The inputs of `bench kernels`, with these heads or those of the options."""
    query, key = heads or (options.heads, options.kv_heads)
    return bench_kernels.inputs(case, bench_kernels.Options(device=options.device, heads=query, kv_heads=key))


def attention(case: Case, options: Options) -> list[Row]:
    """`ra.attention` by auto and by each kernel, and FlashAttention-4's own call."""
    given = drawn(case, options)
    names = [*options.named, *["own"] * (options.device == "cuda")]
    enter = lambda name: own(peers.fa4(given)) if name == "own" else attends(given, name)  # noqa: E731
    return measured(given, contest.entered(names, enter), options)


def attends(given: Inputs, name: str) -> Passes:
    """`ra.attention` with a kernel. Prints what auto runs."""
    spec = AttentionSpec(causal=given.mask != "full", window=given.window)
    docs = None if given.starts is None else Docs.from_lengths(np.diff(given.starts).tolist())
    plan = ra.plan(
        seq_len=given.q.shape[1], heads=(given.q.shape[2], given.k.shape[2]), head_dim=given.q.shape[3], spec=spec,
        docs=docs, kernel=name,
    )  # fmt: skip
    q, k, v = leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    calls = passes(lambda: ra.attention(q, k, v, plan, spec=spec, docs=docs), leaves, given.dout)
    plan.calls.clear()  # of other cases
    calls["forward+backward"]()
    if name == "auto":
        (call,) = plan.calls.values()
        print(f"auto: {call.recipe.forward.kernel.name}, {call.recipe.backward.kernel.name}")
    return calls


def own(call: Passes) -> Passes:
    """A peer's own call; its backward takes what an earlier forward saved."""
    forward = call["forward"]
    return {"forward": forward, "forward+backward": lambda: (forward(), call["backward"]())}


def square(case: Case, options: Options) -> list[Row]:
    """The kernel that auto takes for such a step, and FlashAttention-4's own two calls with the sums of gradients."""
    given, half = drawn(case, options), case.tokens // 2
    begin, end = np.zeros((1, case.tokens), np.int32), np.full((1, case.tokens), case.tokens, np.int32)
    end[0, :half] = np.arange(half) + 1
    device = [torch.from_numpy(x).to(options.device) for x in (begin, end)]
    given = replace(given, where=Intervals(device[0], device[1], rectangles_of(begin, end), (begin, end), made={}))
    problem = replace(problem_of(given.q, given.k, given.v, None, True), rows=case.tokens * options.heads)
    first, second = (kernels.select(problem, backward=x).load() for x in (False, True))
    tensors, scale = (given.q, given.k, given.v, given.where), given.scale

    def step() -> Any:
        return first.attend(*tensors, scale=scale, out_dtype=given.q.dtype)

    def with_gradients() -> Any:
        result = step()
        rows = second.prepare(given.dout, result.lse, None, result.out)
        grads = second.backward(tensors[:3], given.where, rows, scale=scale)
        return [in_dtype(x, given.q.dtype) for x in grads]

    def own_calls(name: str) -> Passes:
        above = replace(given, **{n: getattr(given, n)[:, :half] for n in ("q", "k", "v", "dout")})
        below = replace(given, q=given.q[:, half:], dout=given.dout[:, half:], mask="full")
        calls = [peers.fa4(half) for half in (above, below)]

        def backward() -> Any:
            (dq, dk, dv, *_), (dq_below, dk_all, dv_all, *_) = (call["backward"]() for call in calls)
            dk_all[:, :half] += dk
            dv_all[:, :half] += dv
            return dq, dq_below, dk_all, dv_all

        return own({"forward": lambda: [call["forward"]() for call in calls], "backward": backward})

    contestants: dict[str, Passes] = {"auto": {"forward": step, "forward+backward": with_gradients}}
    contestants |= contest.entered(["own"] * (options.device == "cuda"), own_calls)
    return measured(given, contestants, options)


def measured(given: Inputs, contestants: dict[str, Passes], options: Options) -> list[Row]:
    """The rows of all contestants, in turns."""
    rows, work = [], useful_flops(given)
    for what, factor in (("forward", 1.0), ("forward+backward", 3.5)):
        calls = {name: of[what] for name, of in contestants.items()}
        times = in_turns(calls, options.rounds, options.device or "")
        for name in calls:
            ms = statistics.median(times[name])
            row = {"impl": name, "pass": what, "ms": ms, "tflops": factor * work / ms / 1e9}
            row["auto_over"] = statistics.median(x / y for x, y in zip(times[name], times["auto"], strict=True))
            rows.append(row | {"peak_gib": peak_gib(calls[name])})
    return rows


def host(case: Case, options: Options) -> list[Row]:
    """Microseconds of short calls, with 8 query and 2 key heads: the best of five means of many calls."""
    given = drawn(case, options, 8, 2)
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
    calls |= {name: partial(ours, ra.plan(**shape, kernel=name)) for name in options.named[1:]}
    count = CALLS if options.device == "cuda" else options.rounds

    def rows(name: str) -> list[Row]:
        inside = firsts if name == "torch" else leaves
        dout = heads_first(given.dout).contiguous() if name == "torch" else given.dout
        timed = passes(calls[name], inside, dout)
        least = {what: min([together(call, count) for _ in range(6)][1:]) for what, call in timed.items()}  # warm
        return [{"pass": what, "us": seconds * 1e6} for what, seconds in least.items()]

    return contest.side_by_side(calls, rows)


def ring8(case: Case, options: Options) -> list[Row]:
    """Distances from float64 on one device, and those of a ring of 8 ranks, threads on this device, over them."""
    given = drawn(case, options, 8, 2)
    truth = bench_kernels.exact(given)
    results = "out", "dq", "dk", "dv"
    shape: dict[str, Any] = {"seq_len": case.tokens, "heads": (8, 2), "head_dim": case.dim}

    def off(name: str, mesh: Any = None) -> list[float]:
        plan = ra.plan(mesh, **shape, kernel=name)
        mine = [plan.shard(x).clone().requires_grad_() for x in (given.q, given.k, given.v)]
        out = ra.attention(mine[0], mine[1], mine[2], plan)
        values = out.detach(), *torch.autograd.grad(out, mine, plan.shard(given.dout))
        return [distance(plan.unshard(x), truth[n]) for n, x in zip(results, values, strict=True)]

    def rows(name: str) -> list[Row]:
        single = off(name)
        ring = run_ranks(lambda mesh: off(name, mesh), device=options.device or "", ring=8, timeout=300.0)[0]
        row: Row = {"pass": "forward+backward"}
        for result, x, y in zip(results, single, ring, strict=True):
            row |= {f"error_{result}": x, f"ring_over_one_{result}": y / x}
        return [row]

    return contest.side_by_side(options.named, rows)
