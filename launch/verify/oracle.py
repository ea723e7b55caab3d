"""Attention and linear attention in float64, written from the definitions and from nothing else here; what goes into a
call over ranks, and how far its results are off.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.launch.verify.cases import Case, Step, bounds
from ringattn.masks.spec import AttentionSpec

Named = dict[str, Tensor]
WHOLE = ("sinks", "state", "end")  # what every rank has all of
ROUNDINGS = {"float64": 512, "float32": 64, "bfloat16": 4, "float16": 4}  # that a row may be off by in any case


def row_of(of_rows: Any, batch_row: int) -> Any:
    """That of this row, of a list for each row, or of one for all; nothing of None."""
    return of_rows[batch_row % len(of_rows)] if of_rows and isinstance(of_rows[0], list) else of_rows or []


def documents(case: Case) -> list[list[int]]:
    """The lengths of each row's documents, which end in empty ones where other rows have more."""
    rows = [row_of(case.lengths, b) or [case.seq_len] for b in range(case.batch)]
    return [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]


def near(spec: AttentionSpec, i: Tensor, j: Tensor, causal: bool = True) -> Tensor:
    """Whether the query at position i of a document sees the key at position j, by the words of the spec."""
    inf = float("inf")
    behind, ahead = spec.window if isinstance(spec.window, tuple) else ((spec.window or inf) - 1, inf)
    allowed = (i - j <= behind) & (j - i <= ahead)
    if spec.chunk is not None:
        allowed &= i.div(spec.chunk, rounding_mode="floor") == j.div(spec.chunk, rounding_mode="floor")
    allowed |= (j >= 0) & (j < spec.first)
    return allowed & (j <= i) if spec.causal and causal else allowed


def visible(case: Case, batch_row: int) -> Tensor:
    """[T, S]: whether query i sees key j; of a cache, the queries of each step.

    Documents are trees of one segment. The last query of a segment is at the last key of its branch.
    """
    if case.steps:
        seen = [visible(tree(case, step, batch_row), 0) for step in case.steps]
        return torch.cat([torch.nn.functional.pad(x, (0, case.keys - x.shape[1])) for x in seen])
    i, j = torch.arange(case.seq_len)[:, None], torch.arange(case.keys)[None]
    allowed = torch.zeros(case.seq_len, case.keys, dtype=torch.bool)
    if case.slices is not None:
        for (start, stop), (begin, end), kind in case.slices:
            inside = (start <= i) & (i < stop) & (begin <= j) & (j < end)
            inside &= (stop - i <= end - j) | (kind in ("full", "inverse"))  # or the last query sees the last key
            allowed |= inside & ((j - begin >= i - start) | (kind in ("full", "causal")))  # or the first one the first
        return allowed & near(case.spec, i, j, causal=False)
    lengths = row_of(case.lengths, batch_row)
    of, keys = bounds(lengths or [case.seq_len]), bounds(row_of(case.key_lengths, batch_row) or lengths or [case.keys])
    parents = row_of(case.parents, batch_row) or [-1] * len(of)
    for segment, (a, b) in enumerate(of):
        branch = [segment]
        while (parent := parents[branch[0]]) >= 0:
            branch.insert(0, parent)
        tokens = [token for part in branch for token in range(*keys[part])]
        at = torch.arange(len(tokens))
        allowed[a:b, tokens] = near(case.spec, torch.arange(b - a)[:, None] + len(tokens) - (b - a), at)
    prefixes = zip(of, row_of(case.prefix, batch_row), strict=False)
    for a, b in [*row_of(case.spans, batch_row), *((a, a + n) for (a, _), n in prefixes)]:
        allowed[a:b, a:b] = True
    return allowed


def tree(case: Case, step: Step, batch_row: int) -> Case:
    """The new tokens of a row as segments of a tree that hangs on those before: one branch, or that of the drafts."""
    begin, new = step.begins[batch_row], step.new
    parents = [-1, *(parent + 1 for parent in step.words.get("parents", range(-1, new - 1)))]
    return replace(case, steps=(), seq_len=new, key_len=begin + new, parents=parents, lengths=[0, *[1] * new],
                   key_lengths=[begin, *[1] * new])  # fmt: skip


