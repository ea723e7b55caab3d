"""Apply a function of single tokens to a few tokens at a time, so that intermediate results stay small."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS = 2**28  # the most logits at a time


def tokens_at_once(numbers: int, width: int, batch: int) -> int:
    """The most tokens for which a tensor of this width has at most `numbers` numbers."""
    return max(1, numbers // (width * max(1, batch)))


def in_pieces(function: Callable[..., Tensor], tokens: int, *given: Tensor) -> Tensor:
    """`function` of a few tokens at a time. Backward recomputes each piece."""
    if given[0].shape[1] <= tokens:
        return function(*given)
    pieces = zip(*(x.split(tokens, 1) for x in given), strict=True)
    return torch.cat([checkpoint(function, *piece, use_reentrant=False) for piece in pieces], 1)
