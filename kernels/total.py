"""A gradient as a list of terms, which are added up in one pass when the sum is needed.

A term covers all rows and heads, or some of them, and keeps its dtype: a bfloat16 result of a vendor kernel is stored
and sent as bfloat16. Sums are computed in float32 (float64 for float64).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EVERY = slice(None)


# A term [B, rows, heads, D] of a gradient, for the rows and heads in these half-open ranges.
Term = tuple[Tensor, tuple[int, int], tuple[int, int]]


class Total:
    """The terms of a gradient with the shape of `like`, in the order in which they were added.

    `running` is the sum so far, if it is one tensor: a kernel may add its own to it in place.
    """

    def __init__(self, like: Tensor):
        self.shape, self.device = like.shape, like.device
        self.exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.all = (0, like.shape[1]), (0, like.shape[2])  # rows and heads of a term that covers it
        self.terms: list[Term] = []
        self.nbytes = 0
        self.running: Tensor | None = None

    def add(self, grad: Any, rows: slice = EVERY, heads: slice = EVERY) -> None:
        """Add a tensor or a total for these rows and heads. None, and a sum that is already `running`, add nothing."""
        if grad is None or grad is self.running:
            return
        t, h = rows.start or 0, heads.start or 0
        terms = grad.terms if isinstance(grad, Total) else [(grad, (0, grad.shape[1]), (0, grad.shape[2]))]
        for x, (first, end), (top, bottom) in terms:
            self.terms.append((x, (t + first, t + end), (h + top, h + bottom)))
            self.nbytes += x.nbytes
        x = self.terms[0][0] if len(self.terms) == 1 else None
        self.running = x if x is not None and x.shape == self.shape and x.dtype == self.exact else None

    def fold(self) -> None:
        """Add up all terms if they take more than 1.5 times the memory of the sum."""
        if len(self.terms) > 1 and 2 * self.nbytes > 3 * self.shape.numel() * self.exact.itemsize:
            self.tensor(self.exact)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """The sum, which replaces all terms. It may reuse the memory of the first one."""
        total = self.sum_of(self.terms, dtype)
        self.terms, self.nbytes = [(total, *self.all)], total.nbytes
        self.running = total if dtype == self.exact else None
        return total

    def rows_at(self, at: range, dtype: torch.dtype) -> Tensor:
        """These rows of the sum: a view if one term alone covers them, zeros if none does."""
        terms = [(x, rows, heads) for x, rows, heads in self.terms if rows[0] < at.stop and at.start < rows[1]]
        if not terms:
            return torch.zeros(self.shape[0], len(at), *self.shape[2:], dtype=dtype, device=self.device)
        x, (first, end), heads = terms[0]
        single = len(terms) == 1 and first <= at.start and at.stop <= end and heads == self.all[1]
        if not single or x.dtype != dtype:
            x, first = self.tensor(dtype), 0
        return x[:, at.start - first : at.stop - first : at.step]

    def sum_of(self, terms: Sequence[Term], dtype: torch.dtype) -> Tensor:
        if not terms:
            return torch.zeros(self.shape, dtype=dtype, device=self.device)
        first = terms[0][0]
        covers = first.shape == self.shape
        if len(terms) == 1 and covers:
            return first.to(dtype)
        in_place = covers and first.dtype == dtype and first.is_contiguous()
        if self.device.type == "cuda" and self.exact == torch.float32:
            from ringattn.kernels.attention.triton.gradients import TERMS, add_parts  # triton is part of torch for GPUs

            while len(terms) > TERMS:
                room = torch.empty(self.shape, dtype=self.exact, device=self.device)
                terms = [(add_parts(room, terms[:TERMS]), *self.all), *terms[TERMS:]]
            return add_parts(first if in_place else torch.empty(self.shape, dtype=dtype, device=self.device), terms)
        in_place = in_place and dtype == self.exact  # others would be rounded after each term
        total = first if in_place else torch.zeros(self.shape, dtype=self.exact, device=self.device)
        for x, rows, heads in terms[in_place:]:
            total[:, slice(*rows), slice(*heads)].add_(x)
        return total.to(dtype)


def in_dtype(grad: Tensor | Total, dtype: torch.dtype) -> Tensor:
    """A gradient, or any other tensor, in this dtype."""
    if isinstance(grad, Total):
        return grad.tensor(dtype)
    return grad if grad.dtype == dtype else grad.to(dtype)  # asking first costs the host less
