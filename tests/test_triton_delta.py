"""The Triton kernels of the delta rule equal the recurrence in float64: interpreted, and on a GPU."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.recurrent import recurrent
from ringattn.kernels.linear.triton import delta
from ringattn.kernels.linear.triton.delta_decode import decode
from tests.test_triton_linear import DOCUMENTS, MOST, ON_GPU, Case, check, distance, draw, some_quick, truth_of

# In the interpreter the launch for gentle chunks overflows in strong ones, which the launch for strong ones repeats.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

CASES = [
    Case("head", H=2, G=1, T=40, K=16, V=16, begins=DOCUMENTS[:3]),
    Case(H=1, T=40, K=16, V=16, decay=20.0, states=False),
    Case(H=1, decay=20.0, begins=DOCUMENTS),
    Case("none", H=1, K=20, V=40, strided=True),
    Case("head", B=2, decay=20.0),
    Case(H=4, G=2, T=70, K=20, V=40, strided=True),
    Case("head", H=1, T=40, K=80, V=96),
    Case(H=1, T=35, K=192, V=72),
    Case(H=1, decay=1e-3, T=64),
    Case(H=1, dtype="float16", begins=DOCUMENTS),
    Case("none", T=1, K=16, V=16),
]
CASES = [replace(case, beta="mixed") for case in CASES]


@pytest.fixture(params=[1, 8], ids=["segments", "one"])
def shortest(request: Any, monkeypatch: Any) -> int:
    """A segment of one chunk, or one segment."""
    monkeypatch.setattr(delta, "SHORTEST", request.param)
    return request.param


@pytest.mark.skipif(ON_GPU, reason="the same cases run compiled")
@pytest.mark.parametrize("case", some_quick(CASES, (0, 1)), ids=str)
@pytest.mark.parametrize("shortest", [1], indirect=True)
def test_equals_the_recurrence_in_the_interpreter(case: Case, shortest: int) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        Case("head", H=2, G=1, begins=DOCUMENTS, beta="mixed"),
        *(
            Case(gate, T=300, K=k, V=v, beta="mixed")
            for gate in ("channel", "head")
            for k, v in [(128, 128), (256, 512)]
        ),
    ],
    ids=str,
)
def test_equals_the_recurrence_on_a_gpu(case: Case, dtype: str, shortest: int) -> None:
    check(replace(case, dtype=dtype))


@pytest.mark.parametrize("gate", ["none", "head"])
def test_a_start_state_may_come_late_and_maps_are_those_of_all_tokens(gate: str, shortest: int) -> None:
    """With and without maps the same results; a map takes any state to where `read_out` does."""
    x = draw(Case(gate, H=1, T=70, K=16, V=16, beta="mixed"))
    inputs, truth = Inputs(x.q, x.k, x.v, x.g, x.beta, x.begin, x.scale), truth_of(x)
    scan, rscan = delta.scan_states(inputs), delta.scan_gradients(inputs, x.dout)
    assert distance(scan.map.after(x.start), truth["end"]) <= MOST["float32"]
    assert distance(rscan.map.after(x.dend), truth["dstart"]) <= MOST["float32"]
    alone = delta.scan_states(inputs, maps=False)
    assert alone.map is None
    for given, start in ((scan, lambda: x.start), (alone, x.start)):
        out, end = delta.read_out(inputs, given, start)
        assert distance(out, truth["out"]) <= MOST["float32"]
        assert distance(end, truth["end"]) <= MOST["float32"]


def reads_out(x: Inputs, start: torch.Tensor, most: float) -> torch.Tensor:
    """Out and the end state are the recurrence's; that state."""
    truth = recurrent(doubled(x), start.double())
    for result, expected in zip(delta.read_out(x, delta.scan_states(x, maps=False), start), truth, strict=True):
        assert distance(result, expected) <= most
    return truth[1]


def test_keys_that_repeat_are_reflected_and_lose_few_bits(shortest: int) -> None:
    """beta = 2 and one key: each token reflects the state, and the solve has the largest factors that beta allows."""
    x = draw(Case("none", H=1, T=70, K=16, V=16, beta="twice"))
    reads_out(Inputs(x.q, x.k, x.v, x.g, x.beta, x.begin, x.scale), x.start, 1e-5)


@pytest.mark.parametrize("shortest", [1], indirect=True)
def test_a_segment_keeps_what_long_keys_stretch_as_much_as_gates_shrink(shortest: int) -> None:
    """|k| = 5 and beta = 2 stretch a state along k 49 times, and gates shrink it so: by these alone nothing is left."""
    x = draw(Case("head", H=1, T=70, K=16, V=16, beta="twice"))
    inputs = Inputs(x.q, 5 * x.k, 0 * x.v, torch.full_like(x.g, -math.log(49)), x.beta, None, x.scale)
    assert reads_out(inputs, x.start, 1e-4).norm() > 0.1 * x.start.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["channel", "head", "none"])
def test_the_same_call_gives_the_same_bits(gate: str) -> None:
    x = draw(Case(gate, T=1000, K=128, V=128, dtype="bfloat16", beta="mixed"))
    inputs = Inputs(x.q, x.k, x.v, x.g, x.beta, x.begin, x.scale)

    def run() -> list[torch.Tensor | None]:
        out, _ = delta.read_out(inputs, delta.scan_states(inputs, maps=False), None)
        rscan = delta.scan_gradients(inputs, x.dout, maps=False)
        return [out, *delta.gradients(inputs, delta.scan_states(inputs, maps=False), None, rscan, x.dout, None)]

    for a, b in zip(run(), run(), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("gate", ["channel", "head", "none"])
@pytest.mark.parametrize("beta", ["mixed", None])
def test_tokens_of_generation_equal_the_recurrence(gate: str, beta: str | None) -> None:
    """One to three tokens on a state, in one kernel, with fewer key heads and any strides."""
    for T, strided in ((1, False), (3, True)):
        x = draw(Case(gate, B=2, T=T, H=4, G=2, K=20, V=40, beta=beta, strided=strided))
        inputs = Inputs(x.q, x.k, x.v, x.g, x.beta, None, x.scale)
        for result, truth in zip(decode(inputs, x.start), recurrent(doubled(inputs), x.start.double()), strict=True):
            assert distance(result, truth) <= 1e-6


def doubled(x: Inputs) -> Inputs:
    return Inputs(*[t if t is None else t.double() for t in x[:5]], x.begin, x.scale)
