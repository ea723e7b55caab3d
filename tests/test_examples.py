"""Examples that explain: they are right, and the needle is found."""

import sys
from pathlib import Path

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("ring_in_one_file", "needle", "who_holds_what"):
        sys.modules.pop(name, None)


class Circle:
    """The ring of the example over an axis of threads."""

    def __init__(self, axis):
        self.axis, self.rank, self.size = axis, axis.rank, axis.size

    def rotate(self, tensors):
        return self.axis.rotate(tuple(x.contiguous() for x in tensors)).wait


def test_the_ring_in_one_file_equals_the_library():
    import ring_in_one_file as one_file

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 96, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    dout, starts = torch.randn(2, 96, 4, 8), torch.tensor([0, 31, 33, 80])
    out = ra.attention(q, k, v, docs=ra.Docs.from_lengths([31, 2, 47, 16]))
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    def one_rank(mesh):
        mine = one_file.zigzag(96, 4, mesh.rank)
        inputs = [x.detach()[:, mine].requires_grad_() for x in (q, k, v)]
        out = one_file.ring_attention(*inputs, starts, 96, Circle(mesh.axis("ring")))
        return mine, [out.detach(), *torch.autograd.grad(out, inputs, dout[:, mine])]

    for mine, found in run(one_rank, ring=4):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[:, mine], atol=2e-5, rtol=1e-4)
    assert len((EXAMPLES / "ring_in_one_file.py").read_text().splitlines()) <= 250
