"""Ops that torch knows: torch.compile sees one node, autograd one function, and the host loses little time.

torch's `custom_op` says the same and takes the host 140 us more a call that trains (480, not 340, on a CPU): it
flattens lists of tensors as trees, fills in defaults and looks for aliases each time.

Gradients are there once and in reverse mode: everything else that torch would answer with zeros is refused here.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn.torch.check import TANGENT

LIBRARY = torch.library.Library("ringattn", "FRAGMENT")

Run = Callable[..., Any]


def op(name: str) -> Callable[[Run], Run]:
    """The function as the op ringattn::name. It must not write to its inputs, nor return one of them."""

    def define(run: Run) -> Run:
        LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        for vmap in ("FuncTorchBatched", "Batched"):
            LIBRARY.impl(name, refuse_transforms, vmap)
        return run

    return define


def refuse_transforms(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "vmap (also is_grads_batched and vectorize=True) and the gradients of torch.func do not see through ringattn: "
        "give it a batch, and differentiate with torch.autograd"
    )


def fake(name: str) -> Callable[[Run], Run]:
    """The function tells what an op returns, without computing it."""

    def register(shapes: Run) -> Run:
        torch.library.register_fake(f"ringattn::{name}", shapes, lib=LIBRARY)
        return shapes

    return register


def no_autocast(device: torch.device) -> Any:
    """A context without torch.autocast; to leave one that is off costs the host as much as a small kernel's launch."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


class Once:
    """An autograd function's context that unpacks its saved tensors once, as activation checkpointing demands."""

    def __init__(self, ctx: Any):
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def no_view(x: Any) -> Any:
    """The same memory as a tensor of its own: autograd lets nobody write into a view that a function returns."""
    return x.data if isinstance(x, Tensor) and x._is_view() else x


class NoSecondDerivative(torch.autograd.Function):
    """The first `count` tensors: gradients, of which there are no further ones.

    The others are what they depend on, so that whoever differentiates them comes by here; `edge` always requires a
    gradient, for what was saved may stand in for inputs without depending on them.
    """

    @staticmethod
    def forward(ctx: Any, where: str, edge: Tensor, count: int, *tensors: Tensor | None) -> Any:
        ctx.where = where
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"second derivatives of {ctx.where} are not there: its gradients cannot be differentiated; do without "
            "create_graph=True, or detach them"
        )


def check_tangents(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """No tensor is differentiated in forward mode; also where a compiled graph does that, of which Python knows
    nothing."""
    for name, x in zip(names, tensors, strict=False):
        if isinstance(x, Tensor) and torch._VF._unpack_dual(x, level=0).tangent is not None:
            raise ValueError(f"{name} {TANGENT}")


def once(backward: Run, where: str) -> Any:
    """An autograd function's backward, whose gradients cannot be differentiated again."""

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if any(x is not None and is_batched(x) for x in grads):
            refuse_transforms()
        if forward_ad._current_level >= 0:
            check_tangents(["the gradient of an output"] * len(grads), grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved, edge = Once(ctx), torch.zeros((), requires_grad=True)
        with torch.no_grad():
            found = backward(saved, *grads)
        named = where, edge, len(found)
        return tuple(NoSecondDerivative.apply(*named, *found, *grads, *saved.saved_tensors)[: len(found)])

    return staticmethod(run)


def is_batched(x: Tensor) -> bool:
    """Whether it stands for a batch of tensors, under vmap or is_grads_batched."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


def traced(*tensors: Any) -> bool:
    """Whether somebody looks at each op, or its tensors are not plain ones, so that a call must be an op."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any([type(x) not in PLAIN and isinstance(x, Tensor) for x in tensors])
    )


PLAIN = (Tensor, torch.nn.Parameter)


def differentiate(name: str, save: Callable[[Any, Any, Any], None], gradients: Run, shown: int | None = None) -> None:
    """An op's gradients. Of a tuple that it returns only the first `shown` have any; the others `save` may keep."""
    run = getattr(torch.ops.ringattn, name).default
    names = [one.name for one in run._schema.arguments]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *inputs, kept = given
            with torch._C._AutoDispatchBelowAutograd():
                found = run(*inputs)
            found = tuple([no_view(x) for x in found]) if isinstance(found, tuple) else no_view(found)
            save(ctx, inputs, found)
            if shown is None:
                return found
            kept += found[shown:]
            return found[:shown]

        backward = once(lambda ctx, *grads: (*gradients(ctx, *grads), None), f"ringattn.{name}")

    def dispatch(*inputs: Any) -> Any:
        transforms = torch._C._are_functorch_transforms_active()
        if transforms or forward_ad._current_level >= 0:
            check_tangents(names, inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            if transforms:
                refuse_transforms()
            kept: list[Any] = []
            found = Function.apply(*inputs, kept)
            return found if shown is None else (*found, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    LIBRARY.impl(name, dispatch, "Autograd")
