"""Who sees whom in one call: a plan, a spec and its documents, and the schedule that follows from them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ringattn.planning import Plan
from ringattn.schedule import Schedule, needed
from ringattn.spec import AttentionSpec, Docs, bounds


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
    begin, end = mask.bounds(np.arange(tokens.padded_length))
    everyone = range(tokens.ring)
    return Schedule(needed(begin, end, [tokens.shard(r) for r in everyone], [keys.shard(r) for r in everyone]))
