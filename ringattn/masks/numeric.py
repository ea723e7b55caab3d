"""Plain numbers out of what users pass: ints of any library, lists and arrays of them, and what is wrong with them."""

import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

Row = np.ndarray  # int64 [T], or [rows, T] where the rows of a batch differ
MAX_SIZE = 2**40  # tokens, and other sizes: sums of positions, and their products with ranks, fit in 64 bits


def is_traced(x: Any) -> bool:
    return "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer)


def raise_if(problem: str | None) -> None:
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
    """Whether this is one whole number from `least` on, that fits in 64 bits."""
    number = whole(value)
    return number is not None and least <= number < 2**63


def of_factor(name: str, value: Any, default: str = "None") -> str | None:
    """The problem with a factor of scores: it must be above 0, and its products must fit in float32."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is None or (number and 1e-18 <= value <= 1e18):
        return None
    return f"{name}={value!r}: scores are computed in float32; pass a number from 1e-18 to 1e18, or {default}"


def of_choice(name: str, value: Any, choices: Sequence[str]) -> str | None:
    if isinstance(value, str) and value in choices:
        return None
    return f"{name}={value!r}: choose one of {', '.join(choices)}"


def plain(given: Any) -> Any:
    """Lists of Python's numbers, from an array or a tensor; an error if JAX traces it."""
    if is_traced(given):
        how = "make Docs outside jit and pass them as an argument, or use Docs.from_segment_ids(ids, most=...)"
        raise ValueError(f"Docs need concrete numbers, and these are traced (jit, grad, vmap): {given!r}; {how}")
    return given.tolist() if hasattr(given, "tolist") else given


def rows_of(name: str, given: Any, least: int = 0) -> list[list[int]]:
    """One row of whole numbers from `least` on, or one per batch entry, from lists, arrays and tensors."""
    given = plain(given)
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{name} must be a list, array or tensor of whole numbers, got {given!r}")
    given = [plain(x) for x in given]
    batch = given and all(isinstance(x, (list, tuple)) for x in given)
    rows = [list(row) for row in given] if batch else [given]
    for row in rows:
        if not {*map(type, row)} <= {int} or min(row, default=least) < least:
            raise ValueError(f"{name} must be whole numbers of at least {least}, got {row}")
    return rows
