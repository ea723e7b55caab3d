"""How far each single element of attention's results may be off: the rounding of the dtype, carried to the end.

A norm hides one wrong element among many right ones. Here every sum of the definition is taken again over absolute
values: what rounding can add up to, for these very inputs, whatever their magnitudes. `unit` is what arithmetic
rounds by (float32, or float64 for float64 inputs), `low` what 16-bit inputs add: probabilities and their gradients are
rounded to 16 bits before each product, and so are the results. Where a term is zero its rounding is zero too: of a
query that sees one key dq must vanish in bfloat16 as in float32.

    s = scale q k      off by  unit * scale |q| |k|
    p = exp(s - lse)   off by  p (e^x - 1) for x, what s and lse are off by
    ds = p (dp - delta), and so on
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.kernels.linear.maps import Inputs, of_keys, of_values
from ringattn.launch.verify import linear_oracle, oracle
from ringattn.launch.verify.cases import Case

TIMES = 4.0  # of what one rounding of every term adds up to: a sum rounds more than once, ranks merge


class Rounding(NamedTuple):
    """Of a dtype: of its sums, and of itself where that is less exact, relative and absolute."""

    dtype: torch.dtype
    unit: float
    least: float  # below it, sums may become zero
    low: float
    lowest: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Rounding":
        own = torch.finfo(dtype)
        sums = own if dtype == torch.float64 else torch.finfo(torch.float32)
        narrow = dtype in (torch.bfloat16, torch.float16)
        return cls(dtype, sums.eps, sums.tiny, own.eps / 2 * narrow, own.tiny * own.eps * narrow)

    def result(self, x: Tensor) -> Tensor:
        """What a result loses when it is stored."""
        return (self.low + self.unit) * x.abs() + self.lowest + self.least

    def weights(self, p: Tensor) -> Tensor:
        """What weights lose in 16 bits; 1 and what is nearest to it are 1 there."""
        return torch.minimum(self.low * p, (1 - p).clamp(min=0)) + self.lowest * (p > 0)

    def stored(self, x: Tensor) -> Tensor:
        """What exactly this tensor loses when it is stored; it may be off by a little before."""
        return (x - x.to(self.dtype).double()).abs() if self.low else torch.zeros_like(x)


class Scores(NamedTuple):
    """[B, H, T, S] scores with what they are off by, and the factor that a softcap leaves of their gradients."""

    s: Tensor
    off: Tensor
    slope: Tensor | float
    slope_off: Tensor | float


def largest(seen: Tensor, v: Tensor) -> Tensor:
    """[B, 1 or H, T, 1]: the largest value that a query sees. A merge rounds by what it merges, whatever its weight."""
    return (v.abs().amax(-1)[..., None, :] * seen).amax(-1, keepdim=True)


def scores_of(case: Case, q: Tensor, k: Tensor, unit: float) -> Scores:
    scale = case.spec.scale or case.head_dim**-0.5
    raw, mass = scale * q @ k.mT, scale * q.abs() @ k.abs().mT
    cap = case.spec.softcap
    if cap is None:
        return Scores(raw, unit * mass, 1.0, 0.0)
    t = torch.tanh(raw / cap)
    slope = 1 - t * t
    off = unit * (mass * slope + cap)
    return Scores(cap * t, off, slope, unit + 2 * t.abs() * off / cap)


def by_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, G, D] -> [B, H, T, D] in float64, a copy of its key head for every query head."""
    return x.double().transpose(1, 2).repeat_interleave(heads // x.shape[2], 1)


def by_tokens(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, T, D] -> [B, T, G, D]: the sum over the query heads of each key head."""
    return x.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)


def allowances(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far each element of out, lse and every gradient may be off, in float64 and in the shape of the result."""
    dtype = Rounding.of(given["q"].dtype)
    unit = dtype.unit
    q, k, v = (by_heads(given[n], case.heads) for n in "qkv")
    rows = range(case.batch)
    real = torch.stack([oracle.real_rows(case, b) for b in rows])[:, None, :, None]
    seen = torch.stack([oracle.visible(case, b) for b in rows])[:, None] & real
    scores = scores_of(case, q, k, unit)
    s, off = scores.s.masked_fill(~seen, -torch.inf), scores.off * seen
    if case.sinks:
        sink = given["sinks"].double()[:, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink.masked_fill(~real, -torch.inf)], -1)
    lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.where(torch.isfinite(lse), torch.exp(s - lse), 0.0)
    p, p_sink = p[..., : k.shape[2]], p[..., k.shape[2] :]

    lse = torch.nan_to_num(lse, neginf=0.0)
    lse_off = (p * off).sum(-1, keepdim=True) + unit * (1 + lse.abs())
    p_off = p * torch.expm1((off + lse_off + 4 * unit).clamp(max=30)) + dtype.least * seen
    rounded = p_off + dtype.weights(p)
    out, out_off = p @ v, rounded @ v.abs() + unit * largest(seen, v)
    allowed: dict[str, Tensor] = {
        "out": (out_off + dtype.result(out)).transpose(1, 2), "lse": lse_off[..., 0].transpose(1, 2),
    }  # fmt: skip
    if not given.keys() & {"dout", "dlse"}:
        return scaled(allowed)

    dout = by_heads(given["dout"], case.heads) if "dout" in given else torch.zeros_like(out)
    dlse = given["dlse"].double().transpose(1, 2)[..., None] if "dlse" in given else torch.zeros_like(lse)
    delta = (dout * out).sum(-1, keepdim=True) - dlse
    delta_off = (dout.abs() * (2 * out_off + dtype.stored(out) + unit * out.abs())).sum(-1, keepdim=True)
    delta_off = delta_off + unit * dlse.abs()
    gap = (dout @ v.mT - delta).abs()
    gap_off = delta_off + unit * (dout.abs() @ v.abs().mT)
    ds = p * gap * scores.slope
    ds_off = (p_off * gap + p * gap_off) * scores.slope + p * (gap + gap_off) * scores.slope_off
    ds_off = ds_off + (dtype.low + unit) * ds
    ds_off = (ds_off + dtype.lowest + dtype.least) * seen
    scale = case.spec.scale or case.head_dim**-0.5
    allowed["dq"] = (scale * ds_off @ k.abs()).transpose(1, 2)
    allowed["dk"] = by_tokens(scale * ds_off.mT @ q.abs(), case.kv_heads)
    allowed["dv"] = by_tokens((rounded + (dtype.low + unit) * p).mT @ dout.abs(), case.kv_heads)  # ranks have parts
    if case.sinks:
        sinks = p_sink * delta.abs() * (lse_off + (dtype.low + 4 * unit)) + p_sink * delta_off + dtype.result(0 * delta)
        allowed["dsinks"] = sinks.sum((0, 2, 3))
    return scaled({n: x if n in ("lse", "out") else x + dtype.result(0 * x) for n, x in allowed.items()})


