"""A mask is an interval: every query sees one contiguous range [begin, end) of global key positions.

Causal, sliding window, packed documents, padding and cross attention all become two numbers per query, and neither
decreases along the sequence. Plain numpy, which can be printed and tested without a device.
"""

import math
import operator
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, partial
from importlib import import_module
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from ringattn.values import Value

Row = np.ndarray  # int64 [T], or [rows, T] where the rows of a batch differ


class AttentionSpec(Value):
    """Which attention is computed: softmax(scale * q k^T) v over the keys that each query may see, with a softcap.

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
            raise ValueError(f"causal={self.causal!r}: pass True or False")
        if self.window is not None:
            if isinstance(self.window, bool) or not isinstance(self.window, Integral) or self.window < 1:
                raise ValueError(f"window={self.window!r}: the number of keys a query sees, at least 1 (None for all)")
            if self.window >= 2**63:
                raise ValueError(f"window={self.window}: positions are counted in 64 bits; use None for all keys")
            if not self.causal:
                raise ValueError(
                    f"window={self.window} counts back from the query's own position, which has no meaning with "
                    "causal=False; use causal=True, or window=None"
                )
        for name in ("softcap", "scale"):
            raise_if(of_factor(name, getattr(self, name)))
        for name, number in (("causal", bool), ("window", int), ("softcap", float), ("scale", float)):
            value = getattr(self, name)
            if value is not None:  # numpy's numbers are equal to Python's, but make arrays of their own dtype
                object.__setattr__(self, name, number(value))

    def scale_for(self, head_dim: int) -> float:
        return self.scale if self.scale is not None else head_dim**-0.5


class Docs:
    """Packed documents: where each one starts, for one row or for every row of a batch. Docs compare by value.

    `starts` is int64 [rows, n + 1]: document i of a row is [starts[i], starts[i + 1]). Tokens after the last start are
    padding, which no query sees. Rows with fewer documents end in empty ones.
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
        if "torch" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
            # torch.compile would trace numpy as tensors; with an error it leaves this call to Python instead. Not
            # is_compiling, which is True in every thread while one of them compiles.
            raise ValueError("Docs are made of numbers: make them before the compiled function and pass them to it")
        if "jax" in sys.modules:
            register_in_jax()
        self.starts, self.length = starts, length
        starts.setflags(write=False)
        self.padded = bool((starts[:, -1] < length).any())  # whether some row ends in padding

    def __reduce__(self) -> Any:
        return Docs.known, (self.starts, self.length)

    @classmethod
    def known(cls, starts: np.ndarray, length: int) -> "Docs":
        """Docs of these starts without a check or a copy: they must be right and may not change later."""
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
            if not are_counts(row):
                raise ValueError(f"document lengths must be whole numbers of at least 0, got {row}")
        return cls._from_rows([list(accumulate(map(int, row), initial=0)) for row in rows], pad_to)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Any, pad_to: int | None = None) -> "Docs":
        """Documents from cumulative lengths [0, n1, n1 + n2, ...], as a list, array or tensor; 2-d for a batch."""
        rows = rows_of("cu_seqlens", cu_seqlens)
        for row in rows:
            if not are_counts(row) or row[:1] != [0] or row != sorted(row):
                raise ValueError(f"cu_seqlens must begin with 0 and never decrease, in whole numbers, got {row}")
        return cls._from_rows([list(map(int, row)) for row in rows], pad_to)

    @classmethod
    def from_segment_ids(
        cls, ids: Any, most: int | None = None, *, plan: Any = None, padding: int | None = 0
    ) -> "Docs":
        """Documents from the id of each token, [batch, tokens] or [tokens], as a list, array or tensor.

        Equal ids in a row of tokens are one document. Tokens at the end with the id `padding` are padding; None means
        that there is none. With `plan` the ids are in its order, as `plan.shard(ids)` returns them.

        In JAX the ids may be traced. `most` is required then: the most documents of a row of the batch. Tokens of
        further documents see nothing. Where the ids are known, further documents are an error.

        >>> Docs.from_segment_ids([7, 7, 7, 9, 9, 0]).starts.tolist()
        [[0, 3, 5]]
        """
        from ringattn.segment_ids import docs_of

        return docs_of(ids, most, plan, padding)

    @classmethod
    def bare(cls, starts: Any, length: int, padded: bool = True) -> "Docs":
        """Docs whose starts are not read, since JAX may trace them."""
        docs = object.__new__(cls)
        docs.starts, docs.length, docs.padded = starts, length, padded
        return docs

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
                f"the rows' document lengths add up to {totals}, not one length; pass pad_to={max(totals)} (or more) "
                "to let the shorter rows end in padding"
            )
        if max(totals) > length:
            raise ValueError(f"documents of {max(totals)} tokens do not fit in pad_to={length}")
        width = max(len(row) for row in rows)
        return cls.known(np.array([row + [row[-1]] * (width - len(row)) for row in rows], np.int64), length)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.starts.shape, self.starts.tobytes(), self.length)

    @cached_property
    def first(self) -> "Docs | None":
        """The first row alone if all rows are equal; else None."""
        if len(self.starts) == 1:
            return self
        return Docs.known(self.starts[:1], self.length) if (self.starts == self.starts[:1]).all() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Docs) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        shape: Any = getattr(self.starts, "shape", ())
        if len(shape) != 2:  # in a JAX tree whose leaves are not arrays
            return f"Docs({self.starts!r}, {self.length} tokens)"
        rows, n = shape
        return f"Docs({n - 1} documents, {rows} row{'s' * (rows > 1)}, {self.length} tokens)"


