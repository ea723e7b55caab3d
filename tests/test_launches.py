"""A library's compiled kernels launched without its interface: a stand-in here, FlashAttention-4 itself on a GPU."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from test_fa4 import intervals, needs_fa4
from torch import Tensor

from ringattn.kernels.attention.libraries import launches
from ringattn.kernels.attention.libraries.launches import Learned, Options, repeat
from ringattn.kernels.rows import row_delta
from tests.cases import gradients

CALLS: list[str] = []
CHANGED: set[str] = set()
ELSEWHERE = torch.ones(4)


def kernel(q: Tensor, k: Tensor, tables: Any, scale: float, out: Tensor, total: Tensor, more: Any) -> None:
    """By numpy: torch does not see what a kernel does."""
    CALLS.append("kernel")
    assert not q.requires_grad
    np.multiply(q.numpy(), tables[0].numpy().sum() * scale, out=out.numpy())
    total.numpy()[:] += k.numpy()


def interface(q: Tensor, k: Tensor, *, scale: float, table: Tensor, out: Tensor | None = None) -> tuple[Any, ...]:
    """(q * 4 sum(table) * scale, k + zeros, None)"""
    CALLS.append("interface")
    out, total = torch.empty_like(q) if out is None else out, torch.zeros(k.shape)
    more = {"view": k.expand(2, *k.shape), "address": k.data_ptr(), "elsewhere": ELSEWHERE}
    assert "fails watched" not in CHANGED or type(interface.compile_cache) is dict  # type: ignore[attr-defined]
    if "op" in CHANGED:
        total.add_(0)
    run = kernel if "not compiled" in CHANGED else interface.compile_cache["key"]  # type: ignore[attr-defined]
    run(q.detach(), k.detach(), (table.expand(4, 3), None), scale, out, total, more.get(*CHANGED or [""]))
    return out, total, None


interface.compile_cache = {"key": kernel}  # type: ignore[attr-defined]


def called(options: Options, *like: Tensor) -> list[str]:
    """What a call with other tensors of this kind runs, if its results are right."""
    memory = [torch.randn(20)[x.storage_offset() :] for x in like]
    q, k = (
        new.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad) for new, x in zip(memory, like, strict=True)
    )
    CALLS.clear()
    torch.use_deterministic_algorithms(True)  # then memory that nobody wrote is NaN
    with torch.no_grad():
        out, total, none = repeat(interface, options, {"q": q, "k": k, "out": None}, scale=0.5)
    torch.use_deterministic_algorithms(False)
    assert torch.allclose(out, q * 2 * options["table"].sum()) and torch.equal(total, k) and none is None
    assert out.stride() == q.stride() and not out.requires_grad
    return CALLS


def test_a_call_that_repeats_launches_without_the_interface() -> None:
    options, q, k = Options({"table": torch.arange(3.0)}), torch.ones(3, 6).T.requires_grad_(), torch.ones(5)
    both = ["interface", "kernel"]
    assert [[*called(options, q, k)] for _ in range(4)] == [both, both, ["kernel"], ["kernel"]]
    options["table"].add_(1)
    assert called(options, q, k) == ["kernel"], "memory of the options, as it is now"
    for other in (torch.ones(3, 6), k), (q, torch.ones(9)[::2]), (q, torch.ones(6)[1:]):
        assert called(options, *other) == both, "another kind, the last one by its address alone"
    assert interface.compile_cache == {"key": kernel}, "the interface is as it was"
    held = [weakref.ref(options["table"]), weakref.ref(options)]
    del options
    assert [x() for x in held] == [None, None]


@pytest.mark.parametrize("change", ["op", "view", "address", "elsewhere", "not compiled", "fails watched"])
def test_what_is_not_known_goes_through_the_interface(change: str) -> None:
    options = Options({"table": torch.arange(3.0)})
    CHANGED.add(change)
    try:
        for _ in range(4):
            assert called(options, torch.ones(3), torch.ones(5))[-2:] == ["interface", "kernel"]
    finally:
        CHANGED.clear()
    x = torch.ones(3)
    for _ in range(3):
        repeat(interface, options, {"q": x, "k": x, "out": None}, scale=2.0)
    assert CALLS[-2:] == ["interface", "kernel"], "one tensor twice"
    assert all(type(why) is str and why != launches.ONCE for why in options.launches.values())


T = 12_288
AT = np.arange(T)[None]
MASKS = {
    "causal": (AT * 0, AT + 1),
    "full": (AT * 0, AT * 0 + T),
    "window": (np.maximum(AT - 512, 0), AT + 1),
    "documents": (AT // 700 * 700, AT + 1),
    "300 documents": (AT // 40 * 40, AT + 1),
    "lists": (np.maximum(AT - 900, 0) // 3 * 3, AT + 1),
    "some see nothing": (AT * 0, np.where(AT < 3000, 0, np.minimum(AT + 1, 9000))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", MASKS)
def test_fa4_launched_directly_gives_what_its_interface_gives(monkeypatch, name: str, softcap: float | None) -> None:
    """Calls on other tensors, forward, and backward from out and from delta: from the third on without the interface.

    The interface is reached by masks that are new. Gradients are sums in an order that changes.
    """
    fa4, launched, run = needs_fa4(), [], Learned.run
    monkeypatch.setattr(Learned, "run", lambda self, given: launched.append(1) or run(self, given))
    where, score = intervals(*MASKS[name], host=True), {"scale": 0.1, "softcap": softcap}

    def results(where: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[int, list[Tensor]]:
        launched.clear()
        part = fa4.KERNEL.attend(q, k, v, where, **score)
        given, out = (fa4.KERNEL, q, k, v, where, dout, part.lse), part.out.bfloat16()
        grads = gradients(*given, None, out=out, **score) + gradients(*given, row_delta(out, dout), **score)
        return len(launched), [*part, *grads]

    counts = []
    for _ in range(4):
        tensors = [torch.randn(1, T, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8)]
        (count, found), (none, expected) = results(where, *tensors), results(where._replace(made={}), *tensors)
        assert none == 0 and all(map(torch.equal, found[:2], expected[:2]))
        for a, b in zip(found[2:], expected[2:], strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
        counts.append(count)
    assert counts[:2] == [0, 0] and counts[2] == counts[3] >= 3, counts
