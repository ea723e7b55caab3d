"""Linear attention with one state a document: kernels get rows that hold tokens of one document.

    B batch   T this rank's tokens   P segments per rank   F fragments   R rows   L tokens a row
    H heads   K key dim   V value dim

A fragment is what a segment holds of a document; a segment of padding holds an empty one. It is cut into rows of
equally many tokens, the last of which is filled up. The state before a row is the one behind the row before it; where a
fragment begins it is the initial state of its document, or the state before the segment, which other ranks send. So
kernels need to know nothing of documents: to them rows are a batch.

Between ranks travels one map a segment, as without documents: that of its last fragment (in reverse: of its first),
with a factor of 0 unless one document passes the whole segment.

Documents are counted row by row of the batch, as many in each: document i of row b is number b * width + i.
"""

from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear.maps import Inputs, Map
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan
from ringattn.plans.segments import pieces, segments
from ringattn.torch.sharding import summed

BLOCK = 64  # tokens: what a kernel computes at once, and about what a row costs beside its tokens, for its map
TOKENS_PER_LEVEL = 1024  # its cost on a GPU, where a launch waits for the level before; on a CPU nothing

Ints = np.ndarray


class Documents:
    """Which rows this rank's tokens are folded to, and which states of rows are those of documents and segments.

    `levels[i]` fragments have more than i rows. Fragments with more rows come first, and the first rows of all come
    before the second ones: row i of fragment f is number sum(levels[:i]) + f. Index tensors that belong together are
    pairs: entry i of one goes with entry i of the other.
    """

    def __init__(self, plan: Plan, docs: Docs, batch: int, device: torch.device):
        P, width, (ring_rank, ulysses_rank) = segments(plan), docs.starts.shape[1] - 1, plan.place
        ranges = pieces(plan)[ring_rank * plan.ulysses + ulysses_rank]
        mine = [*ranges, *[range(0)] * (P - len(ranges))]
        self.device, self.segments, self.count = device, batch * P, batch * width
        self.tokens, self.alone = (batch, plan.local_len), plan.ring * plan.ulysses == 1
        starts = np.repeat(np.broadcast_to(docs.starts, (batch, width + 1)), P, 0)  # [B * P, documents and one more]
        first, stop = (np.tile(x, batch)[:, None] for x in zip(*((r.start, r.stop) for r in mine), strict=True))
        begin, end = np.maximum(starts[:, :-1], first), np.minimum(starts[:, 1:], stop)
        present = end > begin
        present[~present.any(1), -1] = True
        segment, i = np.nonzero(present)  # of each fragment, in the order of the sequence
        begin, tokens = begin[present], np.maximum(end - begin, 0)[present]
        begins = (begin == starts[segment, i]) & (tokens > 0)
        ends = (begin + tokens == starts[segment, i + 1]) & (tokens > 0)
        document = segment // P * width + i

        L = row_length(tokens, TOKENS_PER_LEVEL if device.type == "cuda" else 0)
        rows = np.maximum(-(-tokens // L), 1)
        self.levels = [int((rows > n).sum()) for n in range(rows.max())]
        self.joined = not self.alone or len(self.levels) > 1  # whether maps of rows are needed
        offset = np.cumsum([0, *self.levels])
        number = np.argsort(np.argsort(-rows, kind="stable"))
        last = offset[rows - 1] + number

        def pair(which: Ints, *fields: Ints) -> list[Tensor]:
            return [self.index(x[which]) for x in fields]

        self.begun, self.resumed = pair(begins, number, document), pair(~begins, number, segment)
        self.ended, self.left = pair(ends, number, document), pair(~ends, number, segment)
        self.ends = self.index(last[ends])  # the rows of the former's last tokens
        each = np.arange(self.segments)
        self.first_rows = self.index(number[np.searchsorted(segment, each)])
        self.last_rows = self.index(last[np.searchsorted(segment, each, "right") - 1])
        passing = np.flatnonzero(~begins & ~ends & (tokens > 0))
        self.passing = [(int(segment[f]), (offset[: rows[f]] + number[f]).tolist()) for f in passing]

        at = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)  # in its fragment
        before = np.cumsum([0, *map(len, mine)])[segment % P] + segment // P * plan.local_len  # tokens of the segment
        token = np.repeat(before + begin - first[segment, 0], tokens) + at
        self.shape = int(offset[-1]), L
        self.places = self.inverses(token, (offset[at // L] + np.repeat(number, tokens)) * L + at % L)

        self.starts: Ints = np.broadcast_to(docs.starts, (batch, width + 1))
        empty = self.starts[:, 1:] == self.starts[:, :-1]
        self.empty = self.index(np.flatnonzero(empty))
        final = np.where(empty.all(1), 0, width - 1 - np.argmin(empty[:, ::-1], 1))  # of each row, with tokens
        self.final = self.index(np.arange(batch) * width + final)

    def index(self, x: Ints, dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(x.astype(dtype)).to(self.device)

    def inverses(self, token: Ints, slot: Ints) -> list[Tensor]:
        """(each place's token, the places without one, each token's place, the tokens without one: padding)."""
        sizes = self.shape[0] * self.shape[1], self.tokens[0] * self.tokens[1]
        indices, dtype = [], np.int32 if max(sizes) < 2**31 else np.int64  # calls are cached, and these with them
        for size, to, source in zip(sizes, (slot, token), (token, slot), strict=True):
            every = np.full(size, -1)
            every[to] = source
            indices += [self.index(np.maximum(every, 0), dtype), self.index(np.flatnonzero(every < 0))]
        return indices

    def folded(self, x: Tensor) -> Tensor:
        """[B, T, ...] as rows [R, L, ...]; zeros where a row is filled up. Padding is in no row."""
        token, none, _, _ = self.places
        return x.flatten(0, 1).index_select(0, token).index_fill_(0, none, 0).unflatten(0, self.shape)

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `folded`; zeros for padding."""
        _, _, slot, padding = self.places
        return x.flatten(0, 1).index_select(0, slot).index_fill_(0, padding, 0).unflatten(0, self.tokens)

    def of_documents(self, initial: Tensor | None) -> Tensor | None:
        """The initial state of each document; a state a row is that of the row's first document, the others' are 0."""
        if initial is None or len(initial) == self.count:
            return initial
        return F.pad(initial[:, None], [0] * 7 + [self.count // len(initial) - 1]).flatten(0, 1)

    def before(self, initial: Tensor | None, segments: Tensor | None, like: Tensor) -> Tensor:
        """The state before each fragment, from those before documents and segments; None are zeros."""
        return self.put(like, (self.begun, initial), (self.resumed, segments))

    def behind(self, ends: Tensor | None, segments: Tensor | None, like: Tensor) -> Tensor:
        """The gradient for the state behind each fragment, from those behind documents and segments; None are zeros."""
        return self.put(like, (self.left, segments), (self.ended, ends))

    def put(self, like: Tensor, *given: tuple[Any, Tensor | None]) -> Tensor:
        """One state a fragment [F, ...] from pairs (to, source) and the states of their sources; None are zeros."""
        inputs = like.new_zeros(self.levels[0], *like.shape)
        for (to, source), states in given:
            if states is not None:
                inputs.index_copy_(0, to, states[source])
        return inputs

    def level(self, maps: Map, i: int, count: int) -> Map:
        """The maps of the i-th rows of the first `count` fragments."""
        first = sum(self.levels[:i])
        return Map(maps.factor[first : first + count], maps.kv[first : first + count])

    def walked(self, maps: Map | None, state: Tensor) -> Tensor:
        """The state before each row, given that before each fragment."""
        states = [state]
        for i, count in enumerate(self.levels[1:]):
            assert maps is not None
            states.append(self.level(maps, i, count).after(states[-1][:count]))
        return torch.cat(states) if len(states) > 1 else state

    def walked_back(self, maps: Map | None, state: Tensor) -> Tensor:
        """The gradient for the state behind each row, given that behind each fragment."""
        later = state[:0]
        behind: list[Tensor] = []
        for i, count in reversed(list(enumerate(self.levels))):
            if behind:
                assert maps is not None
                later = self.level(maps, i + 1, len(later)).after(later)
            later = torch.cat([later, state[len(later) : count]])
            behind.append(later)
        return torch.cat(behind[::-1]) if len(behind) > 1 else behind[0]

    def of_segments(self, maps: Map, states: Tensor, backward: bool = False) -> Map:
        """The map of each segment [B * P, ...]; `states` are those before rows, backward those behind."""
        leaving = self.first_rows if backward else self.last_rows
        mine = Map(*(x.index_select(0, leaving) for x in maps))
        factor = torch.zeros_like(mine.factor)
        for segment, rows in self.passing:
            of_rows = (Map(maps.factor[r], maps.kv[r]) for r in (rows[::-1] if backward else rows))
            factor[segment] = reduce(Map.then, of_rows).factor
        return Map(factor, mine.after(states.index_select(0, leaving)))

    def shared(self, plan: Plan, behind: Tensor, initial: Tensor | None) -> Tensor:
        """The state behind each document, on every rank, from those behind rows."""
        ends = behind.new_zeros(self.count, *behind.shape[1:])
        ends.index_copy_(0, self.ended[1], behind.index_select(0, self.ends))
        ends = summed(ends, plan.ulysses_axis, plan.ring_axis)  # one rank has each
        return ends if initial is None else ends.index_copy_(0, self.empty, initial.index_select(0, self.empty))

    def of_initial(self, dbefore: Tensor, dend: Tensor | None, initial: Tensor | None) -> Tensor | None:
        """This rank's share of the gradient for the initial state, from those for the states before rows."""
        if initial is None:
            return None
        by_document = dbefore.new_zeros(self.count, *dbefore.shape[1:])
        by_document.index_copy_(0, self.begun[1], dbefore.index_select(0, self.begun[0]))
        if dend is not None:
            by_document.index_copy_(0, self.empty, dend.index_select(0, self.empty).to(by_document.dtype))
        return by_document.unflatten(0, (len(initial), -1))[:, 0]


def row_length(tokens: Ints, level: int = 0) -> int:
    """The length of rows for fragments of so many tokens: long rows are filled up more, short ones are more maps, and
    more levels one after the other, each of which costs `level` tokens.

    Rows hold at most twice the tokens, and 128 more for each fragment.
    """
    longest = max(int(tokens.max()), 1)
    options = [longest]
    while BLOCK << len(options) - 1 < longest:
        options.append(BLOCK << len(options) - 1)

    def cost(length: int) -> tuple[bool, int]:
        rows = np.maximum(-(-tokens // length), 1)
        count = int(rows.sum())
        too_many = count * length > 2 * (int(tokens.sum()) + BLOCK * len(tokens))
        return too_many, count * (-(-length // BLOCK) + 1) * BLOCK + int(rows.max()) * level

    return min(options, key=cost)


def state_of(x: Inputs) -> Tensor:
    """A state's shape [H, K, V], dtype and device."""
    return x.v.new_empty(x.v.shape[2], x.k.shape[3], x.v.shape[3], dtype=accumulator(x.k))
