"""The Triton kernels of gated linear attention equal the recurrence in float64: interpreted, and on a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.recurrent import recurrent
from ringattn.kernels.linear.triton import delta, gated

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MOST = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # relative error in norm
NAMES = ("out", "end", "dq", "dk", "dv", "dstart", "dg", "dbeta")


def some_quick(cases: list[Any], quick: tuple[int, ...]) -> list[Any]:
    """The cases as parameters; those whose numbers are not among `quick` are slow."""
    return [c if i in quick else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(cases)]


@dataclass(frozen=True)
class Case:
    """A shape, its gates by name and strength, and where documents begin."""

    gate: str = "channel"  # channel, head, none
    B: int = 1
    T: int = 70
    H: int = 2
    G: int | None = None  # key heads, if fewer
    K: int = 32
    V: int = 32
    decay: float = 1.0  # the mean log decay of a token, below 0; "mixed": some of 1000 among weak ones
    begins: tuple[int, ...] | None = None  # of the documents; below 0: before these tokens
    dtype: str = "float32"
    strided: bool = False
    states: bool = True  # a start state, and a gradient for the end state
    beta: str | None = None  # the delta rule: "mixed", or "twice" with equal keys

    def __str__(self) -> str:
        shape = f"B{self.B}-T{self.T}-H{self.H}-K{self.K}.{self.V}"
        more = "-docs" * (self.begins is not None) + "-strided" * self.strided + "-zero" * (not self.states)
        more += "" if self.beta is None else f"-delta-{self.beta}"
        return f"{self.gate}-{shape}-decay{self.decay:g}-{self.dtype}{more}"


@dataclass
class Given:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    begin: torch.Tensor | None
    start: torch.Tensor | None
    dout: torch.Tensor
    dend: torch.Tensor | None
    scale: float
    beta: torch.Tensor | None = None


def draw(case: Case) -> Given:
    """Inputs in the case's dtype; with `strided`, views of one tensor whose heads come before its tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        if case.strided:
            x = torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
        return x.to(DEVICE, getattr(torch, case.dtype))

    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    g = None
    if case.gate != "none":
        g = -2 * case.decay * torch.rand(B, T, H, K, generator=generator)
        g[:, ::7] *= 40 if case.decay > 5 else 1  # a token that forgets all, between tokens that do not
        g[:, 1::7] *= 0.01
        g = g if case.gate == "channel" else g[..., 0]
    begin = None
    if case.begins is not None:
        starts = torch.tensor(case.begins)
        begin = starts[torch.searchsorted(starts, torch.arange(T), right=True) - 1].int()[None].to(DEVICE)
    states = [normal(B, H, K, V).to(DEVICE) if case.states else None for _ in range(2)]
    q, k, v, dout = (laid_out(normal(B, T, h, d)) for h, d in ((case.G or H, K), (case.G or H, K), (H, V), (H, V)))
    g = None if g is None else laid_out(g)
    if case.beta is None:
        return Given(q, k, v, g, begin, states[0], dout, states[1], K**-0.5)
    k = F.normalize(k[:, :1].expand_as(k) if case.beta == "twice" else k, dim=-1)
    beta = 2 * torch.rand(B, T, H, generator=generator) if case.beta == "mixed" else torch.full((B, T, H), 2.0)
    if case.beta == "mixed":
        beta[:, ::5], beta[:, 1::5], beta[:, 2::5] = 0.0, 1.0, 2.0
    return Given(q, k, v, g, begin, states[0], dout, states[1], K**-0.5, laid_out(beta))


