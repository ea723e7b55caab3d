"""What all kinds of calls do before they run: cast, look up, and cache."""

from typing import Any

import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec

MAX_CALLS, MAX_PACKED = 64, 12  # bound calls that are cached for a plan: without documents, and with
CAUSAL = AttentionSpec()  # the default
TYPES = Tensor, torch.nn.Parameter  # of tensors that run outside of ops


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast, the inputs cast to its dtype, as for torch's own attention, or to `dtype`."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = dtype or torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x for x in tensors)


def traced(*tensors: Any) -> bool:
    """Whether a call must be an op: a mode traces ops, or the tensors are of a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any([type(x) not in TYPES and isinstance(x, Tensor) for x in tensors])
    )


def key_of(
    q: Tensor, k: Tensor, v: Tensor, plan: Any, spec: Any, docs: Any, key_docs: Any, sinks: Any, gradients: Any,
    return_lse: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The key of a bound call: all of its arguments except the numbers in tensors."""
    return (
        plan, spec, docs, key_docs, gradients, return_lse, torch.are_deterministic_algorithms_enabled(),
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, q.layout, k.layout, v.layout,
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.device, sinks.layout),
    )  # fmt: skip


def remember(calls: dict[Any, Any], key: Any, call: Any) -> None:
    """Cache a call, and drop the oldest of its sort (with documents or without) if there are too many.

    Calls with documents keep two numbers per token on the device, and each batch has other documents.
    """
    packed = call.docs is not None
    most = MAX_PACKED if packed else MAX_CALLS
    same = [old for old, kept in list(calls.items()) if (kept.docs is not None) == packed]
    for old in same[: max(0, len(same) + 1 - most)]:
        calls.pop(old, None)
    calls[key] = call
