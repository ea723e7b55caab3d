"""Rectangles: found exactly, run by a vendor's kernel one by one, and equal to the reference, gradients included."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from ringattn import kernels
from ringattn.comms.local import run as run_ranks
from ringattn.kernels.attention import reference
from ringattn.kernels.attention.libraries import sdpa_cpu
from ringattn.kernels.attention.libraries.rectangles import over_rectangles
from ringattn.kernels.intervals import Intervals, Rectangle, rectangles_of
from ringattn.kernels.partial import NEVER, Partial
from ringattn.kernels.protocol import TorchKernel
from ringattn.layouts.layout import LAYOUTS, Layout, to_local
from ringattn.masks.bands import bounds_at, families
from ringattn.masks.spec import AttentionSpec, Docs
from tests.cases import gradients

MASKS = ("causal", "full", "strict", "docs", "prefix", "half")
GPU_VENDORS = ("cudnn", "fa4")


def covered(rectangles: tuple[Rectangle, ...], T: int, S: int) -> np.ndarray:
    """How often the rectangles hold each pair."""
    count = np.zeros((T, S), int)
    for queries, keys, causal in rectangles:
        block = count[queries, keys]
        assert block.size, "an empty rectangle"
        block += np.tri(*block.shape, dtype=int) if causal else 1
        assert not causal or block.shape[0] == block.shape[1], "a causal rectangle is a square"
    return count


def seen(begin: np.ndarray, end: np.ndarray, S: int) -> np.ndarray:
    at = np.arange(S)
    return (begin[..., None] <= at) & (at < end[..., None])


@st.composite
def monotone(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    T = draw(st.integers(0, 12))
    begin, end = (np.array(sorted(draw(st.lists(st.integers(0, 9), min_size=T, max_size=T))), int) for _ in range(2))
    return begin[None] * draw(st.integers(0, 1)), end[None]


@given(monotone())
@settings(max_examples=300, deadline=None)
def test_rectangles_hold_each_pair_once(intervals: tuple[np.ndarray, np.ndarray]) -> None:
    result = rectangles_of(*intervals)
    assert result is not None
    assert (covered(result, intervals[0].shape[1], 9) == seen(*intervals, 9)[0]).all(), f"{intervals}: {result}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [48, 45])
@pytest.mark.parametrize("docs", [None, [10, 7, 28]])
def test_every_step_of_a_causal_ring_is_a_few_rectangles(layout: str, length: int, docs: list[int] | None) -> None:
    """Each layout's steps, documents and padding included: at most two rectangles a document and piece."""
    where = Layout(layout, length, ring=3)
    packed = Docs.from_lengths(docs, pad_to=length) if docs else None
    for rank in range(3):
        begin, end = bounds_at(*families(AttentionSpec(), length, docs=packed), where.positions(rank))
        for source in range(3):
            local = to_local(where.shard(source), begin, end)
            outputs = rectangles_of(*local)
            assert outputs is not None and len(outputs) <= 2 * len(docs or [1]) + 2, f"{rank} sees {source}: {outputs}"
            assert (covered(outputs, where.shard_len, where.shard_len) == seen(*local, where.shard_len)[0]).all()


def test_runs_are_as_few_as_they_can_be() -> None:
    """Each ends where the next one begins: full ones, a causal half beside the keys that all see."""
    end = np.array([[3, 3, 3, 4, 5, 6, 6, 6, 9, 9]])
    runs = [((0, 3), (0, 3), False), ((3, 6), (0, 3), False), ((3, 6), (3, 6), True), ((6, 8), (0, 6), False),
            ((8, 10), (0, 9), False)]  # fmt: skip
    expected = tuple(Rectangle(slice(*queries), slice(*keys), mask) for queries, keys, mask in runs)
    assert rectangles_of(0 * end, end) == expected


