"""Packed documents dealt to ranks by work: equally many tokens and nearly equal work for each, in a few ranges.

Short documents lie whole on one rank, neighbours together. Long ones are cut into few pieces, each a large part of a
rank's work: a piece receives the keys of all that lies before it, so the first receives none.

Then ranks trade the late tokens of one for early ones of another: first the rank with most work, at last the slowest
one, which receives many keys, or holds two pieces of a document. Work is counted in pairs of a query and a key that it
sees. Kernels compute tiles of queries, so long documents are cut between tiles where that is possible: a tile that is
cut is computed twice. Plain numpy and Python: milliseconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from ringattn.masks.bands import Work

DEALT_FIRST_ABOVE = 0.6  # of a rank's work: such a document, or one of over half of its tokens, is dealt before others
LARGEST_PIECE = 0.75  # of a rank's work: the most that a piece of a long document has
LARGEST_PAIR = 0.8  # of a rank's work: the most that a pair of blocks has, unless all ranks have one
SMALLEST_PIECE = 0.1  # of the largest one
GROUPS = 8  # of short neighbours, that fill a rank
PAIRS_PER_KEY = 256  # take as long as to receive a key and to return its gradient, with four query heads a key head
PAIRS_BEFORE_KEYS = 1_000_000  # and before the first key is received
PAIRS_OF_PASS = 2_400_000  # and as long as a second pass over keys that two pieces of a document see
EVEN = 1.01  # the work of the busiest rank over the mean, and the time of the slowest, at which trading stops
MAX_UNEVENNESS = 1.02  # the work of the busiest rank over the mean, at which another way is tried
MAX_WORK_AFTER_TRADES = 1.012  # of a rank, over the mean, that it may get in a trade for time
PARTNERS, TRIED = 6, 4  # of a trade: ranks that are asked, and the most trades with each that are counted exactly
TILE, TILES = 128, 32  # queries that a kernel computes at once, and from how many tiles a rank on that counts
Range = tuple[int, int]


class Fact(NamedTuple):
    """What is known of a range."""

    start: int  # of its first document
    first: int  # document
    last: int
    work: int
    local: int  # the work that needs no keys of other ranges


class Trade(NamedTuple):
    """What two ranks hold after it, the work that it moved, and what both lose beside their work."""

    ranges: tuple[list[Range], list[Range]]
    moved: float
    lost: tuple[int, int]


class Deal:
    """What each rank holds so far."""

    def __init__(self, starts: np.ndarray, total: int, ranks: int, work: Work):
        self.edges = np.append(starts, total)  # after the documents is padding, which sees nothing
        self.tile = TILE if total >= TILES * TILE * ranks else 1
        self.pairs, self.lengths = np.diff(work.below(self.edges)), np.diff(self.edges)
        self.ranks, self.counts, self.starts = ranks, tuple(x.tolist() for x in work), self.edges.tolist()
        self.most_keys = 1.5 * int(self.lengths.max()) + 0.9 * total / ranks  # that a rank may receive
        self.tokens, self.work = total // ranks, max(1.0, float(self.pairs.sum()) / ranks)
        self.room, self.load = [self.tokens] * ranks, [0.0] * ranks
        self.ranges: list[list[Range]] = [[] for _ in range(ranks)]
        self.late: list[Range] = []  # what did not fit where it should go
        self.facts: dict[Range, Fact] = {}

    def below(self, at: int) -> int:
        """The pairs that all tokens before `at` see: `Work.below` of one number, which is faster without arrays."""
        edges, before, here, slope = self.counts
        i = bisect_right(edges, at) - 1
        n = at - edges[i]
        return int(before[i] + here[i] * n + slope[i] * (n * (n - 1) // 2))

    def document(self, at: int) -> int:
        return bisect_right(self.starts, at) - 1

    def torn(self, at: int) -> int:
        """What a cut within a tile costs on both of its sides."""
        inside = (at - self.starts[self.document(at)]) % self.tile
        return (self.below(at + 1) - self.below(at)) * self.tile // 2 if inside else 0

    def fullness(self, rank: int) -> float:
        return self.load[rank] / self.work - self.room[rank] / self.tokens

    def put(self, start: int, stop: int, rank: int) -> None:
        if start < stop:
            self.ranges[rank].append((start, stop))
            self.room[rank] -= stop - start
            self.load[rank] += self.below(stop) - self.below(start)

    def fill(self, start: int, stop: int) -> None:
        """Give these tokens to whichever ranks have room."""
        while start < stop:
            rank = max(range(self.ranks), key=self.room.__getitem__)
            end = min(stop, start + self.room[rank])
            self.put(start, end, rank)
            start = end

    def deal_long(self, start: int, stop: int) -> None:
        """A long document, from its end: each piece for the rank that has least work."""
        while start < stop:
            rank = min((r for r in range(self.ranks) if self.room[r]), key=self.load.__getitem__)
            left, most = self.work - self.load[rank], LARGEST_PIECE * self.work
            lowest = max(start, stop - self.room[rank])
            before = self.below(stop) - min(most, max(left, SMALLEST_PIECE * most))
            at = bisect_left(range(stop), before, lo=lowest, key=self.below)
            at = min(at + (start - at) % self.tile, max(lowest, stop - self.tile))
            self.put(at, stop, rank)
            stop = at

    def run(self) -> float:
        """Deal all; returns the work of the busiest rank over the mean."""
        long = (self.pairs > DEALT_FIRST_ABOVE * self.work) | (self.lengths > self.tokens / 2)
        long[-1] = False
        alone = long | (np.arange(len(long)) == len(long) - 1)
        for i in sorted(np.flatnonzero(long).tolist(), key=lambda i: -self.pairs[i]):
            self.deal_long(self.starts[i], self.starts[i + 1])
        group = self.edges[:-1] // max(1, self.tokens // GROUPS)
        first = np.append(True, (group[1:] != group[:-1]) | alone[1:] | alone[:-1])
        edges = np.append(np.flatnonzero(first), len(long)).tolist()
        groups = [(self.starts[a], self.starts[b]) for a, b in pairwise(edges) if not alone[a]]
        for a, b in sorted(groups, key=lambda x: self.fact(x).work, reverse=True):
            if fits := [r for r in range(self.ranks) if self.room[r] >= b - a]:
                self.put(a, b, min(fits, key=self.fullness))
            else:
                self.late.append((a, b))
        for a, b in (*self.late, self.starts[-2:]):
            self.fill(a, b)
        self.even_out(for_time=False, trades=16, ranges=6)
        self.even_out(for_time=True, trades=2, ranges=3)
        return max(self.load) / self.work

    def even_out(self, for_time: bool, trades: int, ranges: int) -> None:
        """Trade between the rank with most work, or the slowest one, and one of those with least, until all are even.

        So many trades a rank, at most, of so many of a rank's ranges.
        """
        lost = [self.delay(ranges)[0] for ranges in self.ranges]
        for _ in range(trades * self.ranks):
            costs = [load + for_time * x for load, x in zip(self.load, lost, strict=True)]
            *low, high = sorted(range(self.ranks), key=costs.__getitem__)
            if costs[high] <= EVEN * sum(costs) / self.ranks:
                return
            for rank in low[:PARTNERS]:
                if trade := self.best(high, rank, lost, for_time, ranges):
                    self.ranges[high], self.ranges[rank] = trade.ranges
                    lost[high], lost[rank] = trade.lost
                    self.load[high] -= trade.moved
                    self.load[rank] += trade.moved
                    break
            else:
                return

    def best(self, high: int, low: int, lost: list[int], for_time: bool, ranges: int) -> Trade | None:
        """The trade that wins most, if one does."""
        more, less = self.load[high], self.load[low]
        if not for_time:
            want = min(more - self.work, self.work - less)
            found = self.trades(high, low, want, (0.5 * want, 1.5 * want), ranges)
            return min(found, key=lambda x: sum(x.lost) - min(x.moved, 2 * want - x.moved), default=None)

        def slower(x: Trade) -> float:
            return max(more - x.moved + x.lost[0], less + x.moved + x.lost[1])

        now, room = more + lost[high], MAX_WORK_AFTER_TRADES * self.work - less
        trade = min(self.trades(high, low, room, (0, room), ranges), key=slower, default=None)
        return None if trade is None or slower(trade) >= 0.998 * now else trade

    def trades(self, high: int, low: int, want: float, fits: tuple[float, float], ranges: int) -> Iterator[Trade]:
        """Late tokens for early ones, of about as much work as is wanted and within the bounds of what fits, so that no
        rank receives too many keys.
        """
        dense, light = (sorted(self.ranges[r], key=lambda x: self.fact(x).work / (x[1] - x[0])) for r in (high, low))
        reach, found = self.reach(self.ranges[low]), []
        for give in dense[-ranges:]:
            for take in light[:ranges]:
                n, moved = self.exchanged(give, take, want)
                if fits[0] < moved <= fits[1]:
                    at, stop = give[1] - n, take[0] + n
                    start = self.starts[self.document(at)]
                    keys = max(0, at - reach.get(start, start))
                    off = abs(moved - want) + PAIRS_PER_KEY * keys + self.torn(at) + self.torn(stop)
                    found.append((off, moved, at, stop, give, take))
        for _, moved, at, stop, give, take in sorted(found)[:TRIED]:
            highs = without(self.ranges[high], give, (give[0], at), (take[0], stop))
            lows = without(self.ranges[low], take, (stop, take[1]), (at, give[1]))
            (d1, keys1), (d2, keys2) = self.delay(highs), self.delay(lows)
            if max(keys1, keys2) <= self.most_keys:
                yield Trade((highs, lows), moved, (d1, d2))

    def fact(self, tokens: Range) -> Fact:
        if tokens not in self.facts:
            a, b = tokens
            first, last = self.document(a), self.document(b - 1)
            start, before, after = self.starts[first], self.below(a), self.below(b)
            local = after - (before if a == start else self.below(min(b, self.starts[first + 1])))
            self.facts[tokens] = Fact(start, first, last, after - before, local)
        return self.facts[tokens]

    def delay(self, ranges: list[Range]) -> tuple[int, int]:
        """The pairs that take as long as what these ranges cost beside their own, and the keys that they receive.

        Forward, a quarter of the time, a rank waits for keys when it has computed what needs none.
        """
        ranges = [x for x in ranges if x[0] < self.starts[-2]]  # what begins there is padding, which sees nothing
        reach, facts = self.reach(ranges), [self.fact(x) for x in ranges]
        keys = sum(reach.values()) - sum(reach)
        for x, fact in zip(ranges, facts, strict=True):
            if x[0] < reach.get(fact.start, 0):
                keys -= min(x[1], reach[fact.start]) - x[0]
        ends = [i for fact in facts for i in {fact.first, fact.last}]
        twice = PAIRS_OF_PASS * (len({*ends}) < len(ends))
        if not keys:
            return twice, 0
        waits = PAIRS_BEFORE_KEYS + PAIRS_PER_KEY // 2 * keys - sum(fact.local for fact in facts) // 4
        return PAIRS_PER_KEY * keys + twice + max(0, waits), keys

    def reach(self, ranges: list[Range]) -> dict[int, int]:
        """Up to where these ranges see documents that began before them, by their first tokens."""
        reach: dict[int, int] = {}
        for x in ranges:
            start = self.fact(x).start
            if x[0] > reach.get(start, start):
                reach[start] = x[0]
        return reach

    def exchanged(self, give: Range, take: Range, want: float) -> tuple[int, float]:
        """How many tokens at the end of `give` and the start of `take` to exchange, and the work that this moves."""
        stop, start = self.below(give[1]), self.below(take[0])

        def gain(n: int) -> int:
            return stop - self.below(give[1] - n) - self.below(take[0] + n) + start

        size = min(give[1] - give[0], take[1] - take[0])
        low = bisect_right(range(1, size + 1), want, key=gain)
        last = give[1] - self.starts[self.fact(give).last]  # tokens of the last document up to there
        near = low + (last - low + self.tile // 2) % self.tile - self.tile // 2  # so that whole tiles are left
        n = near if 0 < near <= size else low
        return n, gain(n)


class InPairs(Deal):
    """The same with pairs of an early and a late block of long documents, where these leave no room otherwise."""

    def deal_long(self, start: int, stop: int) -> None:
        n, work = stop - start, self.fact((start, stop)).work
        k = min(self.ranks, max(2, ceil(work / self.work / LARGEST_PAIR)))
        ranks = sorted(range(self.ranks), key=self.fullness)
        while k < self.ranks and n / k > min(self.room[r] for r in ranks[:k]):
            ranks.sort(key=lambda r: -self.room[r])
            k += 1
        edges = [start + n * i // (2 * k) // self.tile * self.tile for i in range(2 * k)] + [stop]
        for i, rank in enumerate(ranks[:k]):
            for a, b in (edges[i : i + 2], edges[2 * k - 1 - i : 2 * k + 1 - i]):
                end = a + min(b - a, self.room[rank])
                self.put(a, end, rank)
                self.late.append((end, b))


def without(ranges: list[Range], old: Range, *new: Range) -> list[Range]:
    """The ranges with new ones in the place of an old one."""
    return [x for x in ranges if x != old] + [x for x in new if x[0] < x[1]]


def joined(ranges: Sequence[range]) -> tuple[range, ...]:
    """Ranges, of which those that touch are one."""
    joined: list[range] = []
    for r in ranges:
        joined.append(range(joined.pop().start, r.stop) if joined and joined[-1].stop == r.start and r.step == 1 else r)
    return tuple(joined)


def deal(starts: np.ndarray, total: int, ranks: int, work: Work) -> list[tuple[range, ...]]:
    """[rank]: the tokens of each rank, total / ranks each, of documents that begin at `starts`, whose last is the end
    of the last document; `total` counts the padding after it too.
    """
    made = Deal(starts, total, ranks, work)
    busiest = made.run()
    if busiest > MAX_UNEVENNESS:
        paired = InPairs(starts, total, ranks, work)
        made = paired if paired.run() < busiest else made
    return [joined([range(*tokens) for tokens in sorted(ranges)]) for ranges in made.ranges]
