"""An axis over a torch process group: gloo on CPUs, NCCL on GPUs."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms.axis import Chain, Done, Pending, Then

# torch 2.13 renamed both; 2.11 knows only the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works:
    """Collective work in flight, and the tensors it reads and writes, which must live until it is done."""

    def __init__(self, works: Sequence[Any], result: Any, held: Sequence[Tensor]):
        self.works, self.result, self.held = works, result, held

    def wait(self) -> Any:
        for work in self.works:
            work.wait()
        self.works, self.held = (), ()
        return self.result


class ProcessGroupAxis:
    """The ranks of one process group, in group order. `sent` counts the bytes this rank has handed to others."""

    def __init__(self, group: dist.ProcessGroup, name: str = "ring"):
        self.group, self.name = group, name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.cheap_words = dist.get_backend(group) == "gloo"
        self.hops = hop_group(group)
        self.sent = 0

    def rotate(self, tensors: Sequence[Tensor], shift: int = 1, send: bool = True, recv: bool = True) -> Pending:
        if shift % self.size == 0:
            return Done(tuple(tensors) if recv else None)
        there, here = (self.peer(self.rank + shift), self.peer(self.rank - shift))
        outgoing = [t.contiguous() for t in tensors] if send else []
        arriving = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors] if recv else []
        ops = [dist.P2POp(dist.isend, t, there, self.hops) for t in outgoing]
        ops += [dist.P2POp(dist.irecv, t, here, self.hops) for t in arriving]
        self.sent += sum(t.nbytes for t in outgoing)
        works = dist.batch_isend_irecv(ops) if ops else []
        return Works(works, tuple(arriving) if recv else None, outgoing)

    def all_to_all(self, x: Tensor, split: int, join: int) -> Pending:
        if self.size == 1:
            return Done(x)
        pieces = torch.stack(x.chunk(self.size, split))
        arrived = torch.empty_like(pieces)
        self.sent += pieces.nbytes // self.size * (self.size - 1)
        work = dist.all_to_all_single(arrived, pieces, group=self.group, async_op=True)
        return Then(Works([work], arrived, [pieces]), lambda pieces: torch.cat(pieces.unbind(0), join))

    def all_gather(self, x: Tensor, dim: int = 0) -> Pending:
        if self.size == 1:
            return Done(x)
        x = x.contiguous()
        arrived = x.new_empty((self.size, *x.shape))
        self.sent += x.nbytes * (self.size - 1)
        work = all_gather_single(arrived.flatten(0, 1) if x.dim() else arrived, x, group=self.group, async_op=True)
        return Then(Works([work], arrived, [x]), lambda pieces: torch.cat(pieces.unbind(0), dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Pending:
        if self.size == 1:
            return Done(x)
        pieces = torch.stack(x.chunk(self.size, dim))
        mine = torch.empty_like(pieces[0])
        self.sent += pieces.nbytes // self.size * (self.size - 1)
        work = reduce_scatter_single(mine, pieces.flatten(0, 1), group=self.group, async_op=True)
        return Works([work], mine, [pieces])

    def exclusive_scan(self, state: Sequence[Tensor], combine: Callable[..., Any], reverse: bool = False) -> Pending:
        return Chain(self, state, combine, reverse)

    def exchange_words(self, words: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, words, group=self.group)
        return gathered

    def peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank % self.size)

    def __repr__(self) -> str:
        return f"{self.name}: rank {self.rank} of {self.size} ({dist.get_backend(self.group)})"


@lru_cache
def hop_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that hops use: `group`, or a twin of it under TORCH_DISTRIBUTED_DEBUG=DETAIL.

    There torch compares the ranks' counts of calls at every collective, and counts hops too, of which ranks make
    different numbers: who has nothing to send does not.
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or dist.get_backend(group) != "gloo":
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
