"""Attention and linear attention in float64, written from the definitions and from nothing else here; what goes into a
call over ranks, and how far its results are off.
"""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.launch.verify.cases import Case
from ringattn.masks.spec import AttentionSpec
from ringattn.torch.sharding import own_positions

Named = dict[str, Tensor]
WHOLE = ("sinks", "state", "end")  # what every rank has all of
ROUNDINGS = {"float64": 512, "float32": 64, "bfloat16": 4, "float16": 4}  # that a row may be off by in any case


def row_of(of_rows: Any, batch_row: int) -> Any:
    """That of this row, of a list for each row, or of one for all; nothing of None."""
    return of_rows[batch_row % len(of_rows)] if of_rows and isinstance(of_rows[0], list) else of_rows or []


def bounds(lengths: Any) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths, dtype=int).tolist()
    return list(zip([0, *ends], ends, strict=False))


def near(spec: AttentionSpec, i: Tensor, j: Tensor, causal: bool = True) -> Tensor:
    """Whether the query at position i of a document sees the key at position j, by the words of the spec."""
    allowed = (i == i) & (j == j)
    if isinstance(spec.window, tuple):
        allowed &= (i - j <= spec.window[0]) & (j - i <= spec.window[1])
    elif spec.window is not None:
        allowed &= i - j < spec.window
    if spec.chunk is not None:
        allowed &= i.div(spec.chunk, rounding_mode="floor") == j.div(spec.chunk, rounding_mode="floor")
    allowed |= (j >= 0) & (j < spec.first)
    return allowed & (j <= i) if spec.causal and causal else allowed


def visible(case: Case, batch_row: int) -> Tensor:
    """[T, S]: whether query i sees key j."""
    i, j = torch.arange(case.seq_len)[:, None], torch.arange(case.keys)[None]
    allowed = torch.zeros(case.seq_len, case.keys, dtype=torch.bool)
    if case.slices is not None:
        for (start, stop), (begin, end), kind in case.slices:
            inside = (start <= i) & (i < stop) & (begin <= j) & (j < end)
            inside &= (stop - i <= end - j) | (kind in ("full", "inverse"))  # or the last query sees the last key
            allowed |= inside & ((j - begin >= i - start) | (kind in ("full", "causal")))  # or the first one the first
        return allowed & near(case.spec, i, j, causal=False)
    of = bounds(row_of(case.lengths, batch_row) or [case.seq_len])
    keys = bounds(row_of(case.key_lengths, batch_row)) or ([(0, case.keys)] if case.lengths is None else of)
    for (a, b), (begin, end) in zip(of, keys, strict=True):
        zero = b - (end - begin)  # that sees key 0
        allowed[a:b, begin:end] = near(case.spec, i[a:b] - zero, j[:, begin:end] - begin)
    for segment, (a, b) in enumerate(of if case.parents is not None else []):
        branch = [segment]
        while (parent := row_of(case.parents, batch_row)[branch[0]]) >= 0:
            branch.insert(0, parent)
        tokens, allowed[a:b] = torch.cat([torch.arange(*of[s]) for s in branch]), False
        at = torch.arange(len(tokens))  # depths along the branch
        allowed[a:b, tokens] = near(case.spec, at[len(at) - (b - a) :, None], at[None])
    prefixes = zip(of, row_of(case.prefix, batch_row), strict=False)
    for a, b in [*row_of(case.spans, batch_row), *((a, a + n) for (a, _), n in prefixes)]:
        allowed[a:b, a:b] = True
    return allowed


