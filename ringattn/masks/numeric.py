"""Plain numbers out of what users pass: ints of any library, lists and arrays of them, and what is wrong with them."""

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

Row = np.ndarray  # int64 [T], or [rows, T] where the rows of a batch differ
LONGEST = 2**40  # tokens, and other sizes: sums of positions, and their products with ranks, fit in 64 bits


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


def is_number(value: Any, least: int) -> bool:
    """Whether this is one whole number from `least` on, that fits in 64 bits; no bool, no array."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


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


def of_choice(name: str, value: Any, choices: Sequence[str]) -> str | None:
    """The problem with a word that must be one of these."""
    if isinstance(value, str) and value in choices:
        return None
    return f"{name}={value!r}: choose one of {', '.join(choices)}"


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
