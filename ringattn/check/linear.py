"""What a call of linear attention must satisfy: shapes, gates, states."""

from typing import Any

from ringattn.check.arguments import has_shape
from ringattn.check.attention import of_batch, of_docs, of_lengths, of_shapes
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import AttentionSpec, Docs, of_factor
from ringattn.plans.plan import Plan
from ringattn.plans.segments import WAYS, segments_problem, uneven, ways
from ringattn.plans.sizes import dtype_name


def of_linear(
    q: Any, k: Any, v: Any, log_decay: Any, beta: Any, plan: Plan, docs: Docs | None, tokens: int
) -> str | None:
    """q, k [B, T, G, K], v [B, T, H, V], gates and beta match, and each rank's segments are consecutive tokens."""
    if docs is not None and not docs.plain:
        return f"{docs}: linear attention takes documents alone; leave out prefix, spans, trees and slices"
    if problem := of_shapes(q, k, v, linear=True) or of_batch(q):
        return problem
    if q.shape[2] != k.shape[2]:
        return f"q has {q.shape[2]} heads, k {k.shape[2]}; linear attention needs as many query heads as key heads"
    if v.shape[2] % k.shape[2]:
        return f"k has {k.shape[2]} heads, v {v.shape[2]}; the key heads must divide the value heads"
    if q.shape[1] != k.shape[1]:
        return f"q has {q.shape[1]} tokens, k {k.shape[1]}; linear attention needs as many keys as queries"
    heads, channels = tuple(v.shape[:3]), (*v.shape[:3], k.shape[3])
    if log_decay is not None and not has_shape(log_decay, channels, heads):
        return f"log_decay has shape {tuple(log_decay.shape)}; expected {channels}, by key channel, or {heads}, by head"
    if beta is not None and tuple(beta.shape) != heads:
        return f"beta has shape {tuple(beta.shape)}; expected {heads}, one for every token and value head"
    if problem := segments_problem(plan):
        return problem
    if plan.keys is not plan:
        return f"the plan has {plan.seq_len} queries and {plan.keys.seq_len} keys; linear attention needs as many"
    return of_lengths(q, k, plan, AttentionSpec(), (tokens, tokens)) or of_docs(
        q.shape[0], plan, AttentionSpec(), docs, None
    )


def of_scan(plan: Plan, scan: str) -> str | None:
    if (problem := of_choice("scan", scan, ("auto", *WAYS))) or scan == "auto" or scan in ways(plan):
        return problem
    if uneven(plan):
        return f"scan={scan!r}: in layout={plan.layout!r} maps go straight to the ranks that need them; leave scan out"
    return f"scan={scan!r} in layout={plan.layout!r}, which passes the {plan.ring} ranks in another order: use 'gather'"


def wrong_number(name: str, at: tuple[int, ...], value: float) -> str:
    decay = "a log decay is at most 0, as logsigmoid gives it (of a decay in [0, 1] pass decay.log())"
    what = "beta is in [0, 2], as sigmoid or 2 * sigmoid gives it" if name == "beta" else decay
    return f"{name}{list(at)} = {value:g}: {what}"


def of_scale(scale: float | None, key_dim: int) -> str | None:
    return of_factor("scale", scale, f"None for 1 / sqrt({key_dim})")


def of_state(name: str, state: Any, q: Any, v: Any, dtype: Any, docs: Docs | None = None) -> str | None:
    """A state is [B, H, K, V] in the dtype of states, or with documents [documents, H, K, V], one a document."""
    (rows, *_, H, V), K, width = v.shape, q.shape[3], width_of(docs)
    if not has_shape(state, (rows, H, K, V), (rows * width, H, K, V)):
        problem = f"{name} has shape {tuple(state.shape)}; expected {(rows, H, K, V)}: batch, heads, key dim, value dim"
        each = f"; or {(rows * width, H, K, V)}, one a document: {rows} x {width} documents"
        return problem + f"{each} (a row with fewer ends in empty ones, which count too)" * (width > 1)
    if state.dtype != dtype:
        return f"{name} is {state.dtype}; the state of {q.dtype} inputs is {dtype_name(dtype)}: cast it to that"
    return None


def returned_states(return_state: bool | str, initial_state: Any, docs: Docs | None, batch: int) -> str:
    """Which states a call returns: "" for none, one behind each of the "rows", or one behind each of the "documents".

    Rows of one document each have the same states either way, so no shape has two meanings.
    """
    several = width_of(docs) > 1 and (return_state == "documents" or by_document(initial_state, docs, batch))
    return "" if not return_state else "documents" if several else "rows"


def by_document(initial_state: Any, docs: Docs | None, batch: int) -> bool:
    """Whether a state of the right shape is one a document, of rows of several documents."""
    width = width_of(docs)
    return initial_state is not None and width > 1 and bool(initial_state.shape[0] == batch * width)


def width_of(docs: Docs | None) -> int:
    """How many documents each row has, empty ones included."""
    return 1 if docs is None else docs.starts.shape[1] - 1
