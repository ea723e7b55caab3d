"""Gated linear attention over GPUs equals the recurrence, by every way in which states travel."""

from itertools import product
from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn.launch.processes import run
from ringattn.plans.segments import WAYS
from ringattn.torch.linear import call as linear
from tests.cases import case_of, check, found, inputs, truth
from tests.test_gpu import backend_for

pytestmark = pytest.mark.gpu
T = 4 * 2 * 70 - 3  # segments of more than one chunk on four ranks
PACKED = ((150, 250, T - 400), (64, T - 100))
ASKED = (("channel", PACKED), ("head", None), (None, PACKED))
PLACES = {
    1: [(1, 1, "contiguous")],
    2: [(2, 1, "zigzag"), (1, 2, "contiguous")],
    4: [(4, 1, "zigzag"), (2, 2, "zigzag")],
}


def over_gpus(ranks: int, truths: dict[Any, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Each case's name: its gate and documents, and what this rank found."""
    results = {}
    for ring, ulysses, layout in PLACES[ranks]:
        mesh = ra.init_mesh(ring=ring, ulysses=ulysses, device_type="cuda")
        for gate, lengths in ASKED:
            given = {n: x if x is None else x.cuda() for n, x in inputs(T, gate, torch.float32).items()}
            for scan, kernel, linear.MAX_KEPT_SHARE in product(WAYS, ("chunkwise", "triton"), (0.5, 0.0)):
                case = case_of(given, lengths, ring=ring, ulysses=ulysses, layout=layout, words={"scan": scan})
                kept = "walked again" if linear.MAX_KEPT_SHARE == 0.0 else "kept"
                name = f"{ring}x{ulysses} {layout} {gate} {scan} {kernel} {kept}"
                results[name] = (gate, lengths), found(case, mesh, given, truths[gate, lengths], kernel=kernel)
    return results


@pytest.mark.parametrize("ranks", PLACES)
def test_equals_the_recurrence(ranks):
    backend = backend_for(ranks, "auto")
    truths = {asked: truth(T, *asked, torch.float32) for asked in ASKED}
    results = run(over_gpus, ranks, ranks, truths, backend=backend, timeout=300.0)
    for name, (asked, _) in results[0].items():
        check([each[name][1] for each in results], truths[asked], 2e-6, name)