def truth_of(x: Given) -> dict[str, torch.Tensor]:
    """By autograd through the recurrence, token by token in float64."""
    q, k, v = (t.double().requires_grad_() for t in (x.q, x.k, x.v))
    g = None if x.g is None else x.g.double().requires_grad_()
    zero = torch.zeros(x.q.shape[0], *x.v.shape[2:3], x.q.shape[3], x.v.shape[3], dtype=torch.float64, device=DEVICE)
    start = (zero if x.start is None else x.start.double()).requires_grad_()
    beta = None if x.beta is None else x.beta.double().requires_grad_()
    out, end = recurrent(Inputs(q, k, v, g, beta, x.begin, x.scale), start)
    loss = (out * x.dout).sum() + (end * (zero.detach() if x.dend is None else x.dend)).sum()
    leaves = {"dq": q, "dk": k, "dv": v, "dstart": start, "dg": g, "dbeta": beta}
    leaves = {name: t for name, t in leaves.items() if t is not None}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out.detach(), "end": end.detach(), **dict(zip(leaves, grads, strict=True))}


def results_of(x: Given, keep: bool = False) -> dict[str, torch.Tensor]:
    """The passes, one after the other, as one rank runs them; `keep`: the states before all chunks, for backward."""
    kernels = delta.KERNEL if x.beta is not None else gated.KERNEL
    inputs = Inputs(x.q, x.k, x.v, x.g, x.beta, x.begin, x.scale)
    scan = kernels.scan_states(inputs)
    sizes, dtype = kernels.states_shape(x.k, x.v)
    kept = torch.full(sizes, torch.nan, dtype=dtype, device=DEVICE) if keep else None
    out, end = kernels.read_out(inputs, scan, x.start, kept)
    rscan = kernels.scan_gradients(inputs, x.dout)
    before = (kept, None) if keep else (scan, x.start)
    dq, dk, dv, dg, dbeta, dstart = kernels.gradients(inputs, *before, rscan, x.dout, x.dend)
    values = (out, end, dq, dk, dv, dstart, dg, dbeta)
    return {name: t for name, t in zip(NAMES, values, strict=True) if t is not None}


def distance(result: torch.Tensor, truth: torch.Tensor) -> float:
    """|found - truth| / |truth|; a truth may vanish, as what crosses a token that forgets all."""
    assert result.isfinite().all(), f"{int((~result.isfinite()).sum())} values are not finite"
    return ((result.double() - truth).norm() / truth.norm().clamp(min=1e-3)).item()


def check(case: Case) -> None:
    given = draw(case)
    truth, results = truth_of(given), results_of(given)
    for name, like in zip(("out", "dq", "dk", "dv", "dg"), (given.q, given.q, given.k, given.v, given.g), strict=True):
        assert like is None or results[name].dtype == like.dtype, name
    errors = {name: distance(results[name], truth[name]) for name in truth}
    most = MOST[case.dtype]
    assert all(error <= most for error in errors.values()), errors


DOCUMENTS = (-5, 3, 4, 40, 64)
CASES = [
    Case(),
    Case("head", H=2, G=1, B=2, begins=DOCUMENTS),
    Case("head", decay=20.0),
    Case(decay=1e-3, T=64),
    Case("none", begins=(0, 33), T=65),
    Case(begins=DOCUMENTS, decay=20.0),
    Case(B=2, T=97, K=20, V=40, strided=True),
    Case("head", T=40, K=80, V=96, H=1, strided=True),
    Case(T=35, K=192, V=72, H=1),
    Case(T=1, K=16, V=16),
    Case(dtype="float16", begins=DOCUMENTS, H=1),
    Case(states=False),
]
ON_GPUS = [*CASES, Case("head"), Case("none"), Case(decay=20.0), Case(begins=DOCUMENTS), Case(begins=(-5,), T=33),
           Case("head", begins=DOCUMENTS, B=2)]  # fmt: skip


@pytest.mark.skipif(ON_GPU, reason="the same cases run compiled")
@pytest.mark.parametrize("case", some_quick(CASES, (1, 4, 9, 10, 11)), ids=str)
def test_equals_the_recurrence_in_the_interpreter(case: Case) -> None:
    check(case)