def attention(case: Case, x: Named) -> tuple[Tensor, Tensor]:
    """(out, lse). Tokens behind the documents see no sink, nor do queries that slices show no key."""
    if case.steps:
        tokens = np.concatenate([step.tokens for step in case.steps], 1)
        x = {**x, "q": x["q"][np.arange(case.batch)[:, None], tokens]}
    seen = torch.stack([visible(case, b) for b in range(case.batch)])
    totals, group = torch.tensor(documents(case)).sum(1, keepdim=True), case.heads // case.kv_heads
    real = seen.any(-1) if case.slices or case.steps else torch.arange(case.seq_len) < totals
    q, k, v = (x[n].transpose(1, 2).repeat_interleave(1 if n == "q" else group, 1) for n in "qkv")
    s = (case.spec.scale or case.head_dim**-0.5) * q @ k.mT
    if case.spec.softcap is not None:
        s = case.spec.softcap * torch.tanh(s / case.spec.softcap)
    s = s.masked_fill(~seen[:, None].to(s.device), -torch.inf)
    if case.sinks:
        s = torch.cat([s, x["sinks"].to(s)[:, None, None].expand(*s.shape[:3], 1)], -1)
    some = (s > -torch.inf).any(-1, keepdim=True) & real[:, None, :, None].to(s.device)
    s = torch.where(some, s, 0.0)
    out = (torch.softmax(s, -1) * some)[..., : k.shape[2]] @ v
    lse = torch.where(some, torch.logsumexp(s, -1, keepdim=True), -torch.inf)
    return out.transpose(1, 2), lse[..., 0].transpose(1, 2)


def recurrence(case: Case, x: Named) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T u_t, and out_t = scale q_t S_t; u is v, or beta (v - k exp(g) S)."""
    q, k = (x[n].repeat_interleave(case.heads // case.kv_heads, 2) for n in "qk")
    scale = case.words.get("scale") or case.head_dim**-0.5
    none = x["v"].new_zeros(case.heads, case.head_dim, case.value_dim) + 0 * x["v"].sum()  # its gradient is 0, not none
    outs, ends = [], []
    for b, row in enumerate(documents(case)):
        states = [none] if case.state is None else [*x["state"].unflatten(0, (case.batch, -1))[b]]
        states += [none] * (len(row) - len(states))  # that of a row is before its first document
        every, last = [], states[0]
        for S, (start, stop) in zip(states, bounds(row), strict=True):
            for t in range(start, stop):
                if case.gate is not None:
                    S = x["g"][b, t].reshape(case.heads, -1, 1).exp() * S
                u = x["v"][b, t][:, None]
                if case.beta:
                    u = x["beta"][b, t][:, None, None] * (u - k[b, t][:, None] @ S)
                S = S + k[b, t][..., None] * u
                outs.append(scale * (q[b, t][:, None] @ S)[:, 0])
            every.append(S)
            last = S if stop > start else last
        outs += [none[:, 0]] * (case.seq_len - sum(row))
        ends += every if case.by_document else [last]
    return torch.stack(outs).unflatten(0, (case.batch, -1)), torch.stack(ends)


def inputs(case: Case, dtype: torch.dtype, seed: int | None = None) -> Named:
    """Random q, k, v, sinks and so on, and the gradients that come back, the same on every rank."""
    g = torch.Generator().manual_seed(case.seed if seed is None else seed)
    B, T, H, G, K, V = case.batch, case.seq_len, case.heads, case.kv_heads, case.head_dim, case.value_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (B, T, G if case.linear else H, K), "k": (B, case.keys, G, K)}
    shapes |= {"v": (B, case.keys, H if case.linear else G, V), "sinks": (H,), "dout": (B, T, H, V), "dlse": (B, T, H)}
    if case.linear:
        width = len(documents(case)[0])
        states, ends = (B * width if each else B for each in (case.state == "document", case.by_document))
        shapes |= {"g": (B, T, H, K)[: 4 if case.gate == "channel" else 3], "beta": (B, T, H)}
        shapes |= {"state": (states, H, K, V), "dend": (ends, H, K, V)}
    x = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in shapes.items()}
    if case.linear:
        x["g"] = torch.nn.functional.logsigmoid(x["g"])
        x["g"] = torch.where(x["g"] < -2.5, -torch.inf, x["g"]) if case.seed % 3 == 1 else x["g"]  # some forget all
        x["beta"] = torch.where(x["beta"].abs() < 0.2, 1.0, (1 + x["beta"]).clamp(0, 2))  # 0, 1 and 2 too
        if case.beta:  # of length 1 or shorter
            x["k"] = x["k"] / x["k"].norm(dim=-1, keepdim=True).clamp(min=K**0.5)
    exact = torch.promote_types(dtype, torch.float32)
    dtypes = {"dlse": torch.float32, **dict.fromkeys(("g", "beta", "state", "dend"), exact)}
    unused = {"g", "beta", *(f"d{n}" for n in case.outputs)} - {*case.arguments, *case.grads}
    return {n: (t * 10 ** case.powers.get(n, 0.0)).to(dtypes.get(n, dtype)) for n, t in x.items() if n not in unused}


def dense(case: Case, given: Named, dtype: torch.dtype = torch.float64) -> Named:
    """Both results and every gradient of the whole sequence, computed densely in `dtype`."""
    x = {n: given[n].detach().to(dtype).requires_grad_() for n in case.arguments}
    results = dict(zip(case.outputs, (recurrence if case.linear else attention)(case, x), strict=True))
    return with_gradients(results, given, x)


def with_gradients(results: Named, given: Named, leaves: Named) -> Named:
    """The results, and the gradients of the leaves by what is given: nothing comes back where an lse is -inf."""
    back = {n: given[f"d{n}"].to(x.dtype) for n, x in results.items() if f"d{n}" in given}
    into = [torch.where(torch.isfinite(results[n]), x, 0.0) for n, x in back.items()]
    outputs, inputs = [results[n] for n in back], list(leaves.values())
    grads = torch.autograd.grad(outputs, inputs, into, materialize_grads=True) if back else ()
    named = {f"d{n}": x for n, x in zip(leaves, grads, strict=False)}
    return {**{n: x.detach() for n, x in results.items()}, **named}


def local(plan: Any, name: str, whole: Any, padding: float = float("nan"), where: Any = torch.where) -> Any:
    """The plan's tokens of an input, a result or a gradient; what is the same on every rank it has whole."""
    name = name.removeprefix("d")
    if name in WHOLE:
        return whole
    plan = plan.keys if name in ("k", "v") else plan
    return where(plan.real_tokens().reshape(1, -1, *[1] * (whole.ndim - 2)), plan.shard(whole), padding)


