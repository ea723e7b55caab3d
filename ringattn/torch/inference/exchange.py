"""Merge the partials of all ranks: stacked and merged in rank order, so that every rank has the same bits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.kernels.partial import Partial, Streams, add_sinks, merge_stack, packed, partial_of, unpacked
from ringattn.planning import Plan, hardware_of
from ringattn.serving import exchange_over, exchange_way


def merged_everywhere(rows: Tensor, plan: Plan, form: str, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The merge of all ranks' packed partials and of the sinks, the same bits on every rank."""
    part, axes = None, [axis for axis in (plan.ulysses_axis, plan.ring_axis) if axis.size > 1]
    for axis in axes:
        rows = rows if part is None else packed(part, form)
        road = rows.nbytes, axis.size, hardware_of(plan.device)
        over = axis.over(exchange_over(*road))
        if exchange_way(*road) == "gather":
            last = axis is axes[-1] and sinks is None
            part = merged(unpacked(over.all_gather(rows[None], 0).wait(), form), dtype if last else torch.float32)
        else:
            part = shared(rows, over, form)
    if part is None:  # one rank
        part = partial_of(rows, form)
    part = part if sinks is None else add_sinks(part, sinks.detach())
    return part.out.to(dtype).contiguous()


def shared(rows: Tensor, axis: Any, form: str) -> Partial:
    """Each rank merges its share of the rows, and sends it to all."""
    flat = rows.flatten(0, -2)[:, None, None]
    pad = -len(flat) % axis.size
    stack = axis.all_to_all(F.pad(flat, [0] * 6 + [0, pad]), 0, 0).wait().unflatten(0, (axis.size, -1))
    everyone = axis.all_gather(packed(merged(unpacked(stack, form)), form), 0).wait()[: len(flat)]
    return partial_of(everyone.reshape(rows.shape), form)


def merged(stack: Partial | Streams, dtype: torch.dtype = torch.float32) -> Partial:
    """Stacked partials [ranks, ...] merged in rank order: on GPUs in one kernel, whose out has `dtype`."""
    if stack.out.is_cuda and stack.out.dtype == torch.float32:
        from ringattn.kernels.triton import merge

        return merge.merge_stack(stack, dtype=dtype)
    return merge_stack(stack)
