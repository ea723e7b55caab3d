"""Who sees whom in one call: a plan, a spec and its documents, and the schedule that follows from them."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringattn.layout import Shard
from ringattn.planning import Plan
from ringattn.schedule import Schedule, needed
from ringattn.spec import AttentionSpec, Docs, bounds

AT_ONCE = 2**20  # positions whose intervals are in memory at one time


@dataclass(frozen=True)
class Mask:
    """All that decides who sees whom and is known before anything runs: documents that JAX traces are not."""

    plan: Plan
    spec: AttentionSpec
    docs: Docs | None = None
    key_docs: Docs | None = None

    def bounds(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys [begin, end) that queries at these positions see, as [1, T] or [rows, T] arrays."""
        plan = self.plan
        return bounds(self.spec, positions, plan.seq_len, plan.keys.seq_len, self.docs, self.key_docs)


@lru_cache(maxsize=32)
def schedule_of(mask: Mask) -> Schedule:
    """Who needs whose keys, the same on every rank."""
    tokens, keys = mask.plan.tokens, mask.plan.keys.tokens
    everyone, total = range(tokens.ring), tokens.padded_length
    queries, held = ([layout.shard(r) for r in everyone] for layout in (tokens, keys))
    found = []
    for start in range(0, total, AT_ONCE):
        at = np.arange(start, min(start + AT_ONCE, total))
        found.append(needed(*mask.bounds(at), [within(shard, start, at[-1] + 1) for shard in queries], held))
    return Schedule(np.any(found, axis=0))


def within(shard: Shard, start: int, stop: int) -> Shard:
    """The part of a shard in [start, stop), counted from there.

    >>> within((range(1, 20, 4),), 8, 16)
    (range(1, 9, 4),)
    """
    parts = [r[bisect_left(r, start) : bisect_left(r, stop)] for r in shard]
    return tuple(range(p.start - start, p.stop - start, p.step) for p in parts)
