"""Dense float64 attention, written from the definition and from nothing else here, and the comparison with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.launch.verify.cases import Case, Truth
from ringattn.masks.spec import AttentionSpec
from ringattn.torch.sharding import own_positions

Mine = Callable[[str, Tensor, float], Tensor]  # of a result by its name, with this where the plan pads
WHOLE = ("sinks", "state", "end")  # what every rank has all of


def visible(case: Case, batch_row: int) -> Tensor:
    """[T, S]: whether query i sees key j, from the definition of the spec."""
    if case.slices is not None:
        return in_slices(case)
    if case.parents is not None:
        return on_branches(case, batch_row)
    T, S = case.seq_len, case.key_len or case.seq_len
    mine, i, i_left = tokens_of(case.lengths or [T], batch_row, T)
    of_keys = case.lengths if case.key_len is None and case.key_lengths is None else case.key_lengths
    theirs, j, j_left = tokens_of(of_keys or [S], batch_row, S)
    if case.key_lengths is not None:  # counted back from the end of a document
        i, j = -i_left, -j_left
    allowed = near(case.spec, i[:, None], j[None])
    i, j = torch.arange(T)[:, None], torch.arange(S)[None]
    for start, stop in spans_of(case, batch_row):
        allowed |= (start <= i) & (i < stop) & (start <= j) & (j < stop)
    return allowed & (mine[:, None] == theirs[None]) & (mine[:, None] >= 0)


def near(spec: AttentionSpec, i: Tensor, j: Tensor) -> Tensor:
    """Whether the query at position i of a document sees the key at position j, by the words of the spec."""
    allowed = (i == i) & (j == j)
    if isinstance(spec.window, tuple):
        allowed &= (i - j <= spec.window[0]) & (j - i <= spec.window[1])
    elif spec.window is not None:
        allowed &= i - j < spec.window
    if spec.chunk is not None:
        allowed &= i.div(spec.chunk, rounding_mode="floor") == j.div(spec.chunk, rounding_mode="floor")
    allowed |= (j >= 0) & (j < spec.first)
    return allowed & (j <= i) if spec.causal else allowed


def spans_of(case: Case, batch_row: int) -> list[tuple[int, int]]:
    """The ranges of tokens that see one another."""
    spans = [] if case.spans is None else list(case.spans)
    if spans and isinstance(spans[0], list):
        spans = list(spans[batch_row])
    lengths = [] if case.prefix is None else row_of(case.lengths, batch_row)
    for i, n in enumerate([] if case.prefix is None else row_of(case.prefix, batch_row)):
        spans.append((sum(lengths[:i]), sum(lengths[:i]) + n))
    return spans


def on_branches(case: Case, batch_row: int) -> Tensor:
    """Of segments: each token sees those of its branch, whose depths are their positions."""
    parents, of = row_of(case.parents, batch_row), tokens_of(case.lengths, batch_row, case.seq_len)[0].tolist()
    allowed = torch.zeros(case.seq_len, case.seq_len, dtype=torch.bool)
    for query, segment in enumerate(of):
        if segment < 0:
            continue
        branch = [segment]
        while parents[branch[0]] >= 0:
            branch.insert(0, parents[branch[0]])
        tokens = torch.tensor([t for s in branch for t, its in enumerate(of) if its == s])
        position = (tokens == query).nonzero()[0]
        allowed[query, tokens] = near(case.spec, position, torch.arange(len(tokens)))
    return allowed


def in_slices(case: Case) -> Tensor:
    """A query sees a key if some slice has both, its kind allows it, and the window and chunks do; not causal alone."""
    i, j = torch.arange(case.seq_len)[:, None], torch.arange(case.seq_len)[None]
    allowed = torch.zeros(case.seq_len, case.seq_len, dtype=torch.bool)
    for (start, stop), (begin, end), kind in case.slices:
        here = (start <= i) & (i < stop) & (begin <= j) & (j < end)
        if kind in ("causal", "both"):  # the last query sees the last key
            here &= stop - i <= end - j
        if kind in ("inverse", "both"):  # the first query sees the first key
            here &= j - begin >= i - start
        allowed |= here
    window = case.spec.window if isinstance(case.spec.window, tuple) else ((case.spec.window or 2**62) - 1, 2**62)
    return allowed & near(AttentionSpec(False, window, case.spec.chunk, case.spec.first), i, j)


def real_rows(case: Case, batch_row: int) -> Tensor:
    """[T]: which queries belong to a document, or see by a slice; the others are padding and see not even a sink."""
    if case.slices is not None:
        return in_slices(case).any(1)
    return tokens_of(case.lengths or [case.seq_len], batch_row, case.seq_len)[0] >= 0


def row_of(lengths: Any, batch_row: int) -> list[int]:
    return lengths[batch_row] if isinstance(lengths[0], list) else lengths


def tokens_of(lengths: Any, batch_row: int, total: int) -> Tensor:
    """[3, total]: of every token its document, its position there, and how many follow with itself; -1 for padding."""
    tokens = [(i, p, n - p) for i, n in enumerate(row_of(lengths, batch_row)) for p in range(n)]
    return torch.tensor(tokens + [(-1, -1, -1)] * (total - len(tokens))).T


def attention(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse), one batch row and head at a time, in the inputs' dtype."""
    outs, lses = [], []
    group = case.heads // case.kv_heads
    for b in range(case.batch):
        allowed, real = visible(case, b).to(q.device), real_rows(case, b).to(q.device)
        for h in range(case.heads):
            scores = q[b, :, h] @ k[b, :, h // group].T * (case.spec.scale or case.head_dim**-0.5)
            if case.spec.softcap is not None:
                scores = case.spec.softcap * torch.tanh(scores / case.spec.softcap)
            scores = scores.masked_fill(~allowed, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].to(scores.dtype).expand(case.seq_len, 1)], 1)
            some = (scores > float("-inf")).any(1, keepdim=True) & real[:, None]
            p = torch.softmax(torch.where(some, scores, 0.0), 1) * some
            lses.append(torch.where(some[:, 0], torch.logsumexp(torch.where(some, scores, 0.0), 1), float("-inf")))
            outs.append(p[:, : allowed.shape[1]] @ v[b, :, h // group])
    shape = (case.batch, case.heads, case.seq_len)
    return torch.stack(outs).reshape(*shape, -1).transpose(1, 2), torch.stack(lses).reshape(shape).transpose(1, 2)


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random q, k, v, sinks and the gradients that come back for out and lse, the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    keys = case.key_len or case.seq_len

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "q": draw(case.batch, case.seq_len, case.heads, case.head_dim),
        "k": draw(case.batch, keys, case.kv_heads, case.head_dim),
        "v": draw(case.batch, keys, case.kv_heads, case.value_dim),
        "sinks": draw(case.heads),
        "dout": draw(case.batch, case.seq_len, case.heads, case.value_dim),
        "dlse": draw(case.batch, case.seq_len, case.heads).float(),
    }


def dense(case: Case, given: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """out, lse and every gradient of the whole sequence, computed densely in `dtype`."""
    leaves = {n: given[n].detach().to(dtype).requires_grad_() for n in case.leaves}
    out, lse = attention(case, leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks"))
    back = {n: given[f"d{n}"] for n in case.outputs if f"d{n}" in given}
    return with_gradients({"out": out, "lse": lse}, back, leaves)


def with_gradients(results: dict[str, Tensor], back: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results, and the gradients of the leaves by what comes back: nothing does where an lse is -inf."""
    into = [torch.where(torch.isfinite(results[n]), x.to(results[n].dtype), 0.0) for n, x in back.items()]
    grads = torch.autograd.grad([results[n] for n in back], list(leaves.values()), into, materialize_grads=True)
    named = {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}
    return {**{n: x.detach() for n, x in results.items()}, **named}


def local(x: Tensor, plan: Any, poison: float = float("nan")) -> Tensor:
    """This rank's tokens of a whole tensor, with poison where the plan pads."""
    pad = x.new_full((x.shape[0], plan.tokens.padded_length - x.shape[1], *x.shape[2:]), poison)
    return torch.cat([x, pad], 1)[:, torch.from_numpy(own_positions(plan)).to(x.device)]


def own(plan: Any, name: str, whole: Tensor, padding: float = float("nan")) -> Tensor:
    """This rank's part of an input, a result or a gradient; what is the same on every rank it has whole."""
    name = name.removeprefix("d")
    if name in WHOLE:
        return whole
    return local(whole, plan.keys if name in ("k", "v") else plan, padding)


def run(case: Any, mesh: Any, given: dict[str, Any], kernel: str = "auto", **choices: Any) -> dict[str, Any]:
    """Both results and every gradient of this rank's part, through the public API; padding goes in as NaN.

    Gradients come back for each result that one is given for: NaN for padding, none where an lse is -inf, and for an
    end state other parts from all ranks. `choices` are further words for the plan: how blocks travel.
    """
    plan = case.plan_on(mesh, kernel, **choices)
    leaves = {n: own(plan, n, given[n]).clone().requires_grad_() for n in case.leaves if given[n] is not None}
    results = dict(zip(case.outputs, case.call(plan, leaves, kernel), strict=True))
    back = {n: own(plan, n, given[f"d{n}"]) for n in results if f"d{n}" in given}
    if "end" in back:
        ranks, rank = plan.ring * plan.ulysses, plan.ring_axis.rank * plan.ulysses + plan.ulysses_axis.rank
        back["end"] = back["end"] * (2 * (rank + 1) / (ranks * (ranks + 1)))
    return with_gradients(results, back, leaves)


def whole(name: str, x: Tensor, padding: float) -> Tensor:
    """Of whole results: all of the truth."""
    return x


def shares(results: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of what is the same on every rank: each rank has a share, and the truth is their sum."""
    return {n: x for n, x in results.items() if n.startswith("d") and n[1:] in WHOLE}


def errors(case: Any, mesh: Any, results: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative error (norm) of each local result; inf where padding leaked or an empty row is not one."""
    held = {n: x for n, x in results.items() if n not in shares(results)}
    return compared(held, Truth({}, exact, {}, {}), partial(own, case.plan_on(mesh)))


def compared(results: dict[str, Any], truth: Truth, mine: Mine = whole) -> dict[str, float]:
    """The error of each result by its norm, and of the worst `element`; or that of the worst element of each.

    `mine` is what of the truth the results are: of whole results all.
    """
    norms, elements = {}, {}
    for n, x in results.items():
        true = truth.exact[n].to(x.device)
        exact = mine(n, true, float("-inf") if n == "lse" else 0.0)
        if n in truth.allowed:
            elements[n] = over(x, exact, mine(n, truth.allowed[n].to(x.device), 0.0))
        if not truth.by_element:
            norms[n] = error(x, exact, size(true))
    if truth.by_element:
        return elements
    return {**norms, **({"element": max(elements.values())} if elements else {})}


def size(x: Tensor) -> float:
    return float(torch.nan_to_num(x, neginf=0).norm())


def error(result: Tensor, expected: Tensor, scale: float) -> float:
    """|result - expected| / the norm of the whole result; inf if one is infinite or NaN where the other is not."""
    gap = gaps(result, expected)
    return float("inf") if gap is None else float(gap.norm()) / max(scale, 1e-30)


def over(result: Tensor, expected: Tensor, allowed: Tensor) -> float:
    """The largest error over what its element is allowed; inf if one is infinite or NaN where the other is not."""
    gap = gaps(result, expected)
    if gap is None or not gap.numel():
        return 0.0 if gap is not None else float("inf")
    return float((gap.abs() / allowed).nan_to_num(nan=0.0, posinf=torch.inf).max())


def gaps(result: Tensor, expected: Tensor) -> Tensor | None:
    """How far each element is off; None if one is infinite or NaN where the other is not."""
    result, finite = result.double(), torch.isfinite(expected)
    if result.isnan().any() or not torch.equal(torch.isfinite(result), finite):
        return None
    return torch.where(finite, result - expected, 0.0)
