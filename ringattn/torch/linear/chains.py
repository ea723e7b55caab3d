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
from ringattn.torch.exchange import Exchange

At = tuple[int, int]  # row of the batch, number of the segment in the order of the sequence


class Need(NamedTuple):
    """A segment of some rank, and the segments whose maps lead to the state before it, in their order."""

    segment: int  # of the rank's segments
    chain: list[At]


class Chains:
    """Which maps this rank gets, and how the states before its segments follow from them."""

    def __init__(
        self, plan: Plan, starts: np.ndarray, place: tuple[int, int], device: torch.device, backward: bool = False
    ):
        self.plan, P, ranks = plan, segments(plan), plan.ring * plan.ulysses
        runs = sorted((r.start, r.stop, rank, p) for rank, each in enumerate(pieces(plan)) for p, r in enumerate(each))
        firsts, stops, owners, numbers = np.array(runs).T
        needs: list[list[Need]] = [[] for _ in range(ranks)]
        for b, edges in enumerate(starts):
            at = stops if backward else firsts
            document = np.searchsorted(edges, at, "right") - 1  # of the token at the edge of each segment
            inside = (document >= 0) & (at < edges[-1]) & (at > edges[np.maximum(document, 0)])
            for m in np.flatnonzero(inside).tolist():
                end = edges[document[m] + 1] - 1 if backward else edges[document[m]]
                i = int(np.searchsorted(firsts, end, "right")) - 1  # where the document ends, or begins
                walk = range(i, m, -1) if backward else range(i, m)
                needs[int(owners[m])].append(Need(b * P + int(numbers[m]), [(b, j) for j in walk]))
        self.count = len(starts) * P
        wanted = [sorted({a for need in each for a in need.chain}) for each in needs]
        source = np.full((ranks, max(map(len, wanted))), -1)
        for rank, maps in enumerate(wanted):
            source[rank, : len(maps)] = [owners[j] * self.count + b * P + numbers[j] for b, j in maps]
        self.exchange = Exchange((plan.ring, plan.ulysses, self.count), place, source.ravel(), device)
        rank = place[0] * plan.ulysses + place[1]
        number = {a: i for i, a in enumerate(wanted[rank])}
        chains = sorted(needs[rank], key=lambda need: len(need.chain))
        self.needs = [(need.segment, [number[a] for a in need.chain]) for need in chains]

    def start(self, maps: Map) -> "Transfer":
        """Send the maps of this rank's segments [N, H, K, ...] to where they are needed."""
        return Transfer(self, self.exchange.start(maps.packed(), self.plan, "maps of segments"), maps.kv.shape[-1])


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
