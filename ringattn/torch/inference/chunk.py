"""Which keys of a cache the queries of a chunk see, in pieces, and where its new tokens are written: on the device.

They are made once for a chunk and cached: all layers of a model use the same ones.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import schedule
from ringattn.kernels.intervals import Intervals, Rectangle, rectangles_of
from ringattn.layout import Layout, Shard, sorted_positions
from ringattn.mask import pieces
from ringattn.serving import Stripes
from ringattn.spec import AttentionSpec, bounds


class Holder(NamedTuple):
    """Memory that holds keys: its stripes, and the first and last position of each batch row in it.

    A fork has several: its own, and those of the caches that it was forked from.
    """

    stripes: Stripes
    first: tuple[int, ...]
    last: tuple[int, ...]

    def copied(self, copies: int, until: tuple[int, ...]) -> "Holder":
        """This memory as a fork sees it: every row `copies` times, visible up to `until`, where the fork's own keys
        begin.
        """
        first, last = (tuple(n for n in side for _ in range(copies)) for side in (self.first, self.last))
        return Holder(self.stripes, first, tuple(map(min, last, until)))


class Chunk(NamedTuple):
    """A chunk of `tokens` new tokens.

    `before`: how many tokens each batch row had. `holders`: the memory whose keys it may see. `queries`: its positions
    that are queries (None: all); those from `tokens` on are padding.
    """

    spec: AttentionSpec
    tokens: int
    before: tuple[int, ...]
    holders: tuple[Holder, ...]
    queries: Shard | None = None

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.tokens) if self.queries is None else sorted_positions(self.queries)


class Piece(NamedTuple):
    """A slice of a holder's local indices.

    seen[i]: the queries' intervals among the keys that the ranks of group i hold there; None if they see none.
    """

    keys: slice
    seen: tuple[Intervals | None, ...]


Groups = tuple[tuple[int, ...], ...]  # ranks whose keys lie together, in the order of their positions
OwnPiece = tuple[slice, Intervals | None]  # a slice of the chunk's tokens, and the queries' intervals among them


@lru_cache(maxsize=32)
def own_pieces(chunk: Chunk, most: int, device: torch.device, rectangles: bool) -> tuple[OwnPiece, ...]:
    """The tokens of a chunk without holders, at most `most` at once: the same for every chunk of this length."""
    begin, end = (x.reshape(1, 1, -1) for x in bounds(chunk.spec, chunk.positions, chunk.tokens, chunk.tokens))
    cuts = [slice(at, min(at + most, chunk.tokens)) for at in range(0, chunk.tokens, most)]
    return tuple((cut, within(begin, end, cut, device, rectangles)) for cut in cuts)


@lru_cache(maxsize=64)
def pieces_of(
    chunk: Chunk, groups: Groups, most: int | None, device: torch.device, rectangles: bool
) -> tuple[tuple[Piece, ...], ...]:
    """Each holder's pieces, of at most `most` keys per rank. `rectangles`: for a kernel that needs them."""
    found = []
    for holder in chunk.holders:
        sides = [seen(chunk, holder, chunk.positions, ranks) for ranks in groups]
        cuts = cuts_of(*reach(chunk, holder), most, holder.stripes.block)
        found.append(tuple(Piece(cut, tuple(within(*side, cut, device, rectangles) for side in sides)) for cut in cuts))
    return tuple(found)


def cuts_of(low: int, high: int, most: int | None, block: int) -> list[slice]:
    """Slices of local indices, each of whole blocks or within one block, so that the ranks' keys are consecutive."""
    low, high = low // block * block, -(-high // block) * block
    size = max(block, high - low) if most is None else most
    size = size // block * block or max(n for n in range(1, size + 1) if block % n == 0)
    return [slice(at, min(at + size, high)) for at in range(low, high, size)]


def seen(chunk: Chunk, holder: Holder, positions: np.ndarray, ranks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The intervals of each rank's local indices that queries at these positions see, [ranks, batch rows or 1, T]."""
    rows = list(zip(chunk.before, holder.first, holder.last, strict=True))
    begins, ends = [], []
    for offset, low, high in rows[:1] if len(set(rows)) == 1 else rows:
        begin, end = bounds(chunk.spec, positions, chunk.tokens, offset + chunk.tokens, offset=offset)
        begins.append(np.minimum(np.maximum(begin, low), high))
        ends.append(np.minimum(np.maximum(end, low), high))
    which = np.array(ranks)[:, None, None]
    begin, end = (holder.stripes.below(np.concatenate(side), which) for side in (begins, ends))
    return begin, end


def reach(chunk: Chunk, holder: Holder) -> tuple[int, int]:
    """The range of local indices at which any rank holds a key that any query of the whole chunk sees.

    It is the same on all ranks.
    """
    ends = np.array([0, chunk.tokens - 1])  # intervals never decrease, so the first and last query suffice
    begin, end = seen(chunk, holder, ends, tuple(range(holder.stripes.ranks)))
    return int(begin.min()), int(end.max())


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
    """The intervals in which every query sees every key, as in most pieces of a long prompt."""
    return on_device(np.stack([np.full((1, queries), edge, np.int32) for edge in (0, keys)]), device, rectangles=True)


def on_device(host: np.ndarray, device: torch.device, rectangles: bool) -> Intervals:
    begin, end = torch.from_numpy(host).to(device, non_blocking=True).unbind()
    return Intervals(begin, end, rectangles_of(*host) if rectangles else None, tuple(host))


@lru_cache(maxsize=32)
def guests_of(blocks: Layout, rank: int, together: int) -> tuple[schedule.Step, ...]:
    """The steps at which all ranks' queries come to one rank: first its own, then up to `together` blocks at a time."""
    shards, T = [blocks.shard(r) for r in range(blocks.ring)], blocks.padded_length
    everyone = schedule.seen(AttentionSpec(causal=False), pieces(T, T), shards, shards)
    return everyone.rounds(rank, together=together)[0].steps


class Landing(NamedTuple):
    """For the batch rows of one length: token source[i] of the chunk is written to local index target[i]."""

    rows: tuple[int, ...]
    source: Tensor
    target: Tensor


@lru_cache(maxsize=32)
def landings(
    lengths: tuple[int, ...], n: int, order: Layout | None, stripes: Stripes, rank: int, device: torch.device
) -> tuple[Landing, ...]:
    """Which of the n tokens after these lengths a rank keeps; `order`: the layout whose shards order them."""
    found = []
    for length in sorted(set(lengths)):
        positions = np.arange(length, length + n)
        mine = np.flatnonzero(stripes.owned(positions, rank))
        if len(mine):
            source = mine if order is None else whereabouts(order)[mine]
            host = np.stack([source, stripes.below(positions[mine], rank)])
            rows = tuple(i for i, one in enumerate(lengths) if one == length)
            found.append(Landing(rows, *torch.from_numpy(host).to(device, non_blocking=True)))
    return tuple(found)


def whereabouts(layout: Layout) -> np.ndarray:
    """The place of each position in the order of all shards."""
    return np.argsort(layout.order())


@lru_cache(maxsize=32)
def whereabouts_on(device: torch.device, layout: Layout, n: int) -> Tensor:
    """`whereabouts` of the first n positions, on the device."""
    return torch.from_numpy(whereabouts(layout)[:n]).to(device)
