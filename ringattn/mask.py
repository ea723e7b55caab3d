"""Which query sees which key in a call: a plan, a spec and its documents, and the schedule that follows from them."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from ringattn.layout import Shard, count_below, sorted_positions
from ringattn.planning import Plan
from ringattn.schedule import Schedule, seen
from ringattn.spec import AttentionSpec, Docs, Runs, runs


@dataclass(frozen=True)
class Mask:
    """All that decides which query sees which key, known before anything runs (documents that JAX traces are not)."""

    plan: Plan
    spec: AttentionSpec
    docs: Docs | None = None
    key_docs: Docs | None = None

    @property
    def arguments(self) -> tuple[int, int, Docs | None, Docs | None]:
        """The lengths of the queries and of the keys, and their documents: one row if all rows are equal."""
        docs, key_docs = self.docs, self.key_docs
        if docs is not None and docs.first is not None and (key_docs is None or key_docs.first is not None):
            docs, key_docs = docs.first, None if key_docs is None else key_docs.first
        return self.plan.seq_len, self.plan.keys.seq_len, docs, key_docs

    def runs(self, shard: Shard) -> Runs:
        """The runs of a shard's queries, in the order of their positions."""
        return runs(sorted_positions(shard), partial(count_below, shard), *self.arguments)

    def bounds(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        """The keys [begin, end) that a shard's queries see, as [1, T] or [rows, T] arrays."""
        return self.runs(shard).bounds(self.spec)


@lru_cache(maxsize=32)
def schedule_of(mask: Mask) -> Schedule:
    """Which rank needs what of whose keys; the same on every rank."""
    plan = mask.plan
    queries, held = ([layout.shard(r) for r in range(plan.ring)] for layout in (plan.tokens, plan.keys.tokens))
    found = seen(mask.spec, pieces(*mask.arguments), queries, held, plan.tokens.by_document)
    return replace(found, parts=None) if plan.axes.whole else found


def pieces(seq_len: int, key_len: int, docs: Docs | None = None, key_docs: Docs | None = None) -> np.ndarray:
    """[4, n]: the queries [start, stop) of every document of every row, and its keys [start, stop)."""
    if docs is None:
        return np.array([[0], [seq_len], [0], [key_len]])
    starts, limits = docs.starts, (docs if key_docs is None else key_docs).starts
    return np.stack([x.ravel() for x in (starts[:, :-1], starts[:, 1:], limits[:, :-1], limits[:, 1:])])
