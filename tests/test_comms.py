"""Axes move what they say, in rank order; nothing in flight is written; every transfer is waited for."""

import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.comms import messages
from ringattn.comms.axis import Afterwards, Axis, Slices
from ringattn.comms.local import run
from ringattn.comms.mesh import axis, hosts_along, init_mesh
from ringattn.comms.process_group import CollectiveAxis
from ringattn.kernels.attention import tiled
from ringattn.launch.processes import RankError
from ringattn.launch.processes import run as run_processes
from tests.launched import as_users_have_it


def exercise(a: Axis) -> None:
    """Every operation of an axis against what it promises."""
    n, r = a.size, a.rank
    mine = torch.full((2, 3), float(r))
    for shift in (1, -1, 2, n):
        (got,) = a.rotate([mine], shift).wait()
        assert got.eq((r - shift) % n).all()
    # only the even ranks send to their neighbour
    got = a.rotate([mine], 1, send=r % 2 == 0, recv=(r - 1) % n % 2 == 0).wait()
    assert (got is None) == ((r - 1) % n % 2 == 1) and (got is None or got[0].eq((r - 1) % n).all())
    # everybody sends each other rank one row of its own, and fills rows of one tensor that do not lie together
    others, rows = [s for s in range(n) if s != r], torch.full((2, n, 3), -1.0)
    a.move({s: [mine + 10 * s] for s in others}, {s: [rows[:, s]] for s in others}, "rows", persistent=False).wait()
    assert all(rows[:, s].eq(s + 10 * r if s != r else -1).all() for s in range(n))
    # and what it sends to itself is copied
    itself, at = Slices([torch.arange(24.0).view(1, 8, 3) + r], (range(2), range(4, 8))), (range(1, 3), range(3, 7))
    for shares in (False, True):
        room = torch.full((1, 8, 3), -1.0)
        shown = [mine]
        given = {r: itself, **dict.fromkeys(others, shown)}, {r: Slices([room], at)} | {s: [rows[:, s]] for s in others}
        with a.sharing(*given, persistent=False) if shares else nullcontext(a.move(*given)) as coming:
            pass
        coming.wait()
        assert torch.equal(room[:, 1:7], torch.cat([*itself], 1)) and room[:, [0, 7]].eq(-1).all()
        assert all(rows[:, s].eq(s).all() for s in others)
    # everybody shows the same to all others beside its work, then only the even ranks do, and all but themselves look;
    # then the last rank sees other rows than the others
    for turn in range(4):
        showing = [s for s in others if turn % 2 == 0 or s % 2 == 0]
        readers = others if turn % 2 == 0 or r % 2 == 0 else []
        wide, room = torch.full((2, 40, 3), r + 10.0 * turn), torch.full((2, n, 40, 3), -1.0)
        all_rows, few = (range(9), range(9, 40)), (range(30, 40),)
        shown = {rows: Slices([wide], rows) for rows in (all_rows, few)}
        last = turn == 2 and r == n - 1
        out = {s: shown[few if turn == 2 and s == n - 1 else all_rows] for s in readers}
        into = {s: Slices([room[:, s]], few, (40,) * (len(others) > 1)) if last else Slices([room[:, s]], all_rows)
                for s in showing}  # fmt: skip
        with a.sharing(out, into, persistent=turn % 2 == 1) as coming:
            pass
        coming.wait()
        for s in range(n):
            assert room[:, s, 30:].eq(s + 10 * turn if s in showing else -1).all()
            assert room[:, s, :30].eq(s + 10 * turn if s in showing and not last else -1).all()
    x = torch.arange(2 * 2 * n * 3.0).reshape(2, 2 * n, 3) + 1000 * r
    swapped, other = a.all_to_all([x, x[..., :1].long()], 1, 2).wait()
    expected = [torch.arange(2 * 2 * n * 3.0).reshape(2, 2 * n, 3)[:, 2 * r : 2 * r + 2] + 1000 * s for s in range(n)]
    assert torch.equal(swapped, torch.cat(expected, 2))
    assert torch.equal(other, torch.cat([each[..., :1] for each in expected], 2).long())  # of another dtype and shape
    assert torch.equal(a.all_to_all([swapped], 2, 1).wait()[0], x)
    assert torch.equal(a.all_gather(mine, 1).wait(), torch.cat([torch.full((2, 3), float(s)) for s in range(n)], 1))
    total = a.reduce_scatter(torch.arange(2 * n * 2.0).reshape(2, 2 * n) * (r + 1), 1).wait()
    assert torch.equal(total, torch.arange(2 * n * 2.0).reshape(2, 2 * n)[:, 2 * r : 2 * r + 2] * n * (n + 1) / 2)
    for like in (torch.zeros(2, 0), torch.ones(2, 2, dtype=torch.bool), torch.eye(2)[:, ::2]):
        assert torch.equal(a.all_gather((like * (r + 1))[None]).wait(), torch.stack([like * (s + 1) for s in range(n)]))
    turned = torch.full((2, 2), 2 - 3j).conj()
    for lazy in (turned, turned.imag):
        assert torch.equal(a.all_gather(lazy).wait(), lazy.repeat(n, 1))
    assert not a.all_gather(mine.clone().requires_grad_()).wait().requires_grad
    assert a.exchange_words("alike") == ["alike"] * n
    assert a.exchange_words({"rank": r * "x"}) == [{"rank": s * "x"} for s in range(n)]


def test_a_transfer_is_launched_after_work_that_fails_and_hides_no_error():
    launched = []

    def launch():
        launched.append("launched")
        raise ConnectionError("a rank is lost")

    with pytest.raises(KeyError), Afterwards(launch):
        raise KeyError("work")
    with pytest.raises(ConnectionError), Afterwards(launch):
        pass
    assert len(launched) == 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads(size):
    run(lambda mesh: exercise(axis(mesh, "ring")), ring=size)


