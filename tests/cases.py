"""A list of cases, and where the tests run them: every feature on every strategy, layout and a few meshes."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec

FULL = AttentionSpec(causal=False)

# What can be computed on any layout, strategy and mesh.
FEATURES = (
    Case("causal"),
    Case("full", spec=FULL),
    Case("window", spec=AttentionSpec(window=11)),
    Case("window_one", spec=AttentionSpec(window=1)),
    Case("softcap", spec=AttentionSpec(softcap=2.0, scale=0.7)),
    Case("docs", lengths=[20, 0, 11, 30]),
    Case("docs_rows", lengths=[[20, 0, 11, 30], [1, 2, 50]], sinks=True),
    Case("docs_full_window", spec=AttentionSpec(window=7, softcap=3.0), lengths=[[3] * 20, [33, 28]]),
    Case("docs_padded", lengths=[[20, 0, 11], [5]]),
    Case("sinks", sinks=True),
    Case("multi_query", heads=8, kv_heads=1),
    Case("value_dim", head_dim=8, value_dim=12),
    Case("cross", spec=FULL, key_len=37, sinks=True),
    Case("cross_docs", spec=FULL, key_len=37, lengths=[20, 11, 30], key_lengths=[5, 0, 32]),
    Case("cross_docs_alike", spec=FULL, key_len=61, lengths=[20, 0, 11], key_lengths=[5, 50, 6]),
    Case("cross_docs_causal", spec=AttentionSpec(window=13), key_len=67, lengths=[[20, 11, 25], [1, 40]],
         key_lengths=[[30, 0, 14], [9, 58]], sinks=True),
    Case("short", seq_len=3),
    Case("even", seq_len=64),
    Case("all_at_once", spec=AttentionSpec(window=13, softcap=5.0, scale=0.3), lengths=[[30, 31], [9, 52]], sinks=True,
         heads=8, kv_heads=4, value_dim=12),
    Case("both_sides", spec=AttentionSpec(causal=False, window=(6, 3))),
    Case("both_sides_packed", spec=AttentionSpec(causal=False, window=(2, 17), first=3), sinks=True,
         lengths=[[20, 0, 11, 30], [1, 2, 50]]),
    Case("chunks", spec=AttentionSpec(chunk=9)),
    Case("chunks_packed", spec=AttentionSpec(chunk=8, window=5, first=2, softcap=3.0), lengths=[20, 0, 11, 26],
         sinks=True, heads=8),
    Case("chunks_full", spec=AttentionSpec(causal=False, chunk=8, first=11), lengths=[[33, 20], [9, 52]]),
    Case("first", spec=AttentionSpec(window=7, first=4)),
    Case("prefix", lengths=[20, 0, 11, 26], prefix=[5, 0, 11, 1]),
    Case("spans", lengths=[[20, 0, 11, 26], [3, 50]], prefix=[[4, 0, 0, 3], [0, 0]], sinks=True,
         spans=[[(5, 9), (9, 16), (25, 31)], [(4, 45)]]),
    Case("spans_near", spec=AttentionSpec(window=4, chunk=13, first=2, softcap=4.0), lengths=[61],
         spans=[(7, 20), (30, 35)]),
    Case("tree", lengths=[17, 9, 3, 12, 7, 5], parents=[-1, 0, 1, 0, 3, 3]),
    Case("trees", spec=AttentionSpec(window=14, first=3, scale=0.4), lengths=[[9, 8, 13, 5, 11, 7], [3, 4, 50]],
         parents=[[-1, 0, -1, 0, 1, 2], [-1, 0, -1]], heads=8, sinks=True),
    Case("tree_chunks", spec=AttentionSpec(chunk=11), lengths=[17, 9, 3, 20, 7, 5], parents=[-1, 0, 1, 0, 3, 0]),
    Case("slices", sinks=True, slices=[((4, 20), (0, 16), "causal"), ((20, 40), (0, 12), "full"),
         ((20, 40), (15, 45), "both"), ((40, 61), (30, 61), "inverse"), ((48, 57), (2, 9), "causal")]),
    Case("slices_near", spec=AttentionSpec(window=9, chunk=40, first=3), sinks=True,
         slices=[((4, 20), (0, 20), "full"), ((20, 61), (0, 50), "inverse")]),
    Case("shared_question", slices=[((0, 30), (0, 30), "causal"), ((30, 61), (0, 13), "full"),
         ((30, 44), (30, 44), "causal"), ((44, 61), (44, 61), "causal")]),
)  # fmt: skip

PLACES = (
    *product(((4, 1),), ("ring", "gather"), ("contiguous", "striped", "zigzag")),
    ((1, 4), "ulysses", "contiguous"),
    ((2, 2), "ring", "zigzag"),
    ((2, 2), "ring", "striped"),
    ((2, 2), "gather", "zigzag"),
    ((8, 1), "ring", "zigzag"),
    ((2, 4), "ring", "contiguous"),
)

CASES = tuple(
    replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout=layout)
    for case in FEATURES
    for (ring, ulysses), strategy, layout in PLACES
)

# What the balanced layout can be: one sequence, whose documents are dealt out to the ring.
BALANCED = tuple(
    replace(case, ring=ring, ulysses=ulysses, strategy=strategy, layout="balanced")
    for case in FEATURES
    if case.keys == case.seq_len
    for ring, ulysses, strategy in ((4, 1, "ring"), (2, 2, "gather"))
)

# A few of each kind, for what costs more than a thread: processes, GPUs.
FEW = (
    *(
        c
        for c in CASES
        if c.name in ("all_at_once", "cross", "docs_rows", "window")
        and (c.strategy, c.layout) in (("ring", "zigzag"), ("gather", "zigzag"), ("ulysses", "contiguous"))
    ),
    *(c for c in BALANCED if c.name == "docs" and c.strategy == "ring"),
)


def large_scores(given: dict[str, Tensor], size: float = 1e4) -> dict[str, Tensor]:
    """The same with scores, where the scale is 1, and sinks that float32 holds exactly, and that are about `size`."""
    scored = {n: (given[n] * 2).round() / (8 if n == "k" else 1) for n in "qk"}
    scored["q"][..., 0], scored["k"][..., 0] = size, 1.0
    return {**given, **scored, "sinks": size + (given["sinks"] * 8).round() / 8}


def errors(case: Case, mesh: Any, results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative error (norm) of each local result; inf where padding leaked or an empty row is not one."""
    plan, off = case.plan_on(mesh), {}
    for n in (n for n in results if n[0] != "d" or n[1:] not in oracle.WHOLE):
        mine = oracle.own(plan, n, exact[n].to(results[n].device), -torch.inf if n == "lse" else 0.0)
        off[n] = oracle.error(results[n], mine, exact[n])
    return off
