"""The bytes a rank hands to others, forward and backward, counted while they are sent, beside the schedule's figure.

Ranks are threads of this process. The busiest rank is shown, in blocks: the keys and values of one ring shard;
`whole` is what would travel if blocks did, not the ranges of them that are seen; `_mb` are millions of bytes. The route
levels is that of two hosts. Log-normal documents have a median of an eighth of a shard and sigma 1.4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import ringattn as ra
from ringattn.comms.local import run as run_ranks
from ringattn.launch.bench import Row
from ringattn.launch.commands.packed import drawn
from ringattn.launch.processes import MOST
from ringattn.launch.words import option
from ringattn.plans.mask import Mask, reads_of, table_of
from ringattn.steps.reads import whole_blocks
from ringattn.steps.table import build

LONG_TAIL = "log-normal documents"

COLUMNS = ["strategy", "route", "ring", "ulysses", "layout", "mask", "forward", "backward", "scheduled", "whole",
           "forward_mb"]  # fmt: skip


@dataclass
class Options:
    ranks: int = option(8, "ranks")
    tokens: int = option(4096, "tokens of the whole sequence")
    heads: int = option(8, "query heads")
    kv_heads: int = option(2, "key heads")
    head_dim: int = option(16, "head dim")
    window: int = option(600, "keys of the windowed rows")
    seed: int = option(0, "draws the documents of the packed rows")


def run(options: Options) -> Iterator[Row]:
    n, window = options.ranks, f"window {options.window}"
    if not 2 <= n <= min(MOST, options.tokens):
        raise ValueError(f"ranks={n}: there can be 2 to {MOST}, and no more than tokens={options.tokens}")
    rings = (
        (n, 1, "zigzag", "causal"), (n, 1, "contiguous", "causal"), (n, 1, "contiguous", "full"),
        (n, 1, "contiguous", window), (n, 1, "zigzag", window), (n, 1, "contiguous", "documents inside shards"),
        (n, 1, "balanced", LONG_TAIL), (n, 1, "zigzag", LONG_TAIL), (n // 2, 2, "zigzag", "causal"),
    )  # fmt: skip
    cases = [("ring", route, *ring) for route in ("direct", "relay", "levels") for ring in rings
             if route != "levels" or (ring[0] % 2 == 0 and ring[0] > 2)]  # fmt: skip
    cases += [("ulysses", "direct", 1, n, "contiguous", "causal"), ("gather", "direct", n, 1, "zigzag", "causal")]
    for case in cases:
        yield count(options, *case)


def count(options: Options, strategy: str, route: str, ring: int, ulysses: int, layout: str, mask: str) -> Row:
    """One forward and backward pass on all ranks; what the busiest one sent."""
    spec = ra.AttentionSpec(causal=mask != "full", window=options.window if mask.startswith("window") else None)
    inside, docs = options.tokens // options.ranks, None
    if mask == LONG_TAIL:
        docs = ra.Docs.from_lengths(drawn(f"lognormal:{max(1, inside // 8)}:1.4", options.tokens, options.seed))
    elif mask.startswith("documents"):
        docs = ra.Docs.from_lengths([inside] * options.ranks, pad_to=options.tokens)
    how = ra.Transport(route, hosts=2 if route == "levels" else None)

    def one_rank(mesh: Any) -> tuple[int, ...]:
        dealt = docs if layout == "balanced" else None
        plan = ra.plan(mesh, seq_len=options.tokens, strategy=strategy, layout=layout, docs=dealt, transport=how)
        shapes = (options.heads, options.kv_heads, options.kv_heads)
        q, k, v = (torch.randn(1, plan.local_len, h, options.head_dim, requires_grad=True) for h in shapes)
        axes = [a for a in (plan.ring_axis, plan.ulysses_axis) if a.size > 1]
        out = ra.attention(q, k, v, plan, spec=spec, docs=docs)
        forward = sum(a.sent for a in axes)
        out.sum().backward()
        mask = Mask(plan, spec, docs)
        tables = table_of(mask, plan.hosts), build(whole_blocks(reads_of(mask).needed, 1), plan.hosts)
        counts = [[int(column[plan.ring_axis.rank]) for column in table.sent] for table in tables]
        return (
            forward,
            sum(a.sent for a in axes) - forward,
            *(n for keys, grads in counts for n in (keys, keys + grads)),
        )

    forward, backward, tokens, both, *whole = (
        max(column) for column in zip(*run_ranks(one_rank, ring=ring, ulysses=ulysses), strict=True)
    )
    shard = -(-options.tokens // ring)
    block = shard * max(1, options.kv_heads // ulysses) * 2 * options.head_dim * 4
    counted = strategy == "ring" and ulysses == 1
    return {
        "suite": "traffic", "tokens": options.tokens, "strategy": strategy, "route": route, "ring": ring,
        "ulysses": ulysses, "layout": layout, "mask": mask, "forward": forward / block, "backward": backward / block,
        "scheduled": f"{tokens / shard:.2f} + {both / shard:.2f}" if counted else None,
        "whole": "{} + {}".format(*whole) if counted else None,
        "forward_mb": forward / 1e6, "backward_mb": backward / 1e6,
    }  # fmt: skip
