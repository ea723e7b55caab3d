"""A loss that is averaged over the real tokens of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.planning import Plan
from ringattn.spec import Docs
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
    averaged. Padding does not count, nor do tokens where `mask` is False (labels to ignore); what a token that does not
    count holds, even NaN, does not matter. `over` names further axes (comms.mesh.axis(mesh, "data")) to average over.
    """
    if losses_BT.shape[1] != plan.local_len:
        raise ValueError(f"losses has {losses_BT.shape[1]} tokens, a rank of this plan holds {plan.local_len} ({plan})")
    counted = torch.ones_like(losses_BT, dtype=torch.bool)
    for name, chosen in (("mask", mask), ("docs", real_tokens(plan, docs, losses_BT.device))):
        if chosen is not None:
            counted = counted & expanded(name, chosen.bool(), losses_BT)
    mine = torch.where(counted, losses_BT, 0.0).sum(dtype=accumulator(losses_BT))
    total = torch.stack([mine.detach().double(), counted.sum().double()])[None]
    for axis in (plan.ulysses_axis, plan.ring_axis, *over):
        total = axis.all_gather(total).wait().sum(0, keepdim=True)
    everyone, count = total[0].unbind()
    share = mine / count.clamp(min=1).to(mine.dtype)
    return share + ((everyone / count.clamp(min=1)).to(mine.dtype) - share).detach()


def expanded(name: str, x: Tensor, like: Tensor) -> Tensor:
    try:
        return x.expand(like.shape)
    except RuntimeError:
        shapes = f"{name} has shape {tuple(x.shape)}, losses {tuple(like.shape)}"
        raise ValueError(f"{shapes}: {name} must have that shape, or 1 where it says the same for all") from None
