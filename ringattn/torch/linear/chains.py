"""The state before each segment where only some documents go on from rank to rank, as in the balanced layout.

Where a segment continues a document that began in an earlier one, the state before it follows from the maps of the
segments from there on, so these maps, and no others, go straight to the rank that holds it. In backward the gradient of
the state behind a segment follows from the maps of the later segments of its last document.

    N segments of a rank, B * P   H heads   K key dim   V value dim
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.linear.maps import Map
from ringattn.plans.plan import Plan
from ringattn.plans.segments import pieces, segments
from ringattn.torch.exchange import sent

At = tuple[int, int]  # row of the batch, number of the segment in the order of the sequence


class Need(NamedTuple):
    """A segment of some rank, and the segments whose maps lead to the state before it, in their order."""

    segment: int  # of the rank's segments
    chain: list[At]


class Chains:
    """Which maps this rank gives to which, and how the states before its segments follow from those that it gets."""

    def __init__(
        self, plan: Plan, starts: np.ndarray, place: tuple[int, int], device: torch.device, backward: bool = False
    ):
        self.plan = plan
        ring, ulysses = plan.ring, plan.ulysses
        runs = sorted((r.start, r.stop, rank, p) for rank, each in enumerate(pieces(plan)) for p, r in enumerate(each))
        firsts, stops, owners, numbers = np.array(runs).T
        needs: dict[int, list[Need]] = {rank: [] for rank in range(ring * ulysses)}
        for b, edges in enumerate(starts):
            at = stops if backward else firsts
            document = np.searchsorted(edges, at, "right") - 1  # of the token at the edge of each segment
            inside = (document >= 0) & (at < edges[-1]) & (at > edges[np.maximum(document, 0)])
            for m in np.flatnonzero(inside).tolist():
                end = edges[document[m] + 1] - 1 if backward else edges[document[m]]
                i = int(np.searchsorted(firsts, end, "right")) - 1  # where the document ends, or begins
                walk = range(i, m, -1) if backward else range(i, m)
                needs[int(owners[m])].append(Need(b * segments(plan) + int(numbers[m]), [(b, j) for j in walk]))

        def sends(ring_rank: int) -> list[At]:
            """The maps of a ring rank's segments that some rank needs, Ulysses rank by Ulysses rank."""
            return sorted((a for a in used if owners[a[1]] // ulysses == ring_rank), key=lambda a: (owners[a[1]], a))

        used = {a for each in needs.values() for need in each for a in need.chain}
        rank, local = place[0] * ulysses + place[1], sends(place[0])
        mine = [b * segments(plan) + int(numbers[j]) for b, j in local if owners[j] == rank]
        self.mine = torch.tensor(mine, dtype=torch.int64, device=device)
        self.of_ulysses = [sum(owners[j] == place[0] * ulysses + u for _, j in local) for u in range(ulysses)]
        wanted = [{a for need in needs[r * ulysses + place[1]] for a in need.chain} for r in range(ring)]
        to_send = [[i for i, a in enumerate(local) if a in want] for want in wanted]
        self.to_send = [torch.tensor(at, dtype=torch.int64, device=device) for at in to_send]
        receives = [[a for a in sends(r) if a in wanted[place[0]]] for r in range(ring)]
        self.of_ring = list(map(len, receives))
        number = {a: i for i, a in enumerate(a for each in receives for a in each)}
        chains = sorted(needs[rank], key=lambda need: len(need.chain))
        self.needs = [(need.segment, [number[a] for a in need.chain]) for need in chains]
        self.count = len(starts) * segments(plan)

    def start(self, maps: Map) -> "Transfer":
        """Send the maps of this rank's segments [N, H, K, ...] to where they are needed."""
        plan, what, packed = self.plan, "the maps of segments", maps.packed().index_select(0, self.mine)
        shard = sent(plan.ulysses_axis, [packed] * plan.ulysses, self.of_ulysses, what).wait()
        given = [shard.index_select(0, at) for at in self.to_send]
        return Transfer(self, sent(plan.ring_axis, given, self.of_ring, what), maps.kv.shape[-1])


class Transfer:
    """Maps on their way; `before()` waits once, for the state before each of this rank's segments [N, H, K, V]."""

    def __init__(self, chains: Chains, transfer: Any, value_dim: int):
        self.chains, self.transfer, self.V = chains, transfer, value_dim
        self.states: Tensor | None = None

    def before(self) -> Tensor:
        if self.states is None:
            every = self.transfer.wait()
            maps = Map(*every.split_with_sizes([every.shape[-1] - self.V, self.V], -1))
            self.states = maps.kv.new_zeros(self.chains.count, *maps.kv.shape[1:])
            walked: dict[int, tuple[int, Tensor | None]] = {}  # by first segment: how far, and the state there
            for segment, chain in self.chains.needs:
                done, state = walked.get(chain[0], (0, None))
                for i in chain[done:]:
                    state = Map(maps.factor[i : i + 1], maps.kv[i : i + 1]).after(state)
                walked[chain[0]] = len(chain), state
                assert state is not None  # a chain has segments
                self.states[segment] = state
            self.transfer = None
        return self.states