def linear_allowances(
    given: dict[str, Any], lengths: linear_oracle.Lengths | None, exact: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same of linear attention: every term's absolute value, decayed half as fast.

    Half, as a decay of e^-x is off by x * unit * e^-x. A gate's gradient is a sum over all later tokens.
    """
    dtype, g = Rounding.of(given["q"].dtype), given["g"]
    heads, key_heads = given["v"].shape[2], given["k"].shape[2]
    sizes: dict[str, Any] = {n: None if x is None else x.double().abs() for n, x in given.items()}
    sizes["g"] = None if g is None else g.double() / 2
    for name in "qk":
        sizes[name] = of_values(sizes[name], heads, 2)
    mass = linear_oracle.dense(sizes, lengths) if given["beta"] is None else rule_mass(given, lengths, exact)
    if g is not None:
        later, more = (linear_oracle.real(sizes[n], lengths) * mass[f"d{n}"] for n in "qk")
        later = later + more
        ends = (mass["end"] * sizes["dend"]).sum(-1).unflatten(0, (len(later), -1)).sum(1)  # of all documents of a row
        later = later.flip(1).cumsum(1).flip(1) + ends[:, None]
        mass["dg"] = later.sum(-1) if g.dim() == 3 else later
    for name in ("dq", "dk"):
        mass[name] = of_keys(mass[name], key_heads, 2)
    decayed = torch.zeros(1, 1) if g is None else linear_oracle.real(g.double().clamp(min=-100), lengths)
    unit = dtype.low + dtype.unit * (4 + float(decayed.abs().sum(1).max()))
    return scaled({n: unit * mass[n] + dtype.result(x) for n, x in exact.items()})


def rule_mass(
    given: dict[str, Any], lengths: linear_oracle.Lengths | None, exact: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The absolute values that add up to each result of the delta rule, for all key channels together.

    The recurrence over absolute values would grow at each token, where the exact one shrinks. But with the exact u and
    dv the delta rule is gated linear attention, in which k is a second query; it mixes channels, so each row has its
    norm here. Every token becomes two: one at which k reads, and one which writes and at which q reads.
    """
    exact_of = {n: x.double() for n, x in given.items() if x is not None}
    v, beta, heads = exact_of["v"], exact_of["beta"][..., None], exact_of["v"].shape[2]
    q, k = (of_values(exact_of[n], heads, 2) for n in "qk")
    g = exact_of.get("g", torch.zeros_like(beta))
    g = g if g.dim() == 4 else g[..., None]
    scale, twice = q.shape[-1] ** -0.5, lengths and tuple(tuple(2 * n for n in row) for row in lengths)

    def woven(reads: Tensor, writes: Tensor) -> Tensor:
        padded = (linear_oracle.real(x, lengths) for x in (reads, writes))
        return torch.stack(list(padded), 2).flatten(1, 2)

    def rows(x: Tensor, dim: int = -1) -> Tensor:
        return x.norm(dim=dim, keepdim=True)

    tokens = (
        woven(k, q),
        woven(0 * k, k),
        woven(0 * v, v),
        woven(g, torch.zeros_like(g)).expand(-1, -1, -1, k.shape[-1]),
    )
    woven_tokens = Inputs(*tokens, woven(0 * beta, beta)[..., 0], None, 1.0)
    read = linear_oracle.walked(woven_tokens, twice, exact_of["state"])[0][:, ::2]
    u, dv = (beta * (v - read)).abs(), exact["dv"].abs()

    def mass(writes: Tensor, dreads: Tensor) -> dict[str, Tensor]:
        sizes = {
            "q": woven(rows(k), scale * rows(q)), "k": woven(0 * beta, rows(k)), "v": woven(0 * v, writes),
            "g": woven(g.amax(-1, keepdim=True) / 2, 0 * beta), "beta": None, "state": rows(exact_of["state"], 2),
            "dout": woven(dreads, exact_of["dout"].abs()), "dend": rows(exact_of["dend"], 2),
        }  # fmt: skip
        return linear_oracle.dense(sizes, twice)

    first = mass(u, dv)
    m = mass(u + beta * (v.abs() + first["out"][:, ::2]), dv + beta * first["dv"][:, 1::2])
    wide = torch.ones_like(k)
    return {
        "out": m["out"][:, 1::2], "dq": scale * m["dq"][:, 1::2] * wide,
        "dk": (m["dk"][:, 1::2] + m["dq"][:, ::2]) * wide, "dv": beta * m["dv"][:, 1::2] + dv,
        "dbeta": (m["dv"][:, 1::2] * (v.abs() + m["out"][:, ::2])).sum(-1),
        "end": m["end"].expand_as(exact_of["state"]), "dstate": m["dstate"].expand_as(exact_of["state"]),
    }  # fmt: skip


def scaled(allowed: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: TIMES * x for name, x in allowed.items()}
