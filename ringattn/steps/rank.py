"""One rank's part in a table: its steps, what it receives and sends for each, and where that lies in its memory.

A rank holds one block for a phase, first its own. The first step of a phase is with that block; in each later one it
receives what it sees of other blocks from ranks of its host, and sends what they see of the block that it holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from ringattn.layouts.dealing import joined
from ringattn.layouts.layout import Shard, count_below, part_of
from ringattn.steps.table import Ranges, Table, Transfers


class Hop(NamedTuple):
    """What a rank sends to another host, to the rank so many places on, and where it puts what it receives."""

    shift: int
    send: Ranges  # places among the tokens that it holds
    receive: Ranges


class Phase(NamedTuple):
    """While a rank holds one block."""

    block: int
    held: Ranges  # what is here of the block: tokens stop travelling when no later host sees them
    onward: Hop | None  # of keys to the next holder, while the phase lasts; in backward of their sums when it ends
    home: Hop | None  # of sums that do not go on, to their owners; received are places in a whole block


class Places(NamedTuple):
    """Where ranges of a block lie among all keys of a step."""

    at: Ranges
    after: tuple[int, ...]  # how many tokens their source sends to others before these, set by set


class Queries(NamedTuple):
    """Some queries of a rank: those that `see` any of these keys, or those that see none."""

    keys: Shard
    see: bool


Part = tuple[int, Shard]  # keys that lie one after the other: the rank from which they come, and their positions


@dataclass(frozen=True, eq=False)
class Step:
    """One kernel call of a rank, and what travels for it. Gradients take the way of the keys in reverse."""

    phase: Phase
    blocks: tuple[int, ...]  # that this rank sees some of
    parts: tuple[Part, ...]  # the keys that are here
    receive: dict[int, Places] = field(default_factory=dict)  # by source
    send: dict[int, Ranges] = field(default_factory=dict)  # by destination: places among the tokens that are held
    local: Ranges = ()  # places among the tokens that are held, which are copied beside what arrives
    local_at: Ranges = ()  # where these then lie
    queries: Queries | None = None  # that are computed, if all of their keys are in this step; None: all
    heads: tuple[slice, slice] | None = None  # the query and the key heads that are computed; None: all
    side: bool = False  # whether it runs on the side stream, beside the step before it
    visible: Any = field(default=None, repr=False)  # whose `at` gives the intervals of queries among keys

    @cached_property
    def keys(self) -> Shard:
        """The positions of the keys that are here, in the order in which they lie."""
        return tuple(r for _, positions in self.parts for r in positions)

    @cached_property
    def length(self) -> int:
        return sum(map(len, self.keys))

    @cached_property
    def where(self) -> Any:
        """The queries' intervals among the keys that are here; None if they see none."""
        return self.visible.at(self.keys, self.queries) if self.visible and self.blocks else None

    @cached_property
    def travels(self) -> bool:
        """Whether this rank receives or sends keys for it."""
        return bool(self.receive or self.send)

    @cached_property
    def shared(self) -> tuple[tuple[Ranges, tuple[int, ...]], ...]:
        """What this rank sends, each with all ranks that receive it."""
        sets = dict.fromkeys(self.send.values())
        return tuple((ranges, tuple(r for r, of in self.send.items() if of == ranges)) for ranges in sets)

    @cached_property
    def returned(self) -> tuple[tuple[int, int, Ranges, Ranges], ...]:
        """Of each rank that receives keys: how many rows it returns, their ranges, and those in the block."""
        of_rank = ((rank, sum(map(len, rows)), rows) for rank, rows in self.send.items())
        return tuple((rank, n, places([(r,) for r in rows]), joined(rows)) for rank, n, rows in of_rank)

    def beside(self, local: Ranges, rank: int, shard: Shard) -> "Step":
        """The same step with some of this rank's keys beside those that arrive, of the queries that see the latter.

        It runs on the side stream.
        """
        parts = (*self.parts, *((rank, part_of(shard, slice(r.start, r.stop))) for r in local))
        parts, at = placed(parts)
        receive = {source: Places(at[source], places.after) for source, places in self.receive.items()}
        queries = Queries(self.keys, True)
        return replace(
            self, parts=parts, receive=receive, local=local, local_at=at.get(rank, ()), queries=queries, side=True
        )