def test_what_is_not_a_few_rectangles_has_none() -> None:
    t = np.arange(300)[None]
    assert rectangles_of(np.maximum(t - 4, 0), t + 1) is None, "a window"
    assert rectangles_of(np.concatenate([t * 0, t * 0]), np.concatenate([t + 1, t])) is None, "rows that differ"
    lengths = [3] * 100
    packed = bounds_at(*families(AttentionSpec(), 300, docs=Docs.from_lengths(lengths)), t[0])
    assert rectangles_of(*packed) is None and len(rectangles_of(*packed, most=100) or ()) == 100, "many documents"


def intervals_of(mask: str, T: int, device: str = "cpu") -> Intervals:
    t = np.arange(T)
    begin, end = {
        "causal": (t * 0, t + 1),
        "full": (t * 0, t * 0 + T),
        "strict": (t * 0, t),
        "docs": (t // 23 * 23, t + 1),
        "prefix": (t * 0, np.maximum(t + 1, T // 4)),
        "half": (t * 0, np.where(t < T // 2, 0, T // 3)),
    }[mask]
    host = begin[None].astype(np.int32), end[None].astype(np.int32)
    return Intervals(*(torch.from_numpy(x).to(device) for x in host), rectangles_of(*host), host)


def run(kernel: TorchKernel, mask: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple]:
    """(found, expected) of the partial, of a merge into a carry, and of gradients, in a vendor's dtype."""
    B, T, H, G, D, V = shape
    device = "cpu" if kernel is sdpa_cpu.KERNEL else "cuda"
    torch.manual_seed(T)
    q, k, v, dout = (
        torch.randn(s, device=device).to(dtype) for s in ((B, T, H, D), (B, T, G, D), (B, T, G, V), (B, T, H, V))
    )
    where, options = intervals_of(mask, T, device), {"scale": D**-0.5}
    exact = [x.double() for x in (q, k, v, dout)]
    truth = reference.attend(*exact[:3], where, **options)
    result = kernel.attend(q, k, v, where, **options)
    carry = Partial(torch.randn_like(result.out), torch.randn_like(result.lse))
    again = kernel.attend(q, k, v, where, carry=Partial(*(x.clone() for x in carry)), **options)
    truth_again = reference.attend(*exact[:3], where, carry=Partial(*(x.double() for x in carry)), **options)
    delta = (exact[3] * truth.out).sum(-1) - torch.randn(B, T, H, device=device)
    delta[truth.lse == NEVER] = 0
    grads = reference.attend_backward(*exact[:3], where, exact[3], truth.lse, delta, **options)
    rows = (dout, truth.lse.to(result.lse.dtype), delta.to(result.lse.dtype))
    given = gradients(kernel, q, k, v, where, *rows, **options)
    row_sums = (exact[3] * truth.out).sum(-1)  # of out alone, which is handed on as it is
    by_out = gradients(kernel, q, k, v, where, *rows[:2], None, out=result.out.to(dtype), **options)
    grads += reference.attend_backward(*exact[:3], where, exact[3], truth.lse, row_sums, **options)
    real = truth.lse != NEVER
    assert (result.lse[~real] == NEVER).all() and (result.out[~real] == 0).all()
    named = {"out": (result.out, truth.out), "lse": (result.lse[real], truth.lse[real])}
    named |= {"carried out": (again.out, truth_again.out), "carried lse": (again.lse, truth_again.lse)}
    names = ("dq", "dk", "dv", "dq of out", "dk of out", "dv of out")
    return named | dict(zip(names, zip([*given, *by_out], grads, strict=True), strict=True))


def errors(pairs: dict[str, tuple]) -> dict[str, float]:
    """The largest error of each, over the largest value (at least one)."""
    return {n: largest(a.double() - b) / max(1.0, largest(b)) for n, (a, b) in pairs.items()}


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0  # no row of a mask may see a key


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(2, 61, 4, 2, 32, 32), (1, 70, 6, 1, 40, 40), (1, 33, 2, 2, 64, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sdpa_cpu_equals_reference(mask: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for name, error in errors(run(sdpa_cpu.KERNEL, mask, shape, dtype)).items():
        assert error < (2e-6 if dtype == torch.float32 else 1e-14), f"{mask} {shape}: {name} is off by {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_cpu_in_half_precision(dtype: torch.dtype) -> None:
    for name, error in errors(run(sdpa_cpu.KERNEL, "prefix", (1, 64, 4, 2, 32, 32), dtype)).items():
        assert error < 8 * torch.finfo(dtype).eps, f"{name} is off by {error}"


def carried(kernel: TorchKernel, mask: str, dtype: torch.dtype) -> list[Partial]:
    """A second step after a causal one whose out was carried in the inputs' dtype, and in float32."""
    device = "cuda" if torch.cuda.is_available() and kernel is not sdpa_cpu.KERNEL else "cpu"
    torch.manual_seed(0)
    q, k, v, more_k, more_v = (torch.randn(1, 160, h, 64, device=device).to(dtype) for h in (4, 2, 2, 2, 2))
    options = {"scale": 0.125}
    outputs = []
    for first in (dtype, None):
        carry = kernel.attend(q, k, v, intervals_of("causal", 160, device), out_dtype=first, **options)
        assert carry.out.dtype == (first or torch.float32)
        for last in (dtype, None):
            where = intervals_of(mask, 160, device)
            before = Partial(*(x.clone() for x in carry))
            outputs.append(kernel.attend(q, more_k, more_v, where, carry=before, out_dtype=last, **options))
    return outputs


def same(partials: list[Partial]) -> bool:
    """To a rounding of the last bit: two kernels need not fuse the same multiplication with an addition."""
    pairs = [(a, b) for i in (0, 1) for a, b in zip(partials[i], partials[i + 2], strict=True)]
    ulp = {torch.bfloat16: 2.0**-7, torch.float32: 1e-6}
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=ulp[a.dtype], atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("mask", MASKS)
def test_a_first_step_is_carried_as_its_kernel_rounded_it_and_nothing_is_lost(mask: str) -> None:
    rounds = over_rectangles("a kernel that rounds", rounding, sdpa_cpu.backward, sdpa_cpu.refuses)
    assert same(carried(rounds, mask, torch.bfloat16))


def rounding(*given: Any, **score: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sdpa_cpu.forward(*(x.float() if isinstance(x, torch.Tensor) else x for x in given), **score)
    return out.to(given[0].dtype), lse


CASES = [  # dtype, and the sizes of v, dout and dlse
    (torch.float32, 1e10, 1.0, 1.0),
    (torch.float32, 1.0, 1e-12, 1.0),
    (torch.float32, 1e6, 0.0, 1.0),
    (torch.float16, 1.0, 1e-3, 30.0),
    (torch.float16, 1e3, 0.0, 1.0),
    (torch.bfloat16, 1.0, 1e-12, 1.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_right_whatever_the_size_of_dout_beside_that_of_the_lse(case: tuple) -> None:
    """On one device, and on a ring and with heads exchanged, where out and delta travel."""
    dtype, *sizes = case
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 32, 2, 8).unbind()
    v, dout, dlse = v * sizes[0], dout * sizes[1], torch.randn(1, 32, 2) * sizes[2]
    leaves = [x.to(dtype) for x in (q, k, v)]
    dout = dout.to(dtype)
    exact = [x.double().requires_grad_() for x in leaves]
    s = torch.einsum("bthd,bshd->bhts", *exact[:2]) * 8**-0.5
    s = s.masked_fill(torch.ones(32, 32).triu(1).bool(), NEVER)
    out, lse = torch.einsum("bhts,bshd->bthd", s.softmax(-1), exact[2]), s.logsumexp(-1).transpose(1, 2)
    truth = torch.autograd.grad([out, lse], exact, [dout.double(), dlse.double()])

    def one_rank(mesh: object) -> list[torch.Tensor]:
        plan = ra.plan(mesh, seq_len=32)
        mine = [plan.shard(x).requires_grad_() for x in leaves]
        outputs = ra.attention(*mine, plan, return_lse=True)
        return [plan.unshard(x) for x in torch.autograd.grad(outputs, mine, [plan.shard(dout), plan.shard(dlse)])]

    single = [x.clone().requires_grad_() for x in leaves]
    outputs = [torch.autograd.grad(ra.attention(*single, return_lse=True), single, [dout, dlse])]
    outputs += [run_ranks(one_rank, ring=2)[0], run_ranks(one_rank, ulysses=2)[0]]
    for grads in outputs:
        for name, a, b in zip(("dq", "dk", "dv"), grads, truth, strict=True):
            if b.abs().max() > 0:
                error = ((a.double() - b).norm() / b.norm()).item()
                assert error < 4 * torch.finfo(dtype).eps, f"{case}: {name} is off by {error}"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("strategy", ["one", "gather"])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(kernel: str, strategy: str, bad: float) -> None:
    """A key, a value, a query or a gradient of the second document, in the middle of a causal rectangle."""
    torch.manual_seed(0)
    clean = torch.randn(4, 1, 48, 2, 8).unbind()
    docs = ra.Docs.from_lengths([20, 28])

    def results(tensors: tuple[torch.Tensor, ...], mesh: object = None) -> list[torch.Tensor]:
        options = {} if mesh is None else {"strategy": "gather", "layout": "striped"}
        plan = ra.plan(mesh, seq_len=48, kernel=kernel, **options)
        *mine, dout = (plan.shard(x) for x in tensors)
        mine = [x.requires_grad_() for x in mine]
        out, lse = ra.attention(*mine, plan, docs=docs, return_lse=True)
        grads = torch.autograd.grad(out, mine, dout)
        return [plan.unshard(x.detach()) for x in (out, lse, *grads)]

    def results_of(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return results(tensors) if strategy == "one" else run_ranks(lambda mesh: results(tensors, mesh), ring=2)[0]

    expected, t = results_of(clean), torch.arange(48)
    before, after = t < 30, t >= 30
    for which, name in enumerate(("q", "k", "v", "dout")):
        tensors = [x.clone() for x in clean]
        tensors[which][:, 30] = bad
        out, lse, dq, dk, dv = results_of(tuple(tensors))
        others = t != 30
        mine = {"q": (others, others, others), "k": (before, before, before), "v": (before, before, before)}
        rows, lses, queries = mine.get(name, (t >= 0, t >= 0, others))
        assert torch.allclose(out[:, rows], expected[0][:, rows], atol=1e-6), f"{name}: out"
        assert torch.allclose(lse[:, lses], expected[1][:, lses], atol=1e-6), f"{name}: lse"
        assert torch.allclose(dq[:, queries], expected[2][:, queries], atol=1e-6), f"{name}: dq"
        if name in ("q", "dout"):
            assert torch.allclose(dk[:, t > 30], expected[3][:, t > 30], atol=1e-6), f"{name}: dk"
            assert torch.allclose(dv[:, t > 30], expected[4][:, t > 30], atol=1e-6), f"{name}: dv"
        for x, y in ((dk, expected[3]), (dv, expected[4])):
            assert torch.allclose(x[:, t < 20], y[:, t < 20], atol=1e-6), f"{name}: dk or dv of the first document"
        if name in ("q", "k") and bad != bad:
            assert out[:, 30].isnan().all() and lse[:, 30].isnan().all(), name
            assert name == "q" or out[:, after].isnan().all()
        if name == "v":
            assert not out[:, after].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_VENDORS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "shape", [(2, 320, 8, 2, 128, 128), (1, 200, 4, 4, 64, 64), (1, 130, 4, 1, 192, 128), (2, 1, 8, 2, 64, 64)], ids=str
)
def test_gpu_vendor_equals_reference(name: str, mask: str, shape: tuple[int, ...]) -> None:
    H, G, D, V = shape[2:]
    arch = torch.cuda.get_device_capability()
    problem = kernels.Problem("cuda", "bfloat16", D, V, H, G, rectangles=True, arch=arch)
    if (reason := kernels.BY_NAME[name].refuses(problem)) is not None:
        pytest.skip(reason)
    kernel = import_module(f"ringattn.kernels.attention.libraries.{name}").KERNEL
    for what, error in errors(run(kernel, mask, shape, torch.bfloat16)).items():
        assert error < 2e-2, f"{name} {mask} {shape}: {what} is off by {error}"
    assert same(carried(kernel, mask, torch.bfloat16))
