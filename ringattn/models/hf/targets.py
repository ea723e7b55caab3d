"""What each token predicts, and the loss that is averaged over the tokens of all ranks.

B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.masks.spec import Docs
from ringattn.models.batch import IGNORED, following
from ringattn.models.loss import compare_ranks, mean_over_ranks
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.plans.plan import Plan


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
    """What this rank's tokens are to predict."""

    labels: Tensor  # [B, t]; IGNORED for nothing
    others: Tensor | None  # [n, B, t]: where several branches go on from a token


@torch.compiler.disable
def wanted(self: Any, targets: list[Tensor], plan: Plan) -> Wanted | None:
    """This rank's part of the targets [B, T]; None if there are none."""
    if not targets:
        return None
    first, *more = (x - IGNORED for x in targets)  # padding, 0, becomes IGNORED
    labels = plan.shard(first, dim=1, compare=self.ringattn.compare) + IGNORED
    others = plan.shard(torch.stack(more), dim=2, compare=False) + IGNORED if more else None
    return Wanted(labels, others)


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
        losses = in_pieces(
            cross_entropy, tokens_at_once(LOGITS, result.shape[-1], len(result)), result, labels, weights=()
        )
    if asked.others is not None:  # of a few tokens, where branches go on from them
        others = asked.others.to(result.device)
        n, rows, at = (others != IGNORED).nonzero(as_tuple=True)
        parting = cross_entropy(result[rows, at][None], others[n, rows, at][None])
        losses, counted = torch.cat([losses.flatten(), parting[0]]), F.pad(counted.flatten(), (0, len(at)), value=True)
    compare_ranks(plan, "the loss of a prepared model", over)
    return mean_over_ranks(losses, counted, plan, over, items)


def cross_entropy(logits_BtV: Tensor, labels_Bt: Tensor) -> Tensor:
    """In float32, of each token that has a label; 0 for the others."""
    logits, labels = logits_BtV.float().flatten(0, 1), labels_Bt.flatten()
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED).view_as(labels_Bt)
