"""A cache of keys and values spread over ranks, and attention of new tokens against it: prefill and decode.

Position p lies on rank (p // block) % ranks, so the cache is balanced at any length, and a rank's positions are sorted:
what a query sees of them is one interval, as everywhere. `prefill` appends a chunk of a prompt and attends; `decode`
does the same for a few tokens that every rank knows. Both merge partials over ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.check import of_lengths
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import (
    Partial,
    add_sinks,
    empty,
    from_streams,
    merge,
    merge_streams,
    to_streams,
)
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, bounds
from ringattn.torch import agree, check
from ringattn.torch.sharding import unshard
from ringattn.torch.steps import on_device, score_of

BLOCK = 64  # positions that lie together on one rank


@dataclass(frozen=True)
class Stripes:
    """Blocks of positions dealt out to ranks in turn, from `origin` on."""

    ranks: int
    block: int
    origin: int = 0

    @property
    def round(self) -> int:
        return self.ranks * self.block

    def below(self, position: Any, rank: int) -> Any:
        """How many of a rank's positions lie below `position`: the local index of a position it holds."""
        whole, rest = np.divmod(np.maximum(np.asarray(position) - self.origin, 0), self.round)
        return whole * self.block + np.clip(rest - rank * self.block, 0, self.block)

    def owned(self, positions: np.ndarray, rank: int) -> np.ndarray:
        return (positions // self.block) % self.ranks == rank


class KVCache:
    """Keys and values of every token so far; `lengths` says how many each batch row has. Make it with `allocate`."""

    def __init__(
        self, plan: Plan, k: Tensor, v: Tensor, lengths: np.ndarray, max_len: int, stripes: Stripes,
        window: int | None = None, prefix: "KVCache | None" = None,
    ):  # fmt: skip
        self.plan, self.k, self.v, self.lengths, self.max_len = plan, k, v, lengths, max_len
        self.stripes, self.window, self.prefix = stripes, window, prefix
        self.start = lengths.copy() if prefix else np.zeros_like(lengths)  # what lies before belongs to the prefix
        self.forked = np.zeros_like(lengths)  # up to where others share these keys

    @classmethod
    def allocate(
        cls,
        plan: Plan,
        *,
        batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
        room: int | None = None,
        block: int = BLOCK,
    ) -> "KVCache":
        """An empty cache for `max_len` tokens a row, of which each rank holds its share.

        With a `window` only what can still be seen is kept: memory for window + `room` tokens (room: the longest chunk
        that will be appended at once; as long as the window by default).
        """
        for name, value in (("batch", batch), ("max_len", max_len), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        ranks = plan.ring * plan.ulysses
        kept = max_len if window is None else min(max_len, window + (window if room is None else room))
        stripes = Stripes(ranks, block)
        rounds = -(-kept // stripes.round) + (window is not None)  # what is dropped is dropped in whole rounds
        shape = (batch, rounds * block, kv_heads)
        # zeros: a tile of keys may reach past what is filled, and 0 * NaN of old memory would not be 0
        k = torch.zeros(*shape, head_dim, dtype=dtype, device=plan.device)
        v = torch.zeros(*shape, value_dim or head_dim, dtype=dtype, device=plan.device)
        return cls(plan, k, v, np.zeros(batch, np.int64), max_len, stripes, window)

    @property
    def ranks(self) -> int:
        return self.stripes.ranks

    @property
    def rank(self) -> int:
        return self.plan.ring_axis.rank * self.plan.ulysses + self.plan.ulysses_axis.rank

    def room(self) -> int:
        """How many more tokens every row can take."""
        return self.max_len - int(self.lengths.max())

    def append(self, k: Tensor, v: Tensor) -> None:
        """Take in the next tokens, the same k and v [B, n, G, D] on every rank; each rank keeps its own."""
        problem = self.problem(k, v)
        if problem:
            raise ValueError(problem)
        n = k.shape[1]
        self.make_room(n)
        for length in np.unique(self.lengths):
            rows = np.flatnonzero(self.lengths == length)
            positions = np.arange(length, length + n)
            mine = np.flatnonzero(self.stripes.owned(positions, self.rank))
            if len(mine):
                to = self.stripes.below(positions[mine], self.rank)
                at = (torch.from_numpy(rows)[:, None].to(k.device), torch.from_numpy(to)[None].to(k.device))
                source = (at[0], torch.from_numpy(mine)[None].to(k.device))
                self.k[at], self.v[at] = k[source].to(self.k.dtype), v[source].to(self.v.dtype)
        self.lengths = self.lengths + n

    def make_room(self, n: int) -> None:
        """With a window, move what can still be seen to the front when the end of the memory is reached."""
        top = int(self.lengths.max()) + n
        if self.window is None or self.stripes.below(top, 0) <= self.k.shape[1]:
            return
        seen = max(0, int(self.lengths.min()) + 1 - self.window)
        rounds = (seen - self.stripes.origin) // self.stripes.round
        drop = rounds * self.stripes.block
        for x in (self.k, self.v):
            x[:, : x.shape[1] - drop] = x[:, drop:].clone()
        origin = self.stripes.origin + rounds * self.stripes.round
        self.stripes = Stripes(self.ranks, self.stripes.block, origin)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget the tokens from these lengths on (rejected ones, say); one number for all rows or one a row."""
        new = np.broadcast_to(np.asarray(lengths, np.int64), self.lengths.shape).copy()
        first = np.maximum(self.start, self.stripes.origin)
        if (new > self.lengths).any() or (new < first).any():
            raise ValueError(
                f"truncate to {new.tolist()}: the rows hold tokens {first.tolist()} to {self.lengths.tolist()}"
            )
        if (new < self.forked).any():
            raise ValueError(f"truncate to {new.tolist()}: forks share the first {self.forked.tolist()} tokens")
        self.lengths = new

    def fork(self, copies: int = 1, max_len: int | None = None) -> "KVCache":
        """`copies` continuations of every row that share its keys so far and append their own."""
        if self.window is not None:
            raise NotImplementedError(
                "a cache with a window moves its keys and cannot share them; allocate another one"
            )
        lengths = self.lengths.repeat(copies)
        max_len = self.max_len if max_len is None else max_len
        origin = int(lengths.min()) // self.stripes.round * self.stripes.round
        stripes = Stripes(self.ranks, self.stripes.block, origin)
        local = -(-(max_len - origin) // stripes.round) * stripes.block
        k, v = (x.new_zeros(len(lengths), max(local, 0), *x.shape[2:]) for x in (self.k, self.v))
        self.forked = np.maximum(self.forked, self.lengths)
        return KVCache(self.plan, k, v, lengths, max_len, stripes, prefix=self)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the cache."""
        if self.prefix is not None:
            raise NotImplementedError("a fork shares its keys with another cache: save that one and append again")
        return {"k": self.k, "v": self.v, "lengths": torch.from_numpy(self.lengths), "origin": self.stripes.origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["k"].shape != self.k.shape or state["v"].shape != self.v.shape:
            raise ValueError(f"the state holds k {tuple(state['k'].shape)}, this cache {tuple(self.k.shape)}")
        self.k.copy_(state["k"])
        self.v.copy_(state["v"])
        self.lengths = state["lengths"].numpy().copy()
        self.stripes = Stripes(self.ranks, self.stripes.block, state["origin"])

    def segments(self) -> Iterator[tuple["KVCache", Tensor, Tensor, np.ndarray, np.ndarray]]:
        """The caches that hold this one's keys: (cache, k, v, first, last position of each row), prefixes first."""
        if self.prefix is not None:
            copies = len(self.lengths) // len(self.prefix.lengths)
            for cache, k, v, first, last in self.prefix.segments():
                k, v = (x[:, None].expand(-1, copies, -1, -1, -1).flatten(0, 1) for x in (k, v))
                yield cache, k, v, first.repeat(copies), np.minimum(last.repeat(copies), self.start)
        most = int(self.stripes.below(int(self.lengths.max()), 0))  # rank 0 holds the most: the same on all ranks
        yield self, self.k[:, :most], self.v[:, :most], self.start, self.lengths

    def problem(self, k: Tensor, v: Tensor) -> str | None:
        """Why these tokens cannot be appended."""
        for name, x, mine in (("k", k, self.k), ("v", v, self.v)):
            if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (mine.shape[0], *mine.shape[2:]):
                B, _, G, D = mine.shape
                return f"{name} has shape {tuple(x.shape)}; this cache takes [{B}, tokens, {G}, {D}]"
            if x.dtype != mine.dtype or x.device != mine.device:
                return f"{name} is {x.dtype} on {x.device}, the cache {mine.dtype} on {mine.device}"
        n = k.shape[1]
        if n > self.room():
            return f"{n} more tokens do not fit: rows hold up to {self.lengths.max()} of max_len={self.max_len}"
        top = int(self.lengths.max()) + n
        if self.window is not None:
            seen = max(0, int(self.lengths.min()) + 1 - self.window)
            origin = seen // self.stripes.round * self.stripes.round
            if Stripes(self.ranks, self.stripes.block, origin).below(top, 0) > self.k.shape[1]:
                return (
                    f"{n} tokens at once do not fit beside a window of {self.window}; allocate(room={n}), or cut them"
                )
        return None

    def __repr__(self) -> str:
        return f"KVCache(lengths {self.lengths.tolist()} of {self.max_len}, over {self.ranks} ranks)"


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
    start: int | Sequence[int] | None = None,
    move: str = "auto",
) -> Tensor:
    """Append a chunk of the prompt to the cache, and attend to everything so far: out [B, T_local, H, V].

    q, k and v are this rank's part of the chunk under `plan` (the cache's plan `for_length(chunk)`). `start` is where
    the chunk begins, checked against the cache if given. `move` says what travels: "queries", "keys", or whichever is
    fewer bytes.
    """
    spec = AttentionSpec() if spec is None else spec
    call = {"q": q, "k": k, "v": v, "sinks": sinks}
    problem = (
        check.of_tensors(q, k, v)
        or check.of_heads(q, k, v, plan, sinks)
        or of_lengths(q, k, plan, AttentionSpec(causal=False), (plan.local_len, plan.local_len))
        or of_cache(cache, plan, spec, start)
        or cache.problem(*(x[:, :1].expand(-1, plan.seq_len, -1, -1) for x in (k, v)))
    )
    if move not in ("auto", "queries", "keys"):
        problem = f"move={move!r}: choose one of auto, queries, keys"
    settle(cache, plan, spec, call, problem)
    before = cache.lengths
    cache.append(unshard(k.detach(), plan), unshard(v.detach(), plan))
    moves = prefill_moves(plan, cache, q.shape[2]) if move == "auto" else move
    if moves == "queries":
        whole = attend_cache(unshard(q.detach(), plan), cache, before, np.arange(plan.seq_len), plan.seq_len, spec)
        part = scattered(whole, plan)
    else:
        ring, ulysses = plan.ring_axis, plan.ulysses_axis
        mine = plan.tokens.positions(ring.rank)[plan.local_slice(ulysses.rank)]
        part = attend_travelling(q.detach(), cache, before, mine, plan.seq_len, spec)
    part = part if sinks is None else add_sinks(part, sinks)
    return part.out.to(q.dtype)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Tensor | None = None,
    form: str = "lse",
    **unknown: Any,
) -> Tensor:
    """The next token or tokens, the same q, k, v [B, n, H or G, D] on every rank: out [B, n, H, V] on every rank.

    Each rank attends to the keys it holds; the partials of all ranks are exchanged once and merged in rank order, as
    (out, lse) or with form="streams" as (out, max, sum).
    """
    if unknown:
        said = "; ".join(f"{name}: decode has no such argument" for name in unknown)
        tree = (
            "several new tokens see each other causally; a tree of drafts is no interval: decode its branches as forks"
        )
        raise ValueError(f"{said} ({tree})")
    if form not in ("lse", "streams"):
        raise ValueError(f"form={form!r}: choose one of lse, streams")
    spec = AttentionSpec() if spec is None else spec
    problem = check.of_tensors(q, k, v) or of_cache(cache, cache.plan, spec, None)
    if problem is None and not cache.lengths.all():
        problem = f"decode before prefill: the cache holds {cache.lengths.tolist()} tokens; prefill a prompt first"
    settle(cache, cache.plan, spec, {"q": q, "k": k, "v": v}, problem or cache.problem(k, v))
    before, n = cache.lengths, q.shape[1]
    cache.append(k.detach(), v.detach())
    part = attend_cache(q.detach(), cache, before, np.arange(n), n, spec)
    part = merged_everywhere(part, cache.plan, form)
    part = part if sinks is None else add_sinks(part, sinks)
    return part.out.to(q.dtype)


def of_cache(cache: KVCache, plan: Plan, spec: AttentionSpec, start: int | Sequence[int] | None) -> str | None:
    """Whether a chunk's plan, spec and place are the cache's."""
    if (plan.ring, plan.ulysses) != (cache.plan.ring, cache.plan.ulysses) or plan.axes is not cache.plan.axes:
        return f"the cache was allocated for another plan ({cache.plan}); use its plan.for_length({plan.seq_len})"
    if cache.window is not None and (spec.window is None or spec.window > cache.window):
        return f"the cache keeps a window of {cache.window} keys, the spec sees window={spec.window}"
    if start is not None and (np.asarray(start) != cache.lengths).any():
        word = "skips" if (np.asarray(start) > cache.lengths).any() else "overlaps"
        return f"a chunk at {start} {word} positions: the rows of the cache end at {cache.lengths.tolist()}"
    return None


def settle(
    cache: KVCache, plan: Plan, spec: AttentionSpec, call: dict[str, Tensor | None], problem: str | None
) -> None:
    """Raise alike on all ranks, before the cache is touched; where words are cheap, lengths are compared too."""
    words = agree.describe(plan, spec, call, None)
    if plan.ring_axis.cheap_words and plan.ulysses_axis.cheap_words:
        words["cache"] = str(cache)
    agree.agree(plan, words, problem)


def attend_cache(
    q: Tensor, cache: KVCache, before: np.ndarray, positions: np.ndarray, tokens: int, spec: AttentionSpec
) -> Partial:
    """Attention of a chunk's queries at these positions over the keys this rank holds."""
    part: Partial | None = None
    for holder, k, v, first, last in cache.segments():
        where = cached(holder, holder.rank, before, positions, tokens, spec, first, last, q.device)
        part = over(q, k, v, where, spec, cache.plan.kernel, part)
    return part or empty(q, cache.v.shape[-1])


def over(
    q: Tensor, k: Tensor, v: Tensor, where: Intervals, spec: AttentionSpec, impl: str, part: Partial | None
) -> Partial | None:
    """One block of keys merged into `part`; nothing runs where nothing is seen."""
    begin, end = where.host
    if not (begin < end).any():
        return part
    return score_of(q, k, v, spec, impl, [where], few=True).attend(q, k, v, where, carry=part)


def cached(
    holder: KVCache, rank: int, before: np.ndarray, positions: np.ndarray, tokens: int, spec: AttentionSpec,
    first: np.ndarray, last: np.ndarray, device: torch.device,
) -> Intervals:  # fmt: skip
    """The intervals of a rank's local indices that these queries see in one holder of keys."""
    rows = []
    for offset, low, high in zip(before, first, last, strict=True):
        begin, end = bounds(spec, positions, tokens, int(offset) + tokens, offset=int(offset))
        begin, end = np.clip(begin[0], low, high), np.clip(end[0], low, high)
        rows.append((holder.stripes.below(begin, rank), holder.stripes.below(end, rank)))
    begin, end = (np.stack(side) for side in zip(*rows, strict=True))
    return on_device(begin, end, device)


def attend_travelling(
    q: Tensor, cache: KVCache, before: np.ndarray, positions: np.ndarray, tokens: int, spec: AttentionSpec
) -> Partial:
    """Attention of this rank's own queries over all ranks' keys, which come by in a ring of rings."""
    part: Partial | None = None
    plan = cache.plan
    ring, ulysses = plan.ring_axis, plan.ulysses_axis
    for holder, *block, first, last in cache.segments():
        outer: Any = tuple(block)
        for i in range(ring.size):
            next_outer = ring.rotate(outer) if i + 1 < ring.size else None
            inner = outer
            for j in range(ulysses.size):
                next_inner = ulysses.rotate(inner) if j + 1 < ulysses.size else None
                source = (ring.rank - i) % ring.size * ulysses.size + (ulysses.rank - j) % ulysses.size
                where = cached(holder, source, before, positions, tokens, spec, first, last, q.device)
                part = over(q, inner[0], inner[1], where, spec, plan.kernel, part)
                inner = next_inner.wait() if next_inner else None
            outer = next_outer.wait() if next_outer else None
    return part or empty(q, cache.v.shape[-1])


def prefill_moves(plan: Plan, cache: KVCache, heads: int) -> str:
    """What a rank sends fewer bytes of, "queries" or "keys". Queries also bring their float32 partials back."""
    _, most, kv_heads, head_dim = cache.k.shape
    most = int(cache.stripes.below(int(cache.lengths.max()), 0))
    value_dim, size = cache.v.shape[-1], cache.k.element_size()
    queries = plan.local_len * heads * (head_dim * size + (value_dim + 1) * 4)
    keys = most * kv_heads * (head_dim + value_dim) * size
    return "queries" if queries < keys else "keys"


def scattered(whole: Partial, plan: Plan) -> Partial:
    """Partials of the whole chunk on every rank -> this rank's tokens, merged over all ranks in rank order."""
    pad = plan.tokens.padded_length - plan.seq_len
    order = torch.from_numpy(plan.tokens.order()).to(whole.out.device)
    none = empty(whole.out[:, :1].expand(-1, pad, -1, -1), whole.out.shape[-1]) if pad else None
    out, lse = (
        (x if none is None else torch.cat([x, n.to(x.dtype)], 1)).index_select(1, order)
        for x, n in zip(whole, none or whole, strict=True)
    )
    for axis in (plan.ring_axis, plan.ulysses_axis):
        if axis.size > 1:
            pending = [axis.all_to_all(x[None], 2, 0) for x in (out, lse)]
            everyone = zip(*(p.wait().unbind(0) for p in pending), strict=True)
            out, lse = reduce(merge, (Partial(*one) for one in everyone))
    return Partial(out, lse)


def merged_everywhere(part: Partial, plan: Plan, form: str) -> Partial:
    """The merge of all ranks' partials, the same bits on every rank."""
    total: Any = part if form == "lse" else to_streams(part)
    join = merge if form == "lse" else merge_streams
    for axis in (plan.ulysses_axis, plan.ring_axis):
        if axis.size > 1:
            pending = [axis.all_gather(x[None].contiguous(), 0) for x in total]
            everyone = zip(*(p.wait().unbind(0) for p in pending), strict=True)
            total = reduce(join, (type(total)(*one) for one in everyone))
    return total if form == "lse" else from_streams(total)