@cache
def register_in_jax() -> None:
    """Docs may be arguments of functions that JAX traces: their starts are then traced, their number is not."""
    register_pytree_node = import_module("jax.tree_util").register_pytree_node

    with suppress(ValueError):  # another thread was faster
        register_pytree_node(Docs, lambda d: ((d.starts,), (d.length, d.padded)), lambda aux, x: Docs.bare(*x, *aux))


def is_traced(x: Any) -> bool:
    """Whether JAX traces x."""
    return "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer)


def raise_if(problem: str | None) -> None:
    """Raise a problem that a check found."""
    if problem:
        raise ValueError(problem)


def whole(value: Any) -> int | None:
    """The value as an int, from Python's ints, numpy's, or an array with one; None for anything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # every tensor has an __index__, even one of floats
        return None


def of_factor(name: str, value: Any, default: str = "None") -> str | None:
    """The problem with a factor of scores: it must be above 0, and its products must fit in float32."""
    if value is None:
        return None
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else -1
    if not 0 < number < math.inf:
        return f"{name}={value!r}: must be a finite number above 0 (not an array), or {default}"
    if not 1e-18 <= number <= 1e18:
        return f"{name}={value!r}: scores are computed in float32; pass a number from 1e-18 to 1e18, or {default}"
    return None


def are_starts(starts: Row, length: int) -> bool:
    """Whether every row begins at 0, never decreases, and ends within the length."""
    rises = starts[:, 1:] >= starts[:, :-1]
    return bool(rises.size and not starts[:, 0].any() and rises.all() and (starts[:, -1] <= length).all())


def is_count(n: Any) -> bool:
    """Whether n is a whole number of at least 0, as an int or a float."""
    return isinstance(n, (int, float)) and 0 <= n < math.inf and int(n) == n


def are_counts(row: list[Any]) -> bool:
    """Whether all are whole numbers of at least 0; many ints are checked at once."""
    if set(map(type, row)) == {int}:
        return min(row) >= 0
    return all(map(is_count, row))


def untraced(given: Any) -> Any:
    """The argument itself; an error if JAX traces it."""
    if is_traced(given):
        raise ValueError(
            f"Docs need concrete numbers, and these are traced (jit, grad, vmap): {given!r}; make Docs outside jit and "
            "pass them as an argument, or use Docs.from_segment_ids(ids, most=...)"
        )
    return given


def rows_of(name: str, given: Any) -> list[list[Any]]:
    """One row of numbers, or one per batch entry, from lists, arrays and tensors."""
    if hasattr(given, "tolist"):
        given = untraced(given).tolist()
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{name} must be a list, array or tensor of whole numbers, got {given!r}")
    given = [untraced(x).tolist() if hasattr(x, "tolist") else x for x in given]
    batch = given and all(isinstance(x, (list, tuple)) for x in given)
    return [list(row) for row in given] if batch else [given]


def interval(spec: AttentionSpec, own: Any, begin: Any, end: Any) -> tuple[Any, Any]:
    """The keys [begin, end) that a query sees, in any array library.

    `own` is the query's position among the keys, and its document has the keys [begin, end). The queries of a document
    of the keys 2 to 6, causal with a window of 3:

        keys    0 1 2 3 4 5 6 7
        own 2   . . # . . . . .    [2, 3)
        own 3   . . # # . . . .    [2, 4)
        own 4   . . # # # . . .    [2, 5)
        own 5   . . . # # # . .    [3, 6)
        own 6   . . . . # # # .    [4, 7)

    Neither side decreases from a query to the next one. Where a query sees nothing, begin = end.
    """
    if spec.causal:
        end = (own + 1).clip(begin, end)
    if spec.window is not None:
        most = 2 ** (8 * own.dtype.itemsize - 1) - 1  # beyond all positions, in their own integers
        begin = (own + 1 - min(spec.window, most)).clip(begin, end)
    return begin, end


class Runs(NamedTuple):
    """Queries at increasing positions, cut into runs, one per document: few numbers, from which intervals are made.

    Run i of a row has counts[i] queries, and its document the keys [begin[i], end[i]). A query's position among the
    keys is its own position + shift[i].
    """

    positions: Row  # [T]
    counts: Row  # [rows, runs], like the following
    begin: Row
    end: Row
    shift: Row

    def bounds(self, spec: AttentionSpec) -> tuple[Row, Row]:
        """The keys [begin, end) that every query sees, [rows, T]."""
        begin, end = repeated(self.begin, self.counts), repeated(self.end, self.counts)
        own = self.positions + repeated(self.shift, self.counts) if self.shift.any() else self.positions
        return interval(spec, own, begin, end)


def repeated(values: Row, counts: Row) -> Row:
    """[rows, runs] -> [rows, T]: each value repeated `counts` times; the counts of all rows have the same sum."""
    return np.repeat(values.ravel(), counts.ravel()).reshape(len(values), -1)


def followed_by(last: int, *columns: Row) -> Row:
    """[rows, n]: these columns, and one of the number `last`."""
    return np.concatenate([*columns, np.full((len(columns[0]), 1), last)], 1)


def runs(
    positions: Row,
    below: Callable[[Row], Row],
    seq_len: int,
    key_len: int | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    offset: int = 0,
) -> Runs:
    """The runs of queries at increasing positions, of which below(x) lie below x; other arguments as of `bounds`."""
    key_len = seq_len if key_len is None else key_len
    starts, limits = np.array([[0, seq_len]]), np.array([[0, key_len]])
    if docs is not None:
        starts, limits = docs.starts, (docs if key_docs is None else key_docs).starts
    # two more runs see nothing: the tokens after the documents, and those after the sequence
    counts = np.diff(below(followed_by(seq_len, starts)), append=len(positions))
    begin = np.minimum(followed_by(key_len, limits), key_len)
    end = np.minimum(followed_by(key_len, limits[:, 1:], limits[:, -1:]), key_len)
    shift = np.full_like(begin, offset)
    if key_docs is not None:  # the last query of a document is at the position of its last key
        shift[:, :-2] += limits[:, 1:] - starts[:, 1:]
    return Runs(positions, counts, begin, end, shift)


def bounds(
    spec: AttentionSpec,
    positions: Row,
    seq_len: int,
    key_len: int | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    offset: int = 0,
) -> tuple[Row, Row]:
    """The keys [begin, end) that queries at these positions see, as [1, T] or [rows, T] arrays.

    Positions from `seq_len` on are padding: they see nothing. With `docs`, a query of document i sees document i of
    `key_docs` (the same documents unless the keys are another sequence), and the last query of a document is at the
    position of its last key. `offset` is the key position of query 0.
    """
    p = np.asarray(positions, np.int64)
    order = np.argsort(p, kind="stable")
    back = np.argsort(order)
    below: Any = partial(np.searchsorted, p[order])
    begin, end = runs(p[order], below, seq_len, key_len, docs, key_docs, offset).bounds(spec)
    return begin[:, back], end[:, back]
