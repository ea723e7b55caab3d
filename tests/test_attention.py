"""Attention over ranks equals dense float64 attention: out, lse and every gradient on every rank, every case."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn import api, choosing
from ringattn.comms.local import LocalAxis
from ringattn.comms.local import run as run_ranks
from ringattn.kernels.attention import tiled
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec
from ringattn.plans import recipe
from ringattn.plans.sizes import Transport
from ringattn.torch.attention import ring
from ringattn.torch.attention.ulysses import summed
from tests.cases import BALANCED, CASES, FEATURES, PLACES, large_scores, on_threads, passes, relative_error
from tests.cases import check as check_found
from tests.cases import errors as errors_of

LIMIT = 2e-6


def check(
    case: Case, dtype: torch.dtype = torch.float32, limits: Any = LIMIT, size: float | None = None, **choices: object
) -> None:
    """Run the case on threads and hold every rank's every result against the limits; with scores of that `size`."""
    given = oracle.inputs(case, dtype) if size is None else large_scores(oracle.inputs(case, dtype), size)
    truth = oracle.dense(case, given)
    check_found(on_threads(case, given, truth, **choices), truth, limits, f"{case} {choices}")


def ways(strategy: str, ulysses: bool) -> list[int]:
    """The places of this strategy, with Ulysses or without."""
    return [i for i, (sizes, name, _) in enumerate(PLACES) if name == strategy and (sizes[1] > 1) == ulysses]


