"""Batches of packed or padded rows as one row of real tokens, whose documents are dealt out over the ranks by work.

B batch   T all tokens of a row   n real tokens of the batch   t those of this rank
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.batch import as_one_row, balanced
from ringattn.models.hf.choice import Choice, attention_of
from ringattn.plans.plan import Plan


class Dealt(NamedTuple):
    """A batch [B, T] as one row of its real tokens, and the plan for its documents."""

    plan: Plan
    docs: Docs
    real: Tensor  # [n]: which of the B * T tokens
    shape: tuple[int, int]

    def row(self, x: Tensor) -> Tensor:
        """[B or 1, T, ...] as [1, n, ...]."""
        whole = x.expand(*self.shape, *x.shape[2:]).flatten(0, 1)
        return whole.index_select(0, self.real.to(x.device))[None]

    def whole(self, x: Tensor) -> Tensor:
        """The rows [B, T, ...] of all ranks' [1, t, ...]; zeros for padding."""
        (rows,) = self.plan.unshard(x)
        room = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
        return room.index_copy(0, self.real.to(x.device), rows).unflatten(0, self.shape)


def joined(last: Dealt | Plan, x: Tensor) -> Tensor:
    """The rows of all ranks' tokens."""
    return last.whole(x) if isinstance(last, Dealt) else last.unshard(x)


def dealt(
    model: Any, plan: Plan, docs: Docs | None, attention_mask: Tensor | None, shape: tuple[int, int]
) -> Dealt | None:
    """The batch as one row, if the model's plans leave the layout open, or deal out documents, and the batch has some.

    Layers of linear attention, which compute documents in rows of their own then, cost more: models with such layers
    are dealt out on request, and not where they are compiled, since that would be done anew for each batch.
    """
    if docs is None or plan.ring == 1:
        return None
    source, linear = model.ringattn.source, model.ringattn_before.linear
    is_open = isinstance(source, Choice) and source.layout == "auto" and not linear
    if not (is_open or plan.layout == "balanced") or (linear and compiled(model)):
        return None
    spec: AttentionSpec = attention_of(model).get("spec", AttentionSpec())
    open_plan = balanced(plan, spec)
    if not docs.plain:  # whose tokens see others than those of their document
        single = shape[0] == 1 and not docs.padded
        return Dealt(open_plan.for_docs(docs), docs, torch.arange(shape[1]), shape) if single else None
    one_row = as_one_row(docs, shape, None if attention_mask is None else attention_mask.bool().numpy(force=True))
    if one_row is None:
        return None
    row, real = one_row
    return Dealt(open_plan.for_docs(row), row, real, shape)


def compiled(model: Any) -> bool:
    """Whether torch.compile runs the model, or a part of it."""
    running = torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
    return running or any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
