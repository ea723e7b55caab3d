"""A step of a training run beside its floor: attention alone plus matrix products alone, nothing sent, nothing else.

The attention floor is, for each layer, one causal call on every rank at once with as many (query, key) pairs as a rank
has of the whole; the matrix floor is every product of a layer, forward and both of backward, on a rank's number of
tokens. Times are means of calls in a row for a second, of the slowest rank: a step keeps a GPU busy for seconds, and
it does not hold the clocks of a single call for so long. `burst` is the ratio to single calls with a pause before each.
The step's own time is the median without the first two.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ringattn as ra
from ringattn.conf.schema import Train, from_dict
from ringattn.launch.bench import Row
from ringattn.launch.bench.timing import median_ms, together
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.train import metrics
from ringattn.launch.words import option

COLUMNS = ["tokens", "ranks", "layers", "kernel", "recompute", "compile", "step_s", "attention_s", "products_s",
           "ratio", "burst", "tokens_per_second", "mfu", "memory_mib", "loss"]  # fmt: skip


@dataclass
class Options:
    run: str = option("", "the folder of the training run")
    seconds: float = option(1.0, "how long calls are made in a row")
    repeats: int = option(5, "single calls")
    timeout: float = option(600.0, "seconds for all")


def run(options: Options) -> Iterator[Row]:
    written = Path(options.run) / "config.json"
    if not options.run or not written.is_file():
        raise ValueError(
            f"run={options.run}: no {written.name} there; name the folder of a training run, as in runs/NAME"
        )
    about = json.loads(written.read_text())
    config, ranks = from_dict(about["config"]), about["ranks"]
    if config.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"{options.run} ran on {ranks} GPUs, and torch sees {torch.cuda.device_count()} here")
    m = config.model
    if m.window is not None or m.softmax_every != 1 or config.data.documents:
        wrong = f"window={m.window}, softmax_every={m.softmax_every}, documents={config.data.documents!r}"
        raise ValueError(f"{wrong}: the floor is full causal attention; train without them to compare")
    steps = [r for r in metrics.read(Path(options.run) / "metrics.jsonl") if r["kind"] == "step"]
    if len(steps) < 3:
        raise ValueError(f"{options.run} has {len(steps)} steps; the first two are not counted, so train 3 or more")
    backend = "nccl" if config.device == "cuda" else "gloo"
    floors = run_ranks(measured, ranks, config, options, ranks, backend=backend, timeout=options.timeout)
    attention, products, *burst = (max(floor[i] for floor in floors) for i in range(4))
    step = statistics.median(r["seconds"] for r in steps[2:])
    yield {
        "suite": "step", **asdict(config.model), **asdict(config.strategy), "ranks": ranks, "tokens": config.seq_len,
        "batch": config.batch, "accumulate": config.accumulate, "compile": config.compile, "steps": len(steps),
        "step_s": step, "attention_s": attention, "products_s": products, "ratio": (attention + products) / step,
        "burst": sum(burst) / step,
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in steps[2:]),
        "mfu": statistics.median(r["mfu"] for r in steps[2:]), "memory_mib": max(r["memory_mib"] for r in steps),
        "first_loss": steps[0]["loss"], "loss": steps[-1]["loss"],
    }  # fmt: skip


def measured(config: Train, options: Options, ranks: int) -> tuple[float, ...]:
    """One rank: seconds of attention and of matrix products in one step, by calls in a row and by single ones."""
    m, spread = config.model, ranks // config.strategy.data
    times, size = config.batch * config.accumulate, m.head_dim or m.dim // m.heads
    tokens, inner, kv = config.seq_len // spread, m.heads * size, m.kv_heads * size
    layer = [(m.dim, inner), (m.dim, kv), (m.dim, kv), (inner, m.dim)]
    layer += [(m.dim, m.hidden), (m.dim, m.hidden), (m.hidden, m.dim)]
    calls = {shape: products(tokens, *shape, config) for shape in {*layer, (m.dim, m.vocab)}}
    attend = attended(round(config.seq_len / spread**0.5), size, config)
    times_of: list[float] = []
    for timed in (in_a_row, singly):
        once = {shape: timed(call, options) for shape, call in calls.items()}
        matrices = m.layers * sum(once[shape] for shape in layer) + once[m.dim, m.vocab]
        times_of += [times * m.layers * timed(attend, options), times * matrices]
    return tuple(times_of)


def attended(tokens: int, size: int, config: Train) -> Callable[[], Any]:
    """Causal attention, forward and backward, on one rank alone."""
    plan = ra.plan(seq_len=tokens, kernel=config.strategy.kernel)
    heads, kv_heads = config.model.heads, config.model.kv_heads
    q, k, v, dout = (random(config, 1, tokens, n, size) for n in (heads, kv_heads, kv_heads, heads))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(ra.attention(q, k, v, plan), (q, k, v), dout)


def products(tokens: int, wide: int, out: int, config: Train) -> Callable[[], Any]:
    """y = x w^T and its two products of backward."""
    x, w, dy = (random(config, *shape) for shape in ((tokens, wide), (out, wide), (tokens, out)))
    return lambda: (x @ w.T, dy @ w, dy.T @ x)


def random(config: Train, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=getattr(torch, config.precision), device=config.device)


def in_a_row(call: Callable[[], Any], options: Options) -> float:
    """Seconds a call, of calls without a pause, all ranks starting together."""
    once = singly(call, options)
    count = max(2, round(options.seconds / once))

    def all_of_them() -> None:
        for _ in range(count):
            call()

    return together(all_of_them) / count


def singly(call: Callable[[], Any], options: Options) -> float:
    """The median in seconds of single calls, all ranks starting together."""
    return median_ms(call, options.repeats) / 1e3