# Each feature meets each strategy, alone and beside Ulysses, and each layout; all features at once meet every place.
# `ringattn verify` draws the others.
FOUR = [
    some
    for some in product(ways("ring", False), ways("gather", False), ways("ulysses", True),
                        ways("ring", True) + ways("gather", True))
    if {PLACES[i][2] for i in some} == {"contiguous", "striped", "zigzag"}
]  # fmt: skip
PLACED = [
    case
    for i, case in enumerate(CASES)
    if i % len(PLACES) in FOUR[7 * (i // len(PLACES)) % len(FOUR)] or case.name == "all_at_once"
]
PLACED += [case for i, case in enumerate(BALANCED) if (i + i // 2) % 2 == 0 or case.name == "all_at_once"]


@pytest.mark.parametrize("case", PLACED, ids=str)
def test_equals_dense_float64(case):
    check(case)


LARGE = AttentionSpec(scale=1.0)
LARGE_CASES = [
    (Case("causal", ring=8, spec=LARGE, sinks=True), {}),
    (Case("causal", ring=8, spec=LARGE, layout="striped"), {"kernel": "tiled"}),
    (Case("full", ring=8, spec=LARGE.replace(causal=False), layout="contiguous"), {"kernel": "reference"}),
    (Case("docs", ring=2, ulysses=2, spec=LARGE, lengths=[20, 0, 11, 25], sinks=True), {}),
    (Case("causal", spec=LARGE, strategy="gather", layout="contiguous", sinks=True), {}),
    (Case("causal", ring=1, spec=LARGE), {}),
]


@pytest.mark.parametrize("case, choices", LARGE_CASES, ids=str)
def test_scores_of_ten_thousand_lose_no_digits(case, choices):
    """They are exact in float32, whose rounding of an lse of 1e4 changes weights by 5e-4."""
    check(case, size=1e4, **choices)


RINGS = [
    [c for c in CASES if c.strategy == "ring" and c.name == name]
    for name in ("all_at_once", "cross_docs", "docs_rows", "full", "window")
]


def a_third(choices: list) -> list:
    """Rings with a choice, in which every two of a feature, a place and a choice still meet."""
    return [
        pytest.param(case, choice, id=f"{case}-{choice}")
        for i, cases in enumerate(RINGS)
        for j, case in enumerate(cases)
        for k, choice in enumerate(choices)
        if (i + j + k) % 3 == 0
    ]


@pytest.mark.parametrize("case, choice", a_third([("auto", 3), ("tiled", 1), ("reference", 3)]))
def test_heads_at_home_may_take_turns(case, choice, monkeypatch):
    """What is done in two halves where keys have a long way, and whether a kernel adds up in place or not."""
    firsts = []
    monkeypatch.setattr(recipe, "HALVES_FROM", 0)
    backward = ring.backward
    monkeypatch.setattr(ring, "backward", lambda *given: firsts.append(given[5][0]) or backward(*given))
    check(case, kernel=choice[0], together=choice[1])
    assert any(first.heads for first in firsts) or case.ulysses > 1 or case.kv_heads == 1


WAYS = [{"route": "relay"}, {"together": 2}, {"together": 7}, {"route": "levels", "hosts": 2}, {"grads": "input"}]


@pytest.mark.parametrize("case, choices", a_third(WAYS))
def test_other_ways_to_bring_keys_equal_it_too(case, choices):
    check(case, **choices)


IN_GROUPS = [
    (replace(c, ring=ring, ulysses=ulysses, strategy=strategy, layout=layout, heads=heads, kv_heads=kv_heads), groups)
    for c in FEATURES
    if c.name in ("all_at_once", "causal", "cross_docs", "docs_padded")
    for ring, ulysses, strategy, layout, heads, kv_heads, groups in (
        (1, 4, "ulysses", "contiguous", 16, 8, 2),
        (1, 4, "ulysses", "contiguous", 12, 6, 3),  # key heads are repeated
        (1, 4, "ulysses", "contiguous", 16, 4, 4),  # all groups of a rank share one key head, which travels once
        (1, 4, "gather", "contiguous", 8, 2, 2),  # and that is a copy
        (4, 1, "gather", "striped", 8, 4, 4),
        (2, 2, "gather", "zigzag", 8, 4, 2),
        (2, 2, "ring", "zigzag", 8, 4, 2),
    )
]


def sent(axes: list[object]) -> int:
    return sum(axis.sent for axis in axes)


@pytest.mark.parametrize(("case", "groups"), IN_GROUPS, ids=str)
def test_heads_in_groups_are_the_same_bits_and_bytes(case, groups):
    """With our kernel: the rounding of torch's own for CPUs depends on how many heads there are."""
    given = oracle.inputs(case, torch.float32)
    truth = oracle.dense(case, given)
    summed = {"dk", "dv"} if case.kv_heads <= case.ulysses else set()  # over the groups, which rounds differently

    def one_rank(mesh):
        axes = [mesh.axis(name) for name in ("ring", "ulysses") if mesh.sizes[name] > 1]
        whole, before = passes(case, mesh, given, "tiled", groups=1), sent(axes)
        grouped = passes(case, mesh, given, "tiled", groups=groups)
        return whole, grouped, before, sent(axes) - before, errors_of(case, mesh, grouped, truth)

    results = run_ranks(one_rank, ring=case.ring, ulysses=case.ulysses)
    for rank, (whole, grouped, before, more, errors) in enumerate(results):
        for name in errors.keys() - summed:
            assert torch.equal(whole[name].nan_to_num(), grouped[name].nan_to_num()), f"{case} rank {rank}: {name}"
        assert before == more and max(errors.values()) <= LIMIT, f"{case} rank {rank}: {errors}, {before} {more} bytes"
    if case.sinks:
        total = sum(grouped["dsinks"].double() for _, grouped, *_ in results)
        assert relative_error(total, truth["dsinks"]) <= LIMIT


@pytest.mark.parametrize(
    ("sizes", "strategy", "forward", "backward"),
    [
        ({"ulysses": 2}, "ulysses", "e e R l e R l R l", "e e R l e R l R l"),
        ({"ring": 2}, "gather", "gg gg R gg R R", "gg gg R ss gg R ss R ss"),
        ({"ring": 2, "ulysses": 2}, "gather", "e e gg e gg R l gg R l R l", "e e gg e gg R ss gg R ss l R ss l l"),
    ],
)
def test_a_group_of_heads_travels_while_another_is_attended_to(
    sizes, strategy, forward, backward, fresh_scores, monkeypatch
):
    """The order in which things start: e enters and l leaves, all tensors of a group in one move; g gathers and s
    scatters, for each tensor; R is the kernel.
    """
    letters: dict[int, str] = defaultdict(str)  # by thread: by rank

    def noting(function: Callable[..., object], letter: Callable[..., str]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            letters[threading.get_ident()] += letter(*args)
            return function(*args, **options)

        return call

    def way(axis: object, x: object, split: int, join: int, persistent: object) -> str:
        return "e" if split == 2 else "l"

    for name, letter in {"all_to_all": way, "all_gather": lambda *_: "g", "reduce_scatter": lambda *_: "s"}.items():
        monkeypatch.setattr(LocalAxis, name, noting(getattr(LocalAxis, name), letter))
    names = "attend", "backward"
    fresh_scores(tiled, **{name: noting(getattr(tiled.KERNEL, name), lambda *_: "R") for name in names})

    def one_rank(mesh):
        plan = choosing.plan(mesh, seq_len=16, strategy=strategy, kernel="tiled", transport=Transport(groups=3))
        q, k, v = (torch.ones(1, plan.local_len, 6, 8, requires_grad=True) for _ in "qkv")
        out = api.attention(q, k, v, plan)
        before = letters[threading.get_ident()]
        out.sum().backward()
        return before, letters[threading.get_ident()].removeprefix(before)

    for results in run_ranks(one_rank, **sizes):
        assert results == (forward.replace(" ", ""), backward.replace(" ", ""))


LOW = [c for c in CASES if c.name in ("causal", "all_at_once")]
TYPES = [(torch.bfloat16, torch.float16)[(i + i // len(PLACES)) % 2] for i in range(len(LOW))]  # both at every place


@pytest.mark.parametrize("case, dtype", list(zip(LOW, TYPES, strict=True)), ids=str)
def test_low_precision_is_within_twice_the_error_of_one_device(case, dtype):
    given = oracle.inputs(case, dtype)
    truth, single = oracle.dense(case, given), oracle.dense(case, given, dtype)
    limits = {n: 2 * relative_error(single[n].double(), truth[n]) + 1e-6 for n in truth}
    check(case, dtype, limits)


@pytest.mark.parametrize("case", FEATURES, ids=lambda c: c.name)
def test_one_device_needs_no_plan(case):
    given = oracle.inputs(case, torch.float64)
    truth = oracle.dense(case, given)
    out, lse = api.attention(
        given["q"], given["k"], given["v"], spec=case.spec, key_docs=case.key_docs, return_lse=True,
        sinks=given["sinks"] if case.sinks else None, **{"docs" if case.slices is None else "mask": case.docs},
    )  # fmt: skip
    torch.testing.assert_close(out, truth["out"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, truth["lse"], rtol=1e-12, atol=1e-12)


def test_the_same_bits_from_run_to_run():
    case = next(c for c in CASES if c.name == "all_at_once" and c.ring == 4)
    given = oracle.inputs(case, torch.float32)
    first, second = (run_ranks(lambda mesh: passes(case, mesh, given), ring=4) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)


@pytest.mark.parametrize("groups", [1, 2])
def test_ulysses_keeps_one_set_of_tensors_for_backward(groups):
    """The entered ones: a set is q, k, v, out and lse of a whole ring shard with this rank's share of the heads.

    The lse is kept in float64.
    """

    def kept(mesh):
        plan = choosing.plan(mesh, seq_len=256, transport=Transport(groups=groups))
        q, k, v = (torch.randn(1, plan.local_len, h, 16, requires_grad=True) for h in (8, 4, 4))
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out, lse = api.attention(q, k, v, plan, return_lse=True)
        (out.sum() + lse.sum()).backward()
        return sum(sizes.values()) / sum(x.nbytes for x in (q, k, v, out, lse.double()))

    assert max(run_ranks(kept, ulysses=2)) < 1.01


def test_outputs_are_rounded_once_however_many_steps_a_ring_has():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, h, 16).bfloat16() for h in (4, 2, 2))
    exact = ra.attention(q.double(), k.double(), v.double())

    def error(out: torch.Tensor) -> float:
        return float((out.double() - exact).norm())

    def one_rank(mesh):
        plan = ra.plan(mesh, seq_len=256, kernel="tiled", strategy="ring")
        return plan.unshard(ra.attention(*(plan.shard(x) for x in (q, k, v)), plan))

    single = ra.attention(q, k, v, ra.plan(seq_len=256, kernel="tiled"))
    assert error(run_ranks(one_rank, ring=16)[0]) <= 1.05 * error(single)


def test_the_copies_of_a_key_head_add_up_in_float32():
    copies = torch.tensor([256.0, *[1.0] * 7], dtype=torch.bfloat16).reshape(1, 1, 8, 1)
    assert summed(copies, kv_heads=1).item() == 264  # 263 rounded; one after the other in bfloat16 it is 256
