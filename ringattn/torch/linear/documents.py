"""Linear attention with one state a document: kernels get rows that hold tokens of one document (fragments.py).

    B batch   T this rank's tokens   P segments per rank   F fragments   R rows   L tokens a row
    H heads   K key dim   V value dim

The state before a row is the one behind the row before it; where a fragment begins it is the initial state of its
document, or the state before the segment, which other ranks send. All of these follow from the maps of rows. So kernels
need to know nothing of documents: to them rows are a batch, with a state before each and one behind each.

Between ranks travels one map a segment, as without documents: that of its last fragment, if its document goes on in the
next segment. The map has a factor of 0 unless the fragment is all that the segment holds.
"""

from collections.abc import Callable
from functools import cache, lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn.comms.axis import Axis
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear import Inputs, Map
from ringattn.planning import Plan
from ringattn.segments import segments
from ringattn.spec import Docs
from ringattn.torch.linear.fragments import LEVEL, Ints, cut, fragments, homes
from ringattn.torch.linear.states import Exchange
from ringattn.torch.sharding import local_positions

if TYPE_CHECKING:
    from ringattn.torch.linear.call import Call, Given


class Sent(NamedTuple):
    """What goes on in another segment, forward in the next one, in reverse in the one before."""

    rows: Tensor  # where a fragment's state leaves the segment: its last row, in reverse its first
    segments: Tensor
    passing: list[tuple[int, list[int]]]  # segments that hold one fragment, which neither begins nor ends, and its rows


