"""What is done to each token by itself, done to a few at once: what lies in between is never there for all of them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS = 2**28  # of so many numbers at once


def tokens_at_once(numbers: int, width: int, batch: int) -> int:
    """Of how many tokens a tensor of that width has at most so many numbers."""
    return max(1, numbers // (width * max(1, batch)))


def in_pieces(function: Callable[..., Tensor], tokens: int, *given: Tensor) -> Tensor:
    """`function` of so many tokens at once. Backward computes each piece again, when its turn comes."""
    if given[0].shape[1] <= tokens:
        return function(*given)
    pieces = zip(*(x.split(tokens, 1) for x in given), strict=True)
    return torch.cat([checkpoint(function, *piece, use_reentrant=False) for piece in pieces], 1)
