"""A gradient as the parts that it is the sum of: kept as they were found, and added in one pass when it is asked for.

A part has all rows and heads or some of them, and a dtype of its own: what a vendor's tile finds in bfloat16 loses
nothing if it is kept and sent as such. Sums are made in float32 (in float64 for float64).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator

MOST = 6  # parts that one pass adds


class Part(NamedTuple):
    """What was found [B, rows, heads, D] for the rows and heads from a first one to before another."""

    found: Tensor
    rows: tuple[int, int]
    heads: tuple[int, int]


class Total:
    """What adds up to a gradient of the shape of `like`, in the order in which it is added."""

    def __init__(self, like: Tensor):
        self.shape, self.device, self.exact = like.shape, like.device, accumulator(like)
        self.parts: list[Part] = []

    def add(self, found: Any, rows: slice = slice(None), heads: slice = slice(None)) -> None:
        """A tensor or a total of these rows and heads; None, or what was added up in `place`, adds nothing."""
        if found is None or found is self.place:
            return
        t, h = range(self.shape[1])[rows], range(self.shape[2])[heads]
        parts = found.parts if isinstance(found, Total) else [Part(found, (0, len(t)), (0, len(h)))]
        for x, (first, end), (top, bottom) in parts:
            self.parts.append(Part(x, (t.start + first, t.start + end), (h.start + top, h.start + bottom)))

    @property
    def place(self) -> Tensor | None:
        """Where a kernel may add its part by itself: the sum so far, if it lies in one tensor."""
        if len(self.parts) == 1 and self.covers(self.parts[0]) and self.parts[0].found.dtype == self.exact:
            return self.parts[0].found
        return None

    def fold(self) -> None:
        """Make one part of all, if they take more memory than the sum and one more of half its width would."""
        if 2 * sum(part.found.nbytes for part in self.parts) > 3 * self.shape.numel() * self.exact.itemsize:
            self.tensor(self.exact)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """The sum, from here on the only part. It may lie in the memory of the first one."""
        total = self.sum_of(self.parts, dtype)
        self.parts = [self.whole(total)]
        return total

    def whole(self, found: Tensor) -> Part:
        return Part(found, (0, self.shape[1]), (0, self.shape[2]))

    def rows_at(self, at: range, dtype: torch.dtype) -> Tensor:
        """Those rows of the sum. What one part alone has is left where it lies; what none has is zero."""
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
        first = parts[0].found
        if len(parts) == 1 and self.covers(parts[0]):
            return first.to(dtype)
        in_place = self.covers(parts[0]) and first.dtype == dtype == self.exact and first.is_contiguous()
        if self.device.type == "cuda" and self.exact == torch.float32:
            from ringattn.kernels.triton.gradients import add_parts  # comes with every torch that has a GPU

            while len(parts) > MOST:
                room = torch.empty(self.shape, dtype=self.exact, device=self.device)
                parts = [self.whole(add_parts(room, parts[:MOST])), *parts[MOST:]]
            return add_parts(first if in_place else torch.empty(self.shape, dtype=dtype, device=self.device), parts)
        total = first if in_place else torch.zeros(self.shape, dtype=self.exact, device=self.device)
        for x, rows, heads in parts[in_place:]:
            total[:, slice(*rows), slice(*heads)].add_(x)
        return total.to(dtype)

    def covers(self, part: Part) -> bool:
        return part.found.shape == self.shape