class Documents:
    """Which rows this rank's tokens are folded to, and which states of rows are those of documents and segments.

    Index tensors that belong together are pairs: entry i of one goes with entry i of the other.
    """

    def __init__(self, plan: Plan, docs: Docs, ring_rank: int, ulysses_rank: int, batch: int, device: torch.device):
        P = segments(plan)
        firsts = local_positions(plan, ring_rank, ulysses_rank).reshape(P, -1)[:, 0]
        level = LEVEL if device.type == "cuda" else 0
        f, self.cut = cut(fragments(plan, docs, batch, firsts, plan.local_len // P), level)
        self.device, self.segments = device, batch * P
        self.tokens, self.count = (batch, plan.local_len), batch * (docs.starts.shape[1] - 1)
        self.alone = plan.ring * plan.ulysses == 1
        self.joined = not self.alone or len(self.cut.levels) > 1  # whether maps of rows are needed
        own = np.arange(len(f.tokens))
        last = self.cut.row(own, -(-f.tokens // self.cut.length) - 1)

        def pair(which: Ints, *fields: Ints) -> list[Tensor]:
            return [self.index(x[which]) for x in fields]

        self.begun = pair(f.begins, own, f.document)
        self.resumed = pair(~f.begins, own, f.segment)
        self.left = pair(~f.ends, own, f.segment)
        ended = np.flatnonzero(f.ends)
        self.ended = pair(ended[np.argsort(f.document[ended])], own, last)  # by document, as in `homes`
        passing = [(int(f.segment[i]), self.cut.rows_of(int(i))) for i in np.flatnonzero(~f.begins & ~f.ends)]
        onward, back = pair(f.begins & ~f.ends, last, f.segment), pair(~f.begins & f.ends, own, f.segment)
        self.onward = Sent(onward[0], onward[1], passing)
        self.back = Sent(back[0], back[1], [(segment, rows[::-1]) for segment, rows in passing])

        at = np.arange(f.tokens.sum()) - np.repeat(np.cumsum(f.tokens) - f.tokens, f.tokens)  # in its fragment
        row = self.cut.row(np.repeat(own, f.tokens), at // self.cut.length)
        self.places = self.inverses(np.repeat(f.first, f.tokens) + at, row * self.cut.length + at % self.cut.length)

        found, empty = homes(plan, docs, batch)
        self.empty = self.index(empty)
        self.order = self.index(np.concatenate(list(found.values())))  # of the documents that have tokens: by rank
        ranks = range(plan.ulysses)
        self.of_ulysses = [len(found[ring_rank, u]) for u in ranks]
        self.of_ring = [sum(len(found[r, u]) for u in ranks) for r in range(plan.ring)]

    def index(self, x: Ints, dtype: Any = np.int64) -> Tensor:
        return torch.from_numpy(x.astype(dtype)).to(self.device)

    def inverses(self, token: Ints, place: Ints) -> list[Tensor]:
        """(each place's token, the places without one, each token's place, the tokens without one: padding)."""
        sizes = self.cut.rows * self.cut.length, self.tokens[0] * self.tokens[1]
        found, dtype = [], np.int32 if max(sizes) < 2**31 else np.int64  # calls are cached, and these with them
        for size, to, source in zip(sizes, (place, token), (token, place), strict=True):
            every = np.full(size, -1)
            every[to] = source
            found += [self.index(np.maximum(every, 0), dtype), self.index(np.flatnonzero(every < 0))]
        return found

    def folded(self, x: Tensor) -> Tensor:
        """[B, T, ...] as rows [R, L, ...]; zeros where a row is filled up. Padding is in no row."""
        token, none, _, _ = self.places
        found = x.flatten(0, 1).index_select(0, token).index_fill_(0, none, 0)
        return found.unflatten(0, (self.cut.rows, self.cut.length))

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `folded`; zeros for padding."""
        _, _, place, padding = self.places
        return x.flatten(0, 1).index_select(0, place).index_fill_(0, padding, 0).unflatten(0, self.tokens)

    def inputs(self, call: "Call", given: "Given") -> Inputs:
        q, k, v, g, beta = (None if x is None else self.folded(x) for x in given[:5])
        assert q is not None and k is not None and v is not None
        return Inputs(q, k, v, g, beta, None, call.scale)

    def of_documents(self, initial: Tensor | None) -> Tensor | None:
        """The initial state of each document; a state a row is that of the row's first document, the others' are 0."""
        if initial is None or len(initial) == self.count:
            return initial
        return F.pad(initial[:, None], [0] * 7 + [self.count // len(initial) - 1]).flatten(0, 1)

    def before(self, initial: Tensor | None, segments: Tensor | None, like: Tensor) -> Tensor:
        """The state before each fragment, from those before documents and segments; None are zeros."""
        found = like.new_zeros(self.cut.levels[0], *like.shape)
        for states, (to, source) in ((initial, self.begun), (segments, self.resumed)):
            if states is not None:
                found.index_copy_(0, to, states.index_select(0, source))
        return found

    def behind(self, ends: Tensor | None, segments: Tensor | None, like: Tensor) -> Tensor:
        """The gradient for the state behind each fragment; `ends` are those behind the documents that end here."""
        found = like.new_zeros(self.cut.levels[0], *like.shape)
        if ends is not None:
            found.index_copy_(0, self.ended[0], ends)
        if segments is not None:
            found.index_copy_(0, self.left[0], segments.index_select(0, self.left[1]))
        return found

    def level(self, maps: Map, i: int, count: int) -> Map:
        """The maps of the i-th rows of the first `count` fragments."""
        first = sum(self.cut.levels[:i])
        return Map(maps.factor[first : first + count], maps.kv[first : first + count])

    def walked(self, maps: Map | None, state: Tensor) -> Tensor:
        """The state before each row, given that before each fragment."""
        found = [state]
        for i, count in enumerate(self.cut.levels[1:]):
            assert maps is not None
            found.append(self.level(maps, i, count).after(found[-1][:count]))
        return torch.cat(found) if len(found) > 1 else state

    def walked_back(self, maps: Map | None, state: Tensor) -> Tensor:
        """The gradient for the state behind each row, given that behind each fragment."""
        later = state[:0]
        found: list[Tensor] = []
        for i, count in reversed(list(enumerate(self.cut.levels))):
            if found:
                assert maps is not None
                later = self.level(maps, i + 1, len(later)).after(later)
            later = torch.cat([later, state[len(later) : count]])
            found.append(later)
        return torch.cat(found[::-1]) if len(found) > 1 else found[0]

    def of_segments(self, maps: Map, before: Tensor, sent: Sent) -> Map:
        """The map of each segment [B * P, ...]; `before` are the states before rows (in reverse: behind)."""
        factor, kv = (x.new_zeros(self.segments, *x.shape[1:]) for x in maps)
        leaving = Map(*(x.index_select(0, sent.rows) for x in maps)).after(before.index_select(0, sent.rows))
        kv.index_copy_(0, sent.segments, leaving)
        for segment, rows in sent.passing:
            factor[segment], kv[segment] = reduce(Map.then, (Map(maps.factor[r], maps.kv[r]) for r in rows))
        return Map(factor, kv)

    def shared(self, plan: Plan, ends: Tensor, initial: Tensor | None) -> Tensor:
        """The state behind each document on every rank; `ends` are those of the documents that end on this rank."""
        shard = torch.cat(collected(plan.ulysses_axis, ends, self.of_ulysses))
        every = torch.cat(collected(plan.ring_axis, shard, self.of_ring))
        found = ends.new_zeros(self.count, *ends.shape[1:]).index_copy_(0, self.order, every)
        return found if initial is None else found.index_copy_(0, self.empty, initial.index_select(0, self.empty))

    def delivered(self, plan: Plan, share: Tensor) -> Tensor:
        """The reverse: the sum of all ranks' shares [documents, ...] for the documents that end on this rank."""
        shard = summed(plan.ring_axis, share.index_select(0, self.order).split(self.of_ring))
        return summed(plan.ulysses_axis, shard.split(self.of_ulysses))

    def of_initial(self, dbefore: Tensor, dend: Tensor | None, initial: Tensor | None) -> Tensor | None:
        """This rank's share of the gradient for the initial state, from those for the states before rows."""
        if initial is None:
            return None
        found = dbefore.new_zeros(self.count, *dbefore.shape[1:])
        found.index_copy_(0, self.begun[1], dbefore.index_select(0, self.begun[0]))
        if dend is not None:
            found.index_copy_(0, self.empty, dend.index_select(0, self.empty).to(found.dtype))
        return found.unflatten(0, (len(initial), -1))[:, 0]


@lru_cache(maxsize=32)
def documents_of(
    plan: Plan, docs: Docs, ring_rank: int, ulysses_rank: int, batch: int, device: torch.device
) -> Documents:
    return Documents(plan, docs, ring_rank, ulysses_rank, batch, device)


def collected(axis: Axis, mine: Tensor, sizes: list[int]) -> list[Tensor]:
    """The tensors of all ranks, of so many entries each; empty ones do not travel."""
    found = [mine if r == axis.rank else mine.new_empty(n, *mine.shape[1:]) for r, n in enumerate(sizes)]
    others = [r for r in range(axis.size) if r != axis.rank]
    out = {r: [mine] for r in others if len(mine)}
    axis.move(out, {r: [found[r]] for r in others if sizes[r]}, what="the states behind documents").wait()
    return found


def summed(axis: Axis, parts: "tuple[Tensor, ...]") -> Tensor:
    """The sum of the parts that all ranks have for this rank; part r goes to rank r."""
    mine = parts[axis.rank]
    found = [mine if r == axis.rank else torch.empty_like(mine) for r in range(axis.size)]
    others = [r for r in range(axis.size) if r != axis.rank]
    into = {r: [found[r]] for r in others if len(mine)}
    out = {r: [parts[r]] for r in others if len(parts[r])}
    axis.move(out, into, what="the gradients for states behind documents").wait()
    return reduce(torch.add, found)


def forward(call: "Call", given: "Given") -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(out, the state behind each document, and for backward the states before segments and before rows)."""
    assert call.documents is not None
    d, x, initial = call.documents, call.documents.inputs(call, given), call.documents.of_documents(given.initial_state)
    like = state_of(x)
    own = call.kernel.scan_states(x, maps=d.joined)
    flying = None
    if not d.alone:
        assert own.map is not None
        before = d.walked(own.map, d.before(initial, None, like))
        flying = Exchange(call.plan, d.of_segments(own.map, before, d.onward), None, call.way)
    starts = cache(lambda: d.walked(own.map, d.before(initial, flying.before() if flying else None, like)))
    out, behind = call.kernel.read_out(x, own, starts)
    end = d.shared(call.plan, behind.index_select(0, d.ended[1]), initial) if call.returned else None
    return d.whole(out), end, flying.before() if flying else None, starts()


def backward(
    call: "Call", given: "Given", segments: Tensor | None, starts: Tensor | None, dout: Tensor, dend: Tensor | None
) -> tuple[Tensor | None, ...]:
    """As `function.backward`. Without the states before rows they are found again, from those before segments."""
    assert call.documents is not None
    d, x, initial = call.documents, call.documents.inputs(call, given), call.documents.of_documents(given.initial_state)
    like, dout = state_of(x), d.folded(dout)
    back = call.kernel.scan_gradients(x, dout, maps=d.joined)
    dends = None if dend is None else d.delivered(call.plan, dend)
    flying = None
    if not d.alone:
        assert back.map is not None
        behind = d.walked_back(back.map, d.behind(dends, None, like))
        flying = Exchange(call.plan, d.of_segments(back.map, behind, d.back), None, call.way, backward=True)
    own = call.kernel.scan_states(x, maps=d.joined and starts is None)
    if starts is None:
        starts = d.walked(own.map, d.before(initial, segments, like))
    dbehind: Callable[[], Tensor] = cache(
        lambda: d.walked_back(back.map, d.behind(dends, flying.before() if flying else None, like))
    )
    *grads, dbefore = call.kernel.gradients(x, own, starts, back, dout, dbehind)
    dinitial = d.of_initial(dbefore, dend, given.initial_state)
    return *(None if t is None else d.whole(t) for t in grads), dinitial


def state_of(x: Inputs) -> Tensor:
    """A state's shape [H, K, V], dtype and device."""
    return x.v.new_empty(x.v.shape[2], x.k.shape[3], x.v.shape[3], dtype=accumulator(x.k))
