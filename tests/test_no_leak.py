"""200 training-like steps of random lengths, or documents, leave the memory that tensors take where it was."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.launch.processes import run

Steps = Iterator[tuple[ra.Plan, ra.Docs | None]]


def living() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) is torch.Tensor
    }
    return sum(storages.values())


def step(plan: ra.Plan, docs: ra.Docs | None) -> int:
    """The bytes of what goes in and comes out."""
    q, k, v = (torch.randn(1, plan.local_len, h, 32, requires_grad=True) for h in (8, 2, 2))
    out = ra.attention(q, k, v, plan, docs=docs)
    out.sum().backward()
    return sum(x.nbytes for x in (q, k, v, out))


def random_lengths(route: str) -> Steps:
    """A new plan each step."""
    mesh, rng = ra.init_mesh(ring=2, device_type="cpu"), np.random.default_rng(0)
    for i in range(240):
        lengths = rng.integers(1, 80, rng.integers(1, 4)).tolist()
        plan = ra.plan(mesh, seq_len=sum(lengths), route=route, together=1 + i % 2)
        yield plan, ra.Docs.from_lengths(lengths) if i % 2 else None


def random_documents(route: str) -> Steps:
    """One plan for all steps, which remembers what ranks agreed on: words between them count as dear."""
    plan = ra.plan(ra.init_mesh(ring=2, device_type="cpu"), seq_len=128, route=route)
    plan.ring_axis.cheap_words = False
    rng = np.random.default_rng(0)
    for i in range(240):
        ends = sorted(rng.choice(127, i % 4, replace=False) + 1)
        yield plan, ra.Docs.from_cu_seqlens([0, *ends, 128])
        assert len(plan.agreed) == 1


def steps(kind: Callable[[str], Steps], route: str) -> tuple[int, int, int]:
    """Living bytes before and after 200 steps, and what one step takes."""
    before = used = 0
    for i, (plan, docs) in enumerate(kind(route)):
        if i == 40:  # the caches of what a mask says fill up first
            before = living()
        used = max(used, step(plan, docs))
    return before, living(), used


@pytest.mark.parametrize("kind", [random_lengths, random_documents])
@pytest.mark.parametrize("route", ["direct", "relay"])
def test_200_steps_leave_memory_as_it_was(kind, route):
    for before, after, used in run(steps, 2, kind, route):
        assert abs(after - before) < used / 4, f"{before} bytes before, {after} after, {used} in one step"
