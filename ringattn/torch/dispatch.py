"""Custom ops with little overhead: torch.compile sees one node, autograd one function.

torch's `custom_op` does the same and costs the host 140 us more per training call (480, not 340, on a CPU): it flattens
lists of tensors as trees, fills in defaults and looks for aliases each time.

Only first derivatives in reverse mode are supported. For others torch would return zeros; they are refused here.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn.torch.check import TANGENT

LIBRARY = torch.library.Library("ringattn", "FRAGMENT")

NOTHING_TO_DISABLE = nullcontext()

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
        "vmap (also is_grads_batched and vectorize=True) and the gradients of torch.func are not supported: pass a "
        "batch, and differentiate with torch.autograd"
    )


def fake(name: str) -> Callable[[Run], Run]:
    """The function gives the shapes and dtypes that an op returns, without computing it."""

    def register(shapes: Run) -> Run:
        torch.library.register_fake(f"ringattn::{name}", shapes, lib=LIBRARY)
        return shapes

    return register


def no_autocast(device: torch.device) -> Any:
    """A context without torch.autocast. None is entered if autocast is off: that costs as much as a kernel launch."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NOTHING_TO_DISABLE


class Once:
    """An autograd function's context that unpacks its saved tensors once, as activation checkpointing demands."""

    def __init__(self, ctx: Any):
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def no_view(x: Any) -> Any:
    """The same memory as a tensor that is no view: autograd forbids writing into a view that a function returns."""
    return x.data if isinstance(x, Tensor) and x._is_view() else x


class NoSecondDerivative(torch.autograd.Function):
    """The first `count` tensors, gradients that cannot be differentiated again.

    The others are the tensors that they depend on, so that differentiating them calls this backward. `edge` always
    requires a gradient, because saved tensors may replace inputs without depending on them.
    """

    @staticmethod
    def forward(ctx: Any, where: str, edge: Tensor, count: int, *tensors: Tensor | None) -> Any:
        ctx.where = where
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            f"second derivatives of {ctx.where} are not supported: its gradients cannot be differentiated; drop "
            "create_graph=True, or detach them"
        )


def check_tangents(names: Sequence[str], tensors: Sequence[Any]) -> None:
    """No tensor is differentiated in forward mode, even by a compiled graph that runs outside of Python."""
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
            firsts = backward(saved, *grads)
        named = where, edge, len(firsts)
        return tuple(NoSecondDerivative.apply(*named, *firsts, *grads, *saved.saved_tensors)[: len(firsts)])

    return staticmethod(run)


def is_batched(x: Tensor) -> bool:
    """Whether x stands for a batch of tensors, under vmap or is_grads_batched."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


def differentiate(name: str, save: Callable[[Any, Any, Any], None], gradients: Run, shown: int | None = None) -> None:
    """Register an op's gradients. Only its first `shown` outputs have gradients; `save` may keep the others."""
    run = getattr(torch.ops.ringattn, name).default
    names = [argument.name for argument in run._schema.arguments]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *inputs, kept = given
            with torch._C._AutoDispatchBelowAutograd():
                results = run(*inputs)
            results = tuple([no_view(x) for x in results]) if isinstance(results, tuple) else no_view(results)
            save(ctx, inputs, results)
            if shown is None:
                return results
            kept += results[shown:]
            return results[:shown]

        backward = once(lambda ctx, *grads: (*gradients(ctx, *grads), None), f"ringattn.{name}")

    def dispatch(*inputs: Any) -> Any:
        transforms = torch._C._are_functorch_transforms_active()
        if transforms or forward_ad._current_level >= 0:
            check_tangents(names, inputs)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            if transforms:
                refuse_transforms()
            kept: list[Any] = []
            results = Function.apply(*inputs, kept)
            return results if shown is None else (*results, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    LIBRARY.impl(name, dispatch, "Autograd")
