"""More ranks than there are GPUs: each process plays one of them, and the others answer for its peers. For times only.

What a rank sends, is sent and computes is what it would be among so many, over the same links; but what arrives is from
another rank, so results mean nothing. It holds where all ranks do the same: full attention, prefill, states that are
gathered. Of causal attention in zigzag, where ranks read ranges of different lengths, blocks travel whole: an upper
bound. Ranks that are late, and links that many share, are not played; what all peers read is sent to each alone, and
before the work that it flies beside.
"""

from typing import Any

from ringattn.comms.axis import ByRank, Pending
from ringattn.comms.moves import Moves
from ringattn.launch.words import option
from ringattn.planning import Plan
from ringattn.ranks import Ranks

PROCESSES: Any = option(0, "processes; fewer than ranks: each plays one of them, for times only; 0: as many", least=0)


def processes_of(options: Any) -> int:
    """How many processes there are to be; a ValueError where they cannot play all ranks."""
    count = options.processes or options.ranks
    if count != options.ranks and (count < 2 or options.ranks % count or getattr(options, "ulysses", 1) > 1):
        raise ValueError(
            f"processes={count} cannot play ranks={options.ranks}: at least 2, which divide them, in a ring"
        )
    return int(count)


def folded(plan: Plan, ranks: int) -> Plan:
    """The same choices among so many ranks."""
    if ranks == plan.ring:
        return plan
    ring = Folded(plan.ring_axis, ranks)  # blocks travel whole, so that all ranks send and receive the same
    return plan.replace(ring=ranks, axes=Ranks(ring, plan.ulysses_axis, device=plan.device, whole=True))


class Folded(Moves):
    """An axis of `size` ranks, of which those of another axis are here: everything is made of its moves."""

    def __init__(self, axis: Any, size: int):
        self.axis, self.size, self.rank, self.name, self.by = axis, size, axis.rank, axis.name, axis.by
        self.cheap_words, self.hosts = axis.cheap_words, axis.hosts

    @property
    def sent(self) -> int:
        return int(self.axis.sent)

    def move(self, out: ByRank, into: ByRank, what: str = "") -> Pending:
        return self.axis.move(self.nearer(out, 1), self.nearer(into, -1), what)

    def nearer(self, by_rank: ByRank, way: int) -> ByRank:
        """To a rank so many places away goes what would go to others as far beyond it; never to this rank itself."""
        found: dict[int, list[Any]] = {}
        for place, tensors in sorted((way * (r - self.rank) % self.size, tensors) for r, tensors in by_rank.items()):
            found.setdefault((self.rank + way * (place % self.axis.size or 1)) % self.axis.size, []).extend(tensors)
        return found

    def exchange_words(self, words: Any) -> list[Any]:
        return self.axis.exchange_words(words) * (self.size // self.axis.size)
