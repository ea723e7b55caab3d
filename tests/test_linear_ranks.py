"""Gated linear attention over ranks equals the recurrence run token by token: out, end state, all gradients."""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.comms.local import run
from ringattn.comms.mesh import axis
from ringattn.comms.scan import Relay
from ringattn.kernels.linear.maps import Map
from ringattn.launch.processes import run as run_processes
from ringattn.layouts.layout import MAKERS, Maker, block
from ringattn.plans.machine import load
from ringattn.plans.plan import Plan
from ringattn.plans.segments import WAYS, choose, layouts, order, segments
from ringattn.torch.linear import call as linear
from ringattn.torch.linear.halo import causal_convolution
from ringattn.torch.linear.states import Passage
from ringattn.torch.sharding import summed
from tests.cases import B, H, K, V, check_processes, docs_of, inputs, on_threads, states_of, worst
from tests.cases import check as check_found
from tests.cases import linear as linear_call

T = 61  # a prime: no number of ranks divides it
LONG = 4 * 2 * 70 - 3  # segments of more than one chunk on four ranks
PACKED = ((20, 0, 11, 30), (1, 2, 50))
FIRST_EMPTY = ((0, 33, 20), (0, 61))
MESHES = [(r, 1, layout) for r in (2, 3, 4, 7) for layout in ("contiguous", "zigzag")]
MESHES += [(1, 4, "contiguous"), (2, 2, "contiguous"), (2, 2, "zigzag"), (2, 3, "zigzag"), (2, 4, "zigzag")]


def check(*asked, T=T, limit=1e-10, **how):
    case, given, exact, _ = linear_call(*asked, T, **how)
    check_found(on_threads(case, given, exact), exact, limit, f"{case} {how}")


@pytest.mark.parametrize("scan", WAYS)
@pytest.mark.parametrize(("ring", "ulysses", "layout"), MESHES)
def test_equals_the_recurrence(ring, ulysses, layout, scan):
    check((ring, ulysses, layout), "channel", None, scan=scan)
    check((ring, ulysses, layout), "head", PACKED, scan=scan)
    check((ring, ulysses, layout), "head", PACKED, scan=scan, beta=True, key_heads=1)


NEW = {
    "halves": lambda n, r: (r, n + r),
    "backwards": lambda n, r: (n - 1 - r,),
    "in_turn": lambda n, r: (2 * r, 2 * r + 1),
    "thirds": lambda n, r: (r, n + r, 2 * n + r),
}


@pytest.mark.parametrize("name", NEW)
def test_how_states_go_follows_from_the_ranges_of_a_layout(name, monkeypatch):
    """Of one that is nowhere named: around the ring if they pass the ranks in turn; else that is refused."""
    blocks = len(NEW[name](2, 0))
    made = lambda layout, n, r: tuple(block(layout.pieces[0], blocks * n, i) for i in NEW[name](n, r))  # noqa: E731
    monkeypatch.setitem(MAKERS, name, Maker(made, blocks))
    for ring, ulysses in ((4, 1), (2, 2)):
        ways = layouts(ring, ulysses).get(name)
        assert ways == {"in_turn": WAYS, "thirds": None}.get(name, ("gather",)), "three segments a rank are too many"
        if ways is None:
            continue
        for scan in ("auto", *ways):
            check((ring, ulysses, name), "head", PACKED, scan=scan)
        for scan in {*WAYS} - {*ways}:
            with pytest.raises(ValueError, match=f"scan='{scan}' .* ranks in another order: use 'gather'"):
                check((ring, ulysses, name), "head", PACKED, scan=scan)


