"""What a cache and the calls on it must satisfy."""

from typing import Any

import numpy as np

from ringattn.check.arguments import BY_PARENTS, of_sizes
from ringattn.check.attention import of_lengths, of_plan
from ringattn.masks.spec import AttentionSpec, is_number, whole
from ringattn.plans.plan import Plan
from ringattn.plans.sizes import heads_problem

FULL = AttentionSpec(causal=False)  # of_lengths then compares lengths alone


def each(given: Any, rows: int) -> list[int] | None:
    """A whole number for each row, from one for all rows or one per row; None for anything else."""
    given = given.tolist() if hasattr(given, "tolist") else given
    many = list(given) if isinstance(given, (list, tuple)) else [given] * rows
    numbers = [n for n in map(whole, many) if n is not None]
    return numbers if len(numbers) == len(many) == rows else None


def of_new(k: Any, v: Any, cache: Any) -> str | None:
    """New tokens [B, n, G, D], at least one, have the shape of those in the cache, each a key and a value."""
    for name, x, (B, _, G, D) in (("k", k, cache.k.shape), ("v", v, cache.v.shape)):
        if len(x.shape) != 4 or (x.shape[0], *x.shape[2:]) != (B, G, D):
            hint = ": dims 1 and 2 look exchanged" if len(x.shape) == 4 and x.shape[1] == G else ""
            return f"{name} has shape {tuple(x.shape)}; this cache takes [{B}, tokens, {G}, {D}]{hint}"
    if k.shape[1] == v.shape[1] > 0:
        return None
    return f"k has {k.shape[1]} tokens, v {v.shape[1]}; every new token has both, and there must be at least one"


def of_fork(copies: Any, max_len: Any, lengths: np.ndarray | None) -> str | None:
    problem = of_sizes(copies=copies, max_len=max_len)
    if problem is None and lengths is not None and max_len < lengths.max():
        return f"max_len={max_len}: the rows hold up to {lengths.max()} tokens already; pass more, or truncate first"
    return problem


def of_truncated(given: Any, rows: int) -> str | None:
    if each(given, rows) is not None:
        return None
    return f"truncate to {given!r}: one whole number, or one for each of {rows} rows"


def of_filled(lengths: np.ndarray | None) -> str | None:
    if lengths is None or all(lengths.tolist()):  # faster than numpy for a few numbers
        return None
    return f"decode before prefill: the cache holds {lengths.tolist()} tokens; prefill a prompt first"


def of_room(n: int, lengths: np.ndarray | None, max_len: int) -> str | None:
    if lengths is None or max(lengths.tolist()) + n <= max_len:
        return None
    return f"{n} tokens do not fit: rows hold up to {lengths.max()} of max_len={max_len}; truncate, or allocate more"


def beside_window(n: int, window: int, apart: int = 0) -> str:
    """`apart`: how many tokens the longest row has more than the shortest one."""
    rows = f" in rows whose lengths differ by {apart}" * (apart > 0)
    return f"{n} tokens at once do not fit beside a window of {window}{rows}; allocate(room={n + apart}) or append less"


def drafts(parents: Any) -> tuple[int, ...] | None:
    """Parents as plain numbers."""
    return None if parents is None else tuple(map(int, parents))


def of_parents(parents: Any, tokens: int) -> str | None:
    """The parents of a tree of drafts: one number for each token, of a token before it, or -1."""
    if parents is None:
        return None
    if not isinstance(parents, (list, tuple)) or not all(is_number(n, -1) for n in parents):
        return f"parents={parents!r}: {BY_PARENTS}, as a list"
    if len(parents) != tokens:
        return f"parents has {len(parents)} numbers for {tokens} tokens; {BY_PARENTS}"
    if wrong := [i for i, parent in enumerate(parents) if parent >= i]:
        return f"parents are not a tree: token {wrong[0]} has parent {parents[wrong[0]]}, which does not come before it"
    return None


def of_window(kept: int | None, spec: AttentionSpec) -> str | None:
    """A cache that keeps a window serves specs that see no further back."""
    if kept is not None and spec.first:
        return f"the cache keeps a window of {kept} keys, and the first {spec.first} leave it; allocate without window"
    if kept is None or (spec.behind is not None and spec.behind <= kept):
        return None
    return f"the cache keeps a window of {kept} keys, the spec sees window={spec.window}; allocate it with that window"


def of_chunk(q: Any, k: Any, v: Any, plan: Plan, cache: Any, spec: AttentionSpec, length: int) -> str | None:
    """Why a chunk, of which q has `length` tokens here, does not fit the plan or the cache."""
    if problem := of_plan(q, k, v, plan) or of_lengths(q, k, plan, FULL, (length, length)):
        return problem
    same = plan.axes is cache.plan.axes or (plan.framework == "jax" and plan.axes == cache.plan.axes)
    if (plan.ring, plan.ulysses) != (cache.plan.ring, cache.plan.ulysses) or not same:
        return f"the cache was allocated for another plan ({cache.plan}); use its plan.for_length({plan.seq_len})"
    if plan.tokens.many:
        return (
            "this plan lays out documents (for_docs, or layout='balanced'), and a chunk is one; use the plan without "
            "for_docs, and another layout"
        )
    return of_window(cache.window, spec) or cache.problem(k, v, plan.seq_len)


def of_decoded(q: Any, k: Any, v: Any, cache: Any, spec: AttentionSpec, lengths: np.ndarray | None) -> str | None:
    """Why these tokens cannot be decoded, with a cache whose rows have these lengths."""
    problem = (
        heads_problem(q.shape[2], k.shape[2], ulysses=1)
        or of_window(cache.window, spec)
        or of_filled(lengths)
        or cache.problem(k, v, k.shape[1])
    )
    if problem is None and q.shape[1] != k.shape[1]:
        return f"q has {q.shape[1]} tokens, k and v {k.shape[1]}; every new token has all three"
    return problem


def of_back(new: np.ndarray | None, lengths: np.ndarray | None, first: np.ndarray | None) -> str | None:
    if new is None or lengths is None or first is None or ((new <= lengths).all() and (new >= first).all()):
        return None
    return f"truncate to {new.tolist()}: the rows can go back from {lengths.tolist()} to {first.tolist()} tokens"