def run(case: Case, plan: Any, given: Named) -> Named:
    """Both results and every gradient of this rank's part, through the public API; padding goes in as NaN.

    Gradients come back for each result that one is given for: NaN for padding, none where an lse is -inf, and for an
    end state other parts from all ranks.
    """
    mine = {n: local(plan, n, x) for n, x in given.items()}
    if "dend" in mine:
        ranks, rank = plan.ring * plan.ulysses, plan.ring_axis.rank * plan.ulysses + plan.ulysses_axis.rank
        mine["dend"] = mine["dend"] * (2 * (rank + 1) / (ranks * (ranks + 1)))
    x = {n: mine[n].clone().requires_grad_() for n in case.arguments}
    return with_gradients(dict(zip(case.outputs, case.call(plan, x), strict=True)), mine, x)


def over_axes(plan: Any, fold: Any, x: Tensor) -> Tensor:
    """All ranks' parts folded into one: their sum, or their maximum."""
    for axis in (plan.ring_axis, plan.ulysses_axis):
        x = fold(axis.all_gather(x[None]).wait(), 0)
    return x


def worst_row(result: Tensor, expected: Tensor, unit: float) -> float:
    """The largest error of a row, of one head and token, over its size and `unit`; lse and the like are numbers."""
    result, finite = result.double(), torch.isfinite(expected)
    if result.isnan().any() or not torch.equal(result[~finite], expected[~finite].double()):
        return float("inf")  # where one is infinite, the other is not the same infinity
    rows = [torch.where(finite, x, 0.0) for x in (result - expected, expected)]
    gap, size = (x.norm(dim=-1) if x.dim() == 4 else x.abs() for x in rows)
    return float((gap / (size + unit)).max()) if gap.numel() else 0.0


class Truth(NamedTuple):
    """What goes into a call, what must come out of it, how far a row may be off, and what is added to its size."""

    given: Named
    exact: Named
    limits: dict[str, float]
    units: dict[str, float]

    def errors(self, found: Named, mine: Any = lambda name, whole, padding: whole) -> dict[str, float]:
        """The worst row of each result, over its limit. `mine` is what of the truth they are: by default all."""
        off = {}
        for n, x in found.items():
            exact = mine(n, self.exact[n].to(x.device), -torch.inf if n == "lse" else 0.0)
            off[n] = worst_row(x, exact, self.units[n]) / self.limits[n]
        return off


def truth(case: Case) -> Truth:
    """A row may be off by twice the worst row of the definition in its dtype, but that states are not of 16 bits."""
    dtype = getattr(torch, case.dtype)
    given = inputs(case, dtype)
    exact = dense(case, given)
    single = dense(case, given, torch.promote_types(dtype, torch.float32) if case.linear else dtype)
    q, k, v, dout = (10 ** case.powers.get(n, 0.0) for n in ("q", "k", "v", "dout"))
    slope = v * dout * (1.0 if case.linear else (case.spec.scale or case.head_dim**-0.5) * case.head_dim**0.5)
    sizes = {"lse": 1.0, "out": v, "end": v, "dv": dout, "dstate": dout, "dq": k * slope, "dk": q * slope}
    limits, units = {}, {}
    for n, x in exact.items():  # where terms cancel, a row is measured by what they are
        mean = float(x.nan_to_num(neginf=0.0).square().mean().sqrt()) if x.numel() else 0.0
        units[n] = mean + 0.2 * (1.0 if n == "lse" else case.value_dim**0.5) * sizes.get(n, v * dout)
        limits[n] = 2 * worst_row(single[n], x, units[n]) + ROUNDINGS[case.dtype] * torch.finfo(dtype).eps
    return Truth(given, exact, limits, units)
