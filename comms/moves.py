"""All transfers of an axis made of `move`, so that every transfer is between two ranks that errors can name."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ringattn.comms.axis import NOTHING_SHARED, Axis, ByRank, Done, Pending, Sharing, Then


class Moves(Axis):
    """An axis that only lacks `move`."""

    def sharing(self, out: ByRank, into: ByRank, what: str = "", persistent: bool = True) -> Sharing:
        return nullcontext(self.move(out, into, what, persistent)) if out or into else NOTHING_SHARED

    def rotate(
        self, tensors: Sequence[Tensor], shift: int = 1, send: bool = True, recv: bool = True, what: str = ""
    ) -> Pending:
        if shift % self.size == 0:
            return Done(tuple(tensors) if recv else None)
        destination, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
        arriving = tuple(x.new_empty(x.shape) for x in tensors) if recv else None
        pending = self.hop({destination: tensors} if send else {}, {source: arriving} if arriving else {}, what)
        return Then(pending, lambda _: arriving)

    def hop(self, out: ByRank, into: ByRank, what: str) -> Pending:
        return self.move(out, into, what)

    def all_to_all(self, tensors: Sequence[Tensor], split: int, join: int, persistent: bool | None = True) -> Pending:
        pieces = [as_stored(x).chunk(self.size, split) for x in tensors]
        results = [self.room(each[self.rank], join) for each in pieces]
        into = [x.chunk(self.size, join) for x in results]
        return Then(self.move(self.by_rank(pieces), self.by_rank(into), "all_to_all", persistent), lambda _: results)

    def all_gather(self, x: Tensor, dim: int = 0, what: str = "all_gather") -> Pending:
        x = as_stored(x)
        result = self.room(x, dim)
        mine = [x]  # the same list for all ranks, so that it is packed once
        out = {rank: mine for rank in range(self.size)}
        return Then(self.move(out, self.by_rank([result.chunk(self.size, dim)]), what=what), lambda _: result)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Pending:
        chunks = [chunk.contiguous() for chunk in as_stored(x).chunk(self.size, dim)]
        arriving = [chunk if r == self.rank else torch.empty_like(chunk) for r, chunk in enumerate(chunks)]
        pending = self.move(self.others([chunks]), self.others([arriving]), what="reduce_scatter")
        return Then(pending, lambda _: torch.stack(arriving).sum(0))

    def __repr__(self) -> str:
        return f"{self.name}: rank {self.rank} of {self.size} ({self.by})"

    def room(self, like: Tensor, dim: int) -> Tensor:
        """Memory for `size` tensors of this shape, joined along `dim`."""
        whole = list(like.shape)
        whole[dim] *= self.size
        return torch.empty(whole, dtype=like.dtype, device=like.device)

    def by_rank(self, pieces: Sequence[Sequence[Tensor]]) -> dict[int, list[Tensor]]:
        """Of each tensor's pieces, one for each rank, those of a rank."""
        return {rank: [each[rank] for each in pieces] for rank in range(self.size)}

    def others(self, pieces: Sequence[Sequence[Tensor]]) -> dict[int, list[Tensor]]:
        """The same of the other ranks."""
        return {rank: each for rank, each in self.by_rank(pieces).items() if rank != self.rank}


def as_stored(x: Tensor) -> Tensor:
    """`x` with lazy conjugations and negations applied, so that its memory holds its values."""
    return x.detach().resolve_conj().resolve_neg()
