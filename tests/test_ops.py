"""torch.compile with symbolic sizes; which kernel is selected."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ringattn
from ringattn import kernels
from ringattn.kernels.attention import pallas
from ringattn.kernels.attention.libraries import sdpa_cpu
from ringattn.kernels.intervals import Intervals

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


def test_a_plan_is_one_line_in_compiled_graphs() -> None:
    """Inductor writes the arguments of ops into comments of the kernels that it generates for GPUs."""
    assert len(ringattn.plan(seq_len=8).text.splitlines()) == 1


def problem(**changes: object) -> kernels.Problem:
    given = {"device": "cuda", "dtype": "bfloat16", "head_dim": 128, "value_dim": 128, "heads": 32, "kv_heads": 8}
    return kernels.Problem(**{**given, **changes})  # type: ignore[arg-type]


def select(name: str = "auto", **changes: object) -> kernels.Kernel:
    return kernels.select(problem(rectangles=True, arch=(9, 0), rows=2**20, **changes), name)


def on_tpu(name: str, **changes: object) -> kernels.Kernel:
    return kernels.select(problem(**{"device": "tpu", **changes}), name, pallas.TABLE)


X = torch.zeros(1, 4, 1, 8)
REFUSED = [  # which kernel, why, and which one serves
    (partial(select, dtype="float64"), r"kernel='tiled' would serve \(slow on this device\)"),
    (partial(select, "cudnn", dtype="float32"), "cuDNN takes bfloat16 and float16, not float32.*'tiled' would serve"),
    (partial(select, "cudnn", deterministic=True), "differ from run to run"),
    (partial(select, "cudnn", device="cpu"), "not on cpu"),
    (partial(select, "cudnn", softcap=True), "softcap"),
    (partial(select, "cudnn", head_dim=264, value_dim=264), "264"),
    (partial(select, "decode", head_dim=512, value_dim=512), "take.* up to 256.*'tiled' would serve"),
    (partial(select, "decode", queries=64), "few queries"),
    (partial(select, "triton", dtype="float64"), "float64"),
    (partial(select, "triton", value_dim=512), "value_dim=512"),
    (partial(select, "triton", device="tpu"), "tpu"),
    (partial(on_tpu, "splash", device="cuda"), "TPU kernel.*cuda.*'reference' would serve"),
    (partial(on_tpu, "splash", dtype="float64"), "not float64"),
    (lambda: sdpa_cpu.attend(X, X, X, Intervals(*torch.zeros(2, 1, 4, dtype=torch.int32)), scale=1.0),
     "rectangles_of.*the triton and tiled kernels run any intervals"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), REFUSED, ids=[says[-40:] for _, says in REFUSED])
def test_a_kernel_that_cannot_says_why_and_which_one_serves(call: Callable[[], object], says: str) -> None:
    """float64 on a GPU: only slow ones serve, so they must be asked for by name."""
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match=says):
        call()


def test_a_kernel_that_can_is_selected() -> None:
    assert (select("cudnn").name, select("tiled", dtype="float64").name) == ("cudnn", "tiled")
    assert (on_tpu("auto").name, on_tpu("auto", device="cuda").name) == ("splash", "reference")
    pytest.importorskip("triton")
    assert select("triton").name == "triton"
    if kernels.TABLE[0].refuses(problem(queries=1)) is None:
        assert kernels.select(problem(queries=1)).name == "decode"
