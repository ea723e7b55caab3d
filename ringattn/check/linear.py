"""What a call of linear attention must satisfy: shapes, gates, states."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringattn.check.arguments import has_shape
from ringattn.check.attention import of_batch, of_docs, of_lengths, of_shapes
from ringattn.kernels.arrays import accumulator, is_floating
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import AttentionSpec, Docs, of_factor
from ringattn.plans.plan import Plan
from ringattn.plans.segments import WAYS, segments_problem, uneven, ways
from ringattn.plans.sizes import dtype_name

LIMITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "log_decay": (
        lambda t: t <= 0, "a log decay is at most 0, as logsigmoid gives it (of a decay in [0, 1] pass decay.log())"
    ),
    "beta": (lambda t: (t >= 0) & (t <= 2), "beta is in [0, 2], as sigmoid or 2 * sigmoid gives it"),
}  # fmt: skip


class Given(NamedTuple):
    """The arrays of a call, as its user passes them."""

    q: Any
    k: Any
    v: Any
    log_decay: Any = None
    beta: Any = None
    initial_state: Any = None


class Settings(NamedTuple):
    """What a call is given beside its arrays and its plan."""

    docs: Docs | None = None
    scale: float | None = None
    kernel: str = "auto"
    scan: str = "auto"
    check: bool | None = None
    return_state: bool | str = False


def of_linear(x: Given, plan: Plan, docs: Docs | None, tokens: int) -> str | None:
    """q, k [B, T, G, K], v [B, T, H, V], gates and beta match, and each rank's segments are consecutive tokens."""
    q, k, v, log_decay, beta, _ = x
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
    spec = AttentionSpec()
    return of_lengths(q, k, plan, spec, (tokens, tokens)) or of_docs(q.shape[0], plan, spec, docs, None)


def of_scan(plan: Plan, scan: str) -> str | None:
    if (problem := of_choice("scan", scan, ("auto", *WAYS))) or scan == "auto" or scan in ways(plan):
        return problem
    if uneven(plan):
        return f"scan={scan!r}: in layout={plan.layout!r} maps go straight to the ranks that need them; leave scan out"
    return f"scan={scan!r} in layout={plan.layout!r}, which passes the {plan.ring} ranks in another order: use 'gather'"


def of_numbers(x: Given, first: Callable[[Any], tuple[int, ...] | None]) -> str | None:
    """The first gate above 0, or beta outside of [0, 2]; `first` finds the first place where bools are true."""
    for name, (right, what) in LIMITS.items():
        t = getattr(x, name)
        if t is not None and (at := first(~right(t))) is not None:
            return f"{name}{list(at)} = {t[at].item():g}: {what}"
    return None


def of_asked(x: Given, plan: Plan, asked: Settings, kernels: Sequence[str]) -> str | None:
    """The scale, the kernel and the scan, the initial state, and that all are floats."""
    others = x._asdict().items()
    return (
        of_factor("scale", asked.scale, f"None for 1 / sqrt({x.q.shape[-1]})")
        or of_choice("kernel", asked.kernel, ("auto", *kernels))
        or of_scan(plan, asked.scan)
        or (None if x.initial_state is None else of_state(x, asked.docs, accumulator(x.q)))
        or next((f"{n} is {t.dtype}; expected floats" for n, t in others if t is not None and not is_floating(t)), None)
    )


def of_state(x: Given, docs: Docs | None, dtype: Any) -> str | None:
    """The initial state is [B, H, K, V], or with documents perhaps [documents, H, K, V], one a document."""
    (rows, *_, H, V), K, width, state = x.v.shape, x.q.shape[3], width_of(docs), x.initial_state
    if not has_shape(state, (rows, H, K, V), (rows * width, H, K, V)):
        expected = f"{(rows, H, K, V)}: batch, heads, key dim, value dim"
        each = f"; or {(rows * width, H, K, V)}, one a document: {rows} x {width} documents"
        expected += f"{each} (a row with fewer ends in empty ones, which count too)" * (width > 1)
        return f"initial_state has shape {tuple(state.shape)}; expected {expected}"
    if state.dtype == dtype:
        return None
    return f"initial_state is {state.dtype}; the state of {x.q.dtype} inputs is {dtype_name(dtype)}: cast it to that"


def returned_states(x: Given, asked: Settings) -> str:
    """Which states a call returns: "" for none, one behind each of the "rows", or one behind each of the "documents".

    Rows of one document each have the same states either way, so no shape has two meanings.
    """
    several = width_of(asked.docs) > 1 and (asked.return_state == "documents" or by_document(x, asked.docs))
    return "" if not asked.return_state else "documents" if several else "rows"


def by_document(x: Given, docs: Docs | None) -> bool:
    """Whether an initial state of the right shape is one a document, of rows of several documents."""
    width = width_of(docs)
    return x.initial_state is not None and width > 1 and bool(x.initial_state.shape[0] == x.v.shape[0] * width)


def width_of(docs: Docs | None) -> int:
    """How many documents each row has, empty ones included."""
    return 1 if docs is None else docs.starts.shape[1] - 1
