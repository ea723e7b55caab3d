"""Recomputation of layers that keeps attention: its work grows with the square of the length."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ringattn.torch.attention.compiled
import ringattn.torch.linear.compiled  # noqa: F401 (their ops are named below)


def keep_attention(*others: Any) -> Any:
    """The `context_fn` of torch's checkpoint with which backward recomputes everything but attention.

    What is kept of attention is as large as a layer's input. `others` are further ops whose results are kept.
    """
    ours = torch.ops.ringattn
    kept = {ours.attention.default, ours.linear_attention.default, *others}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