@pytest.mark.parametrize(
    ("ring", "ulysses", "layout"),
    [(1, 1, "contiguous"), (4, 1, "zigzag"), (2, 3, "zigzag"), (5, 1, "balanced"), (2, 3, "balanced")],
)
@pytest.mark.parametrize(
    "lengths", [None, PACKED, FIRST_EMPTY, ((20, 35),)], ids=["one", "packed", "first_empty", "one_row_for_all"]
)
@pytest.mark.parametrize("gate", ["channel", "head", None])
def test_every_gate_with_every_packing(ring, ulysses, layout, gate, lengths):
    check((ring, ulysses, layout), gate, lengths)
    check((ring, ulysses, layout), gate, lengths, dtype=torch.float32, limit=2e-6, beta=True)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_segments_of_several_chunks_and_fewer_tokens_than_ranks(layout):
    lengths = ((150, 250, LONG - 400), (64, LONG - 100))
    check((4, 1, layout), "channel", lengths, T=LONG)
    check((4, 1, layout), "channel", lengths, T=LONG, dtype=torch.float32, limit=2e-6)
    check((4, 1, layout), "channel", None, T=LONG, dtype=torch.float32, limit=2e-6, beta=True, key_heads=1)
    check((4, 1, layout), "channel", None, T=3)


@pytest.mark.parametrize(
    ("ranks", "meshes"), [(2, [(2, 1), (1, 2)]), (4, [(4, 1), (2, 2)])], ids=["2 ranks", "4 ranks"]
)
def test_equals_the_recurrence_over_gloo(ranks, meshes):
    places = [(ring, ulysses, "zigzag" if ring > 1 else "contiguous") for ring, ulysses in meshes]
    calls = [
        partial(linear_call, place, "channel", lengths, T, scan=scan)
        for place, lengths, scan in product(places, (None, PACKED), WAYS)
    ]
    of_documents = {"beta": True, "states": states_of(PACKED)}  # each goes on from its own state
    calls += [partial(linear_call, place, "channel", PACKED, T, **of_documents) for place in places]
    check_processes(ranks, calls, 1e-10)


def test_bfloat16_is_within_twice_the_error_of_one_device():
    places = (1, 1, "auto"), (4, 1, "zigzag")
    single, over = (linear_call(place, "channel", None, T, torch.bfloat16) for place in places)
    limits = {name: 2 * error + 1e-6 for name, error in worst(on_threads(*single[:3]), single.exact).items()}
    check_found(on_threads(*over[:3]), over.exact, limits, over.case)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("scan", ["ring", "pipeline"])
def test_bytes_a_rank_sends_do_not_depend_on_the_length(layout, scan):
    def one_rank(mesh, length):
        plan = ra.plan(mesh, seq_len=length, layout=layout)
        q, k, v, g = (torch.randn(B, plan.local_len, H, n).requires_grad_() for n in (K, K, V, K))
        out = ra.linear_attention(q, k, v, -g.exp(), plan, scan=scan)
        forward = plan.ring_axis.sent
        out.sum().backward()
        return forward, plan.ring_axis.sent - forward

    rows = B * (2 if layout == "zigzag" else 1)  # sequences x segments a rank
    counts = [run(lambda mesh, n=length: one_rank(mesh, n), ring=4) for length in (64, 640)]
    assert counts[0] == counts[1]
    for forward, backward in counts[0]:
        assert forward <= rows * H * K * V * 4 and backward <= rows * H * K * V * 4
    assert max(forward for forward, _ in counts[0]) == rows * H * K * V * 4  # the state itself: no decay travels


