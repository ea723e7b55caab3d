"""200 training-like steps of random lengths leave the memory that tensors take where it was."""

import gc

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.launch.processes import run


def living() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) is torch.Tensor
    }
    return sum(storages.values())


def steps(route: str, count: int) -> tuple[int, int, int]:
    """Living bytes before and after so many steps, and what one step takes."""
    mesh = ra.init_mesh(ring=2, device_type="cpu")
    rng = np.random.default_rng(0)
    before = used = 0
    for i in range(count + 40):  # the caches of what a mask says fill up first
        if i == 40:
            before = living()
        lengths = rng.integers(1, 80, rng.integers(1, 4)).tolist()
        plan = ra.plan(mesh, seq_len=sum(lengths), route=route, together=1 + i % 2)
        q, k, v = (torch.randn(1, plan.local_len, h, 32, requires_grad=True) for h in (8, 2, 2))
        out = ra.attention(q, k, v, plan, docs=ra.Docs.from_lengths(lengths) if i % 2 else None)
        out.sum().backward()
        used = max(used, sum(x.nbytes for x in (q, k, v, out)))
        del q, k, v, out, plan
    return before, living(), used


@pytest.mark.parametrize("route", ["direct", "relay"])
def test_200_steps_of_random_lengths_leave_memory_as_it_was(route):
    for before, after, used in run(steps, 2, route, 200):
        assert abs(after - before) < used / 4, f"{before} bytes before, {after} after, {used} in one step"
