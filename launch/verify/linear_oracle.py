"""Linear attention token by token in float64, one call over ranks held against it, and a list of such calls."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

import ringattn as ra
from ringattn.choosing import factored
from ringattn.kernels.linear import TABLE as TABLE
from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.recurrent import recurrent
from ringattn.launch.verify.cases import Placed, Truth
from ringattn.launch.verify.oracle import with_gradients
from ringattn.plans.segments import layouts

B, H, K, V = 2, 2, 8, 12
LEAVES = ("q", "k", "v", "g", "beta")
Lengths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case(Placed):
    """One call of linear attention; `strategy` is how its states travel."""

    outputs: ClassVar = ("out", "end")
    leaves: ClassVar = (*LEAVES, "state")
    strategy: str = "gather"
    gate: str | None = "channel"
    lengths: Lengths | None = None  # of packed documents
    seq_len: int = 61  # a prime: no number of ranks divides it
    beta: bool = False  # the delta rule
    key_heads: int = H
    states: bool = False  # one a document

    @property
    def rule(self) -> dict[str, Any]:
        """What `inputs` and `truth` are named by, beside the gate."""
        return {"beta": self.beta, "key_heads": self.key_heads, "states": states_of(self.lengths) if self.states else B}

    @property
    def docs(self) -> ra.Docs | None:
        return (
            None if self.lengths is None else ra.Docs.from_lengths(list(map(list, self.lengths)), pad_to=self.seq_len)
        )

    def plan_on(self, mesh: Any, kernel: str = "auto") -> Any:
        """Its plan, whose documents are laid out if they are alike in every row; the call has the kernel."""
        plan = ra.plan(mesh, seq_len=self.seq_len, layout=self.layout)
        laid_out = plan.layout == "balanced" and self.docs is not None and self.docs.first
        return plan.for_docs(laid_out) if laid_out else plan

    def call(self, plan: Any, x: dict[str, Any], kernel: str = "auto") -> tuple[Any, Any]:
        """The call itself, on tensors of torch or JAX."""
        return ra.linear_attention(
            x["q"], x["k"], x["v"], x.get("g"), plan, beta=x.get("beta"), docs=self.docs, initial_state=x["state"],
            return_state=True, scan=self.strategy, kernel=kernel,
        )  # fmt: skip


FEATURES = (
    Case("linear"),
    Case("linear_head", gate="head"),
    Case("linear_no_gate", gate=None, lengths=((20, 35),)),
    Case("linear_packed", lengths=((20, 0, 11, 30), (1, 2, 50))),
    Case("linear_chunks", gate="head", lengths=((150, 250, 157), (64, 457)), seq_len=557),
    Case("linear_groups", gate="head", key_heads=1),
    Case("linear_states", lengths=((20, 0, 11, 30), (1, 2, 50)), states=True),
    Case("linear_states_chunks", gate="head", lengths=((150, 250, 157), (64, 457)), seq_len=557, states=True),
    Case("linear_delta", beta=True),
    Case("linear_delta_head", gate="head", beta=True, key_heads=1, lengths=((20, 0, 11, 30), (1, 2, 50))),
    Case("linear_delta_no_gate", gate=None, beta=True, lengths=((20, 35),)),
    Case("linear_delta_chunks", beta=True, key_heads=1, lengths=((150, 250, 157), (64, 457)), seq_len=557),
    Case("linear_delta_states", gate="head", beta=True, key_heads=1, lengths=((20, 35),), states=True),
    Case("linear_delta_states_chunks", beta=True, lengths=((150, 250, 157), (64, 457)), seq_len=557, states=True),
)
RESULTS = ("out", "end", *(f"d{n}" for n in LEAVES), "dstate")
TITLE = "linear attention, against its recurrence in float64"
LIMITS = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def truth_of(case: Case, precision: str) -> Truth:
    dtype = getattr(torch, precision)
    given = inputs(case.seq_len, case.gate, dtype, **case.rule)
    exact = truth(case.seq_len, case.gate, case.lengths, dtype, **case.rule)
    return Truth(given, exact, {}, dict.fromkeys(RESULTS, LIMITS[precision]))


def placed(ranks: int) -> Iterator[Case]:
    """Every feature on every layout of every ring x ulysses that makes this many ranks, by every way of its states."""
    for ring, ulysses in factored(ranks):
        for (layout, ways), case in product(layouts(ring, ulysses).items(), FEATURES):
            for way in ways:
                yield replace(case, ring=ring, ulysses=ulysses, layout=layout, strategy=way)


def inputs(
    T: int, gate: str | None, dtype: torch.dtype = torch.float64, deep: float = 1.0, beta: bool = False,
    key_heads: int = H, states: int = B,
) -> dict[str, Any]:  # fmt: skip
    """Random q, k, v, log decays, states and what comes back; the same on every rank. With `beta`, by the delta rule,
    every second k has length 1 and the others are shorter, and some betas are 0, 1 and 2. If `deep` is small, states
    are forgotten as slowly.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = {"channel": (B, T, H, K), "head": (B, T, H)}
    q, k = (draw(B, T, key_heads, K) for _ in "qk")
    given: dict[str, Any] = {
        "q": q, "k": k, "v": draw(B, T, H, V),
        "g": None if gate is None else deep * torch.nn.functional.logsigmoid(draw(*shapes[gate])),
        "state": draw(states, H, K, V), "dout": draw(B, T, H, V), "dend": draw(states, H, K, V),
    }  # fmt: skip
    given["beta"] = None
    if beta:
        lengths, betas = (torch.rand(B, T, h, generator=generator, dtype=torch.float64) for h in (key_heads, H))
        lengths[:, 1::2] = 1
        given["k"] = torch.nn.functional.normalize(k, dim=-1) * lengths[..., None]
        for t, value in enumerate((0.0, 0.5, 1.0)):
            betas[:, t::7] = value
        given["beta"] = 2 * min(deep, 1.0) * betas
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    in_float32 = ("state", "dend", "g", "beta")
    return {n: x if x is None else x.to(exact if n in in_float32 else dtype) for n, x in given.items()}


