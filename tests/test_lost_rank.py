"""A rank that is killed in the middle of a call is named by all others, with the step, in time: none hangs."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.comms import lost
from ringattn.comms.axis import Solo
from ringattn.launch.processes import RankError, run
from ringattn.launch.train import checkpoint, trainer
from ringattn.torch.attention import ring

RANKS, TIMEOUT = 4, 6.0


def calls_until_one_dies(folder: str, victim: int, route: str, stays: bool) -> None:
    """Forward and backward without end; the victim is killed in the backward pass of its fifth call.

    The others write down what they are told and when. With `stays` they keep their connections open after that, as a
    program that catches the error may: then nobody hears of the loss by the closed connection of a neighbour.
    """
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type="cpu")
    plan = ra.plan(mesh, seq_len=100, transport=ra.Transport(route), layout="zigzag")
    rank, start = dist.get_rank(), time.monotonic()
    q, k, v = (torch.randn(1, plan.local_len, 2, 8, requires_grad=True) for _ in range(3))
    for i in range(50):
        if i == 4 and rank == victim:
            ring.backward = partial(with_a_deadly_kernel, ring.backward)
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
    """Rank 3 leaves after a call; the error of each other rank in every kind of transfer that needs it then.

    After that nobody waits for a transfer that is given up.
    """
    mesh = ra.init_mesh(**strategy, device_type="cpu")
    plan, rank, x = ra.plan(mesh, seq_len=64), dist.get_rank(), torch.ones(4, 4)
    axis = plan.ring_axis if plan.ring_axis.size > 1 else plan.ulysses_axis
    axis.all_to_all([x], 0, 0).wait()
    with pytest.raises(RuntimeError):  # an error of its own is no loss, and not reported as one later
        axis.all_gather(x.to("meta")).wait()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    there = axis.size - 1  # where rank 3 is on the axes that it is on
    calls = {
        "move": lambda: axis.move({there: [x]}, {there: [x.clone()]}, what="a step").wait(),
        "all_to_all": lambda: axis.all_to_all([x], 0, 0).wait(),
        "all_gather": lambda: axis.all_gather(x).wait(),
        "reduce_scatter": lambda: axis.reduce_scatter(x).wait(),
        "words": lambda: axis.exchange_words("x"),
    }
    messages = []
    for call in calls.values() if axis.peer(there) == 3 else ():
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    if messages and axis.size == 4:
        given_up = axis.move({}, {(rank + 1) % 3: [x.clone()]})  # which the other rank never sends
        start = time.monotonic()
        del given_up
        assert time.monotonic() - start < TIMEOUT / 2
    Path(folder, str(rank)).write_text("\n".join(messages))
    raise RuntimeError("the end of this rank")


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [({"ring": 4}, "gloo"), ({"ring": 2, "ulysses": 2}, "cpu:gloo"), ({"data": 2, "ulysses": 2}, "gloo")],
)
def test_a_connection_that_is_closed_already_is_the_same_error_for_every_transfer(strategy, backend, tmp_path):
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
        output = path.read_text().splitlines()
        assert len(output) == (5 if path.name in needing else 0)
        for line in output:
            assert line.startswith(f"ConnectionError: {name} rank ") and f" lost {name} rank {whom}" in line, line
            assert "meta" not in line, line


def with_a_deadly_kernel(backward, *args):
    def kernel(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    *others, score, narrow, came = args
    return backward(*others, score._replace(backward=kernel), narrow, came)


HANGS, SHORT = 1, 4.0


def a_rank_that_hangs(folder: str, what: str, sizes: dict[str, int], detail: bool) -> None:
    """One rank sleeps until all others have written down what they raise, and after how long."""
    dist.set_debug_level(dist.DebugLevel.DETAIL if detail else dist.DebugLevel.OFF)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    call = HANGING[what](folder, sizes)
    dist.barrier()
    start = time.monotonic()
    while rank == HANGS and len(os.listdir(folder)) < ranks - 1 and time.monotonic() < start + 40:
        time.sleep(0.05)
    try:
        call()
        message = "nothing"
    except ConnectionError as error:
        message = str(error)
    Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f} {message}")
    raise RuntimeError("the end of this rank")


def an_attention(folder: str, sizes: dict[str, int]) -> Callable[[], object]:
    plan = ra.plan(ra.init_mesh(**sizes, device_type="cpu"), seq_len=64)
    x = torch.ones(1, plan.local_len, 4, 8, requires_grad=True)
    return ra.attention(x, x, x, plan).sum().backward


def a_mesh(folder: str, sizes: dict[str, int]) -> Callable[[], object]:
    return partial(ra.init_mesh, **sizes, device_type="cpu")


def agreeing_to_stop(folder: str, sizes: dict[str, int]) -> Callable[[], object]:
    return trainer.Stop(dist.new_group(timeout=timedelta(seconds=SHORT))).agreed


def a_checkpoint(folder: str, sizes: dict[str, int]) -> Callable[[], object]:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    saved = checkpoint.Checkpoints(
        Path(folder).with_suffix(".run"), 1, dist.new_group(timeout=timedelta(seconds=SHORT))
    )
    return lambda: (saved.save(4, layer, optimizer, {}), saved.finish())


def a_plan(folder: str, sizes: dict[str, int]) -> Callable[[], object]:
    return partial(ra.plan, ra.init_mesh(**sizes, device_type="cpu"), seq_len=64)


HANGING = {"attention": an_attention, "mesh": a_mesh, "plan": a_plan, "stop": agreeing_to_stop, "save": a_checkpoint}


@pytest.mark.parametrize(
    ("what", "sizes", "detail"),
    [
        ("attention", {"ring": 2, "ulysses": 2}, False),
        pytest.param("attention", {"ring": 2, "ulysses": 2}, True, marks=pytest.mark.slow),
        ("mesh", {"ring": 3}, False),
        pytest.param("plan", {"ring": 3}, False, marks=pytest.mark.slow),
        pytest.param("stop", {"ring": 3}, False, marks=pytest.mark.slow),
        ("save", {"ring": 3}, True),
    ],
)
def test_a_rank_that_hangs_is_named_by_all_others_in_time(what, sizes, detail, tmp_path):
    ranks, folder = prod(sizes.values()), tmp_path / "words"
    folder.mkdir()
    with pytest.raises(RankError):
        run(
            a_rank_that_hangs, ranks, str(folder), what, sizes, detail,
            collective_timeout=SHORT, grace=6 * SHORT, preload=("ringattn.launch.train.trainer",),
        )  # fmt: skip
    for rank in set(range(ranks)) - {HANGS}:
        seconds, _, output = (folder / str(rank)).read_text().partition(" ")
        assert 0.9 * SHORT < float(seconds) < 4 * SHORT, f"rank {rank} after {seconds} s: {output}"
        assert (
            f"rank {HANGS} of {ranks}" in output or f"rank {HANGS} did" in output or f"lost ring rank {HANGS}" in output
        ), output


def a_rank_that_is_late_itself(folder: str) -> None:
    """Rank 1 is silent, rank 0 waits for it, and rank 2 for rank 0."""
    plan = ra.plan(ra.init_mesh(ring=3, device_type="cpu"), seq_len=9)
    axis, waits_for = plan.ring_axis, {0: 1, 2: 0}
    if (peer := waits_for.get(axis.rank)) is not None:
        message = lost.Lost(axis, [[peer]], "keys").error(0, "Timed out waiting 4000ms for send operation to complete")
        Path(folder, str(axis.rank)).write_text(message)
    dist.barrier()


def test_a_rank_that_answers_is_not_taken_for_the_one_that_hangs(tmp_path):
    run(a_rank_that_is_late_itself, 3, str(tmp_path), collective_timeout=SHORT)
    late, later = (tmp_path / "0").read_text(), (tmp_path / "2").read_text()
    assert "lost ring rank 1 (keys)" in late and "rank 1 of 3 did not answer" in later


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
    output = {int(p.name): p.read_text() for p in tmp_path.iterdir()}
    assert sorted(output) == [r for r in range(RANKS) if r != victim]
    for rank, text in output.items():
        seconds, error = text.split(" ", 1)
        assert float(seconds) < 2 * TIMEOUT, f"rank {rank}: {text}"  # a wait, and a roll call of half of it
        assert f"lost ring rank {victim} (" in error and ("step" in error or "round" in error), f"rank {rank}: {text}"


def test_a_group_that_another_thread_ends_meanwhile_leaves_the_loss_a_loss():
    """Ray ends the process group of a rank whose peer died, while that rank asks who is missing. Here is none."""
    message = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is"
    for named, text in (
        (lost.missing_named("saving"), r"^saving: .*reset by peer$"),
        (lost.Lost(Solo(), [[0]], "keys").named(), r"reset by peer$"),
    ):
        with pytest.raises(ConnectionError, match=text), named:
            raise RuntimeError(message)
