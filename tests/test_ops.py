"""torch.compile with symbolic sizes; which kernel is selected."""

from typing import Any

import pytest
import torch

import ringattn
from ringattn import kernels

LAYER = ringattn.nn.Attention(8, 2)
SIZES: dict[str, tuple[Any, tuple[int, ...], Any]] = {  # a call, the shape of x, and its second argument
    "state": (lambda x, s=None: ringattn.linear_attention(x, x, x, initial_state=s), (1, 4), lambda B, T: (B, 1, 4, 4)),
    "gates": (lambda x, s=None: ringattn.linear_attention(x, x, x, s), (1, 4), lambda B, T: (B, T, 1)),
    "docs": (lambda x, s=None: ringattn.attention(x, x, x, docs=s), (1, 4), lambda B, T: [[2, T - 2]] * B),
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
