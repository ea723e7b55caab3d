"""Where a cache's tokens lie, and what prefill and decode send: plain Python that can be printed and tested."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ringattn.check.arguments import WORDS, of_arguments, of_sizes
from ringattn.masks.spec import raise_if, whole
from ringattn.plans.machine import Link, Machine
from ringattn.plans.sizes import dtype_name

BLOCK = 64  # positions that lie together on one rank
MIN_KEYS_OF_A_HOP = 1024  # a hop of fewer keys than this is mostly latency
FILLING = 65536  # rows of queries, over all heads, that keep a GPU busy


class KVCache:
    """The keys and values of all earlier tokens, spread over ranks or devices.

    `allocate` makes a cache of the plan's framework. In torch calls change it; in JAX it is a value, and calls return a
    new one. Both also have append, truncate, fork and room.
    """

    plan: Any
    lengths: Any  # how many tokens each batch row has

    @classmethod
    def allocate(
        cls,
        plan: Any,
        *,
        batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = None,
        window: int | None = None,
        room: int | None = None,
        block: int = BLOCK,
    ) -> Any:
        """An empty cache for `max_len` tokens a row, of which each rank holds its share; bfloat16 by default.

        With a `window` only keys that can still be seen are kept, in memory for window + `room` tokens (room: the
        longest chunk that will be appended at once; by default the window).
        """
        raise_if(of_arguments(required=True, plan=plan))
        sizes: Any = {"batch": batch, "max_len": max_len, "kv_heads": kv_heads, "head_dim": head_dim, "block": block}
        sizes |= {"value_dim": value_dim, "window": window, "room": room}
        raise_if(of_sizes("value_dim", "window", "room", **sizes))
        numbers: Any = map(whole, sizes.values())  # also numpy's, as plain numbers
        batch, max_len, kv_heads, head_dim, block, value_dim, window, room = numbers
        most = None if window is None else window + (window if room is None else room)
        stripes, dims = Stripes(plan.ring * plan.ulysses, block), (head_dim, value_dim or head_dim)
        kind = import_module(f"ringattn.{plan.framework}.inference.cache").KVCache
        dtype = "bfloat16" if dtype is None else dtype_name(dtype)
        return kind.made(plan, batch, max_len, kv_heads, dims, dtype, stripes, window, most)


WORDS["cache"] = KVCache, "make one with KVCache.allocate(plan, ...)"


@dataclass(frozen=True)
class Stripes:
    """Blocks of positions dealt out to ranks in turn, from `origin` on."""

    ranks: int
    block: int
    origin: int = 0

    @property
    def round(self) -> int:
        return self.ranks * self.block

    def below(self, position: Any, rank: Any, xp: Any = np) -> Any:
        """How many of a rank's positions lie below `position`: the local index of a position it holds.

        Numbers, or arrays that broadcast; xp is numpy or jax.numpy.
        """
        whole, rest = xp.divmod(xp.maximum(xp.asarray(position) - self.origin, 0), self.round)
        return whole * self.block + xp.minimum(xp.maximum(rest - rank * self.block, 0), self.block)

    def owned(self, positions: np.ndarray, rank: int) -> np.ndarray:
        return (positions // self.block) % self.ranks == rank


class Heads(NamedTuple):
    """The sizes of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    batch: int = 1


WAYS = "queries", "keys"  # what may travel when a chunk of a prompt attends to a cache


def prefill_way(
    ranks: int, local: int, cached: int, sizes: Heads, machine: Machine, link: Link, hides: bool = True
) -> str:  # fmt: skip
    """Queries or keys, whichever leaves less time exposed if they travel; `local` queries a rank, and `cached` keys.

    Compute hides transfers, except that of the first queries. Keys come from all ranks at once, except the chunk's,
    which every rank receives anyway. Each step reads and writes each query's partial once more. If nothing is hidden,
    because the sender also computes (`hides=False`), the way with fewer bytes is chosen.
    """
    hops, rows, dims = ranks - 1, local * sizes.batch * sizes.heads, sizes.head_dim + sizes.value_dim
    keys = -(-max(0, cached - ranks * local) // ranks)  # of a rank
    query_bytes, partial_bytes = hops * rows * sizes.head_dim * sizes.itemsize, rows * (sizes.value_dim + 1) * 4
    key_bytes = hops * keys * sizes.batch * sizes.kv_heads * dims * sizes.itemsize
    both_bytes = query_bytes + hops * partial_bytes
    hidden = 2 * rows * dims * cached / machine.flops(sizes.itemsize, ranks) * hops / ranks * hides
    merged = 2 * partial_bytes / machine.bandwidth * hides * (hops > 0)
    pieces, steps = -(-keys // keys_at_once(local)), -(-hops // queries_at_once(rows))

    def flight(nbytes: float, transfers: int) -> float:
        return float(link.seconds(nbytes, transfers, ranks))

    first = query_bytes / max(1, steps)
    of_queries = flight(first, min(1, hops)) + max(0.0, flight(both_bytes - first, 2 * steps - 1) - hidden)
    of_keys = max(0.0, flight(key_bytes, min(1, hops) * pieces) - hidden)
    return "keys" if of_keys + 2 * pieces * merged < of_queries + ranks * merged else "queries"


def keys_at_once(local: int) -> int:
    """How many keys a rank sends in one hop: a few times its queries, so that memory is proportional to the chunk."""
    return max(MIN_KEYS_OF_A_HOP, 4 * local)


def queries_at_once(rows: int) -> int:
    """How many ranks' queries, with `rows` rows each, a step takes: enough to fill a GPU."""
    return max(1, FILLING // max(1, rows))


def exchange_way(nbytes: int, ranks: int, link: Link) -> str:
    """How partials of `nbytes` per rank are merged into one on every rank.

    gather    every rank sends its partials to all, and each merges them: (ranks - 1) x nbytes, one transfer
    scatter   each rank merges its share of the rows and sends it to all: 2 x nbytes at most, two transfers

    Either way every row is merged in rank order, so all ranks have the same bits.
    """
    gather = link.seconds((ranks - 1) * nbytes, 1, ranks)
    scatter = link.seconds(2 * (ranks - 1) * nbytes / ranks, 2, ranks)
    return "gather" if gather <= scatter else "scatter"


def exchange_over(nbytes: int, ranks: int, machine: Machine) -> str:
    """The transport with which partials of `nbytes` per rank arrive sooner, if both are available.

    group       NCCL, which starts sooner: for a token
    symmetric   copy engines, which move faster: for large partials
    """
    bandwidth, sooner = machine.group
    sent = (ranks - 1) * nbytes
    return "symmetric" if bandwidth and sent / bandwidth > sooner + machine.inside.seconds(sent) else "group"
