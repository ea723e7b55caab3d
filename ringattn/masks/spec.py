"""A mask is a few intervals: every query sees contiguous ranges [begin, end) of global key positions, mostly one.

Causal, sliding window, chunks, packed documents, a prefix, spans, padding and cross attention are two numbers per
query, and neither decreases along the sequence. First keys beside a window are one more such family of intervals.
Plain numpy, which can be printed and tested without a device.
"""

import sys
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

from ringattn.masks.numeric import MAX_SIZE, Row, is_number, is_traced, of_factor, raise_if, rows_of, whole
from ringattn.masks.packing import branch_positions, parents_in, spans_in
from ringattn.masks.segment_ids import starts_of
from ringattn.masks.values import Value, fields


class AttentionSpec(Value):
    """Which attention is computed: softmax(scale * q k^T) v over the keys that each query may see, with a softcap.

    causal   a query sees no key after its own position
    window   a query sees the last `window` keys up to and including its own position; with causal=False a pair
             (left, right): the keys i - left ... i + right
    chunk    a query sees only keys of its own block of `chunk` positions, counted within its document
    first    beside its window or chunk, a query sees the first `first` keys of its document
    softcap  scores become softcap * tanh(scores / softcap)
    scale    None means 1 / sqrt(head_dim)
    """

    causal: bool = True
    window: int | tuple[int, int] | None = None
    chunk: int | None = None
    first: int = 0
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise ValueError(f"causal={self.causal!r}: pass True or False")
        raise_if(of_window(self.causal, self.window))
        for name, least, what in (("chunk", 1, "positions of a block"), ("first", 0, "keys that all queries see")):
            value = getattr(self, name)
            if (value is not None or name == "first") and not is_number(value, least):
                raise ValueError(f"{name}={value!r}: the number of {what}, at least {least}")
        if self.first and self.window is None and self.chunk is None:
            raise ValueError(f"first={self.first} is for a window or a chunk: without them all queries see these keys")
        for name in ("softcap", "scale"):
            raise_if(of_factor(name, getattr(self, name)))
        kinds: Any = bool, int, int, int, float, float
        for name, number in zip(fields(self), kinds, strict=True):
            value = getattr(self, name)
            if value is not None:  # numpy's numbers are equal to Python's, but make arrays of their own dtype
                plain: Any = tuple([int(n) for n in value]) if isinstance(value, tuple) else number(value)
                object.__setattr__(self, name, plain)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own position a query sees; None for all of them."""
        if isinstance(self.window, tuple):
            return self.window
        return None if self.window is None else self.window - 1, 0 if self.causal else None

    @property
    def behind(self) -> int | None:
        """The most keys, from its own position back, that a query sees but for the first ones; None for all."""
        left = self.reach[0]
        return min((n for n in (None if left is None else left + 1, self.chunk) if n is not None), default=None)

    def scale_for(self, head_dim: int) -> float:
        return self.scale if self.scale is not None else head_dim**-0.5


class Docs:
    """Packed documents: where each one starts, for one row or for every row of a batch. Docs compare by value.

    `starts` is int64 [rows, n + 1]: document i of a row is [starts[i], starts[i + 1]). Tokens after the last start are
    padding, which no query sees. Rows with fewer documents end in empty ones.

    `spans`, int64 [rows, m, 2], are ranges [start, stop) of tokens that see one another, within documents, in order.
    `parents`, int64 [rows, n], make the documents segments of trees: one sees itself, its parent, the parent of that,
    and so on (-1: no parent). `slices` are those of a `ringattn.Mask`. None where there are none.
    """

    PARTS = "starts", "spans", "parents", "slices"

    def __init__(
        self, starts: Any, length: int, spans: Any = None, parents: Any = None, slices: Any = None,
        padded: bool | None = None,
    ):  # fmt: skip
        """Docs of these arrays without a check or a copy: they must be right and may not change later.

        JAX may trace starts and spans. Whether some row ends in padding is then `padded`.
        """
        if "torch" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
            # torch.compile would trace numpy as tensors; with an error it leaves this call to Python instead. Not
            # is_compiling, which is True in every thread while one of them compiles.
            raise ValueError("Docs are made of numbers: make them before the compiled function and pass them to it")
        if "jax" in sys.modules:
            register_in_jax(type(self))  # type: ignore[arg-type]  # a class has a hash, whatever its values have
        self.starts, self.spans, self.parents, self.slices, self.length = starts, spans, parents, slices, length
        self.rows = (getattr(starts, "shape", None) or (1,))[0]  # JAX makes trees of placeholders too
        self.padded = bool((starts[:, -1] < length).any()) if padded is None else padded
        for x in self.parts:
            if isinstance(x, np.ndarray):
                x.setflags(write=False)
        if padded is None:
            # All parts as one array: a copy, since torch.compile guards it as a tensor, and warns of a read-only one.
            self.encoded = starts.copy() if self.plain else packed(self.parts)

    def __reduce__(self) -> Any:
        return type(self), (self.starts, self.length, *self.parts[1:])

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.starts, self.spans, self.parents, self.slices

    @property
    def plain(self) -> bool:
        return self.spans is None and self.parents is None and self.slices is None

    @classmethod
    def from_lengths(cls, lengths: Any, pad_to: int | None = None, prefix: Any = None, spans: Any = None) -> "Docs":
        """Documents of these lengths, in order, as a list, array or tensor; a list of lists, or 2-d, for a batch.

        `pad_to` is the length with padding. `prefix`, a number for each document: its first tokens see one another.
        `spans`, pairs (start, stop) of positions in the row: these tokens see one another. For a batch, a list each
        row.

        >>> Docs.from_lengths([3, 5]).starts.tolist()
        [[0, 3, 8]]
        """
        rows = rows_of("document lengths", lengths)
        starts, length = in_one_length([list(accumulate(row, initial=0)) for row in rows], pad_to)
        return cls(starts, length, spans_in(starts, list(map(len, rows)), prefix, spans))

    @classmethod
    def tree(cls, lengths: Any, parents: Any, pad_to: int | None = None) -> "Docs":
        """Segments of trees: each sees itself, causally, and all of its ancestors. For a batch, a list each row.

        `parents`: the number of each segment's parent, which comes before it, or -1. `plan.positions(docs)` gives each
        token's depth along its branch. Depth-first order is the fastest, the longest branch first.

        >>> Docs.tree([4, 2, 3], [-1, 0, 0]).parents.tolist()  # two answers to one question
        [[-1, 0, 0]]
        """
        docs = cls.from_lengths(lengths, pad_to)
        return cls(docs.starts, docs.length, parents=parents_in(docs.starts, rows_of("parents", parents, least=-1)))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, pad_to: int | None = None) -> "Docs":
        """Documents from cumulative lengths [0, n1, n1 + n2, ...], as a list, array or tensor; 2-d for a batch."""
        rows = rows_of("cu_seqlens", cu_seqlens)
        if wrong := [row for row in rows if row[:1] != [0] or row != sorted(row)]:
            raise ValueError(f"cu_seqlens must begin with 0 and never decrease, got {wrong[0]}")
        return cls(*in_one_length(rows, pad_to))

    @classmethod
    def from_segment_ids(
        cls, ids: Any, most: int | None = None, *, plan: Any = None, padding: int | None = 0
    ) -> "Docs":
        """Documents from the id of each token, [batch, tokens] or [tokens], as a list, array or tensor.

        Equal ids in a row of tokens are one document. Tokens at the end with the id `padding` are padding; None means
        that there is none. With `plan` the ids are in its order, as `plan.shard(ids)` returns them.

        In JAX the ids may be traced. `most` is required then: the most documents of a row of the batch. Results for
        a row with more are NaN. Where the ids are known, further documents are an error.

        >>> Docs.from_segment_ids([7, 7, 7, 9, 9, 0]).starts.tolist()
        [[0, 3, 5]]
        """
        starts, length = starts_of(ids if plan is None else plan.unshard(ids, ids.ndim - 1), most, padding)
        return cls(starts, length, padded=True if is_traced(starts) else None)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (*((x.shape, x.tobytes()) for x in self.parts if x is not None), self.plain, self.length)

    @cached_property
    def first(self) -> "Docs | None":
        """The first row alone if all rows are equal; else None."""
        if len(self.starts) == 1:
            return self
        if any((x != x[:1]).any() for x in self.parts if x is not None):
            return None
        return type(self)(self.starts[:1], self.length, *(None if x is None else x[:1] for x in self.parts[1:]))

    @cached_property
    def depths(self) -> Row | None:
        """In trees, the depth of each token along its branch, [tokens], or [rows, tokens] where rows differ."""
        if self.parents is None:
            return None
        docs = self.first or self
        rows = [branch_positions(*of_row, self.length) for of_row in zip(docs.starts, docs.parents, strict=True)]
        return rows[0] if docs.first is not None else np.stack(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Docs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        shape: Any = getattr(self.starts, "shape", ())
        if len(shape) != 2:  # in a JAX tree whose leaves are not arrays
            return f"Docs({self.starts!r}, {self.length} tokens)"
        if self.slices is not None:
            return f"Mask({self.slices.shape[1]} slices, {self.length} tokens)"
        rows, n = shape
        what = "documents" if self.parents is None else "segments"
        spans = "" if self.spans is None else f" with {self.spans.shape[1]} spans"
        return f"Docs({n - 1} {what}{spans}, {rows} row{'s' * (rows > 1)}, {self.length} tokens)"


def in_one_length(rows: list[list[int]], pad_to: int | None) -> tuple[Row, int]:
    """The starts of the documents of rows of cumulative lengths, [rows, n + 1], and the length of a row."""
    if not rows or any(len(row) < 2 for row in rows):
        raise ValueError("no documents: every row needs at least one length (0 for an empty document)")
    totals = [row[-1] for row in rows]
    length = totals[0] if pad_to is None else whole(pad_to)
    if pad_to is None and len(set(totals)) > 1:
        raise ValueError(f"rows whose document lengths add up to {totals}: pass pad_to={max(totals)} (or more)")
    if length is None or max(totals) > length:
        raise ValueError(f"documents of {max(totals)} tokens do not fit in pad_to={pad_to!r}, the length with padding")
    if length > MAX_SIZE:
        raise ValueError(f"documents of {length} tokens: at most {MAX_SIZE} are counted")
    width = max(map(len, rows))
    return np.array([row + [row[-1]] * (width - len(row)) for row in rows], np.int64), length


def packed(parts: tuple[Row | None, ...]) -> Row:
    """Of each part its number of dims, its shape and its numbers, one after the other."""
    each = [np.array([0]) if x is None else np.concatenate([[x.ndim], x.shape, x.ravel()]) for x in parts]
    return np.concatenate(each).astype(np.int64)


@cache
def register_in_jax(kind: type[Docs] = Docs) -> None:
    """Docs may be arguments of functions that JAX traces: their starts and spans are then traced, but not how many.

    Trees and slices are constants of a program.
    """
    register_pytree_node = import_module("jax.tree_util").register_pytree_node

    def taken_apart(docs: Docs) -> tuple[Any, Any]:
        constant = docs.parents is not None or docs.slices is not None
        return ((), docs) if constant else ((docs.starts, docs.spans), (docs.length, docs.padded))

    def put_together(aux: Any, parts: Any) -> Docs:
        return Docs(parts[0], aux[0], parts[1], padded=aux[1]) if parts else aux

    with suppress(ValueError):  # another thread was faster
        register_pytree_node(kind, taken_apart, put_together)


def of_window(causal: bool, window: Any) -> str | None:
    if isinstance(window, tuple):
        if causal:
            return f"window={window!r} looks to both sides; use causal=False, or with causal=True the number of keys"
        if len(window) != 2 or not all(is_number(n, 0) for n in window):
            return f"window={window!r}: (left, right), how many keys before and after its own position a query sees"
    elif window is not None and not is_number(window, 1):
        return f"window={window!r}: the number of keys a query sees, at least 1 (None for all)"
    elif window is not None and not causal:
        return f"window={window} counts back, which needs causal=True; else pass a pair: window=({window - 1}, 0)"
    return None
