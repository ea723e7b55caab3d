"""A library's compiled kernels launched without its interface: a stand-in here, FlashAttention-4 itself on a GPU."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from test_fa4 import intervals, needs_fa4
from torch import Tensor

from ringattn.kernels.attention.libraries import launches
from ringattn.kernels.attention.libraries.launches import Launches, Options, repeat

CALLS: list[str] = []
CHANGED: set[str] = set()
ELSEWHERE = torch.ones(4)


def kernel(q: Tensor, k: Tensor, tables: Any, scale: float, out: Tensor, total: Tensor, more: Any) -> None:
    CALLS.append("kernel")
    torch.mul(q, tables[0].sum() * scale, out=out)
    total.add_(k)


def interface(q: Tensor, k: Tensor, *, scale: float, table: Tensor, out: Tensor | None = None) -> tuple[Any, ...]:
    """(q * 4 sum(table) * scale, k + zeros, None)"""
    CALLS.append("interface")
    out, total = torch.empty_like(q) if out is None else out, torch.zeros(k.shape)
    more = {"view": k[:2], "address": k.data_ptr(), "elsewhere": ELSEWHERE} if CHANGED else {}
    k = k + 0 if "op" in CHANGED else k.detach()
    run = kernel if "not compiled" in CHANGED else interface.compile_cache["key"]  # type: ignore[attr-defined]
    run(q.detach(), k, (table.expand(4, 3), None), scale, out, total, more.get(*CHANGED) if CHANGED else 7)
    return out, total, None


interface.compile_cache = {"key": kernel}  # type: ignore[attr-defined]


def called(options: Options, *like: Tensor) -> list[str]:
    """What a call with other tensors of this kind runs, if its results are right."""
    q, k = (torch.empty_strided(x.shape, x.stride()).normal_().requires_grad_(x.requires_grad) for x in like)
    CALLS.clear()
    with torch.no_grad():
        out, total, none = repeat(interface, options, {"q": q, "k": k, "out": None}, scale=0.5)
    assert torch.allclose(out, q * 2 * options["table"].sum()) and torch.equal(total, k) and none is None
    assert out.stride() == q.stride() and not out.requires_grad
    return CALLS


def test_a_call_that_repeats_launches_without_the_interface() -> None:
    options, q, k = Options({"table": torch.arange(3.0)}), torch.ones(4, 6).T.requires_grad_(), torch.ones(5)
    both = ["interface", "kernel"]
    assert [[*called(options, q, k)] for _ in range(4)] == [both, both, ["kernel"], ["kernel"]]
    options["table"].add_(1)
    assert called(options, q, k) == ["kernel"], "memory of the options, as it is now"
    assert called(options, torch.ones(4, 6), k) == called(options, q, torch.ones(8)[1::2]) == both, "other kinds"
    assert interface.compile_cache == {"key": kernel}, "the interface is as it was"
    held = [weakref.ref(options["table"]), weakref.ref(options)]
    del options
    assert [x() for x in held] == [None, None]


@pytest.mark.parametrize("change", ["op", "view", "address", "elsewhere", "not compiled"])
def test_what_is_not_known_goes_through_the_interface(change: str) -> None:
    options = Options({"table": torch.arange(3.0)})
    CHANGED.add(change)
    try:
        for _ in range(4):
            assert called(options, torch.ones(3), torch.ones(5)) == ["interface", "kernel"]
    finally:
        CHANGED.clear()
    x = torch.ones(3)
    for _ in range(3):
        repeat(interface, options, {"q": x, "k": x, "out": None}, scale=2.0)
    assert CALLS[-2:] == ["interface", "kernel"], "one tensor twice"
    assert all(type(why) is str and why != launches.ONCE for why in options.launches.values())


T = 12_288
ENDS = np.arange(1, T + 1)[None]
STARTS = ENDS * 0
MASKS = {
    "causal": (STARTS, ENDS),
    "full": (STARTS, STARTS + T),
    "window": (np.maximum(ENDS - 512, 0), ENDS),
    "documents": ((ENDS - 1) // 700 * 700, ENDS),
    "300 documents": ((ENDS - 1) // 40 * 40, ENDS),
    "lists": (np.maximum(ENDS - 900, 0) // 3 * 3, ENDS),
    "some see nothing": (STARTS, np.minimum(ENDS, 9000) * (ENDS > 3000)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", MASKS)
def test_fa4_launched_directly_gives_what_its_interface_gives(monkeypatch, name: str, softcap: float | None) -> None:
    """Four calls, forward and backward, from out and from delta: the third and fourth without the interface."""
    fa4, launched, run = needs_fa4(), [], Launches.run
    monkeypatch.setattr(Launches, "run", lambda self, given: launched.append(1) or run(self, given))
    where, score = intervals(*MASKS[name], host=True), {"scale": 0.1, "softcap": softcap}
    counts = []
    for _ in range(4):
        q, k, v, dout = (torch.randn(1, T, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))

        def results(where: Any, q=q, k=k, v=v, dout=dout) -> list[Any]:
            launched.clear()
            part = fa4.KERNEL.attend(q, k, v, where, **score)
            delta = (part.out.float() * dout).sum(-1)
            given = [q, k, v, where, dout, part.lse]
            by_out = fa4.KERNEL.attend_backward(*given, None, out=part.out.bfloat16(), **score)
            return [*part, *by_out, *fa4.KERNEL.attend_backward(*given, delta, **score)]

        found, counted = results(where), len(launched)
        counts.append(counted)
        for a, b in zip(found, results(where._replace(made={})), strict=True):
            assert torch.allclose(a.float(), b.float(), atol=1e-2, rtol=1e-2, equal_nan=True)
        assert all(torch.equal(a, b) for a, b in zip(found[:2], results(where._replace(made={}))[:2], strict=True))
        assert not launched, "new masks go through the interface"
    assert counts[:2] == [0, 0] and counts[2] == counts[3] >= 3, counts
