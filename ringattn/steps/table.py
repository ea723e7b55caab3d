"""One table of what all ranks of a ring do, step by step. Everything else is a fold of it.

A ring has `ring` ranks on `hosts` hosts, with consecutive ranks and equally many on each. Block b is the keys and
values of rank b. Two facts describe a pass over the ring:

    when[rank, block]     the step in which a rank computes with a block; -1 if it sees nothing of it
    reads, hops, homes    one row for each range of tokens that is sent: from which step on it may travel, before which
                          step it must be there, from which rank, to which, and of which block

Between hosts a block hops: it moves to the rank with the same place on another host, which then holds it. Ranks of one
host read the blocks that are held there from each other, for one step. The steps while the same blocks are held are a
phase. On one host there is one phase; with one rank a host there are only hops. In a phase a host may have fewer steps
than others: the last ones are empty.

In backward gradients of what was read return to the holder after the step, to add up there. When the phase is over, the
sums of each token move on with it, or go home from its last holder.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ringattn.masks.crossing import paired
from ringattn.steps.reads import Reads

Row = np.ndarray
Ranges = tuple[range, ...]  # of a block's local indices


class Transfers(NamedTuple):
    """Tokens [begin, end) of a block, which one rank sends to another: columns of equal length."""

    send_at: Row  # the source may send when it begins this step
    needed_at: Row  # the destination needs it when it begins this step
    source: Row
    destination: Row
    block: Row
    begin: Row
    end: Row

    @property
    def tokens(self) -> Row:
        return self.end - self.begin

    def some(self, rows: Row | slice) -> "Transfers":
        return Transfers(*(x[rows] for x in self))


def joined(*parts: Transfers) -> Transfers:
    return Transfers(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Table:
    ring: int
    hosts: int
    length: int  # tokens of a block
    distances: Row  # [phase]: how many hosts back the blocks come from that are held; first 0
    first: Row  # [phase]: its first step
    count: int  # of all steps
    busy: Row  # [host, phase]: how many steps the host has in it; the others are empty
    when: Row  # [rank, block]
    reads: Transfers  # of keys, within a host; used in one step
    hops: Transfers  # of keys, between hosts; held for a phase
    homes: Transfers  # of sums of gradients, from the last holder of a token to its owner

    @property
    def size(self) -> int:
        """The ranks of a host."""
        return self.ring // self.hosts

    @cached_property
    def sends(self) -> dict[tuple[int, int], dict[int, Ranges]]:
        """[step, source]: what a rank sends within its host for a step, by destination, to the nearest ranks first."""
        rows, sends = self.reads, defaultdict[tuple[int, int], dict[int, Ranges]](dict)
        order = np.lexsort(((rows.destination - rows.source) % self.ring, rows.source, rows.needed_at))
        columns = rows.needed_at, rows.source, rows.destination, rows.begin, rows.end
        for step, source, rank, begin, end in zip(*(x[order].tolist() for x in columns), strict=True):
            sends[step, source][rank] = (*sends[step, source].get(rank, ()), range(begin, end))
        return sends


def build(reads: Reads, hosts: int = 1, together: int = 1) -> Table:
    """The table for what is read; a step brings no rank more tokens than `together` blocks have."""
    ring, length, size = reads.ring, reads.length, reads.ring // hosts
    reader, block, begin, end = reads.reader, reads.block, reads.begin, reads.end
    host, other, place = np.ogrid[:hosts, :hosts, :size]

    def read(d: int) -> Row:
        return reads.tokens[host * size + place, (host - other) % hosts * size + (place - d) % size]

    numbers = grouped(read, size, length, together)
    away = (reader // size - block // size) % hosts
    distances = np.flatnonzero(np.bincount(np.append(away, 0)))
    busy = 1 + numbers.max(2)[:, distances]
    first = np.cumsum(busy.max(0)) - busy.max(0)
    count = int(busy.max(0).sum())

    first_of = np.full(hosts, -1)
    first_of[distances] = first
    apart = reader % size - block % size
    step = first_of[away] + numbers[reader // size, away, apart + size * (apart < 0)]
    when = np.full((ring, ring), -1, np.int32)
    when[reader, block] = step

    source = reader - apart  # the rank of this host that holds the block
    within_host = Transfers(step - 1, step, source, reader, block, begin, end).some(apart != 0)

    def holder(of: Row, phase: Row) -> Row:
        return (of + distances[phase] * size) % ring

    of, a, b, hops = travelling(block, begin, end, np.searchsorted(distances, away), length)
    after = np.append(first[1:], count)  # [phase]: the step behind its last one
    last = Transfers(after[hops], 0 * of + count, holder(of, hops), of, of, a, b)
    i, phase = paired(1, hops)
    i, phase = (x[np.lexsort((i, phase))] for x in (i, phase))
    hop = Transfers(first[phase - 1], first[phase], holder(of[i], phase - 1), holder(of[i], phase), of[i], a[i], b[i])
    return Table(ring, hosts, length, distances, first, count, busy, when, within_host, touching(hop), touching(last))


def grouped(read: Callable[[int], Row], size: int, length: int, together: int) -> Row:
    """[host, distance between hosts, distance on the host]: in which step of its phase the latter's blocks are read.

    `read` are the tokens that come from a distance on the host: [host, distance between hosts, rank of the host]. The
    held block itself has step 0. Distances share a step while no rank gets more than `together` blocks, or three times
    as many tokens as were there before, so that computing can hide the transfer.
    """
    coming = 0 * read(0)
    before, number = coming + length, np.zeros(coming.shape[:2], np.int32)
    numbers = np.zeros((*number.shape, size), np.int32)
    for d in range(1, size):
        more = read(d)
        full = (coming + more > np.minimum(together * length, 3 * before)).any(2)
        new = more.any(2) & (full | (number == 0))  # begins a step
        before = before + coming * new[..., None]
        coming = coming * ~new[..., None] + more
        number = numbers[..., d] = number + new
    return numbers


def travelling(block: Row, begin: Row, end: Row, phase: Row, length: int) -> tuple[Row, Row, Row, Row]:
    """(block, begin, end, hops): what goes to other hosts, cut where tokens make a different number of hops.

    Tokens stop travelling when no later host sees them; what is seen is seen in a `phase`, that many hops from home.
    """
    far, base = phase > 0, block * (length + 1)
    ends, phase = np.array([base + begin, base + end])[:, far], phase[far]
    edges = np.unique(ends)
    low, high = np.searchsorted(edges, ends)
    hops = np.zeros(max(0, len(edges) - 1), np.int64)
    which, piece = paired(low, high - low)
    np.maximum.at(hops, piece, phase[which])
    some = np.flatnonzero(hops)
    of, a = np.divmod(edges[some], length + 1)
    return of, a, edges[some + 1] - edges[some] + a, hops[some]


def touching(rows: Transfers) -> Transfers:
    """The same, with one row for neighbouring ranges that follow each other and make the same hop."""
    apart = ~np.logical_and.reduce([x[1:] == x[:-1] for x in rows[:5]] + [rows.begin[1:] == rows.end[:-1]])
    head, tail = (np.append(*x)[: len(rows.block)] for x in ((True, apart), (apart, True)))
    return rows.some(head)._replace(end=rows.end[tail])
