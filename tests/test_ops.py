"""The torch ops of one device: right gradients, also of lse; seen through by compile; wrong calls named."""

from typing import Any

import pytest
import torch

import ringattn
from ringattn import kernels
from ringattn.kernels.partial import NEVER, Partial
from ringattn.torch.attention import one_device as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["auto", "tiled", "reference"]
B, T, S, H, G, D, V = 2, 6, 9, 4, 2, 8, 8


def draw(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=grad)


def inputs(dtype: torch.dtype = torch.float64, kind: str = "ragged") -> tuple[torch.Tensor, ...]:
    """q, k, v, begin, end; row 0 of "ragged" sees nothing, "causal" is one rectangle for the kernels that need one."""
    torch.manual_seed(0)
    t = torch.arange(T, device=DEVICE)
    begin, end = (t * 0, t + 4) if kind == "causal" else (torch.stack([t, t * 0]), torch.stack([t + 2 * (t > 0), t]))
    return draw(B, T, H, D, dtype=dtype), draw(B, S, G, D, dtype=dtype), draw(B, S, G, V, dtype=dtype), begin, end


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> Partial:
    """Attention by autograd's own hand."""
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    at = torch.arange(S, device=DEVICE)
    seen = (begin.expand(B, T)[..., None] <= at) & (at < end.expand(B, T)[..., None])
    s = s.masked_fill(~seen[:, None], NEVER)
    real = seen.any(-1)[:, None, :, None]
    p = torch.where(real, s.masked_fill(~real, 0).softmax(-1), 0.0)
    lse = torch.where(real[..., 0], s.masked_fill(~real, 0).logsumexp(-1), NEVER)
    return Partial(torch.einsum("bhts,bshv->bthv", p, v), lse.transpose(1, 2))


def total(part: Partial) -> torch.Tensor:
    """A loss that weighs every output and every finite lse differently."""
    w = torch.linspace(-1, 2, part.out.numel(), dtype=part.out.dtype, device=DEVICE).reshape(part.out.shape)
    lse = torch.where(part.lse == NEVER, 0.0, part.lse)
    return (part.out * w).sum() + (lse * w[..., 0].cos()).sum()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["ragged", "causal"])
def test_attend_and_its_gradients_equal_dense_attention(impl: str, kind: str) -> None:
    if DEVICE == "cuda" and impl == "auto":
        pytest.skip("float64 on a GPU is served by name only")
    given = inputs(kind=kind)
    result, truth = ops.attend(*given, impl=impl), dense(*given)
    torch.testing.assert_close(result, truth)
    for name, a, b in zip(
        "qkv",
        torch.autograd.grad(total(result), given[:3]),
        torch.autograd.grad(total(truth), given[:3]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"d{name}: {m}")


@pytest.mark.parametrize("impl", ["triton", "decode"])
def test_the_gpu_kernels_behind_the_op(impl: str) -> None:
    """In the interpreter where there is no GPU: forward and gradients in float32."""
    pytest.importorskip("triton")
    given = inputs(torch.float32)
    exact = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given)
    result, truth = ops.attend(*given, impl=impl), dense(*exact)
    torch.testing.assert_close(result.out.double(), truth.out, atol=2e-6, rtol=0)
    grads = torch.autograd.grad(total(result), given[:3])
    for name, a, b in zip("qkv", grads, torch.autograd.grad(total(truth), exact[:3]), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=0, msg=lambda m, name=name: f"d{name}: {m}")


def test_a_loss_of_the_lse_alone_has_the_right_gradient() -> None:
    given = inputs(kind="causal")
    for part in (ops.attend(*given, impl="auto" if DEVICE == "cpu" else "tiled"),):
        result = torch.autograd.grad(part.lse.sin().sum(), given[:2])
        truth = torch.autograd.grad(dense(*given).lse.sin().sum(), given[:2])
        torch.testing.assert_close(result, truth)


