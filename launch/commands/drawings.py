"""Drawings of `ringattn plan`, as text: a mask, and who holds which tokens."""

from itertools import pairwise

import numpy as np

from ringattn.masks.bands import Families, bounds_at
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.mask import Mask, reads_of
from ringattn.plans.plan import Plan

CELLS, SAMPLES = 32, 8  # cells of a side of a mask, and queries of a cell that are looked at
WIDTH = 64  # columns of who holds what
SHADES = " .:#"  # of the tokens of a column: a rank holds none, few, many, or all


def cells(families: Families, seq_len: int, key_len: int) -> list[str]:
    """The first row's mask in up to CELLS x CELLS cells: # all pairs are seen, + some, . none."""
    rows, columns = (np.linspace(0, n, min(n, CELLS) + 1).astype(int) for n in (seq_len, key_len))
    lines = []
    for first, stop in pairwise(rows.tolist()):
        at = np.unique(np.linspace(first, stop - 1, SAMPLES).astype(int))
        seen = np.zeros((len(at), len(columns) - 1), int)
        for family in families:
            begin, end = (side[0][:, None] for side in bounds_at(family[:1], at))
            seen += (np.minimum(end, columns[1:]) - np.maximum(begin, columns[:-1])).clip(0)
        level = (seen > 0).max(0) + (seen == np.diff(columns)).min(0).astype(int)
        lines.append("  " + "".join(".+#"[i] for i in level.tolist()))
    return lines


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
        shares = np.histogram(layout.positions(r), edges)[0] / np.diff(edges)
        bar = "".join(SHADES[int(np.ceil(x * (len(SHADES) - 1)))] for x in shares)
        lines.append(f"  rank {r:>4} {work[r] / max(1, work.mean()):>4.2f} {come[r]:>9.2f}  {bar}")
    return lines
