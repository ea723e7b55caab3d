"""TRL's trainers over ranks: their models answer with log-probabilities instead of logits.

TRL's `add_fused_lm_head` gives a model's forward the argument `fused_lm_head`. In a prepared model each rank computes
the numbers of its tokens, and all ranks get those of the whole sequences, from which TRL computes its losses.
"""

from typing import Any

import torch
from torch import Tensor

from ringattn.planning import Plan
from ringattn.torch.models.hf_packed import IGNORED


def is_head(forward: Any) -> bool:
    """Whether this is the forward that TRL gave a model, with its argument `fused_lm_head`."""
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def log_probs(self: Any, plan: Plan, given: dict[str, Any], targets: Tensor | None, shifted: bool, items: Any) -> Any:
    """TRL's output for the whole sequences, on every rank; its gradient is the sum of the gradients on all ranks."""
    run = getattr(self, "ringattn_fused", self.local_forward)
    if not is_head(run):
        raise ValueError(f"{type(self).__name__} does not take fused_lm_head: TRL did not give it its head")
    if targets is None:
        raise ValueError("fused_lm_head without labels: there is nothing to give log-probabilities of")
    mine = plan.shard(targets - IGNORED, dim=1, compare=self.ringattn.compare) + IGNORED  # also what padding predicts
    output = run(**given, fused_lm_head=True, shift_labels=mine)
    found = {}
    for name, x in output.items():
        if isinstance(x, Tensor) and x.shape == mine.shape:
            x = plan.unshard(x.int()).bool() if x.dtype == torch.bool else plan.unshard(x)
            found[name] = x if shifted else x[:, :-1]
    count = found["label_mask"].sum().clamp(min=1) if items is None else items
    return type(output)(loss=-found["log_probs"].sum() / count, **found)
