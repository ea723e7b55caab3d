"""Where the tests run the cases of `ringattn verify`: every feature on every strategy, layout and a few meshes."""

from dataclasses import replace
from itertools import product

from torch import Tensor

from ringattn.launch.verify.cases import FEATURES

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
    if not case.crossed
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
