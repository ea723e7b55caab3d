"""Packed documents dealt to ranks by work: equally many tokens and nearly equal work for each, in a few ranges.

Short documents lie whole on one rank, neighbours together. Long ones are cut into few pieces, each a large part of a
rank's work: a piece receives the keys of all that lies before it, so the first receives none. If that cannot balance,
since early tokens of very long ones leave no room, they are cut in pairs of an early and a late block.

Then ranks with too much work trade with ranks that have too little: whole documents for several shorter ones, or late
tokens for early ones, whichever wins most for the keys that it costs. At last the slowest rank does so: one that
receives many keys, or holds two pieces of a document, gets somewhat less work. Work is counted in pairs of a query and
a key that it sees. Kernels compute tiles of queries, so long documents are cut, and trades made, between tiles where
that is possible: a tile that is cut is computed twice. Plain numpy and Python: milliseconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from ringattn.masks.bands import Work

LONG = 0.6  # of a rank's work: a document of more, or of more than half of its tokens, is dealt before others
PIECE = 0.75  # of a rank's work: the most that a piece of a long document has
PAIR = 0.8  # of a rank's work or tokens: the most that a pair of blocks has
REST = 0.1  # of a rank's work, or of a long document: less makes no piece of its own
GROUPS = 8  # of short neighbours, that fill a rank
KEY = 256  # pairs that take as long as to receive a key and to return its gradient, with four query heads a key head
START = 1_000_000  # and before the first key is received
TWICE = 2_400_000  # and as long as a second pass over keys that two pieces of a document see
GOAL = 1.01  # the work of the busiest rank over the mean, and the time of the slowest, at which trading stops
AT_MOST = 1.02  # the work of the busiest rank over the mean
MOST = 1.012  # the work of a rank over the mean that it may have in order to be as slow as others
TRADES, LAST = 16, 2  # a rank, at most: for work, and then for time
BEYOND = 0.48  # of what a document's last tile computes beyond its end counts as work
TILE, TILES = 128, 32  # queries that a kernel computes at once, and from how many tiles a rank on that counts
Range = tuple[int, int]


class Try(NamedTuple):
    """How a trade is found."""

    partners: int  # ranks to trade with, at most
    ranges: int  # of each rank: the densest of one, the lightest of the other
    whole: int  # trades of whole ranges that are counted exactly: those that look best
    parts: int  # and of parts
    least: float  # of the work that is wanted: the least that a trade wins
    weight: float = 1.0  # of what both ranks lose beside their work


FOR_WORK = (
    Try(partners=8, ranges=4, whole=2, parts=3, least=0.5),
    Try(partners=8, ranges=8, whole=8, parts=12, least=0.5, weight=0.0),  # if the first finds none
)
FOR_TIME = Try(partners=5, ranges=3, whole=2, parts=4, least=0.02)
WHOLE, MANY = 2, 6  # whole ranges that are given for one, at most, of the densest ones


class Fact(NamedTuple):
    """What is known of a range."""

    start: int  # of its first document
    first: int  # document
    last: int
    work: int
    home: int  # the work that needs no keys of other ranges


class Trade(NamedTuple):
    """Tokens of one rank, the end of `give` or all of it, for whole ranges of another and the first `n` of `take`."""

    moved: float  # work
    given: Range
    give: Range
    ranges: tuple[Range, ...]
    take: Range
    n: int


class After(NamedTuple):
    """What two ranks hold after a trade, the work that it moved, what its cuts cost, and what both lose beside work."""

    held: tuple[list[Range], list[Range]]
    moved: float
    torn: int
    delays: tuple[int, int]


class Deal:
    """What each rank holds so far. `deal_long` gives away a long document, after all that have more work."""

    def __init__(self, starts: np.ndarray, total: int, ranks: int, work: Work):
        edges = np.append(starts, total)  # after the documents is padding, which sees nothing
        lengths = np.diff(edges)
        self.tile = TILE if total >= TILES * TILE * ranks else 1
        work = in_tiles(work, edges, self.tile)
        pairs = np.diff(work.below(edges))
        self.ranks, self.counts = ranks, tuple(x.tolist() for x in work)
        self.edges, self.lengths, self.pairs = edges, lengths, pairs
        self.longest = int(lengths.max())
        self.most = 1.5 * self.longest + 0.9 * total / ranks  # keys that a rank may receive
        self.lists = edges.tolist(), lengths.tolist()
        self.tokens, self.work = total // ranks, max(1.0, float(pairs.sum()) / ranks)
        self.room, self.load = [self.tokens] * ranks, [0.0] * ranks
        self.held: list[list[Range]] = [[] for _ in range(ranks)]
        self.lost = [0] * ranks  # what each rank's ranges cost beside their work
        self.facts: dict[Range, Fact] = {}
        self.late: list[Range] = []  # what did not fit where it should go

    def below(self, at: int) -> int:
        """The pairs that all tokens before `at` see: `Work.below` of one number, which is faster without arrays."""
        edges, before, here, slope = self.counts
        i = bisect_right(edges, at) - 1
        n = at - edges[i]
        return int(before[i] + here[i] * n + slope[i] * (n * (n - 1) // 2))

    def document(self, at: int) -> int:
        return bisect_right(self.lists[0], at) - 1

    def torn(self, at: int) -> int:
        """What a cut within a tile costs on both of its sides."""
        inside = (at - self.lists[0][self.document(at)]) % self.tile
        return (self.below(at + 1) - self.below(at)) * self.tile // 2 if inside else 0

    def put(self, start: int, stop: int, rank: int) -> None:
        if start < stop:
            self.held[rank].append((start, stop))
            self.room[rank] -= stop - start
            self.load[rank] += self.below(stop) - self.below(start)

    def fill(self, start: int, stop: int) -> None:
        """Give these tokens to whichever ranks have room: all of it, or pieces of other documents would fill it."""
        while start < stop:
            rank = max(range(self.ranks), key=self.room.__getitem__)
            end = min(stop, start + self.room[rank])
            self.put(start, end, rank)
            start = end

    def deal_long(self, start: int, stop: int) -> None:
        """A long document, from its end: each piece for the rank that has least work."""
        few = REST * (stop - start)
        while start < stop:
            rank = min((r for r in range(self.ranks) if self.room[r]), key=self.load.__getitem__)
            left, most = self.work - self.load[rank], PIECE * self.work
            lowest, before = max(start, stop - self.room[rank]), self.below(stop) - min(most, max(left, REST * most))
            at = bisect_left(range(stop), before, lo=lowest, key=self.below)
            at = min(at + (start - at) % self.tile, max(lowest, stop - self.tile))
            if at - start < few and lowest == start:
                at = start
            self.put(at, stop, rank)
            stop = at

    def run(self) -> float:
        """Deal all; returns the work of the busiest rank over the mean."""
        long = (self.pairs > LONG * self.work) | (self.lengths > self.tokens / 2)
        long[-1] = False
        lone = long | (np.arange(len(long)) == len(long) - 1)
        for i in sorted(np.flatnonzero(long).tolist(), key=lambda i: -self.pairs[i]):
            self.deal_long(int(self.edges[i]), int(self.edges[i + 1]))
        group = max(1, self.tokens // GROUPS)
        key = self.edges[:-1] // group
        first = np.append(True, (key[1:] != key[:-1]) | lone[1:] | lone[:-1])
        at = np.append(np.flatnonzero(first), len(long)).tolist()
        items = [(int(self.edges[a]), int(self.edges[b])) for a, b in pairwise(at) if not lone[a]]
        weights = [self.below(b) - self.below(a) for a, b in items]
        spill = [tokens for tokens in joined(self.late) if tokens[0] < tokens[1]]
        for i in sorted(range(len(items)), key=lambda i: -weights[i]):
            (a, b), w = items[i], weights[i]
            fits = [r for r in range(self.ranks) if self.room[r] >= b - a]
            if not fits:
                spill.append((a, b))
                continue
            self.put(a, b, min(fits, key=lambda r: max((self.load[r] + w) / self.work, 0) - self.room[r] / self.tokens))
        for a, b in sorted(spill, key=self.density, reverse=True):
            self.fill(a, b)
        self.fill(int(self.edges[-2]), int(self.edges[-1]))
        self.repair()
        self.even_out()
        return max(self.load) / self.work

    def repair(self) -> None:
        """Trade between the busiest rank and one of the least busy ones, until all have nearly equal work."""
        for _ in range(TRADES * self.ranks):
            order = sorted(range(self.ranks), key=self.load.__getitem__)
            high = order.pop()
            if self.load[high] <= GOAL * self.work:
                return
            if not any(self.relieve(high, low, how) for how in FOR_WORK for low in order[: how.partners]):
                return

    def even_out(self) -> None:
        """Trade between the slowest rank and one of the fastest, until all take nearly equal times."""
        self.lost = [self.delay(ranges)[0] for ranges in self.held]
        for _ in range(LAST * self.ranks):
            times = [load + lost for load, lost in zip(self.load, self.lost, strict=True)]
            order = sorted(range(self.ranks), key=times.__getitem__)
            high = order.pop()
            if times[high] <= GOAL * sum(times) / self.ranks:
                return
            if not any(self.hasten(high, low, times) for low in order[: FOR_TIME.partners]):
                return

    def relieve(self, high: int, low: int, how: Try) -> bool:
        """Make the trade that wins most work, less what both ranks lose by it; False if there is none."""
        want = min(self.load[high] - self.work, self.work - self.load[low])
        if want <= 0:
            return False
        before = self.delay(self.held[high])[0] + self.delay(self.held[low])[0]

        def won(after: After) -> float:
            return min(after.moved, 2 * want - after.moved) - after.torn - how.weight * (sum(after.delays) - before)

        best = max(self.trades(high, low, how, want), key=won, default=None)
        return best is not None and self.make(high, low, best)

    def hasten(self, high: int, low: int, times: list[float]) -> bool:
        """Make the trade after which the slower of both ranks is fastest, and faster than now; False if none is so."""
        room = MOST * self.work - self.load[low]
        want = min((times[high] - times[low]) / 2, room)
        if want <= 0:
            return False

        def slower(after: After) -> float:
            (d1, d2), moved = after.delays, after.moved
            return after.torn + max(self.load[high] - moved + d1, self.load[low] + moved + d2)

        fitting = (x for x in self.trades(high, low, FOR_TIME, want) if x.moved <= room)
        best = min(fitting, key=slower, default=None)
        return best is not None and slower(best) < 0.998 * times[high] and self.make(high, low, best)

    def make(self, high: int, low: int, after: After) -> bool:
        self.held[high], self.held[low] = after.held
        self.lost[high], self.lost[low] = after.delays
        self.load[high] -= after.moved
        self.load[low] += after.moved
        return True

    def trades(self, high: int, low: int, how: Try, want: float) -> Iterator[After]:
        """Trades that move about as much work as is wanted for few keys, and after which no rank receives too many."""
        dense, light = (sorted(self.held[rank], key=self.density) for rank in (high, low))
        few, reach = dense[-how.ranges :], self.reach(self.held[low])

        def off(trade: Trade) -> float:
            start = self.fact(trade.given).start
            return abs(trade.moved - want) + KEY * max(0, trade.given[0] - reach.get(start, start))

        def best(ways: Iterable[Trade], count: int) -> list[Trade]:
            useful = [x for x in ways if min(x.moved, 2 * want - x.moved) >= how.least * want]
            return sorted(useful, key=off)[:count]

        whole, parts = self.whole(few, light, want), self.parts(few, light[: how.ranges], want)
        for moved, given, give, ranges, take, n in (*best(whole, how.whole), *best(parts, how.parts)):
            highs = without(self.held[high], give, (give[0], given[0]), *ranges, (take[0], take[0] + n))
            lows = [x for x in without(self.held[low], take, (take[0] + n, take[1]), given) if x not in ranges]
            (d1, keys1), (d2, keys2) = self.delay(highs), self.delay(lows)
            if max(keys1, keys2) <= self.most:
                yield After((highs, lows), moved, max(self.torn(given[0]), self.torn(take[0] + n)), (d1, d2))

    def parts(self, dense: list[Range], light: list[Range], want: float) -> Iterator[Trade]:
        """The end of a range for the start of another."""
        for give in dense:
            for take in light:
                n, moved = self.exchanged(give, take, want)
                yield Trade(moved, (give[1] - n, give[1]), give, (), take, n)

    def whole(self, dense: list[Range], light: list[Range], want: float) -> Iterator[Trade]:
        """A whole range for whole ones, and for the start of the lightest other one that is long enough."""
        sets = [x for count in range(WHOLE + 1) for x in combinations(light[-MANY:], count)]
        sizes = [(ranges, sum(b - a for a, b in ranges), sum(self.fact(x).work for x in ranges)) for ranges in sets]
        for give in dense:
            for ranges, tokens, less in sizes:
                n, moved = give[1] - give[0] - tokens, self.fact(give).work - less
                if n >= 0 and 0.3 * want < moved < 2.5 * want:
                    take = next((x for x in light if x[1] - x[0] >= n and x not in ranges), None)
                    if take is not None:
                        moved -= self.below(take[0] + n) - self.below(take[0])
                        yield Trade(moved, give, give, ranges, take, n)

    def density(self, tokens: Range) -> float:
        return self.fact(tokens).work / (tokens[1] - tokens[0])

    def fact(self, tokens: Range) -> Fact:
        if tokens not in self.facts:
            (a, b), (starts, lengths) = tokens, self.lists
            first, last = self.document(a), self.document(b - 1)
            start, before, after = starts[first], self.below(a), self.below(b)
            home = after - (before if a == start else self.below(min(b, start + lengths[first])))
            self.facts[tokens] = Fact(start, first, last, after - before, home)
        return self.facts[tokens]

    def delay(self, ranges: list[Range]) -> tuple[int, int]:
        """The pairs that take as long as what these ranges cost beside their own, and the keys that they receive.

        Forward, a quarter of the time, a rank waits for keys when it has computed what needs none.
        """
        reach, home = self.reach(ranges), 0
        documents: list[int] = []  # of the ends of ranges
        keys = sum(reach.values()) - sum(reach)
        for x in ranges:
            start, first, last, _, alone = self.fact(x)
            home += alone
            documents += (first,) if first == last else (first, last)
            if reach and x[0] < reach.get(start, start):
                keys -= min(x[1], reach[start]) - x[0]
        twice = TWICE * (len({*documents}) < len(documents))
        return (KEY * keys + twice + max(0, START + KEY // 2 * keys - home // 4) if keys else twice), keys

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

        low, high = 0, min(give[1] - give[0], take[1] - take[0])
        if gain(high) <= want:
            low = high
        size, least = high, high // 64
        while low + least < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if gain(middle) <= want else (low, middle - 1)
        last = (give[1] - self.lists[0][self.document(give[1] - 1)]) % self.tile  # queries of the last tile of `give`
        near = low + (last - low + self.tile // 2) % self.tile - self.tile // 2  # so that whole tiles are left
        n = near if 0 < near <= size and gain(near) < 1.5 * want else low
        return n, gain(n)


class InPairs(Deal):
    """The same with pairs of an early and a late block of long documents."""

    def deal_long(self, start: int, stop: int) -> None:
        n, w = stop - start, self.below(stop) - self.below(start)
        k = min(self.ranks, max(2, ceil(w / self.work / PAIR), ceil(n / self.tokens / PAIR)))
        by_load = sorted(range(self.ranks), key=lambda r: self.load[r] / self.work + 1 - self.room[r] / self.tokens)
        ranks = by_load[:k]
        while k < self.ranks and n / k + 1 > min(self.room[r] for r in ranks):
            k += 1
            ranks = sorted(by_load, key=lambda r: -self.room[r])[:k]
        edges = [start + n * i // (2 * k) // self.tile * self.tile for i in range(2 * k)] + [stop]
        for j, rank in enumerate(ranks):
            for a, b in ((edges[j], edges[j + 1]), (edges[2 * k - 1 - j], edges[2 * k - j])):
                end = a + min(b - a, self.room[rank])
                self.put(a, end, rank)
                self.late.append((end, b))


def in_tiles(work: Work, edges: np.ndarray, tile: int) -> Work:
    """The same work, and a part of what each document's last tile computes beyond its end: some tiles are smaller."""
    ends = edges[1:]
    beyond = (BEYOND * (-np.diff(edges) % tile) * (work.below(ends) - work.below(ends - 1))).astype(np.int64)
    return work._replace(
        before=work.before + np.append(0, np.cumsum(beyond))[np.searchsorted(ends, work.edges, "right")]
    )


def without(ranges: list[Range], old: Range, *new: Range) -> list[Range]:
    """The ranges with new ones in the place of an old one."""
    return [x for x in ranges if x != old] + [x for x in new if x[0] < x[1]]


def joined(ranges: list[Range]) -> list[Range]:
    """The same tokens as increasing ranges that do not touch."""
    joined: list[Range] = []
    for a, b in sorted(ranges):
        if joined and joined[-1][1] == a:
            joined[-1] = joined[-1][0], b
        else:
            joined.append((a, b))
    return joined


def deal(starts: np.ndarray, total: int, ranks: int, work: Work) -> list[list[Range]]:
    """[rank]: the tokens of each rank, total / ranks each, of documents that begin at `starts`, whose last is the end
    of the last document; `total` counts the padding after it too.
    """
    made = Deal(starts, total, ranks, work)
    busiest = made.run()
    if busiest > AT_MOST:
        paired = InPairs(starts, total, ranks, work)
        made = paired if paired.run() < busiest else made
    return [joined(ranges) for ranges in made.held]
