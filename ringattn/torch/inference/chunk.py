"""Which keys of a cache the queries of a chunk see, by ranges, and where its new tokens are written: on the device.

They are made once for a chunk and cached: all layers of a model use the same ones.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.intervals import Intervals, Rectangle
from ringattn.layouts.layout import Layout, Shard, sorted_positions
from ringattn.masks.bands import Families, all_bands, bounds_at, families, joined
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.serving import Stripes
from ringattn.steps.rank import Step, steps_of
from ringattn.steps.reads import seen
from ringattn.steps.table import build
from ringattn.torch.attention.steps import on_device


class Holder(NamedTuple):
    """Memory that holds keys: its stripes, and the first and last position of each batch row in it.

    A fork has several: its own, and those of the caches that it was forked from.
    """

    stripes: Stripes
    first: tuple[int, ...]
    last: tuple[int, ...]
    relative: bool = False  # whether it counts positions from where a row's new tokens begin, as the chunk itself does

    def copied(self, copies: int, until: tuple[int, ...]) -> "Holder":
        """This memory as a fork sees it: every row `copies` times, visible up to `until`, where the fork's own keys
        begin.
        """
        first, last = (tuple(n for n in side for _ in range(copies)) for side in (self.first, self.last))
        return Holder(self.stripes, first, tuple(map(min, last, until)))


class Chunk(NamedTuple):
    """A chunk of `tokens` new tokens.

    `before`: how many tokens each batch row had. `holders`: the memory whose keys it may see. `queries`: its positions
    that are queries (None: all); those from `tokens` on are padding. `parents`: of each token, in a tree of drafts.
    """

    spec: AttentionSpec
    tokens: int
    before: tuple[int, ...]
    holders: tuple[Holder, ...]
    queries: Shard | None = None
    parents: tuple[int, ...] | None = None

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.tokens) if self.queries is None else sorted_positions(self.queries)

    @property
    def alone(self) -> "Chunk":
        """The chunk with its own tokens as the only memory."""
        placed = self.spec.chunk is not None or self.spec.first  # else the tokens see each other as any do
        before = self.before if placed else (0,)
        holder = Holder(Stripes(1, 1), before, tuple(n + self.tokens for n in before), relative=True)
        return self._replace(before=before, holders=(holder,))


@lru_cache(maxsize=64)
def families_of(chunk: Chunk, before: int) -> Families:
    """Who sees whom in a row that had `before` tokens; token i of the chunk is the query before + i."""
    spec, total = chunk.spec, before + chunk.tokens
    if chunk.parents is None:
        (each,) = zip(*families(spec, chunk.tokens, total, offset=before), strict=True)
        moved = (bands._replace(start=bands.start + before, stop=bands.stop + before) for bands in each)
        return tuple((bands,) for bands in moved)
    tree = Docs.tree([before] + [1] * chunk.tokens, [-1] + [parent + 1 for parent in chunk.parents])
    return families(spec, total, docs=tree)


class KeyRange(NamedTuple):
    """Consecutive local indices of a holder, and a family of intervals.

    seen[i]: the queries' intervals among the keys that the ranks of group i hold there; None if they see none.
    """

    keys: slice
    seen: tuple[Intervals | None, ...]


@lru_cache(maxsize=64)
def ranges_of(
    chunk: Chunk, groups: tuple[tuple[int, ...], ...], most: int | None, device: torch.device, rectangles: bool
) -> list[list[KeyRange]]:
    """Each holder's ranges, of at most `most` keys per rank. `rectangles`: for a kernel that needs them.

    `groups`: ranks whose keys lie together, in the order of their positions.
    """
    by_holder = []
    for holder in chunk.holders:
        every = [sides_seen(chunk, holder, chunk.positions, ranks) for ranks in groups]
        ranges = []
        for *sides, (low, high) in zip(*every, reach(chunk, holder), strict=True):
            for keys in slices_of(low, high, most, holder.stripes.block) if low < high else []:
                seen = tuple(within(begin, end, keys, device, rectangles) for begin, end in sides)
                ranges.append(KeyRange(keys, seen))
        by_holder.append(ranges)
    return by_holder


def slices_of(low: int, high: int, most: int | None, block: int) -> list[slice]:
    """Slices of local indices, each of whole blocks or within one block, so that the ranks' keys are consecutive."""
    low, high = low // block * block, -(-high // block) * block
    size = max(block, high - low) if most is None else most
    size = size // block * block or max(n for n in range(1, size + 1) if block % n == 0)
    return [slice(at, min(at + size, high)) for at in range(low, high, size)]


