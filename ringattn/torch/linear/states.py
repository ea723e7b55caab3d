"""The exchange of linear attention: the state before each segment, from each segment's map of the state.

    B batch   P segments per rank   H heads   K key dim   V value dim

A rank holds one segment, or two that are apart (zigzag). The bytes that travel do not depend on the sequence's length.
The ways to exchange states are those of ringattn.plans.segments.

In backward the gradient of the state takes the same way in reverse, by other maps. Ulysses ranks hold consecutive
pieces of one ring shard: they gather among themselves first, and then all of them pass states around the ring.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.comms.scan import Relay, add_up, broadcast
from ringattn.kernels.linear.maps import Map
from ringattn.plans.plan import Plan
from ringattn.plans.segments import Place, Way, order, passes, segments

State = Tensor | None  # None is a state of zero, and costs no launches


class Passage:
    """The segments in the order in which a state passes them: what a call decides once. Backward, from last to first.

    `mine` are this rank's segments, and `legs` those of its ring shard by the passes around the ring, in their order.
    """

    def __init__(self, plan: Plan, way: Way, backward: bool = False):
        self.plan, self.way, self.P, rank = plan, way, segments(plan), plan.ring_axis.rank
        self.walk = order(plan)[::-1] if backward else order(plan)
        self.mine = [(rank, plan.ulysses_axis.rank, p) for p in range(self.P)]
        self.last = max(map(self.walk.index, self.mine))
        self.ends_on_this_rank = self.walk[-1][:2] == (rank, plan.ulysses_axis.rank)
        self.shard = [place for place in self.walk if place[0] == rank]  # this ring rank's segments
        each = len(self.shard) // (passes(plan) or 1)
        self.legs = [self.shard[at : at + each] for at in range(0, len(self.shard), each)]  # unless the way is gather
        self.reversed = [False, True] if len(self.legs) == 2 else [backward]

    def start(self, maps: Map, state: State = None, end_everywhere: bool = False) -> "Transfer":
        """Send the map of each segment, [B * P, ...], or the state [B, H, K, V] before the first segment, the same on
        every rank.
        """
        return Transfer(self, maps, state, end_everywhere)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks: on the ring rank where the passage begins, or on all ranks if the way is gather."""
        x = gathered(x, self.plan.ulysses_axis).sum(0)
        ring = self.plan.ring_axis
        return gathered(x, ring).sum(0) if self.way.name == "gather" else add_up(ring, x, self.walk[0][0])


class Transfer:
    """A transfer of the state before each of this rank's segments; `before()` waits for it."""

    def __init__(self, passage: Passage, local: Map, start: State, end_everywhere: bool):
        self.passage, self.local, self.first, self.end_everywhere = passage, local, start, end_everywhere
        self.ring, self.arrived = passage.plan.ring_axis, False
        self.ahead: Iterable[Tensor] = ()
        self.state: State = None
        self.V = local.kv.shape[-1]
        shard = gathered(local.packed(), passage.plan.ulysses_axis)
        if passage.way.name == "gather":
            self.pending: Any = self.ring.all_gather(shard[None])
        else:
            maps = self.maps_in(shard[None], [(0, u, p) for _, u, p in passage.shard])
            self.maps = dict(zip(passage.shard, maps, strict=True))
            self.pending = self.relay(0, start)

    def before(self) -> State:
        """[B * P, H, K, V]; waits once. Then `behind` is the state behind all segments: on the rank that holds the last
        one of the passage, and if `end_everywhere` on all.
        """
        if not self.arrived:  # no cached_property: in Python 3.11 one would hold a lock that all ranks' threads share
            self.arrived = True
            mine = self.passage.mine
            states = self.through_all() if self.passage.way.name == "gather" else self.around()
            self.state = states[mine[0]]
            if len(mine) > 1:
                local = (states[place] for place in mine)
                self.state = torch.stack([self.zeros() if x is None else x for x in local], 1).flatten(0, 1)
            elif self.state is not None:
                self.state = self.state.contiguous()  # frees the maps of all ranks
        return self.state

    def through_all(self) -> dict[Place, State]:
        """The states before all segments up to the last one of this rank."""
        passage = self.passage
        self.ahead = along(self.maps_in(self.pending.wait(), passage.walk), self.first)
        return dict(zip(passage.walk[: passage.last + 1], self.ahead, strict=False))

    @property
    def behind(self) -> Tensor:
        for state in self.ahead:
            self.end = state
        return self.end

    def around(self) -> dict[Place, State]:
        """Once or, in zigzag, twice around the ring; the second pass begins at the end of the first."""
        by_place: dict[Place, State] = {}
        for i, places in enumerate(self.passage.legs):
            relay = self.pending if i == 0 else self.relay(i, self.behind)
            pieces = relay.wait()
            state = pieces[0] if pieces[0] is None or len(pieces) == 1 else torch.cat(pieces, 3)
            self.ahead = along([self.maps[place] for place in places], state)
            by_place.update(zip(places, self.ahead, strict=False))
        if self.end_everywhere:
            self.end, self.ahead = broadcast(self.ring, self.behind, self.passage.walk[-1][0]), ()
        return by_place

    def relay(self, i: int, value: State) -> Relay:
        """The i-th pass of the state around the ring; the first rank begins with `value`."""
        whole, count = reduce(Map.then, (self.maps[place] for place in self.passage.legs[i])), self.passage.way.pieces
        split = [Map(whole.factor, kv.contiguous()) for kv in whole.kv.chunk(count, 3)]
        pieces = [None] * count if value is None else [x.contiguous() for x in value.chunk(count, 3)]
        return Relay(self.ring, pieces, [each.after for each in split], self.passage.reversed[i], like=split[0].kv)

    def maps_in(self, every: Tensor, places: Iterable[Place]) -> Iterator[Map]:
        """The maps of these segments, among those of all ring ranks, [R, U, B * P, H, K, factor and kv]."""
        (R, U, N, *rest), P, sizes = every.shape, self.passage.P, (every.shape[-1] - self.V, self.V)
        every = every.view(R, U, N // P, P, *rest)
        for r, u, p in places:
            yield Map(*every[r, u].select(1, p).split_with_sizes(sizes, -1))

    def zeros(self) -> Tensor:
        N, H, K, _ = self.local.kv.shape
        return self.local.kv.new_zeros(N // self.passage.P, H, K, self.V)


def along(maps: Iterable[Map], state: State) -> Iterator[Any]:
    """The state before each map, and behind the last; launches only what is asked for."""
    yield state
    for each in maps:
        state = each.after(state)
        yield state


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, stacked."""
    return x[None] if axis.size == 1 else axis.all_gather(x[None]).wait()
