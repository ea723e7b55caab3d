"""A cache of keys and values spread over ranks.

Position p lies on rank (p // block) % ranks, so the cache is balanced at any length. A rank's positions are sorted, so
a query sees one interval of them. Attention to a cache is in `function.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ringattn import serving
from ringattn.check import cache as check
from ringattn.check.arguments import of_arrays
from ringattn.layouts.layout import Layout
from ringattn.masks.spec import raise_if
from ringattn.plans.plan import Plan
from ringattn.serving import Heads, Stripes, prefill_way
from ringattn.torch.inference.chunk import Holder, landings

STEP = 1024  # rows in which a decode's launch grows
lasting = torch.inference_mode(False)  # memory that calls outside of inference mode may write to as well


class KVCache(serving.KVCache):
    """The keys and values of all earlier tokens; each batch row has `lengths` of them. Make it with `allocate`."""

    @lasting
    def __init__(
        self, plan: Plan, k: Tensor, v: Tensor, lengths: np.ndarray, max_len: int, stripes: Stripes,
        window: int | None = None, prefix: "KVCache | None" = None,
    ):  # fmt: skip
        self.plan, self.k, self.v, self.max_len = plan, k, v, max_len
        self.stripes, self.window, self.prefix, self.ranks = stripes, window, prefix, stripes.ranks
        self.filled = torch.zeros(len(lengths), dtype=torch.int64, device=k.device)  # the lengths, for kernels
        self.captured = False  # whether a CUDA graph may have changed them: then only the device has the lengths
        self.lengths = lengths
        self.calls: dict[Any, Any] = {}  # bound calls, by their key (`call.py`)
        self.start = lengths.copy() if prefix else np.zeros_like(lengths)  # earlier tokens are in the prefix
        self.forks: WeakSet[KVCache] = WeakSet()  # the live forks, which share these keys
        if prefix:
            prefix.forks.add(self)

    @classmethod
    @lasting
    def made(
        cls, plan: Plan, batch: int, max_len: int, kv_heads: int, dims: tuple[int, int], dtype: str, stripes: Stripes,
        window: int | None, most: int | None,
    ) -> "KVCache":  # fmt: skip
        """An empty cache for `allocate`, which has checked the sizes; with a window for `most` tokens at one time."""
        kept = max_len if most is None else min(max_len, most)
        rounds = -(-kept // stripes.round) + (window is not None)  # keys are dropped in whole rounds
        shape = (batch, rounds * stripes.block, kv_heads)
        # zeros: a tile may extend past the filled keys, and 0 * NaN from old memory is not 0
        k, v = (torch.zeros(*shape, dim, dtype=getattr(torch, dtype), device=plan.device) for dim in dims)
        return cls(plan, k, v, np.zeros(batch, np.int64), max_len, stripes, window)

    @property
    def lengths(self) -> np.ndarray:
        """A copy of how many tokens each row has; read from the device if a captured decode may have been replayed."""
        if self.captured:
            self.host_lengths = np.minimum(self.filled.cpu().numpy(), self.max_len)
        return self.host_lengths.copy()

    @lengths.setter
    def lengths(self, lengths: np.ndarray) -> None:
        self.host_lengths = lengths.copy()
        self.filled.copy_(torch.from_numpy(lengths), non_blocking=True)

    @cached_property
    def rank(self) -> int:
        ring, ulysses = self.plan.place
        return ring * self.plan.ulysses + ulysses

    def room(self) -> int:
        """How many more tokens every row can take."""
        return self.max_len - int(self.lengths.max())

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append the next tokens, the same k and v [B, n, G, D] on every rank; each rank keeps its share."""
        raise_if(of_arrays({"k": k, "v": v}, {}, self.plan) or self.problem(k, v, k.shape[1]))
        self.keep(k.detach(), v.detach(), k.shape[1])

    def keep(self, k: Tensor, v: Tensor, n: int, order: Layout | None = None) -> None:
        """Append the next n tokens without checks; `order`: they are in the order of this layout's shards."""
        self.make_room(n)
        lengths = tuple(self.lengths.tolist())
        for rows, source, target in landings(lengths, n, order, self.stripes, self.rank, k.device):
            self.k[rows, target] = k[rows, source]
            self.v[rows, target] = v[rows, source]
        self.lengths = self.lengths + n

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Restore the lengths if the body raises: keys past the lengths are never seen."""
        before = self.lengths
        try:
            yield
        except BaseException:
            self.lengths = before
            raise

    def grow(self, n: int, captured: bool) -> None:
        """Add n tokens, which a kernel has appended, to the lengths on the device, and on the host unless captured."""
        self.filled.add_(n)
        if captured:
            self.captured = True
        else:
            self.host_lengths = self.host_lengths + n

    def reach(self, n: int) -> int:
        """How many local rows a decode must cover.

        Those that can hold a key after n more tokens, rounded up to STEP so that the launch rarely changes.
        """
        longest = max(self.host_lengths.tolist())  # faster than numpy for a few numbers
        whole, rest = divmod(longest + n - self.stripes.origin, self.stripes.round)
        top = (whole + (rest > 0)) * self.stripes.block
        return min(self.k.shape[1], -(-top // STEP) * STEP)

    def make_room(self, n: int) -> None:
        """With a window, move keys that can still be seen to the front when the memory is full."""
        if self.window is None:
            return
        top = int(self.lengths.max()) + n
        if self.stripes.below(top, 0) <= self.k.shape[1]:
            return
        rounds = (self.first_seen(self.lengths) - self.stripes.origin) // self.stripes.round
        drop = rounds * self.stripes.block
        for x in (self.k, self.v):
            x[:, : x.shape[1] - drop] = x[:, drop:].clone()
        self.stripes = replace(self.stripes, origin=self.stripes.origin + rounds * self.stripes.round)

    def first_seen(self, lengths: np.ndarray) -> int:
        """The first position that the next token of a row of these lengths still sees."""
        return 0 if self.window is None else max(0, int(lengths.min()) + 1 - self.window)

    def from_round(self, position: int) -> Stripes:
        """The stripes from the round of this position on."""
        return replace(self.stripes, origin=position // self.stripes.round * self.stripes.round)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Drop the tokens from these lengths on, for example rejected ones; one number for all rows or one per row."""
        raise_if(check.of_truncated(lengths, len(self.lengths)))
        new = np.array(check.each(lengths, len(self.lengths)))  # of any size; of_back checks them
        first = self.start
        if self.window is not None and self.stripes.origin:  # the next token must still see its whole window
            first = np.maximum(first, self.stripes.origin + self.window - 1)
        raise_if(check.of_back(new, self.lengths, first))
        if (new < self.shared).any():
            shared = self.shared.tolist()
            raise ValueError(f"truncate to {new.tolist()}: forks share the first {shared} tokens; delete the forks")
        self.lengths = new

    @lasting
    def fork(self, copies: int = 1, max_len: int | None = None) -> "KVCache":
        """`copies` continuations of every row that share its keys so far and append their own.

        A call reads the shared keys of a single row in place. Those of several rows it copies for each continuation,
        into memory that it frees afterwards. Shared keys stay in memory until the fork is deleted.
        """
        if self.window is not None:
            raise NotImplementedError("a cache with a window moves its keys and cannot share them; allocate another")
        max_len = self.max_len if max_len is None else max_len
        raise_if(check.of_fork(copies, max_len, self.lengths))
        copies, max_len = int(copies), int(max_len)
        lengths = self.lengths.repeat(copies)
        stripes = self.from_round(int(lengths.min()))
        local = -(-(max_len - stripes.origin) // stripes.round) * stripes.block
        k, v = (x.new_zeros(len(lengths), max(local, 0), *x.shape[2:]) for x in (self.k, self.v))
        return KVCache(self.plan, k, v, lengths, max_len, stripes, prefix=self)

    @property
    def shared(self) -> np.ndarray:
        """How many of each row's first tokens are shared with forks."""
        ends = [fork.start.reshape(len(self.start), -1)[:, 0] for fork in self.forks]
        return np.max([np.zeros_like(self.start), *ends], axis=0)

    def select(self, rows: Tensor) -> None:
        """Row i goes on from row rows[i], as beams do; without forks."""
        at = rows.to(self.k.device)
        self.k.copy_(self.k[at])
        self.v.copy_(self.v[at])
        self.lengths = self.lengths[rows.numpy(force=True)]

    def way(self, plan: Plan, heads: int) -> str:
        """What will travel when a chunk under `plan` attends to this cache: "queries" or "keys"."""
        cached = int(self.lengths.max()) + plan.seq_len
        road = plan.machine, plan.link, plan.device != "cpu"
        return prefill_way(self.ranks, plan.local_len, cached, self.heads_of(heads), *road)

    def heads_of(self, heads: int) -> Heads:
        """The sizes of a token here, with `heads` query heads."""
        B, _, G, D = self.k.shape
        return Heads(heads, G, D, self.v.shape[-1], self.k.element_size(), B)

    def holders(self) -> tuple[Holder, ...]:
        """The memories that hold this cache's keys: for a fork, first those that it shares."""
        mine = Holder(self.stripes, tuple(self.start.tolist()), tuple(self.lengths.tolist()))
        if self.prefix is None:
            return (mine,)
        copies = len(mine.first) // len(self.prefix.lengths)
        return (*(each.copied(copies, mine.first) for each in self.prefix.holders()), mine)

    def memory(self, until: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """k and v of each holder, below position `until` if given."""
        if self.prefix is not None:
            copies = len(self.k) // len(self.prefix.k)
            for pair in self.prefix.memory(int(self.start.max())):
                k, v = (x[:, None].expand(-1, copies, -1, -1, -1).flatten(0, 1) for x in pair)
                yield k, v
        until = int(self.lengths.max()) if until is None else until
        most = int(self.stripes.below(until, 0))  # rank 0 holds the most: the same on all ranks
        most = -(-most // self.stripes.block) * self.stripes.block
        yield self.k[:, :most], self.v[:, :most]

    def problem(self, k: Tensor, v: Tensor, n: int) -> str | None:
        """Why n tokens like those in k and v cannot be appended."""
        if problem := check.of_new(k, v, self):
            return problem
        for name, x, mine in (("k", k, self.k), ("v", v, self.v)):
            if x.dtype != mine.dtype or x.device != mine.device:
                remedy = f"cast {name}, or allocate the cache so (a layer: reset())"
                return f"{name} is {x.dtype} on {x.device}, the cache {mine.dtype} on {mine.device}; {remedy}"
        return self.overflow(n)

    def overflow(self, n: int) -> str | None:
        """Why n more tokens do not fit."""
        problem = check.of_room(n, self.lengths, self.max_len)
        if problem is None and self.window is not None and not self.fits(n):
            return check.beside_window(n, self.window, int(np.ptp(self.lengths)))
        return problem

    def fits(self, n: int) -> bool:
        """Whether there is memory for n tokens at once in addition to those that can still be seen."""
        if self.window is None:
            return True
        stripes, top = self.from_round(self.first_seen(self.lengths)), int(self.lengths.max()) + n
        return bool(stripes.below(top, 0) <= self.k.shape[1])

    def for_chunk(self, n: int) -> "KVCache":
        """This cache, or, if n tokens at once do not fit beside its window, a larger copy."""
        if self.fits(n) or n > self.room():
            return self
        return self.enlarged(int(self.lengths.max()) + n, self.max_len)

    @lasting
    def enlarged(self, until: int, max_len: int) -> "KVCache":
        """A copy with memory up to position `until`, and room for `max_len` tokens."""
        rounds = -(-(until - self.stripes.origin) // self.stripes.round)
        more = rounds * self.stripes.block - self.k.shape[1]
        k, v = (F.pad(x, [0, 0, 0, 0, 0, more]) for x in (self.k, self.v))
        return KVCache(self.plan, k, v, self.lengths, max_len, self.stripes, self.window)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a cache cannot be pickled or copied: fork() it, or allocate another one and append")

    def __repr__(self) -> str:
        return f"KVCache(lengths {self.lengths.tolist()} of {self.max_len}, over {self.ranks} ranks)"
