"""More ranks than there are GPUs: all processes play the same one of them, and are each other's peers. For times only.

A process computes and receives what this rank would among so many, over the same links, and sends to its peers what
they receive. So results mean nothing, and what a rank sends counts as what it receives: among all ranks the sums are
equal. Ranks that are late, and links that many share, are not played.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import torch

from ringattn.comms.axis import ByRank, Pending, Slices
from ringattn.comms.moves import Moves
from ringattn.launch.words import option
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import Ranks

PROCESSES: Any = option(0, "processes; fewer than ranks: each plays one of them, for times only; 0: as many", least=0)


def processes_of(options: Any) -> int:
    """How many processes there are to be; a ValueError where they cannot play all ranks."""
    count = options.processes or options.ranks
    if count != options.ranks and (count < 2 or options.ranks % count or getattr(options, "ulysses", 1) > 1):
        raise ValueError(
            f"processes={count} cannot play ranks={options.ranks}: at least 2, which divide them, in a ring"
        )
    return int(count)


def folded(plan: Plan, ranks: int, played: int | None = None, axes: Iterable[Any] | None = None) -> Plan:
    """The same choices among so many ranks, as rank `played`, the last one by default; the plan's own if it has them.

    `axes` are the ring and Ulysses axes of the processes, if the plan has none.
    """
    if played is None and ranks == plan.ring:
        return plan
    ring, ulysses = plan.axes if axes is None else axes
    ring = Folded(ring, ranks, ranks - 1 if played is None else played)
    return plan.replace(ring=ranks, axes=Ranks(ring, ulysses, device=plan.device))


class Folded(Moves):
    """An axis of `size` ranks, played by the processes of another axis: everything is made of its moves."""

    def __init__(self, axis: Any, size: int, played: int):
        self.axis, self.size, self.rank, self.name, self.by = axis, size, played, axis.name, axis.by
        self.cheap_words, self.hosts = axis.cheap_words, axis.hosts
        self.ballast: dict[Any, torch.Tensor] = {}  # what is sent, by its dtype

    @property
    def sent(self) -> int:
        return int(self.axis.sent)

    def move(self, out: ByRank, into: ByRank, what: str = "", fills: bool = True) -> Pending:
        return self.axis.move(*self.between(into), what, fills)

    def sharing(self, out: ByRank, into: ByRank, what: str = "", fills: bool = True) -> AbstractContextManager[Pending]:
        return self.axis.sharing(*self.between(into), what, fills)

    def after_sends(self) -> None:
        self.axis.after_sends()

    def between(self, into: ByRank) -> tuple[ByRank, ByRank]:
        """What would come from a rank so many places away comes from a process, which gets as much from this one."""
        arriving: dict[int, Any] = {}
        for source, tensors in into.items():
            apart = (self.rank - source) % self.size % self.axis.size or 1  # never from itself
            arriving[apart] = joined(arriving.get(apart, ()), tensors)
        here, count = self.axis.rank, self.axis.size
        leaving = {(here + apart) % count: self.like(tensors) for apart, tensors in arriving.items()}
        return leaving, {(here - apart) % count: tensors for apart, tensors in arriving.items()}

    def like(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Random numbers in the shapes of these tensors."""
        if isinstance(tensors, Slices):
            return Slices([self.random(x) for x in tensors.tensors], tensors.places)
        return [self.random(x) for x in tensors]

    def random(self, x: torch.Tensor) -> torch.Tensor:
        room = self.ballast.get(x.dtype)
        if room is None or room.numel() < x.numel():
            room = self.ballast[x.dtype] = torch.randn(x.numel(), device=x.device).to(x.dtype)
        return room[: x.numel()].view(x.shape)

    def exchange_words(self, words: Any) -> list[Any]:
        return self.axis.exchange_words(words) * (self.size // self.axis.size)


def joined(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Both after another, as slices if they are of the same tensors. They are all that their process sends, so they
    come after no others, unlike those of the ranks that it plays.
    """
    if isinstance(b, Slices) and not a:
        return Slices(b.tensors, b.places)
    if isinstance(a, Slices) and isinstance(b, Slices) and all(map(is_, a.tensors, b.tensors)):
        return Slices(a.tensors, (*a.places, *b.places))
    return [*a, *b]
