"""A mask is an interval: every query sees one contiguous range [begin, end) of global key positions.

Causal, sliding window, packed documents, padding and cross attention are all two numbers a query, and both numbers
never decrease along the sequence. Plain numpy: what is decided here can be printed and tested without a device.
"""

import math
import operator
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

import numpy as np

Row = np.ndarray  # int64 [T], or [rows, T] where the rows of a batch differ


@dataclass(frozen=True)
class AttentionSpec:
    """What attention is computed: softmax(scale * q k^T) v, the scores softly capped, over the keys that may be seen.

    causal   a query sees no key after its own position
    window   a query sees the last `window` keys up to and including its own position (needs causal)
    softcap  scores become softcap * tanh(scores / softcap)
    scale    None means 1 / sqrt(head_dim)
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise ValueError(f"causal={self.causal!r}: say True or False")
        if self.window is not None:
            if isinstance(self.window, bool) or not isinstance(self.window, Integral) or self.window < 1:
                raise ValueError(f"window={self.window!r}: the number of keys a query sees, at least 1 (None for all)")
            if self.window >= 2**63:
                raise ValueError(f"window={self.window}: positions are counted in 64 bits; say None for all keys")
            if not self.causal:
                raise ValueError(
                    f"window={self.window} counts back from the query's own position, which has no meaning with "
                    "causal=False; use causal=True, or window=None"
                )
        for name in ("softcap", "scale"):
            if found := of_factor(name, getattr(self, name)):
                raise ValueError(found)
        for name, number in (("causal", bool), ("window", int), ("softcap", float), ("scale", float)):
            value = getattr(self, name)
            if value is not None:  # numpy's numbers are equal to Python's, but make arrays of their own dtype
                object.__setattr__(self, name, number(value))

    def scale_for(self, head_dim: int) -> float:
        return self.scale if self.scale is not None else head_dim**-0.5


class Docs:
    """Packed documents: where each one starts, for one row or for every row of a batch. Equal docs compare equal.

    `starts` is int64 [rows, n + 1]: document i of a row is [starts[i], starts[i + 1]), and what lies past the last
    start is padding that nobody sees. Rows with fewer documents end in empty ones.
    """

    def __init__(self, starts: np.ndarray, length: int):
        given, limit = np.asarray(untraced(starts)), whole(length)
        if limit is None or given.ndim != 2 or given.dtype.kind not in "iu" or not are_starts(given, limit):
            raise ValueError(
                f"Docs(starts, length={length!r}): starts must be whole numbers [rows, n + 1], each row from 0 on, "
                f"never decreasing, up to the length; got {given!r} (Docs.from_lengths makes them)"
            )
        self._keep(given.astype(np.int64), limit)  # a copy: a loader may fill its array again

    def _keep(self, starts: np.ndarray, length: int) -> None:
        if "torch" in sys.modules and sys.modules["torch"].compiler.is_compiling():
            # numpy would be traced as tensors; an error while it traces leaves this call to Python
            raise ValueError("Docs are made of numbers: make them before the compiled function and pass them to it")
        self.starts, self.length = starts, length
        starts.setflags(write=False)
        self.padded = bool((starts[:, -1] < length).any())  # whether some row ends in padding

    def __reduce__(self) -> Any:
        return Docs.known, (self.starts, self.length)

    @classmethod
    def known(cls, starts: np.ndarray, length: int) -> "Docs":
        """Of starts that are right and that nobody changes: they are not looked at, nor copied."""
        docs = object.__new__(cls)
        docs._keep(starts, length)
        return docs

    @classmethod
    def from_lengths(cls, lengths: Any, pad_to: int | None = None) -> "Docs":
        """Documents of these lengths, in order, as a list, array or tensor; a list of lists, or 2-d, for a batch.

        `pad_to` is the length with padding.

        >>> Docs.from_lengths([3, 5]).starts.tolist()
        [[0, 3, 8]]
        """
        rows = rows_of("document lengths", lengths)
        for row in rows:
            if not all(map(is_count, row)):
                raise ValueError(f"document lengths must be whole numbers of at least 0, got {row}")
        return cls._from_rows([list(accumulate(map(int, row), initial=0)) for row in rows], pad_to)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, pad_to: int | None = None) -> "Docs":
        """Documents from cumulative lengths [0, n1, n1 + n2, ...], as a list, array or tensor; 2-d for a batch."""
        rows = rows_of("cu_seqlens", cu_seqlens)
        for row in rows:
            if not all(map(is_count, row)) or row[:1] != [0] or row != sorted(row):
                raise ValueError(f"cu_seqlens must begin with 0 and never decrease, in whole numbers, got {row}")
        return cls._from_rows([list(map(int, row)) for row in rows], pad_to)

    @classmethod
    def _from_rows(cls, rows: list[list[int]], pad_to: int | None) -> "Docs":
        if not rows or any(len(row) < 2 for row in rows):
            raise ValueError("no documents: every row needs at least one length (0 for an empty document)")
        totals = [row[-1] for row in rows]
        length = totals[0] if pad_to is None else whole(pad_to)
        if length is None:
            raise ValueError(
                f"pad_to={pad_to!r}: the length with padding, a whole number of tokens (None for no padding)"
            )
        if max(length, *totals) >= 2**63:
            raise ValueError(f"documents of {max(length, *totals)} tokens: positions are counted in 64 bits")
        if pad_to is None and len(set(totals)) > 1:
            raise ValueError(
                f"the rows' document lengths add up to {totals}, not to one length; say pad_to={max(totals)} (or more) "
                "to let the shorter rows end in padding"
            )
        if max(totals) > length:
            raise ValueError(f"documents of {max(totals)} tokens do not fit in pad_to={length}")
        width = max(len(row) for row in rows)
        return cls.known(np.array([row + [row[-1]] * (width - len(row)) for row in rows], np.int64), length)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.starts.shape, self.starts.tobytes(), self.length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Docs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        shape: Any = getattr(self.starts, "shape", ())
        if len(shape) != 2:  # in a tree of something else than arrays
            return f"Docs({self.starts!r}, {self.length} tokens)"
        rows, n = shape
        return f"Docs({n - 1} documents, {rows} row{'s' * (rows > 1)}, {self.length} tokens)"

    def index(self, positions: Row) -> Row:
        """Which document each position lies in, [rows, T]; the number of documents for padding."""
        if (positions[1:] < positions[:-1]).any():
            return np.stack([np.searchsorted(row, positions, side="right") - 1 for row in self.starts])
        ends = [np.searchsorted(positions, row) for row in self.starts]
        counts = np.diff(ends, prepend=0, append=len(positions))
        return np.stack([np.repeat(np.arange(-1, len(row) - 1), row) for row in counts])


def whole(value: Any) -> int | None:
    """The int that a value is: Python's, numpy's, or an array of one; None for what is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # every tensor has an __index__, also one of floats
        return None