@pytest.mark.parametrize("kind", ["ragged", "causal"])
def test_opcheck(kind: str) -> None:
    q, k, v, begin, end = inputs(torch.float32, kind)
    begin, end = (x.int().reshape(-1, T) for x in (begin, end))
    torch.library.opcheck(torch.ops.ringattn.attend, (q, k, v, begin, end, 0.3, None, "tiled"))
    torch.library.opcheck(torch.ops.ringattn.attend, (q, k, v, begin, end, 0.3, 2.0, "auto"))
    rows = [x.detach() for x in (draw(B, T, H, V), draw(B, T, H), draw(B, T, H, V), draw(B, T, H))]
    args = (q.detach(), k.detach(), v.detach(), begin, end, *(x.float() for x in rows), 0.3, None, "tiled")
    torch.library.opcheck(torch.ops.ringattn.attend_backward, args)


@pytest.mark.slow
def test_compile_sees_through_attend_and_merge() -> None:
    """One graph, no breaks, forward and backward, for two lengths."""
    impl = "tiled"

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        half = k.shape[1] // 2
        near = ops.attend(q, k[:, :half], v[:, :half], begin.clamp(max=half), end.clamp(max=half), impl=impl)
        far = ops.attend(q, k[:, half:], v[:, half:], (begin - half).clamp(min=0), (end - half).clamp(min=0), impl=impl)
        return total(ringattn.merge(near, far))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for given in (inputs(), tuple(x.detach()[:1].requires_grad_(x.is_floating_point()) for x in inputs())):
        torch.testing.assert_close(compiled(*given), f(*given))
        result = torch.autograd.grad(compiled(*given), given[:3])
        torch.testing.assert_close(result, torch.autograd.grad(f(*given), given[:3]))


LAYER = ringattn.nn.Attention(8, 2)
SIZES: dict[str, tuple[Any, tuple[int, ...], Any]] = {  # a call, the shape of x, and its second argument
    "state": (lambda x, s=None: ringattn.linear_attention(x, x, x, initial_state=s), (1, 4), lambda B, T: (B, 1, 4, 4)),
    "gates": (lambda x, s=None: ringattn.linear_attention(x, x, x, s), (1, 4), lambda B, T: (B, T, 1)),
    "docs": (lambda x, s=None: ringattn.attention(x, x, x, docs=s), (1, 4), lambda B, T: [[2, T - 2]] * B),
    "intervals": (lambda x, s=None: x if s is None else ops.attend(x, x, x, s, s + 1).out, (1, 4), lambda B, T: (T,)),
    "positions": (lambda x, s=None: LAYER(x, positions=s), (8,), lambda B, T: (T,)),
}


@pytest.mark.parametrize("kind", ["docs", *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != "docs")])
def test_an_argument_may_come_first_when_sizes_have_become_symbolic(kind: str) -> None:
    """Two sizes without it make the lengths symbolic; its own are still numbers."""
    call, rest, second = SIZES[kind]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for size, extra in ((2, False), (3, False), (3, True)):
        x, shape = torch.randn(size, size + 3, *rest), second(size, size + 3)
        given = (x,)
        if extra and kind == "docs":
            given += (ringattn.Docs.from_lengths(shape),)
        elif extra:
            given += (torch.arange(shape[0]) if len(shape) == 1 else -torch.rand(shape),)
        torch.testing.assert_close(compiled(*given), call(*given))


