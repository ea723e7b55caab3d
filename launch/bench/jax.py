"""Attention on JAX arrays over this machine's GPUs, beside what their kernel does alone.

One process drives all devices. `alone` is the kernel's own rate in one call on one device: causal, of tokens /
sqrt(ranks) tokens, which are as many (query, key) pairs as a rank has of the whole; other masks whole. Times are
medians of runs that end when every device is done; TFLOP/s are a device's. `error` is that of the whole result, forward
and gradients, at 2048 tokens against dense float64.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import ringattn as ra
from ringattn.launch.bench import Row, version
from ringattn.launch.bench.masks import WORDS, Case, case_of
from ringattn.launch.bench.ring import FLOPS
from ringattn.launch.bench.timing import median_ms
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "ranks", "strategy", "layout", "kernel", "mode", "ms", "tflops", "alone", "ratio", "error"]
# Without it hops wait for the work during which they could travel.
OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_latency_hiding_scheduler": True}
LONGEST_ON_CPU = 2048


@dataclass
class Options:
    ranks: int = option(0, "devices; 0: all of them")
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([32768], "lengths of the whole sequence")
    mask: list[str] = option(["causal"], WORDS)
    heads: int = option(32, "query heads")
    kv_heads: int = option(8, "key heads")
    head_dim: int = option(128, "head dim")
    strategy: str = option("ring", "ring, gather or ulysses")
    layout: list[str] = option(["zigzag"], "contiguous, striped or zigzag")
    kernel: str = option("auto", "the kernel of every step")
    repeats: int = option(10, "timed runs")
    check: bool = option(True, "whether to compare with dense float64 too")
    hide: bool = option(True, "whether the compiler is asked to hide transfers")


def run(options: Options) -> Iterator[Row]:
    import jax

    import ringattn.jax as rj

    devices = jax.devices()[: options.ranks or None]
    ranks = len(devices)
    if ranks < options.ranks or ranks % options.ulysses:
        there = f"jax sees {len(jax.devices())} device(s)"
        raise ValueError(f"ranks={options.ranks} and ulysses={options.ulysses}, and {there}")
    if devices[0].platform == "cpu" and max(options.tokens) > LONGEST_ON_CPU:
        raise ValueError(f"jax sees no GPU; on a CPU use tokens={LONGEST_ON_CPU} or fewer, and heads=4 kv_heads=2")
    mesh = rj.init_mesh(ring=ranks // options.ulysses, ulysses=options.ulysses, devices=devices)
    single = rj.init_mesh(ring=1, devices=devices[:1])
    heads = (options.heads, options.kv_heads)
    how: dict[str, Any] = {"heads": heads, "head_dim": options.head_dim, "kernel": options.kernel}
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        tokens = case.tokens
        share = 1 if case.plain else ranks
        less = case_of(mask, round(tokens / ranks**0.5)) if share < ranks else case
        floor = measured(options, ra.plan(single, seq_len=less.tokens, spec=case.asked["spec"], **how), less)
        for layout in options.layout:
            plan = ra.plan(mesh, seq_len=tokens, strategy=options.strategy, layout=layout, **case.asked, **how)
            off = error(options, plan.for_length(2048), case_of(mask, 2048)) if options.check else None
            for mode, ms in measured(options, plan, case).items():
                flops = FLOPS[mode] * case.pairs * options.heads * options.head_dim / ranks
                yield {
                    "suite": "jax", "jax": version("jax"), "devices": devices[0].device_kind, **asdict(options),
                    "tokens": tokens, "mask": mask, "ranks": ranks, "strategy": plan.strategy, "layout": layout,
                    "kernel": kernel_of(plan), "mode": mode, "ms": ms, "tflops": flops / ms / 1e9,
                    "alone": share * flops / floor[mode] / 1e9, "ratio": floor[mode] / share / ms, "error": off,
                }  # fmt: skip


def kernel_of(plan: Any) -> str:
    """The name of the kernel that runs, from the plan's own report."""
    lines = [line for line in plan.report.lines if line.startswith("kernel ")]
    return lines[0].split("-> ")[-1].split()[0] if lines else str(plan.kernel)


def calls(options: Options, plan: Any, modes: Iterable[str], case: Case) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What is timed, compiled, and random data for it in the plan's order."""
    import jax
    import jax.numpy as jnp

    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    random = np.random.default_rng(0)
    shapes = [(1, plan.seq_len, h, options.head_dim) for h in heads]
    given = [plan.shard(jnp.asarray(random.standard_normal(s, np.float32), jnp.bfloat16)) for s in shapes]

    def forward(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return ra.attention(q, k, v, plan, **case.asked)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(lambda q, k, v: forward(q, k, v, dout), q, k, v)
        return out, *back(dout)

    choices = OPTIONS if plan.device == "cuda" and options.hide else {}
    passes = {"forward": forward, "forward+backward": both}
    made = {mode: jax.jit(passes[mode]).lower(*given).compile(compiler_options=choices) for mode in modes}
    return made, tuple(given)


def measured(options: Options, plan: Any, case: Case) -> dict[str, float]:
    """Milliseconds of each mode."""
    import jax

    programs, given = calls(options, plan, FLOPS, case)
    medians = {}
    for name, program in programs.items():
        medians[name] = median_ms(partial(lambda run: jax.block_until_ready(run(*given)), program), options.repeats)
        print(f"{plan.seq_len} tokens, ring={plan.ring}, {name}: {medians[name]:.3f} ms", file=sys.stderr)
    return medians


def error(options: Options, plan: Any, mask: Case) -> float:
    """The largest relative error (norm) of out, dq, dk, dv."""
    import torch

    from ringattn.launch.verify import cases, oracle

    programs, given = calls(options, plan, ["forward+backward"], mask)
    results = [np.asarray(plan.unshard(x), np.float64) for x in programs["forward+backward"](*given)]
    leaves = [torch.from_numpy(np.array(plan.unshard(x), np.float64)) for x in given]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("q", "k", "v", "dout")
    docs = mask.asked.get("docs")
    lengths = None if docs is None else np.diff(docs.starts[0]).tolist()
    sizes: dict[str, Any] = {"heads": options.heads, "kv_heads": options.kv_heads, "batch": 1}
    sizes |= {"head_dim": options.head_dim, "value_dim": options.head_dim}
    case = cases.Case("bench", spec=mask.asked["spec"], lengths=lengths, seq_len=plan.seq_len, **sizes)
    inputs = {n: x.to(device) for n, x in zip(names, leaves, strict=True)}
    inputs |= {"sinks": torch.zeros(options.heads, device=device), "dlse": torch.zeros(*leaves[0].shape[:3]).to(device)}
    truth = oracle.dense(case, inputs)
    expected = [truth[n].cpu().numpy() for n in ("out", "dq", "dk", "dv")]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(results, expected, strict=True))
