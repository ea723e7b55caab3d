"""Where a cache's tokens lie, and what prefill and decode send: plain Python that can be printed and tested."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ringattn.check.arguments import of_arguments
from ringattn.check.cache import of_memory
from ringattn.masks.spec import raise_if, whole
from ringattn.plans.machine import Link, Machine
from ringattn.plans.sizes import dtype_name

BLOCK = 64  # positions that lie together on one rank
FEWEST_KEYS = 1024  # a hop of fewer keys than this is mostly latency
FILLING = 65536  # rows of queries, over all heads, that keep a GPU busy


class KVCache:
    """The keys and values of all earlier tokens, spread over ranks or devices.

    `allocate` makes a cache of the plan's framework. In torch calls change it; in JAX it is a value, and calls return a
    new one. Both also have append, truncate, fork, room and explain; in torch state_dict and
    load_state_dict, while in JAX a cache is a pytree.
    """

    plan: Any
    lengths: Any  # how many tokens each batch row has

    def __init__(self, *given: Any, **more: Any):
        raise TypeError(
            "a cache is made with KVCache.allocate(plan, batch=..., max_len=..., kv_heads=..., head_dim=...)"
        )

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
        problem = of_arguments(required=True, plan=plan) or of_memory(
            room, batch=batch, max_len=max_len, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
            window=window, block=block,
        )  # fmt: skip
        raise_if(problem)
        sizes: Any = map(whole, (batch, max_len, kv_heads, head_dim, value_dim, window, room, block))
        batch, max_len, kv_heads, head_dim, value_dim, window, room, block = sizes  # also numpy's, as plain numbers
        most = None if window is None else window + (window if room is None else room)
        stripes, dims = Stripes(plan.ring * plan.ulysses, block), (head_dim, value_dim or head_dim)
        kind = import_module(f"ringattn.{plan.framework}.inference.cache").KVCache
        dtype = "bfloat16" if dtype is None else dtype_name(dtype)
        return kind.made(plan, batch, max_len, kv_heads, dims, dtype, stripes, window, most)

    def explain(self: Any, chunk: int, heads: int) -> str:
        """A report of what prefill of a chunk with `heads` query heads, and decode of one token, will send."""
        moves, nbytes = self.moves(self.plan.for_length(chunk), heads), self.heads_of(heads).partial_bytes
        return (
            f"{self}\na chunk of {chunk} tokens: {moves}\n"
            f"a decoded token: partials of {nbytes / 1e3:.1f} kB a rank, exchanged by {self.exchanged_by(nbytes)}"
        )


@dataclass(frozen=True)
class Stripes:
    """Blocks of positions dealt out to ranks in turn, from `origin` on."""

    ranks: int
    block: int
    origin: int = 0

    @property
    def round(self) -> int:
        return self.ranks * self.block

    def below(self, position: Any, rank: Any) -> Any:
        """How many of a rank's positions lie below `position`: the local index of a position it holds.

        Numbers, or arrays that broadcast.
        """
        whole, rest = np.divmod(np.maximum(np.asarray(position) - self.origin, 0), self.round)
        return whole * self.block + np.minimum(np.maximum(rest - rank * self.block, 0), self.block)

    def owned(self, positions: np.ndarray, rank: int) -> np.ndarray:
        return (positions // self.block) % self.ranks == rank


@dataclass(frozen=True)
class Heads:
    """The sizes of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    batch: int = 1

    @property
    def query_bytes(self) -> int:
        return self.batch * self.heads * self.head_dim * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """The bytes of a query's partial, in float32."""
        return self.batch * self.heads * (self.value_dim + 1) * 4

    @property
    def key_bytes(self) -> int:
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def pair_flops(self) -> int:
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Moves:
    """What travels when a chunk of a prompt attends to a cache, and both ways' bytes and exposed time."""

    way: str  # "queries" or "keys"
    sent: dict[str, int]
    exposed: dict[str, float]  # seconds

    def __str__(self) -> str:
        figures = [
            f"{way}: {self.sent[way] / 1e6:.1f} MB sent, {self.exposed[way] * 1e3:.2f} ms exposed" for way in MOVES
        ]
        return f"{self.way} travel ({'; '.join(figures)})"


