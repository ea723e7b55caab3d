"""Which query sees which key in a call: a plan, a spec and its documents, and the schedule that follows from them."""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ringattn.bands import Bands, Families, Runs, Work, families, joined
from ringattn.kernels.rates import FEW, mask_of
from ringattn.layout import Shard, count_below, sorted_positions
from ringattn.planning import Plan
from ringattn.schedule import Schedule, seen
from ringattn.spec import AttentionSpec, Docs


@dataclass(frozen=True)
class Mask:
    """All that decides which query sees which key, known before anything runs (documents that JAX traces are not).

    `among` sees, without documents, all that `spec` may see in documents that JAX traces.
    """

    plan: Plan
    spec: AttentionSpec
    docs: Docs | None = None
    key_docs: Docs | None = None
    among: AttentionSpec | None = None

    @property
    def arguments(self) -> tuple[int, int, Docs | None, Docs | None]:
        """The lengths of the queries and of the keys, and their documents: one row if all rows are equal."""
        docs, key_docs = self.docs, self.key_docs
        if docs is not None and docs.first is not None and (key_docs is None or key_docs.first is not None):
            docs, key_docs = docs.first, None if key_docs is None else key_docs.first
        return self.plan.seq_len, self.plan.keys.seq_len, docs, key_docs

    @property
    def families(self) -> Families:
        """Who sees whom, as bands of one row if all rows are equal."""
        return families(self.among or self.spec, *self.arguments)

    def runs(self, shard: Shard) -> list[Runs]:
        """Of each family the runs of a shard's queries, in the order of their positions."""
        positions, below = sorted_positions(shard), partial(count_below, shard)
        return [Runs.of(family, positions, below) for family in self.families]

    def bounds(self, shard: Shard) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each family the keys [begin, end) that a shard's queries see, as [1, T] or [rows, T] arrays."""
        return [runs.bounds() for runs in self.runs(shard)]


def bands_of(mask: Mask) -> Bands:
    """All bands of all families and rows."""
    return joined([bands for family in mask.families for bands in family])


@lru_cache(maxsize=32)
def schedule_of(mask: Mask) -> Schedule:
    """Which rank needs what of whose keys; the same on every rank."""
    plan = mask.plan
    queries, held = ([layout.shard(r) for r in range(plan.ring)] for layout in (plan.tokens, plan.keys.tokens))
    found = seen(bands_of(mask), queries, held, plan.tokens.by_document)
    return Schedule(found.needed, found.length) if plan.axes.whole else found


def kind_of(
    spec: AttentionSpec, lengths: tuple[int, int], docs: Docs | None, key_docs: Docs | None, alone: bool
) -> str:
    """The kind of mask, by which the fastest kernel is chosen where steps are not few rectangles.

    `lengths` are those of the queries and of the keys; `alone`: on one device, and all batch rows have the same.
    """
    if (docs is None or docs.plain) and not spec.first and not isinstance(spec.window, tuple):
        rows = np.array([[lengths[1]]]) if docs is None else np.diff(docs.starts)
        if spec.chunk is not None:  # each chunk is a document
            size = spec.chunk
            rows = np.array([[n for row in rows.tolist() for m in row for n in [size] * (m // size) + [m % size]]])
        return mask_of(rows, spec.causal, spec.window, alone)
    found = [Work.of(joined(bands)) for bands in zip(*families(spec, *lengths, docs, key_docs), strict=True)]
    pairs = sum(int(work.below(lengths[0])) for work in found)
    return "long" if pairs >= FEW * lengths[0] * len(found) else "short"
