"""Which tokens each rank holds: a layout is the ranges of every rank, made by one function, for any length.

A shard is a few Python ranges in increasing order, so its positions are sorted, and the local index of a global
position is a sum of clipped divisions: searchsorted without the array.

    contiguous   0 0 0 0 1 1 1 1      rank r holds one block
    striped      0 1 0 1 0 1 0 1      rank r holds every size-th token
    zigzag       0 0 1 1 1 1 0 0      rank r holds block r from the front and block r from the back
    balanced     0 1 1 0 0 0 1 1      documents are dealt out by their work: short ones whole, long ones in a few blocks

Contiguous and zigzag may also lay out each document of a packed sequence instead of the whole of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from ringattn.layouts.dealing import deal
from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs, raise_if

Shard = tuple[range, ...]
RANGES_SUMMED = 4  # of more ranges, which do not interleave, the one of a position is looked up


def block(whole: tuple[int, int], count: int, i: int) -> range:
    start, n = whole[0], (whole[1] - whole[0]) // count
    return range(start + i * n, start + (i + 1) * n)


def contiguous(layout: "Layout", ranks: int, rank: int) -> Shard:
    """Block `rank` of each piece."""
    return tuple([block(whole, ranks, rank) for whole in layout.pieces])


def striped(layout: "Layout", ranks: int, rank: int) -> Shard:
    """Every token that is `rank` modulo `ranks`."""
    return (range(rank, layout.padded_length, ranks),)


def zigzag(layout: "Layout", ranks: int, rank: int) -> Shard:
    """Block `rank` of each piece, counted from the front and from the back."""
    if ranks == 1:
        return contiguous(layout, ranks, rank)
    return tuple([block(whole, 2 * ranks, i) for whole in layout.pieces for i in (rank, 2 * ranks - 1 - rank)])


class Maker(NamedTuple):
    """The shard of one of so many ranks, of how many equal blocks of each piece it consists, whether each document can
    be laid out, and whether documents are dealt out by their work, which JAX does not take.
    """

    shard: Callable[["Layout", int, int], Shard]
    blocks: int
    each_document: bool = False
    by_work: bool = False


MAKERS = {
    "contiguous": Maker(contiguous, 1, each_document=True),
    "striped": Maker(striped, 1),
    "zigzag": Maker(zigzag, 2, each_document=True),
    "balanced": Maker(lambda layout, ranks, rank: layout.dealt[rank], 1, by_work=True),  # to whole ring ranks
}
LAYOUTS = tuple(name for name, maker in MAKERS.items() if not maker.by_work)  # the same for any documents


@dataclass(frozen=True)
class Layout:
    """`length` tokens over the ring, padded at the end so that every shard has the same `shard_len`.

    Each shard is cut contiguously among the Ulysses ranks. With `docs` each of these documents, and the padding after
    them, is laid out over all ranks, and what the Ulysses ranks of one ring rank hold is its shard; unless the layout
    is balanced: then they are dealt out to the ring by the work of `spec`.
    """

    name: str
    length: int
    ring: int = 1
    ulysses: int = 1
    docs: Docs | None = None
    spec: AttentionSpec | None = None

    def __post_init__(self) -> None:
        if self.docs is not None:
            raise_if(self._docs_problem(self.docs))

    @property
    def maker(self) -> Maker:
        return MAKERS[self.name]

    def _docs_problem(self, docs: Docs) -> str | None:
        """Why these documents cannot be laid out, if they cannot."""
        ranks = self.ring * self.ulysses
        if not (self.maker.each_document or self.maker.by_work):
            return f"layout={self.name!r} deals out each document's tokens as it is: use the plan without for_docs"
        if docs.length != self.length:
            return f"{docs}: the plan is for {self.length} tokens; make them the same"
        if docs.first is None:
            return f"{docs}: rows with other documents would lie on other ranks; put the rows one after the other"
        unit = ranks * self.maker.blocks if ranks > 1 and self.by_document else 1
        if odd := [stop - start for start, stop in self.pieces if (stop - start) % unit]:
            return (
                f"a document of {odd[0]} tokens cannot be cut over {ranks} ranks in layout={self.name!r}: pad each "
                f"document (and what follows the last one) to a multiple of {unit} tokens"
            )
        return None

    @property
    def by_document(self) -> bool:
        """Whether each document is laid out over all ranks, Ulysses ranks too."""
        return self.docs is not None and self.maker.each_document

    @cached_property
    def dealt(self) -> list[Shard]:
        """Of a balanced layout, every ring rank's shard."""
        spec = self.spec or AttentionSpec()
        starts = np.array([0, self.length]) if self.docs is None else self.docs.starts[0]
        if spec.chunk is not None and not spec.first:  # each chunk is a document
            starts = np.unique(np.concatenate([np.arange(a, b, spec.chunk) for a, b in pairwise(starts)] + [starts]))
        return deal(starts, self.padded_length, self.ring, work_of(spec, self.length, self.length, self.docs))

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """What is laid out: the whole sequence, or each document that has tokens, and the padding after them."""
        if self.docs is None or not self.by_document:
            return [(0, self.padded_length)]
        edges = [*self.docs.starts[0].tolist(), self.length]
        return [(start, stop) for start, stop in pairwise(edges) if start < stop]

    @cached_property
    def padded_length(self) -> int:
        if self.by_document:
            return self.length
        unit = self.ring * lcm(self.maker.blocks, self.ulysses)
        return max(1, -(-self.length // unit)) * unit

    @property
    def shard_len(self) -> int:
        return self.padded_length // self.ring

    def shard(self, rank: int) -> Shard:
        """The global positions of one ring rank's tokens, as ranges; positions from `length` on are padding."""
        return self.maker.shard(self, self.ring, rank)

    def held(self, rank: int, inner: int) -> Shard:
        """The global positions of what one Ulysses rank holds of a ring rank's shard."""
        if self.by_document:
            return self.maker.shard(self, self.ring * self.ulysses, rank * self.ulysses + inner)
        n = self.shard_len // self.ulysses
        return part_of(self.shard(rank), slice(inner * n, (inner + 1) * n))

    def positions(self, rank: int) -> np.ndarray:
        return positions_of(self.shard(rank))

    def order(self) -> np.ndarray:
        """The global positions of what all ranks hold, one after the other: `x[order]` is the sharded order of x."""
        return np.concatenate([positions_of(self.held(r, u)) for r in range(self.ring) for u in range(self.ulysses)])

    def shard_order(self) -> np.ndarray:
        """The same of whole ring shards, whose tokens are in the order of their positions."""
        return np.concatenate([self.positions(r) for r in range(self.ring)])

    def swapped(self, rank: int) -> np.ndarray | None:
        """Where each token of a ring rank's shard lies among those of its Ulysses ranks; None if just there."""
        if not self.by_document or self.ulysses == 1:
            return None
        return np.argsort(np.concatenate([positions_of(self.held(rank, u)) for u in range(self.ulysses)]))

    @cached_property
    def in_order(self) -> bool:
        """Whether the ring shards one after the other are the sequence in its own order."""
        n = self.shard_len
        return all(self.shard(r) == (range(r * n, (r + 1) * n),) for r in range(self.ring))

    @property
    def many(self) -> bool:
        """Whether shards may have many ranges."""
        return self.by_document or self.maker.by_work

    @cached_property
    def segments(self) -> int:
        """Of how many runs of neighbouring tokens, equally long, every rank's tokens consist: 1, 2, or 0 for more."""
        local, ranks = self.shard_len // self.ulysses, [(r, u) for r in range(self.ring) for u in range(self.ulysses)]
        for count in (1, 2):
            parts = [x for place in ranks for x in self.parts(*place, count)] if local % count == 0 else [()]
            if all(len(part) == 1 and part[0].step == 1 for part in parts):
                return count
        return 0

    def parts(self, rank: int, inner: int, count: int) -> list[Shard]:
        """What one Ulysses rank holds, in `count` parts of equally many tokens."""
        held, n = self.held(rank, inner), self.shard_len // self.ulysses // count
        return [part_of(held, slice(i * n, (i + 1) * n)) for i in range(count)]


def part_of(shard: Shard, some: slice) -> Shard:
    """The tokens of a shard with these local indices."""
    inside, at = [], 0
    for r in shard:
        inside.append(r[max(0, some.start - at) : max(0, some.stop - at)])
        at += len(r)
    return tuple(r for r in inside if r)


def positions_of(shard: Shard) -> np.ndarray:
    return np.concatenate([np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in shard])


def sorted_positions(shard: Shard) -> np.ndarray:
    """The positions of a shard, whose ranges may interleave."""
    positions = positions_of(shard)
    positions.sort(kind="stable")
    return positions


def count_below(shard: Shard, position: Any) -> Any:
    """How many of the shard's positions are below `position`: searchsorted(positions, position), in closed form.

    Works on numpy arrays, tensors and traced arrays.
    """
    if len(shard) > RANGES_SUMMED and shard[0].step == 1 and isinstance(position, np.ndarray):
        edges = np.array([(r.start, r.stop) for r in shard]).ravel()
        counts = np.cumsum(np.diff(edges, prepend=edges[0]) * (np.arange(len(edges)) % 2))
        return np.interp(position, edges, counts).astype(np.int64)
    counted = (position - r.start if r.step == 1 else (position - r.start + r.step - 1) // r.step for r in shard)
    return sum(count.clip(0, len(r)) for count, r in zip(counted, shard, strict=True))


def to_local(shard: Shard, begin: Any, end: Any) -> tuple[Any, Any]:
    """Each global interval [begin, end) as an interval of the shard's local indices."""
    return count_below(shard, begin), count_below(shard, end)
