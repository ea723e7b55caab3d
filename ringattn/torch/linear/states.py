"""The exchange of linear attention: the state before each segment, from each segment's map of the state.

    B batch   P segments per rank   H heads   K key dim   V value dim

A rank holds one segment, or two that are apart (zigzag). The bytes that travel do not depend on the sequence's length.
The ways to exchange states are those of ringattn.segments.

In backward the gradient of the state takes the same way in reverse, by other maps. Ulysses ranks hold consecutive
pieces of one ring shard: they gather among themselves first, and then all of them pass states around the ring.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.comms.scan import Relay, add_up, broadcast
from ringattn.kernels.linear import Map
from ringattn.planning import Plan
from ringattn.segments import Place, Way, order, passes, segments


class Exchange:
    """A transfer of the state before each of this rank's segments; `before()` waits for it.

    `own` is the map of each segment, [B * P, ...], `start` [B, H, K, V] the state before the first segment, the same on
    every rank. In backward all runs from the last segment to the first.
    """

    def __init__(
        self, plan: Plan, own: Map, start: Tensor | None, way: Way, backward: bool = False,
        end_everywhere: bool = False,
    ):  # fmt: skip
        self.plan, self.way, self.backward, self.end_everywhere = plan, way, backward, end_everywhere
        self.P, self.rank = segments(plan), plan.ring_axis.rank
        N, H, K, V = own.kv.shape
        self.start = own.kv.new_zeros(N // self.P, H, K, V) if start is None else start
        self.walk = order(plan)[::-1] if backward else order(plan)
        self.mine = [(self.rank, plan.ulysses_axis.rank, p) for p in range(self.P)]
        self.found: Tensor | None = None
        self.V = V
        factor = own.factor.expand(N, H, K, -1)
        shard = gathered(torch.cat([factor, own.kv], -1), plan.ulysses_axis)
        if way.name == "gather":
            self.flying: Any = plan.ring_axis.all_gather(shard[None])
        else:
            self.maps = {(self.rank, u, p): each for (_, u, p), each in maps_of(shard[None], self.P, V).items()}
            self.flying = self.relay(0, self.start)

    def before(self) -> Tensor:
        """[B * P, H, K, V]; waits once. Then `behind` is the state behind all segments: on the rank that holds the last
        one of the walk, and if `end_everywhere` on all."""
        if self.found is None:
            states = self.through_all() if self.way.name == "gather" else self.around()
            self.found = torch.stack([states[place] for place in self.mine], 1).flatten(0, 1)
        return self.found

    def through_all(self) -> dict[Place, Tensor]:
        """The states before all segments up to the last one of this rank, or before all."""
        maps = maps_of(self.flying.wait(), self.P, self.V)
        last = len(self.walk) - 1 if self.end_everywhere else max(self.walk.index(place) for place in self.mine)
        before, self.behind = through((maps[place] for place in self.walk[: last + 1]), self.start)
        return dict(zip(self.walk, before, strict=False))

    def around(self) -> dict[Place, Tensor]:
        """Once or, in zigzag, twice around the ring; the second pass begins at the end of the first."""
        found: dict[Place, Tensor] = {}
        for i in range(passes(self.plan)):
            relay = self.flying if i == 0 else self.relay(i, self.behind)
            places = self.places(i)
            before, self.behind = through((self.maps[place] for place in places), torch.cat(relay.wait(), 3))
            found.update(zip(places, before, strict=True))
        if self.end_everywhere:
            self.behind = broadcast(self.plan.ring_axis, self.behind, self.walk[-1][0])
        return found

    def relay(self, i: int, value: Tensor) -> Relay:
        """The i-th pass of the state around the ring; the first rank begins with `value`."""
        whole = reduce(Map.then, (self.maps[place] for place in self.places(i)))
        cut = [Map(whole.factor, kv) for kv in whole.kv.chunk(self.way.pieces, 3)]
        pieces = [x.contiguous() for x in value.chunk(self.way.pieces, 3)]
        reverse = i == 1 if passes(self.plan) == 2 else self.backward
        return Relay(self.plan.ring_axis, pieces, [each.after for each in cut], reverse)

    def places(self, i: int) -> list[Place]:
        """The segments of this ring shard in the i-th pass, in its order."""
        shard = [place for place in self.walk if place[0] == self.rank]
        each = len(shard) // passes(self.plan)
        return shard[i * each : (i + 1) * each]


def through(maps: Iterable[Map], state: Tensor) -> tuple[list[Tensor], Tensor]:
    """The state before each map, and behind the last."""
    before = []
    for each in maps:
        before.append(state)
        state = each.after(state)
    return before, state


def maps_of(every: Tensor, P: int, V: int) -> dict[Place, Map]:
    """The segments' maps from [R, U, B * P, H, K, 1 or K + V], factor and kv."""
    places = every.unflatten(2, (-1, P))
    factor, kv = places[..., :-V], places[..., -V:]
    R, U = places.shape[:2]
    return {(r, u, p): Map(factor[r, u, :, p], kv[r, u, :, p]) for r in range(R) for u in range(U) for p in range(P)}


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, stacked."""
    return x[None] if axis.size == 1 else axis.all_gather(x[None]).wait()


def total_at(plan: Plan, x: Tensor, way: Way, ring_rank: int) -> Tensor:
    """The sum over all ranks: on ring rank `ring_rank`, or on all ranks if the way is gather."""
    x = gathered(x, plan.ulysses_axis).sum(0)
    return gathered(x, plan.ring_axis).sum(0) if way.name == "gather" else add_up(plan.ring_axis, x, ring_rank)
