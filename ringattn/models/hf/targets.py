"""What each token predicts, the loss that is averaged over the tokens of all ranks, and logits of some tokens only.

B batch   T all tokens   t this rank's tokens   m kept tokens of this rank   n kept tokens   V vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.masks.spec import Docs
from ringattn.models.batch import IGNORED, Dealt, following, local_labels
from ringattn.models.loss import compare_ranks, mean_over_ranks, token_losses
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.plans.plan import Plan
from ringattn.torch.sharding import Gathered, local_positions


def targets_of(
    labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None, docs: Docs | None = None
) -> list[Tensor]:
    """What each token [B, T] is to predict: IGNORED for the last token of a row, and what padding predicts.

    Several, if several branches go on from some token; none without labels.
    """
    targets = [] if shift_labels is None else [shift_labels.long()]
    if labels is not None and not targets:
        targets = following(labels, docs)
    return targets if attention_mask is None else [x.masked_fill(~attention_mask.bool(), IGNORED) for x in targets]


class Wanted(NamedTuple):
    labels: Tensor  # [B, t]; IGNORED for nothing
    others: Tensor | None  # [n, B, t]: where several branches go on from a token


@torch.compiler.disable
def wanted(targets: list[Tensor], batch: Dealt, compare: bool) -> Wanted | None:
    """This rank's part of the targets [B, T], as the batch is dealt out; None if there are none."""
    if not targets:
        return None
    labels, *more = map(batch.row, targets)
    others = local_labels(torch.stack(more), batch.plan, dim=2, compare=False) if more else None
    return Wanted(local_labels(labels, batch.plan, compare=compare), others)


@torch.compiler.disable
def with_loss(self: Any, output: Any, asked: Wanted, plan: Plan, items: Any) -> Any:
    """The model's output, and first of all the loss over all ranks; of losses in the place of logits only that."""
    spread, result = self.ringattn, output.logits
    loss = mean_loss(result, asked, plan, spread.over, items)
    new = {"loss": scaled(loss, spread.ranks) if spread.averaged else loss}
    return changed(output, **new, **({"logits": None} if result.dim() == 2 else {}))


def changed(output: Any, **new: Any) -> Any:
    """The model's output with other values, which come first."""
    return type(output)(**{**new, **{name: x for name, x in output.items() if name not in new}})


def scaled(loss: Tensor, ranks: int) -> Tensor:
    """The same loss, whose gradient is `ranks` times as large: a mean over the ranks makes it their sum."""
    return loss + (ranks - 1) * (loss - loss.detach())


def mean_loss(result: Tensor, asked: Wanted, plan: Plan, over: Sequence[Any], items: Any = None) -> Tensor:
    """The mean cross entropy of the targets of all ranks that count; with `items`, their sum divided by it.

    `result` is the logits [B, t, V], or the cross entropy [B, t] of `asked.labels`.
    """
    labels = asked.labels.to(result.device)
    losses, counted = result, labels != IGNORED
    if result.dim() == 3:
        at_once = tokens_at_once(LOGITS, result.shape[-1], len(result))
        losses = in_pieces(token_losses, at_once, result, labels, weights=())
    if asked.others is not None:  # of a few tokens, where branches go on from them
        others = asked.others.to(result.device)
        n, rows, at = (others != IGNORED).nonzero(as_tuple=True)
        parting = token_losses(result[rows, at][None], others[n, rows, at][None])
        losses, counted = torch.cat([losses.flatten(), parting[0]]), F.pad(counted.flatten(), (0, len(at)), value=True)
    compare_ranks(plan, "the loss of a prepared model", over)
    return mean_over_ranks(losses, counted, plan, over, items)


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
                f"logits_to_keep has shape {tuple(keep.shape)} and dtype {keep.dtype}; expected positions [n] below {T}"
            )
        at = np.where(at < 0, at + T, at)
    else:
        at = np.arange(max(0, T - keep), T)
    places = [(r, u) for r in range(plan.ring) for u in range(plan.ulysses)]
    rows = {place: np.flatnonzero(np.isin(local_positions(plan, *place), at)) for place in places}
    most, slots = max(map(len, rows.values())), np.empty(T, np.int64)
    for i, place in enumerate(places):
        slots[local_positions(plan, *place)[rows[place]]] = i * most + np.arange(len(rows[place]))
    mine, order = (torch.from_numpy(x).to(device) for x in (rows[plan.place], slots[at]))
    return Kept(mine, order, most, plan)