MOVES = ("queries", "keys")


def prefill_moves(
    ranks: int, local: int, cached: int, heads: Heads, machine: Machine, link: Link, hides: bool = True,
    beside: bool = True,
) -> Moves:  # fmt: skip
    """Queries or keys, whichever leaves less time exposed, for `local` queries per rank and `cached` keys in all.

    Compute hides transfers, except that of the first queries, and that of all queries unless they travel `beside` it.
    Keys then come from all ranks at once, except the chunk's, which every rank receives anyway; otherwise they come
    from one rank after the other. Each step reads and writes each query's partial once more. If nothing is hidden,
    because the sender also computes (`hides=False`), the way with fewer bytes is chosen.
    """
    hops, partials = ranks - 1, local * heads.partial_bytes
    held = -(-max(0, cached - ranks * local * beside) // ranks)
    queries_sent = hops * local * heads.query_bytes
    sent = {"queries": queries_sent + hops * partials, "keys": hops * held * heads.key_bytes}
    hidden = local * cached * heads.pair_flops / machine.flops(heads.itemsize, ranks) * hops / ranks * hides
    merged = 2 * partials / machine.bandwidth * hides * (hops > 0)
    pieces = -(-held // keys_at_once(local))
    transfers, visits = (min(1, hops) * pieces, 2 * pieces) if beside else (hops * pieces, ranks * pieces)
    steps = -(-hops // queries_at_once(local * heads.batch * heads.heads))

    def flight(nbytes: float, transfers: int) -> float:
        return float(link.transfer(nbytes, ranks) + transfers * link.latency)

    gathered = flight(sent["queries"], 2 * min(1, hops))
    if beside:
        first = queries_sent / max(1, steps)
        gathered = flight(first, min(1, hops)) + max(0.0, flight(sent["queries"] - first, 2 * steps - 1) - hidden)
    travelled = max(0.0, flight(sent["keys"], transfers) - hidden)
    exposed = {"queries": gathered + ranks * merged, "keys": travelled + visits * merged}
    way = "keys" if exposed["keys"] < exposed["queries"] else "queries"
    return Moves(way, sent, exposed)


def keys_at_once(local: int) -> int:
    """How many keys a rank sends in one hop: a few times its queries, so that memory is proportional to the chunk."""
    return max(FEWEST_KEYS, 4 * local)


def queries_at_once(rows: int) -> int:
    """How many ranks' queries, with `rows` rows each, a step takes: enough to fill a GPU."""
    return max(1, FILLING // max(1, rows))


def exchange_way(nbytes: int, ranks: int, link: Link) -> str:
    """How partials of `nbytes` per rank are merged into one on every rank.

    gather    every rank sends its partials to all, and each merges them: (ranks - 1) x nbytes, one transfer
    scatter   each rank merges its share of the rows and sends it to all: 2 x nbytes at most, two transfers

    Either way every row is merged in rank order, so all ranks have the same bits.
    """
    gather = link.latency + link.transfer((ranks - 1) * nbytes, ranks)
    scatter = 2 * link.latency + link.transfer(2 * (ranks - 1) * nbytes / ranks, ranks)
    return "gather" if gather <= scatter else "scatter"


def exchange_over(nbytes: int, ranks: int, machine: Machine) -> str:
    """The transport with which partials of `nbytes` per rank arrive sooner, if both are available.

    group       NCCL, which starts sooner: for a token
    symmetric   copy engines, which move faster: for large partials
    """
    bandwidth, sooner = machine.group
    sent = (ranks - 1) * nbytes
    return "symmetric" if bandwidth and sent / bandwidth > sooner + sent / machine.inside.bandwidth else "group"