def softmax(case: Case, x: Named, seen: Tensor, real: Tensor | bool = True) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries [B, T, H, D] that see these keys [B, T, S]; those that are not `real` see no sink too."""
    group = case.heads // case.kv_heads
    q, k, v = (x[n].transpose(1, 2).repeat_interleave(1 if n == "q" else group, 1) for n in "qkv")
    s = (case.spec.scale or case.head_dim**-0.5) * q @ k.mT
    if case.spec.softcap is not None:
        s = case.spec.softcap * torch.tanh(s / case.spec.softcap)
    s = s.masked_fill(~seen[:, None].to(s.device), -torch.inf)
    if "sinks" in x:
        s = torch.cat([s, x["sinks"].to(s)[:, None, None].expand(*s.shape[:3], 1)], -1)
    some = (s > -torch.inf).any(-1, keepdim=True) & torch.as_tensor(real, device=s.device)
    s = torch.where(some, s, 0.0)
    out = (torch.softmax(s, -1) * some)[..., : k.shape[2]] @ v
    lse = torch.where(some, torch.logsumexp(s, -1, keepdim=True), -torch.inf)
    return out.transpose(1, 2), lse[..., 0].transpose(1, 2)


def attention(case: Case, x: Named) -> tuple[Tensor, Tensor]:
    seen = torch.stack([visible(case, b) for b in range(case.batch)])
    totals = torch.tensor([sum(row_of(case.lengths, b) or [case.seq_len]) for b in range(case.batch)])
    real = seen.any(-1) if case.slices is not None else torch.arange(case.seq_len) < totals[:, None]
    return softmax(case, x, seen, real[:, None, :, None])


def recurrence(case: Case, x: Named) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T u_t, and out_t = scale q_t S_t; u is v, or beta (v - k exp(g) S)."""
    q, k = (x[n].repeat_interleave(case.heads // case.kv_heads, 2) for n in "qk")
    scale = case.words.get("scale") or case.head_dim**-0.5
    rows = [row_of(case.lengths, b) or [case.seq_len] for b in range(case.batch)]
    width = max(map(len, rows))
    none = x["v"].new_zeros(case.heads, case.head_dim, case.value_dim)
    outs, ends = [], []
    for b, row in enumerate(rows):
        states = [none] if case.state is None else x["state"].unflatten(0, (case.batch, -1))[b]
        every, last = [], states[0]
        for d, (start, stop) in enumerate(bounds([*row, *[0] * (width - len(row))])):
            S = states[d] if case.state == "document" or d == 0 else none
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


def through_cache(case: Case, x: Named) -> Named:
    """What the steps of a cache give: a query sees the tokens of its row up to its own, or the branch of its draft."""
    rows, outs = torch.arange(case.batch)[:, None], []
    for step in case.steps:
        at = torch.as_tensor(step.tokens)
        seen = near(case.spec, at[..., None], torch.arange(int(at.max()) + 1))
        for b, (i, parent) in product(range(case.batch), enumerate(step.words.get("parents", ()))):
            begin = step.begins[b]
            seen[b, i, begin:] = seen[b, parent, begin:] if parent >= 0 else False
            seen[b, i, at[b, i]] = True
        given = {"q": x["q"][rows, at], **{m: x[m][:, : seen.shape[2]] for m in "kv"}}
        outs.append(softmax(case, {**given, **({"sinks": x["sinks"]} if case.sinks else {})}, seen)[0])
    return {"out": torch.cat(outs, 1)}


def inputs(case: Case, dtype: torch.dtype, seed: int | None = None) -> Named:
    """Random q, k, v, sinks and so on, and the gradients that come back, the same on every rank."""
    g = torch.Generator().manual_seed(case.seed if seed is None else seed)
    B, T, H, G, K, V = case.batch, case.seq_len, case.heads, case.kv_heads, case.head_dim, case.value_dim
    shapes: dict[str, tuple[int, ...]] = {"q": (B, T, G if case.linear else H, K), "k": (B, case.keys, G, K)}
    shapes |= {"v": (B, case.keys, H if case.linear else G, V), "sinks": (H,), "dout": (B, T, H, V), "dlse": (B, T, H)}
    if case.linear:
        width = max(len(row_of(case.lengths, b) or [T]) for b in range(B))
        shapes |= {"g": (B, T, H, K)[: 4 if case.gate == "channel" else 3], "beta": (B, T, H)}
        shapes |= {"state": (B * (width if case.state == "document" else 1), H, K, V)}
        shapes |= {"dend": (B * (width if case.by_document else 1), H, K, V)}
    x = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in shapes.items()}
    if case.linear:
        x["g"] = torch.nn.functional.logsigmoid(x["g"])
        x["g"] = torch.where(x["g"] < -2.5, -torch.inf, x["g"]) if case.seed % 3 == 1 else x["g"]  # some forget all
        x["beta"] = torch.where(x["beta"].abs() < 0.2, 1.0, (1 + x["beta"]).clamp(0, 2))  # 0, 1 and 2 too
        if case.beta:  # of length 1 or shorter
            x["k"] = x["k"] / x["k"].norm(dim=-1, keepdim=True).clamp(min=K**0.5)
    exact = torch.promote_types(dtype, torch.float32)
    kept = {n: t * 10 ** case.powers.get(n, 0.0) for n, t in x.items() if n not in ("g", "beta") or n in case.arguments}
    of_float32 = ("dlse", "g", "beta", "state", "dend")
    kept = {n: t.float() if n == "dlse" else t.to(exact if n in of_float32 else dtype) for n, t in kept.items()}
    return {n: t for n, t in kept.items() if n[1:] not in case.outputs or n in case.grads}


def dense(case: Case, given: Named, dtype: torch.dtype = torch.float64) -> Named:
    """Both results and every gradient of the whole sequence, computed densely in `dtype`."""
    x = {n: t.detach().to(dtype) for n, t in given.items() if n != "sinks" or case.sinks}
    if case.steps:
        return through_cache(case, x)
    leaves = {n: x[n].requires_grad_() for n in case.arguments}
    results = dict(zip(case.outputs, (recurrence if case.linear else attention)(case, x), strict=True))
    return with_gradients(results, {n: given[f"d{n}"] for n in results if f"d{n}" in given}, leaves)


def with_gradients(results: Named, back: Named, leaves: Named) -> Named:
    """The results, and the gradients of the leaves by what comes back: nothing does where an lse is -inf."""
    outputs = [results[n] for n in back]
    into = [torch.where(torch.isfinite(results[n]), x.to(results[n].dtype), 0.0) for n, x in back.items()]
    grads = torch.autograd.grad(outputs, list(leaves.values()), into, materialize_grads=True)
    named = {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}
    return {**{n: x.detach() for n, x in results.items()}, **named}


def local(plan: Any, name: str, whole: Tensor, padding: float = float("nan")) -> Tensor:
    """This rank's tokens of an input, a result or a gradient; what is the same on every rank it has whole."""
    name = name.removeprefix("d")
    if name in WHOLE:
        return whole
    plan = plan.keys if name in ("k", "v") else plan
    pad = whole.new_full((len(whole), plan.tokens.padded_length - whole.shape[1], *whole.shape[2:]), padding)
    return torch.cat([whole, pad], 1)[:, torch.from_numpy(own_positions(plan)).to(whole.device)]


def run(case: Case, mesh: Any, given: Named, kernel: str = "auto", plan: Any = None, **choices: Any) -> Named:
    """Both results and every gradient of this rank's part, through the public API; padding goes in as NaN.

    Gradients come back for each result that one is given for: NaN for padding, none where an lse is -inf, and for an
    end state other parts from all ranks. `choices` are further words for the plan: how blocks travel.
    """
    plan = plan or case.plan_on(mesh, kernel, **choices)
    x = {n: local(plan, n, given[n]).clone().requires_grad_() for n in case.arguments}
    results = dict(zip(case.outputs, case.call(plan, x, kernel), strict=True))
    back = {n: local(plan, n, given[f"d{n}"]) for n in results if f"d{n}" in given}
    if "end" in back:
        ranks, rank = plan.ring * plan.ulysses, plan.ring_axis.rank * plan.ulysses + plan.ulysses_axis.rank
        back["end"] = back["end"] * (2 * (rank + 1) / (ranks * (ranks + 1)))
    return with_gradients(results, back, x)


def error(result: Tensor, expected: Tensor, whole: Tensor | None = None) -> float:
    """|result - expected| / |whole|, by default of `expected`; inf where `gaps` has none."""
    gap, whole = gaps(result, expected), expected if whole is None else whole
    return float("inf") if gap is None else float(gap.norm()) / max(float(whole.nan_to_num(neginf=0.0).norm()), 1e-30)


def worst_row(result: Tensor, expected: Tensor, unit: float) -> float:
    """The largest error of a row, of one head and token, over its size and `unit`; lse and the like are numbers."""
    gap, expected = gaps(result, expected), expected.nan_to_num(neginf=0.0)
    if gap is None or not gap.numel():
        return float("inf") if gap is None else 0.0
    rows = [x if x.dim() == 4 else x[..., None] for x in (gap, expected)]
    return float((rows[0].norm(dim=-1) / (rows[1].norm(dim=-1) + unit)).max())


def gaps(result: Tensor, expected: Tensor) -> Tensor | None:
    """How far each element is off; None if one is NaN, or infinite where the other is not the same infinity."""
    result, finite = result.double(), torch.isfinite(expected)
    if result.isnan().any() or not torch.equal(result[~finite], expected[~finite].double()):
        return None
    return torch.where(finite, result - expected, 0.0)


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
    scale = 1.0 if case.linear else (case.spec.scale or case.head_dim**-0.5) * case.head_dim**0.5
    sizes = {"lse": 1.0, "dv": dout, "dstate": dout, "out": v, "end": v, "dq": scale * k * v * dout}
    sizes["dk"] = scale * q * v * dout
    limits, units = {}, {}
    for n, x in exact.items():  # where terms cancel, a row is measured by what they are
        mean = float(x.nan_to_num(neginf=0.0).square().mean().sqrt()) if x.numel() else 0.0
        units[n] = mean + 0.2 * (1.0 if n == "lse" else case.value_dim**0.5) * sizes.get(n, v * dout)
        limits[n] = 2 * worst_row(single[n], x, units[n]) + ROUNDINGS[case.dtype] * torch.finfo(dtype).eps
    return Truth(given, exact, limits, units)
