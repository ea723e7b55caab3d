"""What a plan computes and moves: pairs, bytes, groups of heads. Plain Python and numpy; predict.py has the times."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringattn.bands import bounds_at, families
from ringattn.layout import Layout, laps, positions_at
from ringattn.spec import AttentionSpec, Docs


@dataclass(frozen=True)
class Hardware:
    """Measured rates of one rank: kernel flops per second, link bytes per second each way, seconds per transfer.

    `room` is the most bytes of keys that a step brings at once: few large steps fill a GPU better than many small ones.
    Between GPUs that can read each other's memory there are two transports: copy engines, which these rates are for,
    start `engines` seconds later than a process group, which moves a few MiB at `group_link` bytes per second.
    """

    name: str
    flops: float
    link: float
    latency: float
    memory: float  # bytes per second, read or written
    room: int = 0
    engines: float = 0.0
    group_link: float = 0.0

    def blocks_at_once(self, block: int) -> int:
        """How many blocks of `block` bytes a step may bring."""
        return max(1, self.room // max(1, block))


HARDWARE = {
    "h200": Hardware("H200, NVLink", 550e12, 250e9, 20e-6, 4e12, room=384 * 2**20, engines=25e-6, group_link=160e9),
    "tpu": Hardware("TPU v6e, half its datasheet's rates", 459e12, 45e9, 5e-6, 0.8e12),  # not measured
    "cpu": Hardware("CPU", 5e10, 1e9, 300e-6, 1e10),
}


@dataclass(frozen=True)
class Shape:
    """One attention call, whole sequence and all heads."""

    seq_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int = 2
    batch: int = 1

    @property
    def flops_a_pair(self) -> int:
        """Multiply-adds of one (query, key) pair over all heads: the two products of the forward pass."""
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim)

    def kv_bytes(self, tokens: int, heads: int) -> int:
        return self.batch * tokens * heads * (self.head_dim + self.value_dim) * self.itemsize

    def q_bytes(self, tokens: int) -> int:
        return self.batch * tokens * self.heads * (self.head_dim + self.value_dim) * self.itemsize  # q, and out back

    def backward_bytes(self, ring: int, grads: int = 4) -> int:
        """The bytes that a block moves in backward: keys and values, and their gradients of `grads` bytes a number."""
        block = self.kv_bytes(self.key_len // ring, self.kv_heads)
        return block + block // self.itemsize * grads


SAMPLED_ROWS = 65536


def seen_pairs(
    layout: Layout, key_layout: Layout, spec: AttentionSpec, docs: Docs | None = None, ranks: np.ndarray | None = None,
    samples: int = SAMPLED_ROWS,
) -> np.ndarray:  # fmt: skip
    """[rank, block]: how many (query, key) pairs of two ring shards are seen, sampled at so many queries.

    By default the rows are those of all ranks.
    """
    ranks = np.arange(layout.ring) if ranks is None else ranks
    every = max(1, layout.shard_len * len(ranks) // samples)
    sample = np.stack([positions_at(layout.shard(rank), slice(0, None, every)) for rank in ranks.tolist()])
    found = np.zeros((len(ranks), layout.ring))
    for family in families(spec, layout.length, key_layout.length, docs):
        begin, end = (side.reshape(-1, *sample.shape) for side in bounds_at(family, sample.ravel()))
        earlier = keys_below(key_layout, begin) if begin.any() else 0
        found += every * (keys_below(key_layout, np.maximum(begin, end)) - earlier)
    return found


@lru_cache(maxsize=64)
def turns(layout: Layout) -> tuple[int, np.ndarray, np.ndarray]:
    """`laps` of all shards of a layout."""
    return laps([layout.shard(rank) for rank in range(layout.ring)])


def keys_below(layout: Layout, positions: np.ndarray) -> np.ndarray:
    """[rank, block]: how many keys of a block lie below positions [..., rank, n], summed over a rank's positions."""
    lap, starts, owners = turns(layout)
    ranks = positions.shape[-2]
    shape = (ranks, len(owners))
    full, rest = np.divmod(positions, lap)
    piece = np.searchsorted(starts, rest, "right") - 1
    at = (piece + len(owners) * np.arange(ranks)[:, None]).ravel()
    within = np.bincount(at, minlength=math.prod(shape)).reshape(shape)  # positions in each piece
    cut = np.bincount(at, (rest - starts[piece]).ravel(), minlength=math.prod(shape)).reshape(shape)  # keys before them
    beyond = within.sum(1, keepdims=True) - within.cumsum(1)  # positions in later pieces of the lap
    every = np.moveaxis(full, -2, 0).reshape(ranks, -1).sum(1, keepdims=True)  # whole laps
    found = np.diff(starts, append=lap) * (every + beyond) + cut
    order = np.argsort(owners, kind="stable")
    return np.add.reduceat(found[:, order], np.searchsorted(owners[order], np.arange(layout.ring)), axis=1)


def replicas(kv_heads: int, ulysses: int) -> int:
    """How often each key head is repeated so that the Ulysses size divides them."""
    return ulysses // math.gcd(kv_heads, ulysses)


def kv_heads_of_a_rank(kv_heads: int, ulysses: int) -> int:
    return kv_heads * replicas(kv_heads, ulysses) // ulysses


def exchanged(shape: Shape, ring: int, ulysses: int, strategy: str, local: tuple[int, int]) -> int:
    """The bytes that a rank sends in forward and no step hides: Ulysses' exchanges both ways, and gathered keys.

    `local` is how many tokens of the queries and of the keys a rank holds.
    """
    kv_heads = shape.kv_heads * replicas(shape.kv_heads, ulysses)
    block = shape.kv_bytes(local[1], kv_heads)
    swap = (shape.q_bytes(local[0]) + block) * (ulysses - 1) // ulysses
    return swap + (ring - 1) * block * (strategy == "gather")


MOST_GROUPS = 4
# cost of one more group: latencies, part of the attention's time; 2 H200s, 32K and 131K
MORE_LATENCIES, MORE_WORK = 15, 0.0065


def groups_of(shape: Shape, sent: int, ranks: int, kv_heads: int, hardware: Hardware) -> int:
    """How many groups to cut a rank's heads into, so that one group travels while another is computed.

    Each group costs launches, and smaller groups fill a GPU less well.
    """
    attending = shape.flops_a_pair * shape.seq_len * shape.key_len / 2 / ranks / hardware.flops
    more = MORE_LATENCIES * hardware.latency + MORE_WORK * attending
    possible = [n for n in range(1, MOST_GROUPS + 1) if kv_heads % n == 0]
    return min(possible, key=lambda n: sent / hardware.link / n + n * more)
