"""Checks of a call in torch: the shapes of ringattn.check, and dtypes and devices."""

from typing import Any

import torch
from torch import Tensor

from ringattn.check.attention import of_docs, of_dtypes, of_lengths, of_plan, of_shapes, of_sinks
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.plan import Plan


def problem(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None,
    sinks: Tensor | None,
) -> str | None:  # fmt: skip
    """The first problem of a call, or None."""
    return (
        of_tensors(q, k, v)
        or of_device(q, plan)
        or of_plan(q, k, v, plan)
        or of_sinks_for(q, sinks)
        or of_lengths(q, k, plan, spec, (plan.local_len, plan.keys.local_len), docs, key_docs)
        or of_docs(q.shape[0], plan, spec, docs, key_docs)
    )


def of_types(**tensors: Any) -> str | None:
    """All are tensors."""
    wrong = ((name, type(x).__name__) for name, x in tensors.items() if not isinstance(x, Tensor))
    return next((f"{name} is of type {kind}; it must be a torch tensor" for name, kind in wrong), None)


def of_tensors(q: Tensor, k: Tensor, v: Tensor, linear: bool = False) -> str | None:
    named = {"q": q, "k": k, "v": v}
    if problem := of_dtypes(q, k, v):
        return problem
    if len({x.device for x in named.values()}) > 1:
        return ", ".join(f"{n} is on {x.device}" for n, x in named.items()) + "; put all three on one device"
    if q.is_meta:
        return "q, k and v are on meta, which has no numbers; pass tensors on a device"
    return of_dense(**named) or of_shapes(q, k, v, linear)


def of_device(q: Tensor, plan: Plan) -> str | None:
    """The ranks exchange tensors of that device: gloo would end the process, and NCCL waits."""
    if plan.ring * plan.ulysses == 1 or q.device.type == plan.device:
        return None
    return (
        f"q is on {q.device}, and the ranks of this plan exchange tensors on {plan.device}; make its mesh with "
        f"device_type={q.device.type!r}"
    )


def of_dense(**tensors: Tensor | None) -> str | None:
    """No tensor is sparse or in the layout of another library."""
    for name, x in tensors.items():
        if x is not None and x.layout != torch.strided:
            return f"{name} has the layout {x.layout}; give {name}.to_dense()"
    return None


def of_sinks_for(q: Tensor, sinks: Tensor | None) -> str | None:
    problem = of_dense(sinks=sinks) or of_sinks(sinks, q.shape[2])
    if problem is None and sinks is not None and sinks.device != q.device:
        problem = f"sinks is on {sinks.device}, q on {q.device}; put both on one device"
    return problem
