"""Packed documents dealt to ranks by work: equally many tokens and nearly equal work for each, in a few ranges.

Short documents lie whole on one rank, neighbours together. Long ones are cut into few pieces, each a large part of a
rank's work: a piece receives the keys of all that lies before it, so the first receives none. If that cannot balance,
since early tokens of very long ones leave no room, they are cut in pairs of an early and a late block.

Then ranks with too much work swap late tokens against early ones of ranks with too little. At last the slowest rank
does so: one that receives many keys, or holds two pieces of a document, gets somewhat less work. Work is counted in
pairs of a query and a key that it sees. Kernels compute tiles of queries, so long documents are cut, and swaps made,
between tiles where that is possible: a tile that is cut is computed twice. Plain numpy and Python: milliseconds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from math import ceil

import numpy as np

from ringattn.bands import Work

LONG = 0.6  # of a rank's work: a document of more, or of more than half of its tokens, is dealt before others
PIECE = 0.75  # of a rank's work: the most that a piece of a long document has
PAIR = 0.8  # of a rank's work or tokens: the most that a pair of blocks has
REST = 0.1  # of a rank's work, or of a long document: less makes no piece of its own
GROUPS = 8  # of short neighbours, that fill a rank
KEY = 256  # pairs that take as long as to receive a key and to return its gradient, with four query heads a key head
START = 1_000_000  # and before the first key is received
TWICE = 2_400_000  # and as long as a second pass over keys that two pieces of a document see
GOAL = 1.01  # the work of the busiest rank over the mean, and the time of the slowest, at which swapping stops
AT_MOST = 1.02  # the work of the busiest rank over the mean
MOST = 1.012  # the work of a rank over the mean that it may have in order to be as slow as others
SWAPS, PARTNERS = 16, 8  # for work: swaps a rank, and ranks to swap with, at most
LAST, NEAR = 2, 5  # the same for time
TRIED = (3, 8)  # ranges of each that are tried, at most: more if no swap of fewer wins anything
TILE, TILES = 128, 32  # queries that a kernel computes at once, and from how many tiles a rank on that counts
Range = tuple[int, int]


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
        self.densities: dict[Range, float] = {}
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
        """Swap between the busiest rank and one of the least busy ones, until all have nearly equal work."""
        for _ in range(SWAPS * self.ranks):
            order = sorted(range(self.ranks), key=self.load.__getitem__)
            high = order.pop()
            if self.load[high] <= GOAL * self.work:
                return
            if not any(self.swap(high, low, tried) for tried in TRIED for low in order[:PARTNERS]):
                return

    def even_out(self) -> None:
        """Swap between the slowest rank and one of the fastest, until all take nearly equal times."""
        delays = [self.delay(ranges) for ranges in self.held]
        for _ in range(LAST * self.ranks):
            times = [load + delay for load, delay in zip(self.load, delays, strict=True)]
            order = sorted(range(self.ranks), key=times.__getitem__)
            high = order.pop()
            if times[high] <= GOAL * sum(times) / self.ranks:
                return
            if not any(self.hasten(high, low, times, delays) for low in order[:NEAR]):
                return

    def density(self, tokens: Range) -> float:
        if tokens not in self.densities:
            self.densities[tokens] = (self.below(tokens[1]) - self.below(tokens[0])) / (tokens[1] - tokens[0])
        return self.densities[tokens]

    def received(self, ranges: list[Range]) -> tuple[dict[int, int], int]:
        """Up to where these ranges see documents that began elsewhere, by their first tokens, and how many of those
        keys they lack.
        """
        starts, places = self.lists[0], []
        reach: dict[int, int] = {}
        for a, b in ranges:
            start = starts[bisect_right(starts, a) - 1]
            places.append((start, a, b))
            if a > reach.get(start, start):
                reach[start] = a
        own = sum([min(b, reach[start]) - a for start, a, b in places if a < reach.get(start, start)])
        return reach, sum(reach.values()) - sum(reach) - own

    def delay(self, ranges: list[Range]) -> int:
        """The pairs that take as long as what these ranges cost beside their own.

        Forward, a quarter of the time, a rank waits for keys when it has computed what needs none.
        """
        keys, (starts, lengths) = self.received(ranges)[1], self.lists
        documents: list[int] = []  # of the ends of ranges
        home = 0
        for a, b in ranges:
            first, last = self.document(a), self.document(b - 1)
            documents += {first, last}
            home += self.below(b) - self.below(a if a == starts[first] else min(b, starts[first] + lengths[first]))
        waits = max(0, START + KEY // 2 * keys - home // 4) if keys else 0
        return KEY * keys + TWICE * (len({*documents}) < len(documents)) + waits

    def swaps(self, high: int, low: int, tried: int, want: float) -> Iterator[tuple[Range, Range, int, float, int]]:
        """Late tokens of one rank and as many early ones of another: of which ranges, how many, the work that this
        moves, and what both ranks' cuts cost.
        """
        takers = sorted(self.held[low], key=self.density)[:tried]
        for give in sorted(self.held[high], key=self.density)[-tried:]:
            for take in takers:
                n, moved = self.exchanged(give, take, want)
                if moved > 0.02 * want:
                    yield give, take, n, moved, max(self.torn(give[1] - n), self.torn(take[0] + n))

    def after(self, high: int, low: int, give: Range, take: Range, n: int) -> tuple[list[Range], list[Range]]:
        """What both ranks hold after a swap."""
        highs = without(self.held[high], give, (give[0], give[1] - n), (take[0], take[0] + n))
        return highs, without(self.held[low], take, (take[0] + n, take[1]), (give[1] - n, give[1]))

    def swap(self, high: int, low: int, tried: int) -> bool:
        """Make the swap that wins most, for the fewest keys that both ranks receive more; False if none does."""
        want = min(self.load[high] - self.work, self.work - self.load[low])
        if want <= 0:
            return False
        (reach_high, has_high), (reach_low, has_low) = self.received(self.held[high]), self.received(self.held[low])
        best: tuple[float, list[Range], list[Range], float] | None = None
        for give, take, n, moved, torn in self.swaps(high, low, tried, want):
            more_low, more_high = self.more(give[1] - n, reach_low), self.more(take[0], reach_high)
            score = (moved - torn) / want - (more_low + more_high) / self.longest
            if best is None or score > best[0]:
                highs, lows = self.after(high, low, give, take, n)
                if self.fits(highs, has_high + more_high) and self.fits(lows, has_low + more_low):
                    best = score, highs, lows, moved
        if best is None:
            return False
        _, self.held[high], self.held[low], moved = best
        self.load[high] -= moved
        self.load[low] += moved
        return True

    def hasten(self, high: int, low: int, times: list[float], delays: list[int]) -> bool:
        """Make the swap after which the slower of both ranks is fastest, and faster than now; False if none is so."""
        room = MOST * self.work - self.load[low]
        want, best = min((times[high] - times[low]) / 2, room), 0.998 * times[high]
        chosen: tuple[list[Range], list[Range], float, tuple[int, int]] | None = None
        for give, take, n, moved, torn in self.swaps(high, low, TRIED[0], want) if want > 0 else ():
            highs, lows = self.after(high, low, give, take, n)
            both = self.delay(highs), self.delay(lows)
            slower = torn + max(self.load[high] - moved + both[0], self.load[low] + moved + both[1])
            if slower < best and moved <= room and max(both) <= TWICE + KEY * self.most:
                best, chosen = slower, (highs, lows, moved, both)
        if chosen is None:
            return False
        self.held[high], self.held[low], moved, (delays[high], delays[low]) = chosen
        self.load[high] -= moved
        self.load[low] += moved
        return True

    def fits(self, ranges: list[Range], most: int) -> bool:
        """Whether these ranges, which receive at most so many keys, receive no more than a rank may."""
        return most <= self.most or self.received(ranges)[1] <= self.most

    def more(self, start: int, reach: dict[int, int]) -> int:
        """How many more keys a rank receives with a range that begins at `start`."""
        first = self.lists[0][self.document(start)]
        return max(0, start - reach.get(first, first))

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
    """The same work, and half of what each document's last tile computes beyond its end: some tiles are smaller."""
    ends = edges[1:]
    beyond = (-np.diff(edges) % tile) * (work.below(ends) - work.below(ends - 1)) // 2
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