def of_factor(name: str, value: Any, default: str = "None") -> str | None:
    """What is wrong with a factor of scores, a number above 0 whose products with others float32 still holds."""
    if value is None:
        return None
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else -1
    if not 0 < number < math.inf:
        return f"{name}={value!r}: must be a finite number above 0 (no array), or {default}"
    if not 1e-18 <= number <= 1e18:
        return f"{name}={value!r}: scores are worked out in float32; say a number from 1e-18 to 1e18, or {default}"
    return None


def are_starts(starts: Row, length: int) -> bool:
    """Whether every row begins at 0, never decreases, and ends within the length."""
    rises = starts[:, 1:] >= starts[:, :-1]
    return bool(rises.size and not starts[:, 0].any() and rises.all() and (starts[:, -1] <= length).all())


def is_count(n: Any) -> bool:
    """Whether it is a whole number of at least 0, as an int or a float."""
    return isinstance(n, (int, float)) and 0 <= n < 2**63 and int(n) == n


def untraced(given: Any) -> Any:
    """The same, unless JAX traces it."""
    if "jax" in sys.modules and isinstance(given, sys.modules["jax"].core.Tracer):
        raise ValueError(
            f"documents are made of numbers that are at hand, and these are traced (jit, grad, vmap): {given!r}; make "
            "Docs outside jit and pass them as an argument"
        )
    return given


def rows_of(name: str, given: Any) -> list[list[Any]]:
    """One row of numbers, or one a batch entry, from lists, arrays and tensors."""
    if hasattr(given, "tolist"):
        given = untraced(given).tolist()
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{name} must be a list, array or tensor of whole numbers, got {given!r}")
    given = [untraced(x).tolist() if hasattr(x, "tolist") else x for x in given]
    batch = given and all(isinstance(x, (list, tuple)) for x in given)
    return [list(row) for row in given] if batch else [given]


def bounds(
    spec: AttentionSpec,
    positions: Row,
    seq_len: int,
    key_len: int | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    offset: int = 0,
) -> tuple[Row, Row]:
    """The keys [begin, end) that queries at these (sorted) positions see, as [1, T] or [rows, T] arrays.

    Positions from `seq_len` on are padding: they see nothing. With `docs`, a query of document i sees document i of
    `key_docs` (the same documents unless the keys are another sequence). `offset` is the key position of query 0.
    """
    key_len = seq_len if key_len is None else key_len
    p = np.asarray(positions, np.int64)
    begin = np.zeros((1, len(p)), np.int64)
    end = np.full((1, len(p)), key_len, np.int64)
    if docs is not None:
        key_docs = docs if key_docs is None else key_docs
        i = docs.index(p)  # [rows, T]; the last index is padding, which starts and ends where the documents stop
        limits = np.pad(key_docs.starts, ((0, 0), (0, 1)), mode="edge")
        rows = [(row[at], row[at + 1]) for row, at in zip(limits, i, strict=True)]
        begin, end = (np.stack(side) for side in zip(*rows, strict=True))
    own = p + offset
    if spec.causal:
        np.minimum(end, own + 1, out=end)
    if spec.window is not None:
        np.maximum(begin, own + 1 - spec.window, out=begin)
    for side in (begin, end):
        np.minimum(side, key_len, out=side)
        side[:, p >= seq_len] = key_len
    return np.minimum(begin, end, out=begin), end
