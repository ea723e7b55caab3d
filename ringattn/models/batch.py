"""A batch of whole rows as this rank's part of it: what a training loop needs of a plan, in one call.

B rows   T tokens of a row   t this rank's tokens   n real tokens of a batch
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.loss import IGNORED, cross_entropy
from ringattn.plans.plan import Plan


class Batch(NamedTuple):
    """This rank's part of a batch, and the plan and documents to call a model with."""

    tokens: Tensor  # [B, t]
    labels: Tensor  # [B, t]: what each token predicts; IGNORED where it predicts nothing
    positions: Tensor  # [t]: of the tokens in the row that they came in
    plan: Plan
    docs: Docs | None

    def loss(self, logits: Tensor, over: Sequence[Any] = ()) -> Tensor:
        """The mean cross entropy of the labels of all ranks, as `ringattn.cross_entropy`; `logits` is [B, t, V]."""
        return cross_entropy(logits, self.labels, self.plan, ignore_index=IGNORED, docs=self.docs, over=over)


def local_batch(
    tokens: Tensor, plan: Plan, *, labels: Tensor | None = None, docs: Docs | None = None, deal: bool | None = None,
    spec: AttentionSpec | None = None, device: Any = None,
) -> Batch:  # fmt: skip
    """This rank's part of `tokens` [B, T], which all ranks have whole.

    `labels` [B, T] are what each token predicts, -100 for nothing. By default that is the next token of its document.
    With `deal` all rows become one row of their real tokens, whose documents are dealt out over the ranks by their
    work, that of `spec` (layout="balanced"); by default so if the plan is balanced. Call the model with `batch.plan`
    and `batch.docs`, since every batch then has its own.
    """
    if labels is None:
        labels, *more = following(tokens, docs)
        if more:
            raise ValueError("several branches of these trees go on from one token: pass labels=, with one of them")
    at = torch.arange(tokens.shape[1])
    if docs is not None and (plan.layout == "balanced" if deal is None else deal):
        row = dealt(plan, docs, spec or AttentionSpec(), (tokens.shape[0], tokens.shape[1]))
        plan = row.plan
        if row.real is not None:
            docs, tokens, labels, at = row.docs, row.row(tokens), row.row(labels), row.real % len(at)
    tokens = plan.shard(tokens, dim=1).to(device or tokens.device)
    labels = local_labels(labels, plan).to(device or labels.device)
    return Batch(tokens, labels, plan.shard(at, dim=0, compare=False).to(tokens.device), plan, docs)


def local_labels(labels: Tensor, plan: Plan, dim: int = 1, compare: bool = True) -> Tensor:
    """This rank's part of whole labels; IGNORED where the plan pads."""
    mine: Tensor = plan.shard(labels.long() - IGNORED, dim=dim, compare=compare)  # pads with 0
    return mine + IGNORED


class Dealt(NamedTuple):
    """A batch [B, T], or one row of its real tokens, and a plan that may deal out its documents by their work."""

    plan: Plan
    docs: Docs | None
    real: Tensor | None  # [n]: which of the B * T tokens; None where the rows stay as they are
    shape: tuple[int, int]

    def row(self, x: Tensor, dim: int = 1) -> Tensor:
        """[B or 1, T, ...] as [1, n, ...]; tokens in dim 2 have further numbers in dim 0."""
        if self.real is None:
            return x
        if dim == 2:
            return torch.stack([self.row(each) for each in x])
        rows = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return rows.index_select(0, self.real.to(x.device))[None]

    def whole(self, x: Tensor) -> Tensor:
        """The rows [B, T, ...] of all ranks' [1, t, ...]; zeros for padding."""
        rows: Tensor = self.plan.unshard(x)
        if self.real is None:
            return rows
        whole = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return whole.index_copy(0, self.real.to(x.device), rows[0]).unflatten(0, self.shape)


def dealt(plan: Plan, docs: Docs, spec: AttentionSpec, shape: tuple[int, int], real: np.ndarray | None = None) -> Dealt:
    """The batch as one row of its real tokens, dealt out by its work: the plan's, or that of this attention.

    Trees, and a batch without documents, keep their rows. `real` [B, T] says which tokens are real; by default all but
    those after a row's last document.
    """
    work = plan.work or AttentionSpec(spec.causal, spec.window, spec.chunk, spec.first)
    plan = plan.replace(layout="balanced", work=work)
    if real is None:
        real = np.broadcast_to(np.arange(shape[1]) < docs.starts[:, -1:], shape)
    if not docs.plain or not real.any():
        return Dealt(plan.for_docs(docs), docs, None, shape)
    edges = np.unique(docs.starts + shape[1] * np.arange(shape[0])[:, None])
    lengths = np.diff(np.append(0, np.cumsum(real))[np.append(edges, real.size)])
    docs = Docs.from_lengths(lengths[lengths > 0])
    return Dealt(plan.for_docs(docs), docs, torch.from_numpy(np.flatnonzero(real)), shape)


def following(labels: Tensor, docs: Docs | None) -> list[Tensor]:
    """What each token [B, T] predicts: the label of the next one of its document, in trees along its branches.

    Where several branches go on from a token, it has a target in several of these. Targets are int64, whatever the
    tokens are: bytes have no value for IGNORED.
    """
    labels = labels.long()
    if docs is None:
        return [F.pad(labels[:, 1:], (0, 1), value=IGNORED)]
    cuts, joins = [], []  # (row, token) that ends a document, and (which target, row, token, the token it predicts)
    for row in range(len(labels)):
        i = min(row, len(docs.starts) - 1)
        starts = docs.starts[i].tolist()
        parents = [-1] * (len(starts) - 1) if docs.parents is None else docs.parents[i].tolist()
        cuts += [(row, at) for at in (*(stop - 1 for stop in starts[1:] if stop), *range(starts[-1], docs.length))]
        last: list[int] = []
        branches: dict[int, int] = {}
        for start, stop, parent in zip(starts, starts[1:], parents, strict=False):
            before = last[parent] if parent >= 0 else -1
            last.append(stop - 1 if stop > start else before)
            if before >= 0 and stop > start:
                branches[before] = branches.get(before, -1) + 1
                joins.append((branches[before], row, before, start))
    targets = labels.new_full((1 + max((n for n, *_ in joins), default=0), *labels.shape), IGNORED)
    targets[0] = labels.roll(-1, 1)
    targets[0].index_put_(tuple(torch.tensor(cuts, device=labels.device).T), labels.new_tensor(IGNORED))
    if joins:
        n, rows, before, start = torch.tensor(joins, device=labels.device).T
        targets[n, rows, before] = labels[rows, start]
    return list(targets)
