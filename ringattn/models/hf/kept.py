"""`logits_to_keep` over ranks: the logits of some tokens, wherever they lie, on every rank.

B batch   T all tokens   m kept tokens of this rank   n kept tokens   V vocabulary
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.plans.plan import Plan
from ringattn.torch.sharding import Gathered, local_positions


class Kept(NamedTuple):
    """Which of this rank's tokens are kept, and how the kept tokens of all ranks make the result."""

    mine: Tensor  # [m], local indices
    order: Tensor  # [n], indices into the kept tokens of all ranks, each padded to `most`
    most: int
    plan: Plan

    @torch.compiler.disable
    def join(self, logits_BmV: Tensor) -> Tensor:
        """The logits of all kept tokens [B, n, V] on every rank; differentiable as `plan.unshard` is."""
        padded = F.pad(logits_BmV, [0, 0, 0, self.most - logits_BmV.shape[1]])
        return Gathered.apply(padded, self.plan, 1).index_select(1, self.order)


def kept(keep: int | Tensor, plan: Plan, device: torch.device) -> Kept:
    """The last `keep` tokens, or those at the positions of a tensor."""
    T = plan.seq_len
    if isinstance(keep, Tensor):
        at = keep.numpy(force=True)
        if at.ndim != 1 or at.dtype.kind not in "iu" or not at.size or (at < -T).any() or (at >= T).any():
            raise ValueError(
                f"logits_to_keep has shape {tuple(keep.shape)} and dtype {keep.dtype}; expected positions [n], of {T} "
                "tokens"
            )
        at = np.where(at < 0, at + T, at)
    else:
        at = np.arange(max(0, T - keep), T)
    places = [(r, u) for r in range(plan.ring) for u in range(plan.ulysses)]
    rows = {place: np.flatnonzero(np.isin(local_positions(plan, *place), at)) for place in places}
    most, slots = max(map(len, rows.values())), np.empty(T, np.int64)
    for i, place in enumerate(places):
        slots[local_positions(plan, *place)[rows[place]]] = i * most + np.arange(len(rows[place]))
    mine = rows[plan.ring_axis.rank, plan.ulysses_axis.rank]
    return Kept(torch.from_numpy(mine).to(device), torch.from_numpy(slots[at]).to(device), most, plan)
