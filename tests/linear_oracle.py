"""What linear attention is given in its tests, and its recurrence in float64, as `ringattn verify` has it."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import ringattn as ra
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case

B, H, K, V = 2, 2, 8, 12
LEAVES = ("q", "k", "v", "g", "beta")
Lengths = tuple[tuple[int, ...], ...]


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


def case_of(given: dict[str, Any], lengths: Lengths | None, **placed: Any) -> Case:
    """The call of these inputs over some ranks."""
    g, (rows, T, key_heads, _) = given["g"], given["q"].shape
    return Case(
        "linear", seq_len=T, batch=rows, heads=H, kv_heads=key_heads, head_dim=K, value_dim=V,
        lengths=lengths and [list(row) for row in lengths],
        gate=None if g is None else "head" if g.dim() == 3 else "channel", beta=given["beta"] is not None,
        state="document" if len(given["state"]) > rows else "row", **placed,
    )  # fmt: skip


@lru_cache
def truth(T: int, gate: str | None, lengths: Lengths | None = None, *how: Any, **rule: Any) -> dict[str, Tensor]:
    """out, the end states and every gradient, by autograd through the recurrence, for what `inputs` gives."""
    given = inputs(T, gate, *how, **rule)
    return oracle.dense(case_of(given, lengths), {n: x for n, x in given.items() if x is not None})


def begins(lengths: Lengths | None, T: int) -> Tensor | None:
    """[rows, T]: the first token of each token's document, -1 in the row's first; padding goes on with the last."""
    if lengths is None:
        return None
    rows = []
    for row in lengths:
        of = [sum(row[:i]) if i else -1 for i, n in enumerate(row) for _ in range(n)]
        rows.append(of + (of or [-1])[-1:] * (T - len(of)))
    return torch.tensor(rows)


def states_of(lengths: Lengths | None, rows: int = B) -> int:
    """How many states there are with one a document: as many for each row."""
    return rows * max(map(len, lengths or ((0,),)))


def docs_of(lengths: Lengths | None, T: int) -> ra.Docs | None:
    return None if lengths is None else ra.Docs.from_lengths([list(row) for row in lengths], pad_to=T)