@pytest.mark.skipif(ON_GPU, reason="the kernels below are measured there")
@pytest.mark.parametrize("decay", [0.6, 20.0], ids=["hard", "strong"])
def test_what_tensor_cores_cut_off_does_not_reach_the_gates_gradient(decay: float, monkeypatch: Any) -> None:
    """Interpreted as an H200 runs it, with products of 10 bits: a pair's two parts in dg still cancel."""
    monkeypatch.setattr(gated, "architecture", lambda _device: "sm90")
    monkeypatch.setattr(InterpreterBuilder, "create_dot", cut_off(InterpreterBuilder.create_dot))
    case = Case(T=150, K=32, V=32, H=1, decay=decay, dtype="float16")
    given = draw(case)
    given.g = given.g.float()
    assert distance(results_of(given)["dg"], truth_of(given)["dg"]) <= 6e-4


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.6, 20.0], ids=["hard", "strong"])
def test_gates_in_float32_have_a_finer_gradient_than_16_bits(decay: float) -> None:
    given = draw(Case(T=700, K=128, V=128, decay=decay, dtype="bfloat16"))
    given.g = given.g.float()
    assert distance(results_of(given)["dg"], truth_of(given)["dg"]) <= 8e-4


def cut_off(dot: Any) -> Any:
    """The interpreter's product as tensor cores compute it in tf32: the last 13 bits of a factor are not there."""

    def in_tf32(x: Any) -> Any:
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return TensorHandle(bits.view(np.float32), x.dtype)

    def dot_of_cut(self: Any, a: Any, b: Any, acc: Any, precision: Any, most: Any) -> Any:
        tf32 = precision == INPUT_PRECISION.TF32 and a.data.dtype == np.float32
        return dot(self, *((in_tf32(a), in_tf32(b)) if tf32 else (a, b)), acc, precision, most)

    return dot_of_cut


KEEPS = [Case(begins=DOCUMENTS, decay=20.0, H=1), Case("head", T=40, H=1), Case("none", H=1, dtype="float16")]


@pytest.mark.skipif(ON_GPU, reason="the same cases run compiled")
@pytest.mark.parametrize("case", some_quick(KEEPS, (1,)), ids=str)
def test_kept_states_and_walked_ones_give_the_same_bits_in_the_interpreter(case: Case) -> None:
    same_bits(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [*KEEPS, Case(T=700, K=128, V=128)], ids=str)
def test_kept_states_and_walked_ones_give_the_same_bits_on_a_gpu(case: Case, dtype: str) -> None:
    same_bits(replace(case, dtype=dtype))


def same_bits(case: Case) -> None:
    given = draw(case)
    again, kept = results_of(given), results_of(given, keep=True)
    for name in again:
        assert torch.equal(again[name], kept[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "case", [*ON_GPUS, Case(T=700, K=128, V=128), Case(T=300, K=256, V=512), Case("head", T=300, K=256, V=512)], ids=str
)
def test_equals_the_recurrence_on_a_gpu(case: Case, dtype: str) -> None:
    check(replace(case, dtype=dtype))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """2^18 tokens, more than 2^31 numbers a tensor: a document at the end is what it is when it stands alone."""
    T, H, K, length = 2**18, 68, 128, 150
    assert T * H * K > 2**31
    q, k, v, dout = (torch.randn(1, T, H, K, dtype=torch.bfloat16, device=DEVICE) for _ in range(4))
    g = q.clone().abs_().neg_().mul_(0.1)
    begin = torch.zeros(1, T, dtype=torch.int32, device=DEVICE)
    begin[:, -length:] = T - length

    def run(part: slice, begin: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        x = [t[:, part] for t in (q, k, v, g, dout)]
        results = results_of(Given(*x[:4], begin, None, x[4], None, K**-0.5))
        return tuple(results[name][:, -length:] for name in ("out", "dq", "dk", "dv", "dg"))

    torch.cuda.empty_cache()
    whole = run(slice(0, T), begin)
    for results, truth in zip(whole, run(slice(T - length, T), None), strict=True):
        assert distance(results, truth.double()) <= 8e-3
