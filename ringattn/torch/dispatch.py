"""Ops that torch knows: torch.compile sees one node, autograd one function, and the host loses little time.

torch's `custom_op` says the same and takes the host 140 us more a call that trains (480, not 340, on a CPU): it
flattens lists of tensors as trees, fills in defaults and looks for aliases each time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("ringattn", "FRAGMENT")

Run = Callable[..., Any]


def op(name: str) -> Callable[[Run], Run]:
    """The function as the op ringattn::name, for all devices. It changes none of its inputs, and returns none."""

    def define(run: Run) -> Run:
        LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        return run

    return define


def fake(name: str) -> Callable[[Run], Run]:
    """The function tells what an op returns, without computing it."""

    def register(shapes: Run) -> Run:
        torch.library.register_fake(f"ringattn::{name}", shapes, lib=LIBRARY)
        return shapes

    return register


def differentiate(name: str, save: Callable[[Any, Any, Any], None], backward: Run, shown: int | None = None) -> None:
    """An op's gradients. Of a tuple that it returns only the first `shown` have any; the others `save` may keep."""
    run = getattr(torch.ops.ringattn, name).default

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *inputs, kept = given
            with torch._C._AutoDispatchBelowAutograd():
                found = run(*inputs)
            save(ctx, inputs, found)
            if shown is None:
                return found
            kept += found[shown:]
            return found[:shown]

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return *backward(ctx, *grads), None

    def dispatch(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            kept: list[Any] = []
            found = Function.apply(*inputs, kept)
            return found if shown is None else (*found, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    LIBRARY.impl(name, dispatch, "Autograd")
