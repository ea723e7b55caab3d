"""What a call that cuts a sequence into parts, joins them, or shifts it must satisfy, on tensors and arrays alike."""

from typing import Any

from ringattn.check.arguments import of_arguments
from ringattn.check.attention import of_packed
from ringattn.masks.numeric import whole
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan


def of_dim(x: Any, dim: Any) -> str | None:
    number = whole(dim)
    if number is not None and -x.ndim <= number < x.ndim:
        return None
    return f"dim={dim!r}: x has shape {tuple(x.shape)}; say which of its {x.ndim} dims is the sequence"


def of_whole(x: Any, dim: int, plan: Plan, part: int) -> str | None:
    """Dim `dim` of x has the whole sequence; `part`: how many tokens it has once it is sharded."""
    count = x.shape[dim]
    if count == plan.seq_len:
        return None
    hint = "it is already sharded: shard x once" if count == part else f"use plan.for_length({count})"
    return f"dim {dim} of x has {count} tokens, the plan is for {plan.seq_len}; {hint}"


def of_part(x: Any, dim: int, plan: Plan, part: int, holder: str) -> str | None:
    """Dim `dim` of x has as many tokens as what `plan.shard` gives."""
    count = x.shape[dim]
    if count == part:
        return None
    hint = "; x is the whole sequence: pass plan.shard(x)" if count == plan.seq_len else ""
    return f"dim {dim} of x has {count} tokens; {holder} {part} ({plan}){hint}"


def of_roll(x: Any, dim: int, plan: Plan, shift: Any, docs: Docs | None) -> str | None:
    if whole(shift) is None:
        return f"shift={shift!r}: how many places tokens move, a whole number"
    problem = of_arguments(docs=docs) or of_packed("docs", docs, plan.seq_len, x.shape[0])
    if problem is None and docs is not None and docs.rows > 1 and dim % x.ndim == 0:
        return f"dim={dim!r}: {docs} are of the rows of dim 0, which cannot also be the sequence"
    return problem