@pytest.mark.parametrize(
    ("ranks", "layout", "scan", "backward"),
    [
        *product([13], ("contiguous", "zigzag"), ("gather", "ring", "pipeline"), (False, True)),
        pytest.param(128, "zigzag", "pipeline", True, marks=pytest.mark.slow),
    ],
)
def test_a_scan_over_many_ranks_equals_the_sequential_result(ranks, layout, scan, backward):
    plan = Plan(seq_len=2 * ranks, ring=ranks, layout=layout)
    P, generator = segments(plan), torch.Generator().manual_seed(0)
    decay = torch.rand(ranks, P, 1, 2, 1, generator=generator, dtype=torch.float64)
    kv = torch.randn(ranks, P, 1, 2, 3, generator=generator, dtype=torch.float64)
    start = torch.randn(1, 1, 2, 3, generator=generator, dtype=torch.float64)
    state, expected = start, {}
    for r, _, p in order(plan)[:: -1 if backward else 1]:
        expected[r, p] = state
        state = decay[r, p][None] * state + kv[r, p][None]

    def one_rank(mesh):
        mine = ra.plan(mesh, seq_len=2 * ranks, layout=layout)
        r = mine.ring_axis.rank
        way = choose(mine, scan, 16, 3)
        flying = Passage(mine, way, backward).start(Map(decay[r], kv[r]), start, end_everywhere=True)
        return flying.before(), flying.behind

    for r, (before, end) in enumerate(run(one_rank, ring=ranks)):
        for p in range(P):
            torch.testing.assert_close(before[p : p + 1], expected[r, p], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scan", WAYS)
def test_states_are_on_their_way_before_anybody_waits(scan):
    """So that what does not need them can run meanwhile; on the first rank of a ring, which waits for nobody."""

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=64, layout="contiguous")
        own = Map(torch.rand(1, 1, 4, 1), torch.randn(1, 1, 4, 3))
        flying = Passage(plan, choose(plan, scan, 16, 3)).start(own, None)
        sent = plan.ring_axis.sent
        assert flying.before() is flying.before()  # and waited for once
        return sent

    sent = run(one_rank, ring=3)
    assert all(sent) if scan == "gather" else sent[0] == 4 * 3 * 4


def test_the_way_states_travel_is_chosen_by_size():
    shared = load("cpu")
    machine = shared.replace(inside=shared.inside.replace(sharing=1))
    few, many = (Plan(n, ring, layout="zigzag", machine=machine) for n, ring in ((4096, 4), (2**20, 256)))
    small, large = 8 * 128 * 4, 64 * 256 * 4  # bytes of a column of a state
    assert choose(few, "auto", small, 128).name == "gather"
    assert choose(few.replace(machine=shared), "auto", small, 128).name == "ring"  # four ranks send over one link
    assert choose(few, "auto", 2**21, 128).name in ("ring", "pipeline")  # no room for all of them
    assert choose(few, "auto", small, 128, factor=128).name == "pipeline"  # by the delta rule, maps are twice as large
    assert choose(many, "auto", large, 256).name == "pipeline"
    assert choose(many, "auto", large, 255).pieces == 1  # a value dim that cannot be cut
    for way in WAYS:
        assert choose(few, way, small, 128).name == way


def exercise_scans(a: Any) -> None:
    """A relay in both directions and pieces, and a sum of a number of elements that no number of ranks divides."""
    mine = torch.tensor([[1.0, a.rank + 1.0], [0.5 * a.rank, 2.0]])
    for reverse in (False, True):
        order = list(range(a.size))[:: -1 if reverse else 1]
        expected = torch.eye(2)
        for r in order[: order.index(a.rank)]:
            expected = torch.tensor([[1.0, r + 1.0], [0.5 * r, 2.0]]) @ expected
        steps: list[Callable[[Tensor], Tensor]] = [lambda x: mine @ x] * 3
        for result in Relay(a, [torch.eye(2)] * 3, steps, reverse, like=torch.eye(2)).wait():
            torch.testing.assert_close(result, expected)
    ranks = sum(range(a.size))
    assert torch.equal(summed(torch.full((7, 1), float(a.rank)), a, a), torch.full((7, 1), float(ranks * a.size)))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_relays_and_sums(size):
    run(lambda mesh: exercise_scans(axis(mesh, "ring")), ring=size)


def scans_over_gloo() -> None:
    exercise_scans(axis(ra.init_mesh(ring=3, device_type="cpu"), "ring"))


def test_relays_and_sums_over_gloo():
    run_processes(scans_over_gloo, 3)