def over_gloo() -> None:
    mesh = init_mesh(ring=4, device_type="cpu")
    exercise(CollectiveAxis(mesh.get_group("ring")))  # the collectives that NCCL uses
    assert hosts_along(mesh, "ring") == 0  # one host of CPUs: any route is as fast
    a = axis(mesh, "ring")
    exercise(a)
    slices, held = Slices([torch.ones(2, 4, 3)], (range(2),)), []
    started, a.started = a.started, lambda ops, lost: held.extend(ops) or started(ops, lost)
    others = [s for s in range(4) if s != a.rank]
    a.move(dict.fromkeys(others, slices), {s: [torch.empty(2, 2, 3)] for s in others}).wait()
    assert len({op.tensor.data_ptr() for op in held}) == 1 + 3  # packed once for all receivers


def test_gloo_processes():
    run_processes(over_gloo, 4)
    run_processes(as_users_have_it, 4, over_gloo)


def a_kernel_that_fails_once() -> None:
    real, fails = tiled.KERNEL.attend, [True]

    def attend(*args, **given):
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError("out of memory")
        return real(*args, **given)

    tiled.KERNEL = replace(tiled.KERNEL, attend=attend)
    plan = ra.plan(init_mesh(ring=3, device_type="cpu"), seq_len=48, kernel="tiled")
    whole = torch.randn(3, 1, 48, 2, 8, generator=torch.Generator().manual_seed(0))
    mine = [plan.shard(x) for x in whole]
    with pytest.raises(torch.OutOfMemoryError):
        ra.attention(*mine, plan)
    torch.testing.assert_close(ra.attention(*mine, plan), plan.shard(ra.attention(*whole)))


def after_the_end_of_its_ranks() -> None:
    plan = ra.plan(init_mesh(ring=2, device_type="cpu"), seq_len=8)
    x = plan.shard(torch.randn(1, 8, 2, 4))
    ra.attention(x, x, x, plan)
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"destroy_process_group\(\) has ended the ranks of this plan"):
        ra.attention(x, x, x, plan)


def test_a_plan_whose_ranks_have_ended_says_so():
    run_processes(after_the_end_of_its_ranks, 2)


def test_a_call_that_failed_on_all_ranks_is_not_met_by_the_next_one():
    run_processes(a_kernel_that_fails_once, 3, timeout=30)
    run_processes(as_users_have_it, 3, a_kernel_that_fails_once, timeout=30)


def writes_to_what_is_in_flight(a) -> None:
    x = torch.zeros(3)
    pending = a.rotate([x])
    x.add_(1)
    pending.wait()


def fails_alone(a) -> None:
    if a.rank == 1:
        raise KeyError("lost")
    a.rotate([torch.zeros(3)]).wait()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (writes_to_what_is_in_flight, AssertionError, "written while it was in flight"),
        (lambda a: a.rotate([torch.zeros(3)]), AssertionError, "never waited for"),
        (lambda a: a.move({1: [torch.zeros(3)]} if a.rank == 0 else {}, {}).wait(), AssertionError, "rank 0 -> 1"),
        (fails_alone, KeyError, "lost"),
    ],
)
def test_threads_find_what_a_rank_does_wrong_and_end_with_its_error(call, error, says):
    with pytest.raises(error, match=says):
        run(lambda mesh: call(axis(mesh, "ring")), ring=3)


class Harmful:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return exit, ("it ran",)


def a_pickle_among_words() -> None:
    mesh = init_mesh(ring=2, device_type="cpu")
    axes = axis(mesh, "ring"), CollectiveAxis(mesh.get_group("ring"))
    if dist.get_rank() == 1:
        messages.encode = lambda words: pickle.dumps(Harmful())
    for each in axes:
        with pytest.raises(ValueError, match=r"rank 1 sent .* not JSON"):
            each.exchange_words("harmless")


def test_words_are_never_unpickled():
    run_processes(a_pickle_among_words, 2)
    for refused in (Harmful(), {1: 2}, {"a": [torch.ones(2)]}):
        with pytest.raises(TypeError, match="ranks exchange None, bools"):
            messages.encode(refused)
    assert messages.decode(messages.encode({"a": (1, 2.5, None, True)}), 0) == {"a": [1, 2.5, None, True]}


def of_another_mesh(own: bool) -> None:
    sizes = {"ring": 2} if dist.get_rank() else {"ulysses": 2}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(*sizes,)) if own else init_mesh(**sizes, device_type="cpu")
    plan = ra.plan(mesh, seq_len=64)
    ra.attention(*torch.ones(3, 1, 32, 2, 4), plan)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (False, r"rank 0 has ulysses=2 on cpu; rank 1 has ring=2 on cpu"),
        (True, r"ring rank 0 has 64 tokens over ring=1 x ulysses=2.* ring rank 1 has .*ring=2 x ulysses=1"),
    ],
)
def test_ranks_that_make_other_meshes_are_named_with_them(own, says):
    with pytest.raises(RankError, match=says):
        run_processes(of_another_mesh, 2, own)


def test_axes_of_a_two_dimensional_mesh_are_independent():
    def one_rank(mesh):
        ring, ulysses = axis(mesh, "ring"), axis(mesh, "ulysses")
        x = torch.tensor([10.0 * ring.rank + ulysses.rank])
        return ring.all_gather(x).wait().tolist(), ulysses.all_gather(x).wait().tolist()

    results = run(one_rank, ring=2, ulysses=3)
    assert results[4] == ([1.0, 11.0], [10.0, 11.0, 12.0])  # rank 4 is ring 1, ulysses 1
