"""The exchange of linear attention: the state before each segment, from each segment's map of the state.

    B batch   P segments per rank   H heads   K key dim   V value dim

A rank holds one segment, or two that are apart (zigzag). The bytes that travel do not depend on the sequence's length.
The ways to exchange states are those of ringattn.segments.

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
from ringattn.planning import Plan
from ringattn.segments import Place, Way, order, passes, segments

State = Tensor | None  # None is a state of zero, and costs no launches


class Exchange:
    """A transfer of the state before each of this rank's segments; `before()` waits for it.

    `own` is the map of each segment, [B * P, ...], `start` [B, H, K, V] the state before the first segment, the same on
    every rank. In backward all runs from the last segment to the first.
    """

    def __init__(
        self, plan: Plan, own: Map, start: State, way: Way, backward: bool = False, end_everywhere: bool = False
    ):
        self.plan, self.way, self.backward, self.end_everywhere = plan, way, backward, end_everywhere
        self.P, self.rank = segments(plan), plan.ring_axis.rank
        self.own, self.start, self.arrived = own, start, False
        self.ahead: Iterable[Tensor] = ()
        self.state: State = None
        N, H, K, self.V = own.kv.shape
        self.walk = order(plan)[::-1] if backward else order(plan)
        self.mine = [(self.rank, plan.ulysses_axis.rank, p) for p in range(self.P)]
        shard = gathered(torch.cat([own.factor.expand(N, H, K, -1), own.kv], -1), plan.ulysses_axis)
        if way.name == "gather":
            self.flying: Any = plan.ring_axis.all_gather(shard[None])
        else:
            here = [place for place in self.walk if place[0] == self.rank]
            self.maps = dict(
                zip(here, maps_in(shard[None], [(0, u, p) for _, u, p in here], self.P, self.V), strict=True)
            )
            self.flying = self.relay(0, start)

    def before(self) -> State:
        """[B * P, H, K, V]; waits once. Then `behind` is the state behind all segments: on the rank that holds the last
        one of the walk, and if `end_everywhere` on all.
        """
        if not self.arrived:  # no cached_property: in Python 3.11 one would hold a lock that all ranks' threads share
            self.arrived = True
            states = self.through_all() if self.way.name == "gather" else self.around()
            self.state = states[self.mine[0]]
            if self.P > 1:
                own = (states[place] for place in self.mine)
                self.state = torch.stack([self.zeros() if x is None else x for x in own], 1).flatten(0, 1)
            elif self.state is not None:
                self.state = self.state.contiguous()  # frees the maps of all ranks
        return self.state

    def through_all(self) -> dict[Place, State]:
        """The states before all segments up to the last one of this rank."""
        self.ahead = along(maps_in(self.flying.wait(), self.walk, self.P, self.V), self.start)
        last = max(self.walk.index(place) for place in self.mine)
        return dict(zip(self.walk[: last + 1], self.ahead, strict=False))

    @property
    def behind(self) -> Tensor:
        for state in self.ahead:
            self.end = state
        return self.end

    def around(self) -> dict[Place, State]:
        """Once or, in zigzag, twice around the ring; the second pass begins at the end of the first."""
        by_place: dict[Place, State] = {}
        for i in range(passes(self.plan)):
            relay = self.flying if i == 0 else self.relay(i, self.behind)
            pieces, places = relay.wait(), self.places(i)
            state = pieces[0] if pieces[0] is None or len(pieces) == 1 else torch.cat(pieces, 3)
            self.ahead = along([self.maps[place] for place in places], state)
            by_place.update(zip(places, self.ahead, strict=False))
        if self.end_everywhere:
            self.end, self.ahead = broadcast(self.plan.ring_axis, self.behind, self.walk[-1][0]), ()
        return by_place

    def relay(self, i: int, value: State) -> Relay:
        """The i-th pass of the state around the ring; the first rank begins with `value`."""
        whole, count = reduce(Map.then, (self.maps[place] for place in self.places(i))), self.way.pieces
        cut = [Map(whole.factor, kv.contiguous()) for kv in whole.kv.chunk(count, 3)]
        pieces = [None] * count if value is None else [x.contiguous() for x in value.chunk(count, 3)]
        reverse = i == 1 if passes(self.plan) == 2 else self.backward
        return Relay(self.plan.ring_axis, pieces, [each.after for each in cut], reverse, like=cut[0].kv)

    def places(self, i: int) -> list[Place]:
        """The segments of this ring shard in the i-th pass, in its order."""
        shard = [place for place in self.walk if place[0] == self.rank]
        each = len(shard) // passes(self.plan)
        return shard[i * each : (i + 1) * each]

    def zeros(self) -> Tensor:
        N, H, K, _ = self.own.kv.shape
        return self.own.kv.new_zeros(N // self.P, H, K, self.V)


def maps_in(every: Tensor, places: Iterable[Place], P: int, V: int) -> Iterator[Map]:
    """The maps of these segments, among those of all ring ranks, [R, U, B * P, H, K, factor and kv]."""
    (R, U, N, *rest), sizes = every.shape, (every.shape[-1] - V, V)
    every = every.view(R, U, N // P, P, *rest)
    for r, u, p in places:
        yield Map(*every[r, u].select(1, p).split_with_sizes(sizes, -1))


def along(maps: Iterable[Map], state: State) -> Iterator[Any]:
    """The state before each map, and behind the last; launches only what is asked for."""
    yield state
    for each in maps:
        state = each.after(state)
        yield state


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, stacked."""
    return x[None] if axis.size == 1 else axis.all_gather(x[None]).wait()


def total_at(plan: Plan, x: Tensor, way: Way, ring_rank: int) -> Tensor:
    """The sum over all ranks: on ring rank `ring_rank`, or on all ranks if the way is gather."""
    x = gathered(x, plan.ulysses_axis).sum(0)
    return gathered(x, plan.ring_axis).sum(0) if way.name == "gather" else add_up(plan.ring_axis, x, ring_rank)