def begins(lengths: Lengths | None, T: int) -> Tensor | None:
    """[rows, T]: the first token of each token's document, -1 in the row's first; padding goes on with the last."""
    if lengths is None:
        return None
    rows = []
    for row in lengths:
        of = [sum(row[:i]) if i else -1 for i, n in enumerate(row) for _ in range(n)]
        rows.append(of + (of or [-1])[-1:] * (T - len(of)))
    return torch.tensor(rows)


def real(x: Tensor, lengths: Lengths | None) -> Tensor:
    """`x` [B, T, ...] with zeros for padding."""
    if lengths is None:
        return x
    T = x.shape[1]
    keep = torch.arange(T) < torch.tensor([[sum(row)] for row in lengths])
    return torch.where(keep.reshape(*keep.shape, *[1] * (x.dim() - 2)), x, 0.0)


@lru_cache
def truth(T: int, gate: str | None, lengths: Lengths | None = None, *how: Any, **rule: Any) -> dict[str, Tensor]:
    """out, the end states and every gradient, by autograd through the recurrence, for what `inputs` gives."""
    return dense(inputs(T, gate, *how, **rule), lengths)


def dense(given: dict[str, Any], lengths: Lengths | None) -> dict[str, Tensor]:
    """The same for any inputs; as many states as documents are theirs."""
    given = {n: None if x is None else x.detach().double() for n, x in given.items()}
    leaves = {n: given[n].requires_grad_() for n in (*LEAVES, "state") if given[n] is not None}
    q, k, v, g, beta = (None if given[n] is None else real(given[n], lengths) for n in LEAVES)
    assert q is not None and k is not None and v is not None
    out, end = walked(Inputs(q, k, v, g, beta, None, q.shape[-1] ** -0.5), lengths, given["state"])
    back = {"out": real(given["dout"], lengths), "end": given["dend"]}
    return with_gradients({"out": out, "end": end}, back, leaves)


def states_of(lengths: Lengths | None, rows: int = B) -> int:
    """How many states there are with one a document: as many for each row."""
    return rows * max(map(len, lengths or ((0,),)))


def walked(x: Inputs, lengths: Lengths | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence from a state a row, or from one a document: each document alone, from its own state."""
    rows, T = x.v.shape[:2]
    if lengths is None or len(state) == rows:
        return recurrent(x._replace(begin=begins(lengths, T)), state)
    out, ends, width = [], list(state), len(state) // rows
    for b in range(rows):
        first, outs = 0, []
        for i, n in enumerate(lengths[b % len(lengths)]):
            q, k, v, g, beta = (None if t is None else t[b : b + 1, first : first + n] for t in x[:5])
            if n:
                tokens: Any = q, k, v, g, beta, None, x.scale
                own, (ends[b * width + i],) = recurrent(Inputs(*tokens), state[b * width + i][None])
                outs.append(own)
            first += n
        out.append(torch.cat([*outs, x.v.new_zeros(1, T - first, *x.v.shape[2:])], 1))
    return torch.cat(out), torch.stack(ends)


def docs_of(lengths: Lengths | None, T: int) -> ra.Docs | None:
    return None if lengths is None else ra.Docs.from_lengths([list(row) for row in lengths], pad_to=T)
