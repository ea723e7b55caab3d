"""Lists of the tiles that intervals touch, for kernels that visit tiles one by one (FlashAttention-4).

A tile is full if every query in it sees every key in it: no mask is needed there. All other tiles that hold a visible
pair are masked. A forward pass needs the tiles of each block of queries, a backward pass those of each block of keys.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.intervals import Intervals


class Lists(NamedTuple):
    """Counts [rows, 1, blocks] and the numbers of the tiles, [rows, 1, blocks, most]."""

    masked_count: Tensor
    masked: Tensor
    full_count: Tensor
    full: Tensor


def block_lists(where: Intervals, length: int, queries: int, keys: int, by_keys: bool) -> Lists:
    """The lists for tiles of `queries` x `keys`, of each block of queries, or with `by_keys` of each block of keys.

    `length` is the number of keys. The host does not wait for the device. Lists have room for the longest one, if the
    host knows the intervals; otherwise for every tile: 4 MB at 131,072 queries and keys.
    """
    begin, end = (x.long().clamp(0, length) for x in (where.begin, where.end))
    tiles = -(-length // keys)
    touched = seen_by(begin // keys, torch.where(begin < end, -(-end // keys), 0), queries, tiles) > 0
    full = seen_by(-(-begin // keys), end // keys, queries, tiles) == queries
    most = longest(where, length, queries, keys, by_keys)
    kinds = [x.mT if by_keys else x for x in (touched & ~full, full)]
    return Lists(*[x for which in kinds for x in listed(which, most)])


def seen_by(first: Tensor, stop: Tensor, queries: int, tiles: int) -> Tensor:
    """How many queries of each block see each tile, [rows, blocks, tiles], if they see the tiles [first, stop)."""
    rows, T = first.shape
    block = torch.arange(T, device=first.device) // queries * (tiles + 1)
    one = torch.ones_like(first, dtype=torch.int32)
    steps = one.new_zeros(rows, -(-T // queries) * (tiles + 1))
    steps.scatter_add_(1, block + first, one).scatter_add_(1, block + torch.maximum(first, stop), -one)
    return steps.view(rows, -1, tiles + 1).cumsum(-1, dtype=torch.int32)[..., :-1]


def listed(which: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """The counts of the tiles, and their numbers in order, as lists of at most `most`."""
    tiles = which.shape[-1]
    numbers = torch.arange(tiles, dtype=torch.int32, device=which.device).expand(which.shape)
    place = torch.where(which, which.cumsum(-1) - 1, tiles)
    lists = numbers.new_zeros(*which.shape[:-1], tiles + 1).scatter_(-1, place, numbers)
    return which.sum(-1, dtype=torch.int32)[:, None], lists[:, None, :, : most or tiles].contiguous()


def longest(where: Intervals, length: int, queries: int, keys: int, by_keys: bool) -> int | None:
    """How many tiles the longest list has at most, if all batch rows are alike and the host knows them."""
    if where.host is None or len(where.host[0]) > 1:
        return None
    (begin,), (end,) = where.host
    if by_keys:
        first = np.arange(0, length, keys)
        low, high = np.searchsorted(end, first, "right"), np.searchsorted(begin, np.minimum(first + keys, length))
    else:
        first, real = np.arange(0, len(begin), queries), begin < end
        low = np.minimum.reduceat(np.where(real, begin, length), first)
        high = np.maximum.reduceat(np.where(real, end, 0), first)
    size = queries if by_keys else keys
    return max(1, int((-(-high // size) - low // size).max()))
