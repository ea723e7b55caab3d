"""Which query sees which key in a call: a plan, a spec and its documents, and the schedule that follows from them."""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from ringattn.layouts.layout import Shard, count_below, sorted_positions
from ringattn.masks.bands import Bands, Families, Runs, all_bands, families
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import shards
from ringattn.plans.plan import Plan
from ringattn.steps.reads import Reads, seen, union
from ringattn.steps.table import Table, build


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

    @cached_property
    def seeing(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Where the ranges of queries that see a key by slices begin and end; the others are as padding."""
        if self.docs is None or self.docs.slices is None:
            return None
        bands = bands_of(self)
        return union(np.zeros_like(bands.start), bands.start, bands.stop)[1:]

    def runs(self, shard: Shard) -> list[Runs]:
        """Of each family the runs of a shard's queries, in the order of their positions."""
        positions, below = sorted_positions(shard), partial(count_below, shard)
        return [Runs.of(family, positions, below) for family in self.families]

    def bounds(self, shard: Shard) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each family the keys [begin, end) that a shard's queries see, as [1, T] or [rows, T] arrays."""
        return [runs.bounds() for runs in self.runs(shard)]


def among_all(spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None) -> AttentionSpec:
    """A mask of the whole sequence that sees all that this one may see in any documents."""
    if docs is None:
        return spec
    if docs.spans is not None or key_docs is not None or (spec.first and not spec.causal):
        return AttentionSpec(causal=False)
    if spec.first:
        return AttentionSpec()
    if spec.chunk is None:
        return spec
    if spec.causal:
        return AttentionSpec(window=spec.behind)
    left, right = (spec.chunk if n is None else min(n, spec.chunk) for n in spec.reach)
    return AttentionSpec(False, (left, right))


def bands_of(mask: Mask) -> Bands:
    return all_bands(mask.among or mask.spec, *mask.arguments)


@lru_cache(maxsize=32)
def reads_of(mask: Mask) -> Reads:
    return seen(bands_of(mask), shards(mask.plan.tokens), shards(mask.plan.keys.tokens))


@lru_cache(maxsize=32)
def table_of(mask: Mask, hosts: int, together: int = 1) -> Table:
    """The steps of all ranks; one brings as much as so many blocks."""
    return build(reads_of(mask), hosts, together)
