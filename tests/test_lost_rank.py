"""A rank that is killed in the middle of a call is named by all others, with the step, in time: none hangs."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.comms.mesh import split
from ringattn.launch.processes import RankError, run
from ringattn.torch import attention

RANKS, TIMEOUT = 4, 12.0


def calls_until_one_dies(folder: str, victim: int, route: str, stays: bool) -> None:
    """Forward and backward without end; the victim is killed in the backward pass of its fifth call.

    The others write down what they are told and when. With `stays` they keep their connections open after that, as a
    program that catches the error may: then nobody hears of the loss by the closed connection of a neighbour.
    """
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type="cpu")
    plan = ra.plan(mesh, seq_len=100, route=route, layout="zigzag")
    rank, start = dist.get_rank(), time.monotonic()
    q, k, v = (torch.randn(1, plan.local_len, 2, 8, requires_grad=True) for _ in range(3))
    for i in range(50):
        if i == 4 and rank == victim:
            attention.BACKWARD[route] = partial(with_a_deadly_kernel, attention.BACKWARD[route])
        try:
            start = time.monotonic()
            ra.attention(q, k, v, plan).sum().backward()
        except Exception as error:
            Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f} {type(error).__name__}: {error}")
            break
    while stays and len(os.listdir(folder)) < RANKS - 1 and time.monotonic() < start + 2 * TIMEOUT:
        time.sleep(0.1)
    raise RuntimeError("the end of this rank")


def a_closed_connection_everywhere(folder: str, strategy: dict[str, int]) -> None:
    """Rank 3 leaves after a call; what each other rank is told by every kind of transfer that needs it then."""
    mesh = ra.init_mesh(**strategy, device_type="cpu")
    plan, rank, x = ra.plan(mesh, seq_len=64), dist.get_rank(), torch.ones(4, 4)
    axis = plan.ring_axis if plan.ring_axis.size > 1 else plan.ulysses_axis
    axis.all_to_all(x, 0, 0).wait()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    there = axis.size - 1  # where rank 3 is on the axes that it is on
    calls = {
        "move": lambda: axis.move({there: [x]}, {there: [x.clone()]}, what="a step").wait(),
        "all_to_all": lambda: axis.all_to_all(x, 0, 0).wait(),
        "all_gather": lambda: axis.all_gather(x).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(x).wait(),
        "words": lambda: axis.exchange_words("x"),
    }
    said = []
    for call in calls.values() if axis.peer(there) == 3 else ():
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    Path(folder, str(rank)).write_text("\n".join(said))
    raise RuntimeError("the end of this rank")


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [({"ring": 4}, "gloo"), ({"ring": 2, "ulysses": 2}, "cpu:gloo"), ({"data": 2, "ulysses": 2}, "gloo")],
)
def test_a_connection_that_is_closed_already_is_said_alike_whatever_needs_it(strategy, backend, tmp_path):
    """The error comes where a transfer is launched then, not where it is waited for."""
    with pytest.raises(RankError, match="the end of this rank"):
        run(
            a_closed_connection_everywhere, RANKS, str(tmp_path), strategy,
            backend=backend, collective_timeout=TIMEOUT, grace=TIMEOUT,
        )  # fmt: skip
    name, whom, needing = {
        4: ("ring", "3 (", "012"), 2: ("ring", "1, which is rank 3 of 4 (", "1"),
        None: ("ulysses", "1, which is rank 3 of 4 (", "2"),
    }[strategy.get("ring")]  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == set("012")
    for path in tmp_path.iterdir():
        said = path.read_text().splitlines()
        assert len(said) == (5 if path.name in needing else 0)
        for line in said:
            assert line.startswith(f"ConnectionError: {name} rank ") and f" lost {name} rank {whom}" in line, line


def a_local_error_and_then_a_loss(folder: str) -> None:
    """What comes of an error that is no loss, and what is said of a loss after it."""
    plan, rank, x = ra.plan(ra.init_mesh(ring=3, device_type="cpu"), seq_len=12), dist.get_rank(), torch.ones(1, 4)
    axis = plan.ring_axis
    with pytest.raises(RuntimeError, match="meta"):
        axis.all_gather(x.to("meta")).wait()
    assert torch.equal(plan.unshard((x + 2j).conj()), torch.full((1, 12), 1 - 2j))
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ConnectionError) as error:
        axis.exchange_words("after")
    Path(folder, str(rank)).write_text(str(error.value))


def test_an_error_of_its_own_is_no_loss_and_is_not_told_as_one_later(tmp_path):
    with pytest.raises(RankError, match="killed by signal 9"):
        run(a_local_error_and_then_a_loss, 3, str(tmp_path), collective_timeout=TIMEOUT, grace=TIMEOUT)
    said = [path.read_text() for path in tmp_path.iterdir()]
    assert len(said) == 2 and all("lost ring rank 2 (words)" in one and "meta" not in one for one in said)


def with_a_deadly_kernel(backward, q, k, v, axis, run, score, rows):
    def kernel(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    return backward(q, k, v, axis, run, score._replace(attend_backward=kernel, halves=kernel), rows)


def patience_of_axes():
    meshes = [ra.init_mesh(data=2, ring=2, device_type="cpu"), ra.init_mesh(sequence=4, device_type="cpu")]
    meshes.append(split(meshes[1], "sequence", {"ring": 2, "ulysses": 2}))
    groups = [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


@pytest.mark.skipif("TORCH_DISTRIBUTED_DEBUG" in os.environ, reason="wraps groups, which then keep torch's limit")
def test_every_axis_waits_as_long_as_the_ranks_were_told_to():
    assert run(patience_of_axes, 4, collective_timeout=77.0) == [{77.0}] * 4


@pytest.mark.parametrize(
    ("victim", "route", "stays"),
    [(0, "direct", True), (2, "direct", False), pytest.param(0, "relay", True, marks=pytest.mark.slow)],
)
def test_all_others_name_it_and_the_step(victim, route, stays, tmp_path):
    with pytest.raises(RankError):
        run(
            calls_until_one_dies, RANKS, str(tmp_path), victim, route, stays,
            collective_timeout=TIMEOUT, grace=3 * TIMEOUT,
        )  # fmt: skip
    said = {int(p.name): p.read_text() for p in tmp_path.iterdir()}
    assert sorted(said) == [r for r in range(RANKS) if r != victim]
    for rank, text in said.items():
        seconds, error = text.split(" ", 1)
        assert float(seconds) < 1.5 * TIMEOUT, f"rank {rank}: {text}"
        assert f"lost ring rank {victim} (" in error and "step" in error, f"rank {rank}: {text}"
