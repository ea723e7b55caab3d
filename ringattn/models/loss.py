"""Losses that are averaged over the real tokens of all ranks.

B batch   T this rank's tokens   V vocabulary
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.check.arguments import of_arguments
from ringattn.check.attention import of_packed
from ringattn.kernels.arrays import accumulator
from ringattn.masks.spec import Docs, raise_if, whole
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once
from ringattn.plans.plan import Plan
from ringattn.torch.agree import agree
from ringattn.torch.check import of_types
from ringattn.torch.sharding import real_tokens

IGNORED = -100  # a label that does not count
MINE = "pass those of this rank's tokens (plan.shard), or use plan.for_length(n)"


def token_mean(
    losses_BT: Tensor, plan: Plan, *, mask: Tensor | None = None, docs: Docs | None = None, over: Sequence[Any] = ()
) -> Tensor:
    """sum of the real tokens' losses over all ranks / number of real tokens over all ranks.

    Every rank gets the same value. Its gradient is this rank's share, so gradients are summed over ranks, never
    averaged. Padding does not count, nor do tokens where `mask`, of bools or integers, is 0 (labels to ignore); their
    losses are ignored, even NaN. `over` is further axes to average over (comms.mesh.axis(mesh, "data")).

    Use `cross_entropy` for labels: F.cross_entropy(reduction="none") gives 0 for ignored ones, which would count here.
    """
    raise_if(of_plan("token_mean", plan))
    problem = of_tokens("losses", losses_BT, "batch, tokens", plan, docs) or of_mask(mask, losses_BT) or of_axes(over)
    compare_ranks(plan, "token_mean", over, problem)
    return mean_over_ranks(losses_BT, counted_of(losses_BT, plan, mask, docs), plan, over)


def cross_entropy(
    logits_BTV: Tensor,
    labels_BT: Tensor,
    plan: Plan,
    *,
    ignore_index: int = -100,
    docs: Docs | None = None,
    over: Sequence[Any] = (),
) -> Tensor:
    """The mean cross entropy of the labels of all ranks that are not `ignore_index`, nor of padding.

    `logits_BTV` and `labels_BT` are this rank's tokens; a label is the class of its own token, so for a language model
    shift the labels before `plan.shard`. Computed in float32 (float64 for float64), for a few tokens at a time, and
    recomputed in backward. The value, its gradient, `docs` and `over` are as in `token_mean`.
    """
    raise_if(of_plan("cross_entropy", plan))
    problem = of_labels(logits_BTV, labels_BT, plan, ignore_index, docs) or of_axes(over)
    compare_ranks(plan, "cross_entropy", over, problem)
    counted = counted_of(labels_BT, plan, labels_BT != ignore_index, docs)
    at_once = tokens_at_once(LOGITS, logits_BTV.shape[2], len(logits_BTV))
    labels = torch.where(counted, labels_BT, 0).long()
    losses = in_pieces(losses_of_counted, at_once, logits_BTV, labels, counted, weights=())
    return mean_over_ranks(losses, counted, plan, over)


def token_losses(logits_BtV: Tensor, labels_Bt: Tensor) -> Tensor:
    """The cross entropy of each token, in float32 (float64 for float64); 0 where its label is IGNORED."""
    logits = logits_BtV.to(accumulator(logits_BtV)).flatten(0, 1)
    return F.cross_entropy(logits, labels_Bt.flatten(), reduction="none", ignore_index=IGNORED).view_as(labels_Bt)


def losses_of_counted(logits_BtV: Tensor, labels_Bt: Tensor, counted_Bt: Tensor) -> Tensor:
    """The same of each token that counts. Others' logits are zeroed: NaN times a gradient of 0 is NaN."""
    return token_losses(torch.where(counted_Bt[..., None], logits_BtV, 0.0), labels_Bt)


def counted_of(like_BT: Tensor, plan: Plan, mask: Tensor | None, docs: Docs | None) -> Tensor:
    counted = torch.ones_like(like_BT, dtype=torch.bool)
    for chosen in (mask, real_tokens(plan, docs, like_BT.device)):
        if chosen is not None:
            counted = counted & chosen.bool()
    return counted