Sides = tuple[np.ndarray, np.ndarray]


def sides_seen(chunk: Chunk, holder: Holder, positions: np.ndarray, ranks: tuple[int, ...]) -> list[Sides]:
    """Of each family, which of each rank's local indices these queries see: intervals [ranks, batch rows or 1, T]."""
    rows = list(zip(chunk.before, holder.first, holder.last, strict=True))
    intervals = []
    which = np.array(ranks)[:, None, None]
    rows = rows[:1] if len(set(rows)) == 1 else rows
    every = [families_of(chunk._replace(before=(), holders=(), queries=None), before) for before, *_ in rows]
    for i in range(max(map(len, every))):
        begins, ends = [], []
        for (before, low, high), of_row in zip(rows, every, strict=True):
            family = of_row[i] if i < len(of_row) else (joined([]),)
            begin, end = bounds_at(family, before + positions)
            origin = before * holder.relative
            begins.append(np.minimum(np.maximum(begin, low), high) - origin)
            ends.append(np.minimum(np.maximum(end, low), high) - origin)
        begin, end = (holder.stripes.below(np.concatenate(side), which) for side in (begins, ends))
        intervals.append((begin, end))
    return intervals


def reach(chunk: Chunk, holder: Holder) -> list[tuple[int, int]]:
    """Of each family, the range of local indices at which any rank holds a key that any query of the chunk sees.

    It is the same on all ranks.
    """
    at = np.arange(chunk.tokens) if chunk.parents else np.array([0, chunk.tokens - 1])  # intervals never decrease
    of_all = sides_seen(chunk, holder, at, tuple(range(holder.stripes.ranks)))
    return [(int(begin.min()), int(end.max())) for begin, end in of_all]


def within(begin: np.ndarray, end: np.ndarray, keys: slice, device: torch.device, rectangles: bool) -> Intervals | None:
    """The intervals of some ranks, [ranks, rows, T], restricted to the slice `keys` of each and joined."""
    size = keys.stop - keys.start
    if begin[..., -1].max() <= keys.start and end[..., 0].min() >= keys.stop:
        return everything(begin.shape[-1], len(begin) * size, device)
    host = np.clip(np.stack([begin, end]) - keys.start, 0, size).sum(1).astype(np.int32)
    if not (host[0] < host[1]).any():
        return None
    return on_device(host, device, rectangles)


def in_any_order(where: Intervals | None, keys: int) -> bool:
    """Whether these keys may lie in any order: every query sees all of them, or none."""
    return where is None or where.rectangles == (Rectangle(slice(0, where.begin.shape[1]), slice(0, keys), False),)


@lru_cache(maxsize=64)
def everything(queries: int, keys: int, device: torch.device) -> Intervals:
    """The intervals in which every query sees every key, as in most ranges of a long prompt."""
    return on_device(tuple(np.full((1, queries), edge, np.int32) for edge in (0, keys)), device)


@lru_cache(maxsize=32)
def guests_of(blocks: Layout, rank: int, together: int) -> tuple[Step, ...]:
    """The steps at which all ranks' queries come to one rank: first its own, then up to `together` blocks at a time."""
    shards, T = [blocks.shard(r) for r in range(blocks.ring)], blocks.padded_length
    everyone = seen(all_bands(AttentionSpec(causal=False), T), shards, shards)
    return steps_of(build(everyone, together=together), shards, rank)


@lru_cache(maxsize=32)
def landings(
    lengths: tuple[int, ...], n: int, order: Layout | None, stripes: Stripes, rank: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """Which of the n tokens after these lengths a rank keeps; `order`: the layout whose shards order them.

    For the batch rows [n, 1] of each length: their tokens, and the local indices to which these are written.
    """
    made = []
    for length in sorted(set(lengths)):
        positions = np.arange(length, length + n)
        mine = np.flatnonzero(stripes.owned(positions, rank))
        if len(mine):
            source = mine if order is None else np.argsort(order.order())[mine]
            host = np.stack([source, stripes.below(positions[mine], rank)])
            rows = torch.tensor([[i] for i, each in enumerate(lengths) if each == length])
            source, target = torch.from_numpy(host).to(device, non_blocking=True)
            made.append((rows.to(device, non_blocking=True), source, target))
    return tuple(made)
