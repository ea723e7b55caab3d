"""A loss that is averaged over the real tokens of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.check import of_packed, of_words
from ringattn.kernels.arrays import accumulator
from ringattn.planning import Plan
from ringattn.spec import Docs
from ringattn.torch.agree import agree
from ringattn.torch.check import of_types
from ringattn.torch.sharding import real_tokens


def token_mean(
    losses_BT: Tensor,
    plan: Plan,
    *,
    mask: Tensor | None = None,
    docs: Docs | None = None,
    over: Sequence[Any] = (),
) -> Tensor:
    """sum of the real tokens' losses over all ranks / number of real tokens over all ranks.

    Every rank gets the same value. Its gradient is this rank's share, so gradients are summed over ranks, never
    averaged. Padding does not count, nor do tokens where `mask`, of bools or integers, is 0 (labels to ignore); what a
    token that does not count holds, even NaN, does not matter. `over` names further axes to average over
    (comms.mesh.axis(mesh, "data")).
    """
    problem = of_words(required=True, plan=plan)
    if problem is None and plan.framework != "torch":
        problem = "token_mean is for torch; JAX arrays are global: take the mean where plan.positions() < plan.seq_len"
    if problem:
        raise ValueError(problem)
    problem = of_losses(losses_BT, plan, mask, docs) or of_axes(over)
    agree(plan, {"call": "token_mean", "over": "" if problem else str([axis.name for axis in over])}, problem)
    counted = torch.ones_like(losses_BT, dtype=torch.bool)
    for chosen in (mask, real_tokens(plan, docs, losses_BT.device)):
        if chosen is not None:
            counted = counted & chosen.bool()
    mine = torch.where(counted, losses_BT, 0.0).sum(dtype=accumulator(losses_BT))
    total = torch.stack([mine.detach().double(), counted.sum().double()])[None]
    for axis in (plan.ulysses_axis, plan.ring_axis, *over):
        total = axis.all_gather(total).wait().sum(0, keepdim=True)
    everyone, count = total[0].unbind()
    share = mine / count.clamp(min=1).to(mine.dtype)
    return share + ((everyone / count.clamp(min=1)).to(mine.dtype) - share).detach()


def of_losses(losses_BT: Tensor, plan: Plan, mask: Tensor | None, docs: Docs | None) -> str | None:
    """A loss for each of this rank's tokens, and which of them count."""
    if found := of_types(losses=losses_BT) or of_words(docs=docs):
        return found
    shape = tuple(losses_BT.shape)
    if len(shape) != 2 or not losses_BT.is_floating_point():
        return f"losses has shape {shape} and dtype {losses_BT.dtype}; expected a float for each token, [batch, tokens]"
    if shape[1] != plan.local_len:
        return f"losses has {shape[1]} tokens, a rank of this plan holds {plan.local_len} ({plan})"
    return of_packed("docs", docs, plan.seq_len, shape[0]) or (None if mask is None else of_mask(mask, losses_BT))


def of_axes(over: Any) -> str | None:
    """Axes to average over."""
    if isinstance(over, list | tuple) and all(hasattr(axis, "all_gather") for axis in over):
        return None
    return f"over={over!r}: a list of axes, such as [ringattn.comms.mesh.axis(mesh, 'data')]"


def of_mask(mask: Tensor, like: Tensor) -> str | None:
    if found := of_types(mask=mask):
        return found
    if mask.is_floating_point() or mask.is_complex():
        return f"mask is {mask.dtype}: a token counts or does not, so give bools (mask > 0) or integers"
    if mask.device != like.device:
        return f"mask is on {mask.device}, losses on {like.device}; put both on one device"
    if mask.dim() > 2 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], like.shape[::-1], strict=False)):
        shapes = f"mask has shape {tuple(mask.shape)}, losses {tuple(like.shape)}"
        return f"{shapes}: mask must have that shape, or 1 where it says the same for all"
    return None
