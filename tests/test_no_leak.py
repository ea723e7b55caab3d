"""200 training-like steps of random lengths, or documents, leave the memory that tensors take where it was."""

import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
        plan = ra.plan(mesh, seq_len=sum(lengths), transport=ra.Transport(route, together=1 + i % 2))
        yield plan, ra.Docs.from_lengths(lengths) if i % 2 else None


def random_documents(route: str) -> Steps:
    """One plan for all steps, which remembers what ranks agreed on: words between them count as dear."""
    plan = ra.plan(ra.init_mesh(ring=2, device_type="cpu"), seq_len=128, transport=ra.Transport(route))
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "route"), [(random_documents, "direct"), (random_lengths, "relay")])
def test_200_steps_leave_memory_as_it_was(kind, route):
    for before, after, used in run(steps, 2, kind, route):
        assert abs(after - before) < used / 4, f"{before} bytes before, {after} after, {used} in one step"


def ends_and_begins(folder: str, detail: bool) -> list[tuple[int, int]]:
    """Threads and open files after each of some lives of the process group."""
    dist.set_debug_level(dist.DebugLevel.DETAIL if detail else dist.DebugLevel.OFF)
    rank, results = dist.get_rank(), []
    for life in range(4):
        mesh = ra.init_mesh(sequence=2, device_type="cpu") if life % 2 else ra.init_mesh(ring=2, device_type="cpu")
        step(ra.plan(mesh, seq_len=64, heads=(8, 2), head_dim=32), None)
        dist.destroy_process_group()
        gc.collect()
        results.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{life}", 2), rank=rank, world_size=2)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("detail", [False, True])
def test_a_process_group_that_ends_takes_its_threads_and_connections_along(detail, tmp_path):
    for results in run(ends_and_begins, 2, str(tmp_path), detail):
        assert max(threads for threads, _ in results[2:]) <= results[1][0], f"(threads, files): {results}"
        assert max(files for _, files in results[2:]) <= results[1][1], f"(threads, files): {results}"
