"""A gradient as a list of parts, which are added up in one pass when the sum is needed.

A part covers all rows and heads, or some of them, and keeps its dtype: a bfloat16 result of a vendor kernel is stored
and sent as bfloat16. Sums are computed in float32 (float64 for float64).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """A part `grad` [B, rows, heads, D] of a gradient, for the rows and heads in these half-open ranges."""

    grad: Tensor
    rows: tuple[int, int]
    heads: tuple[int, int]


class Total:
    """The parts of a gradient with the shape of `like`, in the order in which they were added."""

    def __init__(self, like: Tensor):
        self.shape, self.device = like.shape, like.device
        self.exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.parts: list[Part] = []

    def add(self, grad: Any, rows: slice = slice(None), heads: slice = slice(None)) -> None:
        """Add a tensor or a total for these rows and heads. None, and a sum that is already in `place`, add nothing."""
        if grad is None or grad is self.place:
            return
        t, h = range(self.shape[1])[rows], range(self.shape[2])[heads]
        parts = grad.parts if isinstance(grad, Total) else [Part(grad, (0, len(t)), (0, len(h)))]
        for x, (first, end), (top, bottom) in parts:
            self.parts.append(Part(x, (t.start + first, t.start + end), (h.start + top, h.start + bottom)))

    @property
    def place(self) -> Tensor | None:
        """The sum so far, if it is one tensor: a kernel may add its part to it in place."""
        if len(self.parts) == 1 and self.covers(self.parts[0]) and self.parts[0].grad.dtype == self.exact:
            return self.parts[0].grad
        return None

    def fold(self) -> None:
        """Add up all parts if they take more than 1.5 times the memory of the sum."""
        if 2 * sum(part.grad.nbytes for part in self.parts) > 3 * self.shape.numel() * self.exact.itemsize:
            self.tensor(self.exact)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """The sum, which replaces all parts. It may reuse the memory of the first part."""
        total = self.sum_of(self.parts, dtype)
        self.parts = [self.whole(total)]
        return total

    def whole(self, grad: Tensor) -> Part:
        return Part(grad, (0, self.shape[1]), (0, self.shape[2]))

    def rows_at(self, at: range, dtype: torch.dtype) -> Tensor:
        """These rows of the sum: a view if one part alone covers them, zeros if none does."""
        parts = [part for part in self.parts if part.rows[0] < at.stop and at.start < part.rows[1]]
        if not parts:
            return torch.zeros(self.shape[0], len(at), *self.shape[2:], dtype=dtype, device=self.device)
        x, (first, end), heads = parts[0]
        alone = len(parts) == 1 and first <= at.start and at.stop <= end and heads == (0, self.shape[2])
        if not alone or x.dtype != dtype:
            x, first = self.tensor(dtype), 0
        return x[:, at.start - first : at.stop - first : at.step]

    def sum_of(self, parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
        if not parts:
            return torch.zeros(self.shape, dtype=dtype, device=self.device)
        first = parts[0].grad
        if len(parts) == 1 and self.covers(parts[0]):
            return first.to(dtype)
        in_place = self.covers(parts[0]) and first.dtype == dtype == self.exact and first.is_contiguous()
        if self.device.type == "cuda" and self.exact == torch.float32:
            from ringattn.kernels.attention.triton.gradients import MOST, add_parts  # triton is part of torch for GPUs

            while len(parts) > MOST:
                room = torch.empty(self.shape, dtype=self.exact, device=self.device)
                parts = [self.whole(add_parts(room, parts[:MOST])), *parts[MOST:]]
            return add_parts(first if in_place else torch.empty(self.shape, dtype=dtype, device=self.device), parts)
        total = first if in_place else torch.zeros(self.shape, dtype=self.exact, device=self.device)
        for x, rows, heads in parts[in_place:]:
            total[:, slice(*rows), slice(*heads)].add_(x)
        return total.to(dtype)

    def covers(self, part: Part) -> bool:
        return part.grad.shape == self.shape


def in_dtype(grad: Tensor | Total, dtype: torch.dtype) -> Tensor:
    """A gradient, or any other tensor, in this dtype."""
    if isinstance(grad, Total):
        return grad.tensor(dtype)
    return grad if grad.dtype == dtype else grad.to(dtype)  # asking first costs the host less