def call(plan: Plan | None, x: Tensor, again: bool = False) -> Tensor:
    """A small model's loss: projections, a convolution, linear attention, what comes out once more."""

    def body(x: Tensor) -> Tensor:
        q, k, v, g = (x * n for n in (1.0, 0.5, 2.0, 0.25))
        gate, how = nn.functional.logsigmoid(g), {"return_state": True, "docs": DOCS}
        v = causal_convolution(v.flatten(2), v.new_ones(8, 3), plan, docs=DOCS).unflatten(2, (2, 4))
        out, end = ra.linear_attention(q, k, v, gate, plan, **how)
        more, last = ra.linear_attention(
            q, nn.functional.normalize(k, dim=-1), v, gate, plan, beta=-gate[..., 0], **how
        )
        return out + more + (end.sum() + last.sum()) * 0.01

    return (checkpoint(body, x, use_reentrant=False) if again else body(x)).square().sum()


DOCS = ra.Docs.from_lengths([13, 35])


def compiled_and_not() -> list[np.ndarray]:
    plan = None
    if dist.is_initialized():
        plan = ra.plan(ra.init_mesh(ring=dist.get_world_size(), device_type="cpu"), seq_len=48, layout="zigzag")
    whole = torch.randn(1, 48, 2, 4, generator=torch.Generator().manual_seed(0))
    x = (whole if plan is None else plan.shard(whole)).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for how in (lambda: call(plan, x), lambda: compiled(plan, x), lambda: call(plan, x, again=True)):
        loss = how()
        results += [loss.detach().numpy(), torch.autograd.grad(loss, x)[0].numpy()]
    return results


@pytest.mark.slow
def test_compiling_and_recomputing_give_the_same_bits():
    torch._dynamo.reset()
    for loss, grad, *others in [compiled_and_not(), *run_processes(compiled_and_not, 2)]:
        for i, (a, b) in enumerate(zip(others, (loss, grad) * 2, strict=True)):
            assert np.array_equal(a, b), ("compiled", "compiled", "recomputed", "recomputed")[i]


def test_opcheck():
    importlib.import_module("ringattn.torch.linear.public")  # where the op is registered
    q, k, v, g = (torch.randn(1, 5, 2, 4).requires_grad_() for _ in range(4))
    state = torch.randn(1, 2, 4, 4).requires_grad_()
    plan = ra.plan(seq_len=5)
    for returned, initial, gate, keep in (("rows", state, -g.exp(), True), ("", None, None, False)):
        beta = None if gate is None else torch.rand(1, 5, 2).requires_grad_()
        args = (q, k, v, gate, beta, initial, None, plan.text, False, 0.5, "auto", "auto", returned, keep)
        torch.library.opcheck(torch.ops.ringattn.linear_attention, args)


@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (4, "zigzag")])
@pytest.mark.parametrize(("dim", "kept"), [(16, True), (179, True), (180, False), (200, False)])
def test_states_before_chunks_are_kept_where_they_are_small_beside_the_inputs(dim, kept, ring, layout):
    """Up to 0.7 of their bytes; else the state before each segment, over ranks. Without gradients nothing is."""

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=ring * 128, layout=layout)
        q, k, v, g = (torch.randn(1, 128, 2, dim).requires_grad_() for _ in range(4))
        saved = []

        def save(x: Tensor) -> Tensor:
            saved.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            ra.linear_attention(q, k, v, -g.exp(), plan)
        P = segments(plan)
        assert ((P, 2, 128 // P // 64, dim, dim) in saved) == kept
        assert ((P, 2, dim, dim) in saved) == (not kept and ring > 1)

    run(one_rank, ring=ring)


@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (4, "contiguous"), (4, "zigzag")])
def test_kept_states_and_walked_ones_give_the_same_bits(ring, layout, monkeypatch):
    given = inputs(LONG, "channel")
    docs = docs_of(((150, 250, LONG - 400), (64, LONG - 100)), LONG)

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=LONG, layout=layout)
        leaves = [plan.shard(given[n]).requires_grad_() for n in "qkvg"]
        out, end = ra.linear_attention(*leaves, plan, return_state=True, docs=docs)
        return [x.detach() for x in (out, end)] + list(torch.autograd.grad((out.sum() + end.sum()), leaves))

    kept = run(one_rank, ring=ring)
    monkeypatch.setattr(linear, "MAX_KEPT_SHARE", 0.0)
    for ours, others in zip(kept, run(one_rank, ring=ring), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))
