"""Attention on JAX arrays over this machine's GPUs, beside what their kernel does alone.

One process drives all devices. `alone` is the kernel's own rate on one device: causal, of about tokens / sqrt(ranks)
tokens, which are as many (query, key) pairs as a rank has of the whole; other masks whole. Times are medians of runs
that end when every device is done, of one of their `calls`; TFLOP/s are a device's.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

import ringattn as ra
from ringattn.launch.bench import Row
from ringattn.launch.bench.masks import WORDS, Case, case_of
from ringattn.launch.bench.timing import CALLS, FLOPS, Heads, median_ms
from ringattn.launch.words import option

COLUMNS = ["tokens", "mask", "ranks", "strategy", "layout", "kernel", "mode", "ms", "tflops", "alone", "ratio"]
# Without the first, hops wait for the work during which they could travel; without the second, only values travel
# meanwhile, after the keys.
OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_collective_permute_combine_threshold_bytes": str(1 << 30),
}


@dataclass
class Options(Heads):
    device: str = option("gpu", "where it runs", among=("gpu", "cpu"))
    ranks: int = option(0, "devices; 0: all of them")
    ulysses: int = option(1, "how many of them are Ulysses ranks")
    tokens: list[int] = option([32768], "lengths of the whole sequence")
    mask: list[str] = option(["causal"], WORDS)
    strategy: str = option("ring", "ring, gather or ulysses")
    layout: list[str] = option(["zigzag"], "contiguous, striped or zigzag")
    kernel: str = option("auto", "the kernel of every step")
    calls: int = CALLS


def run(options: Options) -> Iterator[Row]:
    import jax

    import ringattn.jax as rj

    devices = jax.devices()[: options.ranks or None]
    ranks, kind = len(devices), devices[0].device_kind
    if ranks < options.ranks:
        raise ValueError(f"ranks={options.ranks}, and jax sees {ranks} device(s)")
    if devices[0].platform == "cpu" and options.device != "cpu":
        raise ValueError("jax sees no GPU; use device=cpu tokens=2048 heads=4 kv_heads=2 or the like")
    mesh = rj.init_mesh(ring=ranks // options.ulysses, ulysses=options.ulysses, devices=devices)
    single = rj.init_mesh(ring=1, devices=devices[:1])
    how: dict[str, Any] = {**options.sizes, "kernel": options.kernel}
    for mask, tokens in product(options.mask, options.tokens):
        case = case_of(mask, tokens)
        less = case.alone(ranks)
        alone = measured(options, ra.plan(single, seq_len=less.tokens, spec=case.asked["spec"], **how), less)
        about = {"devices": kind, **asdict(options), "tokens": tokens, "mask": mask, "ranks": ranks}
        for layout in options.layout:
            plan = ra.plan(mesh, seq_len=case.tokens, strategy=options.strategy, layout=layout, **case.asked, **how)
            for mode, ms in measured(options, plan, case).items():
                flops = FLOPS[mode] * case.pairs * options.heads * options.head_dim / ranks
                floor = alone[mode] * case.pairs / less.pairs / ranks
                row = {"strategy": plan.strategy, "layout": layout, "mode": mode, "ms": ms}
                yield {**about, **row, "tflops": flops / ms / 1e9, "alone": flops / floor / 1e9, "ratio": floor / ms}


def measured(options: Options, plan: Any, case: Case) -> dict[str, float]:
    """Milliseconds of each mode, compiled, on random data in the plan's order."""
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

    choices, medians = OPTIONS if plan.device == "cuda" else {}, {}
    for name, function in {"forward": forward, "forward+backward": both}.items():
        program = jax.jit(function).lower(*given).compile(compiler_options=choices)

        def in_a_row(program: Any = program) -> None:
            """Devices run programs in order, so all are done when the last one is."""
            for _ in range(options.calls):
                out = program(*given)
            jax.block_until_ready(out)

        medians[name] = median_ms(in_a_row, options.repeats) / options.calls
    return medians