def mean_over_ranks(losses_BT: Tensor, counted: Tensor, plan: Plan, over: Sequence[Any], items: Any = None) -> Tensor:
    """The mean over the tokens of all ranks that count; its gradient is this rank's share.

    With `items`, the sum over these tokens divided by it: a part of the mean over several batches. It may differ
    between the ranks of `over`.
    """
    mine = torch.where(counted, losses_BT, 0.0).sum(dtype=accumulator(losses_BT))
    if items is not None:
        mine = mine / torch.as_tensor(items, dtype=mine.dtype, device=mine.device).clamp(min=1)
    total = torch.stack([mine.detach().double(), counted.sum().double()])[None]
    for axis in (plan.ulysses_axis, plan.ring_axis, *over):
        total = axis.all_gather(total).wait().sum(0, keepdim=True)
    everyone, count = total[0].unbind()
    count = count.clamp(min=1) if items is None else torch.ones_like(count)
    return Everyones.apply(mine / count.to(mine.dtype), (everyone / count).to(mine.dtype))


class Everyones(torch.autograd.Function):
    """The value that all ranks have, bit by bit, with the gradient of this rank's share of it."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def compare_ranks(plan: Plan, call: str, over: Sequence[Any], problem: str | None = None) -> None:
    """Raise the problem on all ranks, or an error if the ranks make other calls or were given other data."""
    agree(plan, {"call": call, "over": "" if problem else str([axis.name for axis in over])}, problem)


def of_plan(function: str, plan: Any) -> str | None:
    if problem := of_arguments(required=True, plan=plan):
        return problem
    other = f"{function} is for torch; JAX arrays are global: take the mean where plan.real_tokens()"
    return None if plan.framework == "torch" else other


def of_tokens(name: str, x: Tensor, dims: str, plan: Plan, docs: Docs | None) -> str | None:
    """Floats of these dims for each of this rank's tokens, and documents of the whole."""
    if problem := of_types(**{name: x}) or of_arguments(docs=docs):
        return problem
    shape = tuple(x.shape)
    if len(shape) != len(dims.split(", ")) or not x.is_floating_point() or not shape[-1]:
        return f"{name} has shape {shape} and dtype {x.dtype}; expected floats [{dims}]"
    if shape[1] != plan.local_len:
        return f"{name} has {shape[1]} tokens, a rank of this plan holds {plan.local_len} ({plan}); {MINE}"
    return of_packed("docs", docs, plan.seq_len, shape[0])


def of_labels(logits_BTV: Tensor, labels_BT: Tensor, plan: Plan, ignore_index: Any, docs: Docs | None) -> str | None:
    """Logits and a label for each of this rank's tokens; on CPUs the labels' values are checked too."""
    if problem := of_tokens("logits", logits_BTV, "batch, tokens, vocabulary", plan, docs) or of_types(
        labels=labels_BT
    ):
        return problem
    shape = tuple(logits_BTV.shape)
    if tuple(labels_BT.shape) != shape[:2] or labels_BT.dtype not in (torch.int32, torch.int64):
        return (
            f"labels has shape {tuple(labels_BT.shape)} and dtype {labels_BT.dtype}; expected int64 or int32 "
            f"{shape[:2]}, a class for each token"
        )
    if labels_BT.device != logits_BTV.device:
        return f"labels is on {labels_BT.device}, logits on {logits_BTV.device}; put both on one device"
    if whole(ignore_index) is None:
        return f"ignore_index={ignore_index!r}: the label that does not count, a whole number"
    if labels_BT.is_cpu:
        counted = counted_of(labels_BT, plan, labels_BT != ignore_index, docs)
        wrong = labels_BT[counted & ((labels_BT < 0) | (labels_BT >= shape[2]))]
        if wrong.numel():
            return f"label {wrong[0]} is not among {shape[2]} classes, nor ignore_index={ignore_index}"
    return None


def of_axes(over: Any) -> str | None:
    if isinstance(over, list | tuple) and all(hasattr(axis, "all_gather") for axis in over):
        return None
    return f"over={over!r}: a list of axes, such as [ringattn.comms.mesh.axis(mesh, 'data')]"


def of_mask(mask: Tensor | None, like: Tensor) -> str | None:
    if mask is None:
        return None
    if problem := of_types(mask=mask):
        return problem
    if mask.is_floating_point() or mask.is_complex():
        return f"mask is {mask.dtype}: a token counts or does not, so give bools (mask > 0) or integers"
    fits = mask.dim() <= 2 and all(m in (1, n) for m, n in zip(mask.shape[::-1], like.shape[::-1], strict=False))
    if not fits or mask.device != like.device:
        shapes = f"mask has shape {tuple(mask.shape)} on {mask.device}, losses {tuple(like.shape)} on {like.device}"
        return f"{shapes}: mask must be there and have that shape, or 1 in dims where it is the same for all"
    return None