def test_checkpointing_no_grad_and_autocast_change_nothing() -> None:
    given = inputs(torch.float32, "causal")
    plain = ops.attend(*given, impl="tiled")
    again = torch.utils.checkpoint.checkpoint(lambda *x: ops.attend(*x, impl="tiled"), *given, use_reentrant=False)
    torch.testing.assert_close(again, plain, atol=0, rtol=0)
    result = torch.autograd.grad(total(again), given[:3])
    torch.testing.assert_close(result, torch.autograd.grad(total(plain), given[:3]), atol=0, rtol=0)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        inside = ops.attend(*given, impl="tiled")
        grads = torch.autograd.grad(total(inside), given[:3])
    torch.testing.assert_close(inside, plain, atol=0, rtol=0)
    torch.testing.assert_close(grads, result, atol=0, rtol=0)
    with torch.no_grad():
        assert not ops.attend(*given, impl="tiled").out.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x.float()}, "give all three the same dtype"),
        ({"q": lambda x: x[..., :4]}, "head dims differ: q 4, k 8"),
        ({"q": lambda x: x[:, :, :3]}, "2 key heads do not divide 3 query heads"),
        ({"begin": lambda x: x.float()}, "begin is torch.float32; intervals are int32"),
        ({"end": lambda x: x[:, :-1]}, r"end has shape \(2, 5\); expected \(6,\) or \(2, 6\)"),
        ({"scale": -1.0}, "scale=-1.0: must be a finite number above 0"),
        ({"impl": "fast"}, "choose one of auto"),
        ({"check": True, "end": lambda x: x + 5}, r"end\[0, 3\] = 10 lies outside \[0, 9\]"),
        ({"check": True, "end": lambda x: x.flip(1)}, "end decreases in row 0, from 7 at query 0 to 6 at query 1"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_wrong_call_says_what_is_wrong(change: dict, message: str) -> None:
    call = dict(zip(("q", "k", "v", "begin", "end"), inputs(), strict=True))
    for name, how in change.items():
        call[name] = how(call[name]) if callable(how) else how
    with pytest.raises(ValueError, match=message):
        ops.attend(**call)


@pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere looking would wait for the device")
@pytest.mark.parametrize("change", [-3, 50])
def test_on_a_cpu_intervals_that_leave_the_keys_are_refused_unasked(change: int) -> None:
    """A kernel there reads what is not its own, which may end the process."""
    q, k, v, begin, end = inputs(torch.float32, "causal")
    with pytest.raises(ValueError, match=rf"begin\[0, 0\] = {change} lies outside \[0, 9\], .*; clamp it"):
        ops.attend(q, k, v, begin + change, end + max(change, 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_queries_give_no_rows(impl: str) -> None:
    q, k, v, begin, end = inputs(torch.float32)
    part = ops.attend(q[:, :0], k, v, begin[:, :0], end[:, :0], impl=impl)
    assert part.out.shape == (B, 0, H, V) and part.lse.shape == (B, 0, H)


def problem(**changes: object) -> kernels.Problem:
    given = {"device": "cuda", "dtype": "bfloat16", "head_dim": 128, "value_dim": 128, "heads": 32, "kv_heads": 8}
    return kernels.Problem(**{**given, **changes})  # type: ignore[arg-type]


def test_nothing_falls_back_to_a_slow_kernel_unasked() -> None:
    """float64 on a GPU: only the slow ones serve, so they must be asked for by name."""
    with pytest.raises(NotImplementedError, match=r"kernel='tiled' would serve \(slow on this device\)"):
        kernels.select(problem(dtype="float64"))
    assert kernels.select(problem(dtype="float64"), "tiled").name == "tiled"


def test_a_named_kernel_that_refuses_says_why_and_which_kernel_serves() -> None:
    with pytest.raises(
        NotImplementedError, match=r"cuDNN takes bfloat16 and float16, not float32.*'tiled' would serve"
    ):
        kernels.select(problem(dtype="float32", rectangles=True), "cudnn")
    with pytest.raises(NotImplementedError, match=r"take.* up to 256.*'tiled' would serve"):
        kernels.select(problem(head_dim=512, value_dim=512), "decode")


def test_few_queries_go_to_decode() -> None:
    pytest.importorskip("triton")
    if ringattn.kernels.TABLE[0].refuses(problem(queries=1)) is None:
        assert kernels.select(problem(queries=1)).name == "decode"
    assert "few queries" in str(kernels.refusals(problem(queries=64))["decode"])
