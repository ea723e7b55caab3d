"""Documents for `ringattn plan`: given lengths, or ones drawn as of real data; and a drawing of who holds what."""

import numpy as np

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.mask import Mask, reads_of
from ringattn.plans.plan import Plan

MIXES = "lognormal:MEDIAN:SIGMA or pareto:ALPHA:LEAST"
WIDTH = 64  # columns of a drawing
SHADES = " .:#"  # of the tokens of a column: a rank holds none, few, many, or all


def lengths_of(given: tuple[int, ...] | str, seq_len: int, seed: int = 0) -> list[int]:
    """These lengths, or those of as many documents as fill the sequence; the same for a seed."""
    lengths = drawn(given, seq_len, seed) if isinstance(given, str) else list(given)
    if sum(lengths) > seq_len:
        raise ValueError(f"docs= holds {sum(lengths)} tokens, more than seq_len={seq_len}")
    return lengths


def drawn(mix: str, seq_len: int, seed: int) -> list[int]:
    """Random lengths of a mix, whose sum is `seq_len`."""
    kind, *numbers = mix.split(":")
    try:
        first, second = map(float, numbers)
    except ValueError:
        first = second = 0.0
    if kind not in ("lognormal", "pareto") or not (0 < first < np.inf and 0 < second < np.inf):
        raise ValueError(f"docs={mix}: give lengths, as in docs=4000,200, or {MIXES}, numbers above 0")
    random, lengths, left = np.random.default_rng(seed), [], seq_len
    while left:
        n = random.lognormal(np.log(first), second) if kind == "lognormal" else (random.pareto(first) + 1) * second
        lengths.append(min(left, max(1, int(min(n, seq_len)))))
        left -= lengths[-1]
    return lengths


def holdings(plan: Plan, spec: AttentionSpec, docs: Docs) -> list[str]:
    """Which tokens each rank holds, its work over the mean, and the keys that it receives, in shards."""
    layout, columns = plan.tokens, min(WIDTH, plan.tokens.padded_length)
    edges = np.arange(columns + 1) * layout.padded_length // columns
    work = seen_pairs(layout, layout, spec, docs).sum(1)
    read = reads_of(Mask(plan.replace(strategy="ring"), spec, docs)).tokens
    come = (read.sum(1) - read.diagonal()) / layout.shard_len
    longest = int(np.diff(docs.starts).max())
    begins = np.isin(np.arange(columns), np.searchsorted(edges, docs.starts, "right") - 1)
    lines = [
        f"who holds what ({longest} tokens in the longest document; | where documents begin):",
        "           work  receives  " + "".join("|" if begun else " " for begun in begins),
    ]
    for r in range(plan.ring):
        held = np.histogram(layout.positions(r), edges)[0] / np.diff(edges)
        bar = "".join(SHADES[int(np.ceil(x * (len(SHADES) - 1)))] for x in held)
        lines.append(f"  rank {r:>4} {work[r] / max(1, work.mean()):>4.2f} {come[r]:>9.2f}  {bar}")
    return lines
