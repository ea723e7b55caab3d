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

LIBRARY = torch.library.Library("ringattn", "FRAGMENT")

NOTHING_TO_DISABLE = nullcontext()
TYPES = Tensor, torch.nn.Parameter  # of tensors that run outside of ops

Run = Callable[..., Any]


def op(name: str, schema: str | None = None) -> Callable[[Run], Run]:
    """The function as the op ringattn::name. It must not write to its inputs, nor return one of them.

    The schema follows from its annotations, unless it is given.
    """

    def define(run: Run) -> Run:
        LIBRARY.define(name + (schema or torch.library.infer_schema(run, mutates_args=())))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        for vmap in ("FuncTorchBatched", "Batched"):
            LIBRARY.impl(name, refuse_transforms, vmap)
        return run

    return define


def refuse_transforms(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "vmap (also is_grads_batched and vectorize=True), forward mode and the gradients of torch.func are not "
        "supported: pass a batch, and differentiate with torch.autograd"
    )


def fake(name: str) -> Callable[[Run], Run]:
    """The function gives the shapes and dtypes that an op returns, without computing it."""
    return torch.library.register_fake(f"ringattn::{name}", lib=LIBRARY)


def gradients_like(tensors: Sequence[Tensor | None], empty: Tensor) -> tuple[Tensor, ...]:
    """What the op of a backward pass returns: a gradient of each tensor, an empty one like `empty` if there is none."""
    contiguous = torch.contiguous_format
    return tuple([empty.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in tensors])


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast, the inputs cast to its dtype, as for torch's own attention, or to `dtype`."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = dtype or torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x for x in tensors)


def traced(*tensors: Any) -> bool:
    """Whether a call must be an op: a mode traces ops or transforms them, or the tensors are of a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any([type(x) not in TYPES and isinstance(x, Tensor) for x in tensors])
    )


def no_autocast(device: torch.device) -> Any:
    """A context without torch.autocast. None is entered if autocast is off: that costs as much as a kernel launch."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NOTHING_TO_DISABLE


class Unpacked:
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


def first_order(backward: Run, where: str) -> Any:
    """An autograd function's backward, whose gradients cannot be differentiated again."""

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if forward_ad._current_level >= 0 or any([x is not None and is_batched(x) for x in grads]):
            refuse_transforms()
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved, edge = Unpacked(ctx), torch.zeros((), requires_grad=True)
        with torch.no_grad():
            firsts = backward(saved, *grads)
        return NoSecondDerivative.apply(where, edge, len(firsts), *firsts, *grads, *saved.saved_tensors)

    return staticmethod(run)


def is_batched(x: Tensor) -> bool:
    """Whether x stands for a batch of tensors, under vmap or is_grads_batched."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


def differentiate(name: str, save: Callable[[Any, Any, Any], None], gradients: Run, count: int | None = None) -> None:
    """Register an op's gradients. Only its first `count` outputs have gradients; `save` may keep the others."""
    run = getattr(torch.ops.ringattn, name).default

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *inputs, kept = given
            with torch._C._AutoDispatchBelowAutograd():
                results = run(*inputs)
            results = tuple([no_view(x) for x in results]) if isinstance(results, tuple) else no_view(results)
            save(ctx, inputs, results)
            if count is None:
                return results
            kept += results[count:]
            return results[:count]

        backward = first_order(lambda ctx, *grads: (*gradients(ctx, *grads), None), f"ringattn.{name}")

    def dispatch(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            refuse_transforms()
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            kept: list[Any] = []
            results = Function.apply(*inputs, kept)
            return results if count is None else (*results, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)

    LIBRARY.impl(name, dispatch, "Autograd")
