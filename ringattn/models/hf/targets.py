"""What each token predicts, and the loss that is averaged over the tokens of all ranks.

B batch   T all tokens   t this rank's tokens   V vocabulary
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.models.batch import IGNORED, following
from ringattn.models.loss import compare_ranks, mean_over_ranks
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.planning import Plan
from ringattn.spec import Docs


def targets_of(
    labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None, docs: Docs | None = None
) -> list[Tensor]:
    """What each token [B, T] is to predict: IGNORED for the last token of a row, and what padding predicts.

    Several, if several branches go on from some token; none without labels.
    """
    targets = [] if shift_labels is None else [shift_labels]
    if labels is not None and not targets:
        targets = following(labels, docs)
    return targets if attention_mask is None else [x.masked_fill(~attention_mask.bool(), IGNORED) for x in targets]


@torch.compiler.disable
def with_loss(self: Any, output: Any, targets: list[Tensor], plan: Plan, items: Any) -> Any:
    """The model's output, and first of all the loss over all ranks."""
    spread = self.ringattn
    loss = mean_loss(output.logits, targets, plan, spread.over, spread.compare, items)
    return changed(output, loss=scaled(loss, spread.ranks) if spread.averaged else loss)


def changed(output: Any, **new: Any) -> Any:
    """The model's output with other values, which come first."""
    return type(output)(**{**new, **{name: x for name, x in output.items() if name not in new}})


def scaled(loss: Tensor, ranks: int) -> Tensor:
    """The same loss, whose gradient is `ranks` times as large: a mean over the ranks makes it their sum."""
    return loss + (ranks - 1) * (loss - loss.detach())


def mean_loss(
    logits_BtV: Tensor, targets: list[Tensor], plan: Plan, over: Sequence[Any], compare: bool = True, items: Any = None
) -> Tensor:
    """The mean cross entropy of the targets [B, T] of all ranks that count; with `items`, their sum divided by it."""
    first, *more = targets
    labels = plan.shard(first, dim=1, compare=compare).to(logits_BtV.device)
    counted = plan.shard(first != IGNORED, dim=1, compare=False).to(logits_BtV.device)
    at_once = tokens_at_once(LOGITS, logits_BtV.shape[-1], len(logits_BtV))
    losses = in_pieces(cross_entropy, at_once, logits_BtV, labels)
    if more:  # of a few tokens, where branches go on from them
        others = plan.shard(torch.stack(more) - IGNORED, dim=2, compare=False).to(logits_BtV.device) + IGNORED
        n, rows, at = (others != IGNORED).nonzero(as_tuple=True)
        parting = cross_entropy(logits_BtV[rows, at][None], others[n, rows, at][None])
        losses, counted = torch.cat([losses.flatten(), parting[0]]), F.pad(counted.flatten(), (0, len(at)), value=True)
    compare_ranks(plan, "the loss of a prepared model", over)
    return mean_over_ranks(losses, counted, plan, over, items)


def cross_entropy(logits_BtV: Tensor, labels_Bt: Tensor) -> Tensor:
    """In float32, of each token that has a label; 0 for the others."""
    logits, labels = logits_BtV.float().flatten(0, 1), labels_Bt.flatten()
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED).view_as(labels_Bt)