def steps_of(table: Table, shards: Sequence[Shard], rank: int, visible: Any = None) -> tuple[Step, ...]:
    """The steps of one rank: those of its host that are not empty. `shards` are the positions of every block."""
    steps = []
    for p, phase in enumerate(phases(table, rank)):
        first, shard = int(table.first[p]), shards[phase.block]
        held = tuple(r for at in phase.held for r in part_of(shard, slice(at.start, at.stop)))
        sees = table.when[rank, phase.block] == first
        steps.append(Step(phase, (phase.block,) if sees else (), ((rank, held),), visible=visible))
        for number in range(first + 1, first + int(table.busy[rank // table.size, p])):
            steps.append(reading(table, shards, phase, rank, number, visible))
    return tuple(steps)


def reading(
    table: Table, shards: Sequence[Shard], phase: Phase, rank: int, number: int, visible: Any
) -> Step:  # fmt: skip
    """A step with keys of other ranks of the host, the nearest first."""
    size, blocks = table.size, np.flatnonzero(table.when[rank] == number).tolist()
    blocks.sort(key=lambda block: (rank - block) % size)
    parts: list[Part] = []
    after = {}
    for block in blocks:
        source = rank // size * size + block % size
        sent = table.sends[number, source]
        parts += [(source, part_of(shards[block], slice(r.start, r.stop))) for r in sent[rank]]
        others = takewhile(sent[rank].__ne__, dict.fromkeys(sent.values()))
        after[source] = tuple(sum(map(len, each)) for each in others)
    in_order, at = placed(parts)
    receive = {source: Places(at[source], before) for source, before in after.items()}
    send = {reader: within(phase.held, ranges) for reader, ranges in table.sends[number, rank].items()}
    return Step(phase, tuple(blocks), in_order, receive, send, visible=visible)


def phases(table: Table, rank: int) -> Iterator[Phase]:
    """What a rank holds, one phase after the other."""
    hops, homes, ring = table.hops, table.homes, table.ring
    sent, received = (hops.some(x == rank) for x in (hops.source, hops.destination))
    left, returned = (homes.some(x == rank) for x in (homes.source, homes.destination))
    held: Ranges = (range(table.length),)
    apart = (table.distances * table.size).tolist()
    for p, (distance, following) in enumerate(pairwise([*apart, None])):
        block, onward, home = (rank - distance) % ring, None, None
        arriving: Ranges = ()
        if following is not None:
            first = table.first[p + 1]
            arriving = ranges_of(received.some(received.needed_at == first))
            room = sum(map(len, arriving))
            out = within(held, ranges_of(sent.some(sent.needed_at == first)))
            onward = Hop(following - distance, out, (range(room),) if room else ())
        if p:
            out = within(held, ranges_of(left.some(left.block == block)))
            home = Hop(-distance, out, ranges_of(returned.some(returned.source == (rank + distance) % ring)))
        yield Phase(block, held, onward, home)
        held = arriving


def ranges_of(rows: Transfers) -> Ranges:
    return tuple(map(range, rows.begin.tolist(), rows.end.tolist()))


def placed(parts: Iterable[Part]) -> tuple[tuple[Part, ...], dict[int, Ranges]]:
    """Parts in the order of their positions, and where those of each source then lie."""
    in_order = sorted(parts, key=lambda part: part[1][0].start)
    ranges = [r for _, positions in in_order for r in positions]
    assert all(a.stop <= b.start for a, b in pairwise(ranges) if a.step == 1), "keys of a step increase"
    at: dict[int, Ranges] = {}
    for (source, _), where in zip(in_order, places([positions for _, positions in in_order]), strict=True):
        at[source] = (*at.get(source, ()), where)
    return tuple(in_order), at


def places(parts: Sequence[Shard]) -> Ranges:
    """Where the tokens of each part lie among all of them: one after the other, or stripes dealt out in turn."""
    if parts and parts[0][0].step > 1:
        shard = tuple(r for ranges in parts for r in ranges)
        first, second = (count_below(shard, np.array([r.start + i * r.step for r in shard])).tolist() for i in (0, 1))
        return tuple(range(a, a + len(r) * (b - a), b - a) for a, b, r in zip(first, second, shard, strict=True))
    ends = [0, *accumulate(sum(map(len, ranges)) for ranges in parts)]
    return tuple(map(range, ends, ends[1:]))


def within(held: Ranges, ranges: Ranges) -> Ranges:
    """Where these ranges, each of which is in one of `held`, lie among all tokens of `held`."""
    first = count_below(held, np.array([r.start for r in ranges])).tolist() if ranges else ()
    return tuple(range(at, at + len(r)) for at, r in zip(first, ranges, strict=True))
