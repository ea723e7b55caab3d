"""A step of a training run beside its floor: attention alone plus matrix products alone, of one rank, nothing sent.

    python benchmarks/step.py runs/NAME

The attention floor is, for each layer, one causal call with as many (query, key) pairs as a rank has of the whole; the
matrix floor is every product of a layer, forward and both of backward, on a rank's number of tokens. Times are medians
of ten calls in a row; the step's own time is the median without the first two.
"""

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import ringattn as ra
from ringattn.launch.bench.timing import attention_passes, median_ms
from ringattn.launch.train import metrics


def main(folder: Path) -> None:
    about = json.loads((folder / "config.json").read_text(), object_hook=lambda fields: SimpleNamespace(**fields))
    config, ranks = about.config, about.ranks
    m, spread = config.model, ranks // config.strategy.data
    if m.window is not None or m.softmax_every != 1 or config.data.documents:
        sys.exit("the floor is full causal attention; train without windows, linear attention and documents to compare")
    size, tokens, calls = m.head_dim or m.dim // m.heads, config.seq_len // spread, config.batch * config.accumulate
    heads = SimpleNamespace(heads=m.heads, kv_heads=m.kv_heads, head_dim=size, device=config.device)
    plan = ra.plan(seq_len=round(config.seq_len / spread**0.5), kernel=config.strategy.kernel)
    attention = calls * m.layers * seconds(attention_passes(heads, plan)["forward+backward"])
    inner, kv = m.heads * size, m.kv_heads * size
    layer = [(m.dim, inner), (m.dim, kv), (m.dim, kv), (inner, m.dim)]
    layer += [(m.dim, m.hidden), (m.dim, m.hidden), (m.hidden, m.dim)]

    def products(wide: int, out: int) -> float:
        """y = x w^T and its two products of backward."""
        how = {"dtype": getattr(torch, config.precision), "device": config.device}
        x, w, dy = (torch.randn(shape, **how) for shape in ((tokens, wide), (out, wide), (tokens, out)))
        return seconds(lambda: (x @ w.T, dy @ w, dy.T @ x))

    once = {shape: products(*shape) for shape in {*layer, (m.dim, m.vocab)}}
    matrices = calls * (m.layers * sum(once[shape] for shape in layer) + once[m.dim, m.vocab])
    steps = [row["seconds"] for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "step"]
    step = statistics.median(steps[2:])
    print(f"step {step:.4g} s, attention {attention:.4g} s, products {matrices:.4g} s: "
          f"{(attention + matrices) / step:.3f} of the step")  # fmt: skip


def seconds(call: Any) -> float:
    return median_ms(call, 5, calls=10) / 1e3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
