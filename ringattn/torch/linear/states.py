"""The exchange of linear attention: the state before each segment, from each segment's map of the state.

    B batch   P segments per rank   N = B * P   H heads   K key dim   V value dim

A rank holds one segment, or two that are apart (zigzag). The bytes that travel do not depend on the sequence's length.
The ways to exchange states are those of ringattn.plans.segments: a `Passage`, or in the balanced layout `Chains`.

In backward the gradient of the state takes the same way in reverse, by other maps. Ulysses ranks hold consecutive
pieces of one ring shard: they gather among themselves first, and then all of them pass states around the ring.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.comms.scan import Relay
from ringattn.kernels.linear.maps import Map
from ringattn.plans.plan import Plan
from ringattn.plans.segments import Place, Way, order, passes, pieces, segments
from ringattn.torch.sharding import Exchange, summed

State = Tensor | None  # None is a state of zero, and costs no launches


class Passage:
    """The segments in the order in which a state passes them: what a call decides once. Backward, from last to first.

    `mine` are this rank's segments, and `legs` those of its ring shard by the passes around the ring, in their order.
    """

    def __init__(self, plan: Plan, way: Way, backward: bool = False):
        self.plan, self.way, self.P, rank = plan, way, segments(plan), plan.place[0]
        self.walk = order(plan)[::-1] if backward else order(plan)
        self.mine = [(*plan.place, p) for p in range(self.P)]
        self.last = max(map(self.walk.index, self.mine))
        self.ends_on_this_rank = self.walk[-1][:2] == plan.place
        self.shard = [place for place in self.walk if place[0] == rank]  # this ring rank's segments
        each = len(self.shard) // (passes(plan) or 1)
        self.legs = [self.shard[at : at + each] for at in range(0, len(self.shard), each)]  # unless the way is gather
        self.reversed = [False, True] if len(self.legs) == 2 else [backward]

    def start(self, maps: Map, state: State = None, end_everywhere: bool = False) -> "Transfer":
        """Send the map of each segment, [B * P, ...], or the state [B, H, K, V] before the first segment, the same on
        every rank.
        """
        return Transfer(self, maps, state, end_everywhere)


class Awaited:
    """What `before()` waits for, once, and then keeps."""

    # no cached_property: in Python 3.11 one would hold a lock that all ranks' threads share

    def __init__(self, wait: Callable[[], State]):
        self.wait: Callable[[], State] | None = wait
        self.state: State = None

    def before(self) -> State:
        if self.wait is not None:
            wait, self.wait = self.wait, None
            self.state = wait()
        return self.state


class Transfer(Awaited):
    """A transfer of the state before each of this rank's segments; `before()` waits for it. Then `behind` is the state
    behind all segments: on the rank that holds the last one of the passage, and if `end_everywhere` on all.
    """

    def __init__(self, passage: Passage, local: Map, start: State, end_everywhere: bool):
        self.wait, self.state = self.states, None
        self.passage, self.local, self.first, self.end_everywhere = passage, local, start, end_everywhere
        self.ring, self.V = passage.plan.ring_axis, local.kv.shape[-1]
        self.ahead: Iterable[Tensor] = ()
        shard, ulysses = local.packed()[None], passage.plan.ulysses_axis
        shard = shard if ulysses.size == 1 else ulysses.all_gather(shard).wait()
        if passage.way.name == "gather":
            self.pending: Any = self.ring.all_gather(shard[None])
        else:
            maps = self.maps_in(shard[None], [(0, u, p) for _, u, p in passage.shard])
            self.maps = dict(zip(passage.shard, maps, strict=True))
            self.pending = self.relay(0, start)

    def states(self) -> State:
        """[B * P, H, K, V]"""
        every: dict[Place, Any] = self.through_all() if self.passage.way.name == "gather" else self.around()
        first, *others = self.passage.mine
        if others:
            N, H, K, V = self.local.kv.shape
            zeros = self.local.kv.new_zeros(N // self.passage.P, H, K, V)
            local = [zeros if every[place] is None else every[place] for place in self.passage.mine]
            return torch.stack(local, 1).flatten(0, 1)
        return None if every[first] is None else every[first].contiguous()  # frees the maps of all ranks

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
            parts = relay.wait()
            state = parts[0] if parts[0] is None or len(parts) == 1 else torch.cat(parts, 3)
            self.ahead = along([self.maps[place] for place in places], state)
            by_place.update(zip(places, self.ahead, strict=False))
        if self.end_everywhere:
            end = self.behind
            end = end if self.passage.walk[-1][0] == self.ring.rank else torch.zeros_like(end)
            self.end, self.ahead = summed(end, self.ring), ()
        return by_place

    def relay(self, i: int, value: State) -> Relay:
        """The i-th pass of the state around the ring; the first rank begins with `value`."""
        whole, count = reduce(Map.then, (self.maps[place] for place in self.passage.legs[i])), self.passage.way.pieces
        cut = [Map(whole.factor, kv.contiguous()) for kv in whole.kv.chunk(count, 3)]
        parts = [None] * count if value is None else [x.contiguous() for x in value.chunk(count, 3)]
        return Relay(self.ring, parts, [each.after for each in cut], self.passage.reversed[i], like=cut[0].kv)

    def maps_in(self, every: Tensor, places: Iterable[Place]) -> Iterator[Map]:
        """The maps of these segments, among those of all ring ranks, [R, U, B * P, H, K, factor and kv]."""
        (R, U, N, *rest), P, sizes = every.shape, self.passage.P, (every.shape[-1] - self.V, self.V)
        every = every.view(R, U, N // P, P, *rest)
        for r, u, p in places:
            yield Map(*every[r, u].select(1, p).split_with_sizes(sizes, -1))


def along(maps: Iterable[Map], state: State) -> Iterator[Any]:
    """The state before each map, and behind the last; launches only what is asked for."""
    yield state
    for each in maps:
        state = each.after(state)
        yield state


class Chains:
    """Which maps this rank gets, and how the states before its segments follow from them, in the balanced layout.

    Where a segment continues a document that began in an earlier one, the state before it follows from the maps of the
    segments from there on, so these maps, and no others, go straight to the rank that holds it. In backward the
    gradient of the state behind a segment follows from the maps of the later segments of its last document.
    """

    def __init__(self, plan: Plan, starts: np.ndarray, device: torch.device, backward: bool = False):
        self.plan, P, ranks = plan, segments(plan), plan.ring * plan.ulysses
        runs = sorted((r.start, r.stop, rank, p) for rank, each in enumerate(pieces(plan)) for p, r in enumerate(each))
        firsts, stops, owners, numbers = np.array(runs).T
        needs: list[list[Any]] = [[] for _ in range(ranks)]  # of each rank: a segment, and the maps that lead to it
        for b, edges in enumerate(starts):
            at = stops if backward else firsts
            document = np.searchsorted(edges, at, "right") - 1  # of the token at the edge of each segment
            inside = (document >= 0) & (at < edges[-1]) & (at > edges[np.maximum(document, 0)])
            for m in np.flatnonzero(inside).tolist():
                end = edges[document[m] + 1] - 1 if backward else edges[document[m]]
                i = int(np.searchsorted(firsts, end, "right")) - 1  # where the document ends, or begins
                walk = range(i, m, -1) if backward else range(i, m)
                needs[int(owners[m])].append((b * P + int(numbers[m]), [(b, j) for j in walk]))
        self.count = len(starts) * P
        wanted = [sorted({a for _, chain in each for a in chain}) for each in needs]
        source = np.full((ranks, max(map(len, wanted))), -1)
        for rank, maps in enumerate(wanted):
            source[rank, : len(maps)] = [owners[j] * self.count + b * P + numbers[j] for b, j in maps]
        self.exchange = Exchange(plan, self.count, source.ravel(), device)
        rank = plan.place[0] * plan.ulysses + plan.place[1]
        number = {a: i for i, a in enumerate(wanted[rank])}
        chains = sorted(needs[rank], key=lambda need: len(need[1]))
        self.needs = [(segment, [number[a] for a in chain]) for segment, chain in chains]

    def start(self, maps: Map) -> Awaited:
        """Send the maps of this rank's segments [N, H, K, ...] to where they are needed."""
        pending = self.exchange.start(maps.packed(), self.plan, "maps of segments")
        sizes = maps.factor.shape[-1], maps.kv.shape[-1]
        return Awaited(lambda: self.states(Map(*pending.wait().split_with_sizes(sizes, -1))))

    def states(self, maps: Map) -> Tensor:
        """The state before each of this rank's segments [N, H, K, V], from the maps that arrived."""
        states = maps.kv.new_zeros(self.count, *maps.kv.shape[1:])
        walked: dict[int, tuple[int, State]] = {}  # by first segment: how far, and the state there
        for segment, chain in self.needs:
            done, state = walked.get(chain[0], (0, None))
            for i in chain[done:]:
                state = Map(maps.factor[i : i + 1], maps.kv[i : i + 1]).after(state)
            walked[chain[0]] = len(chain), state
            assert state is not None  # a chain has segments
            states[segment] = state
        return states
