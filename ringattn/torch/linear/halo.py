"""The halo of each segment, a few tokens before it that other ranks hold, and the convolution that needs it.

B batch   T this rank's tokens   P segments per rank   W width   C channels
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan
from ringattn.plans.segments import order, segments, uneven
from ringattn.torch.dispatch import differentiate, fake, op
from ringattn.torch.handles import docs_of, of_text, plan_of, spread, starts_of, text_of, whole_on_one
from ringattn.torch.linear.call import begins
from ringattn.torch.sharding import Exchange, cached, own_positions, summed


def causal_convolution(
    x_BTC: Tensor, weight_CW: Tensor, plan: Plan | None = None, docs: Docs | None = None, first: Tensor | None = None
) -> Tensor:
    """y_t = sum over i < W of weight[:, i] * x_{t-i}, along the whole sequence and within its documents.

    `first` [B, W - 1, C] are the tokens before the sequence, the same on every rank, without a gradient; by default
    zeros.
    """
    plan = whole_on_one(x_BTC, x_BTC) if plan is None else plan
    P, W = segments(plan), weight_CW.shape[1]
    if uneven(plan):
        if first is not None:
            raise ValueError(f"first= is for layouts of equally long segments, not for layout={plan.layout!r}")
        shifted = [x_BTC, *(plan.roll(x_BTC, i, docs=docs) for i in range(1, W))]
        return sum((x * weight_CW[:, i] for i, x in enumerate(shifted[1:], 1)), x_BTC * weight_CW[:, 0])
    halo, begin = torch.ops.ringattn.tokens_before(x_BTC, first, starts_of(docs), text_of(plan), W - 1)
    rows = torch.cat([halo, x_BTC.unflatten(1, (P, -1))], 2).flatten(0, 1)  # [B * P, W - 1 + T / P, C]
    length = rows.shape[1] - (W - 1)
    at = torch.arange(length, device=x_BTC.device)
    y = rows[:, W - 1 :] * weight_CW[:, 0]
    for i in range(1, W):
        earlier = rows[:, W - 1 - i : W - 1 - i + length]
        if docs is not None:
            earlier = torch.where((begin <= at - i)[..., None], earlier, 0.0)
        y = y + earlier * weight_CW[:, i]
    return y.unflatten(0, (-1, P)).flatten(1, 2)


def last_tokens(x_BTC: Tensor, plan: Plan, count: int, first: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The last `count` tokens of the whole sequence, on every rank; a short sequence is preceded by `first`.

    With `lengths` [B], the last ones of the first so many tokens of each row, which zeros precede.
    """
    at = torch.from_numpy(own_positions(plan)).to(x_BTC.device).expand(len(x_BTC), -1) + count
    at = at - (plan.seq_len if lengths is None else lengths[:, None])
    row, token = ((at >= 0) & (at < count)).nonzero(as_tuple=True)
    tokens = x_BTC.new_zeros(len(x_BTC), count, x_BTC.shape[2])
    tokens[row, at[row, token]] = x_BTC[row, token]
    tokens = summed(tokens, plan.ulysses_axis, plan.ring_axis)  # one rank has each
    if first is not None and plan.seq_len < count:
        tokens[:, : count - plan.seq_len] = first[:, plan.seq_len :]
    return tokens


@cached
def halo_of(plan: Plan, count: int, device: torch.device) -> Exchange:
    """Every segment gets the `count` tokens before it; the slots of a rank are those of its segments, in turn."""
    P, length = segments(plan), plan.local_len // segments(plan)
    segment = np.array([(r * plan.ulysses + u) * P + p for r, u, p in order(plan)])  # rank by rank
    at = length * np.arange(len(segment))[:, None] + np.arange(-count, 0)  # below 0: before the sequence
    i, token = np.divmod(np.maximum(at, 0), length)
    source = np.empty_like(at)
    source[segment] = np.where(at < 0, -1, segment[i] * length + token)
    return Exchange(plan, plan.local_len, source.ravel(), device)


@op("tokens_before")
def tokens_before(x: Tensor, first: Tensor | None, docs: Tensor | None, plan: str, count: int) -> tuple[Tensor, Tensor]:
    """[B, P, count, C]: the tokens just before each segment; `first`, or zeros, before the sequence. With documents,
    also where that of each token begins in its segment, [1 or B * P, T / P].
    """
    live = plan_of(plan, x.shape[1], x.shape[1])
    halo, P = halo_of(live, count, x.device), segments(live)
    tokens = halo.carry(x, live, 1).unflatten(1, (P, count)).contiguous()
    if first is not None:
        for p, start in enumerate(own_positions(live).reshape(P, -1)[:, 0].tolist()):
            tokens[:, p, : max(count - start, 0)] = first[:, start:]
    begin = begins(live, docs_of(docs, live.seq_len), len(x), x.device)
    return tokens, x.new_empty(0, dtype=torch.int32) if begin is None else begin.clone()


@fake("tokens_before")
def _(x: Tensor, first: Tensor | None, docs: Tensor | None, plan: str, count: int) -> tuple[Tensor, Tensor]:
    P = segments(spread(plan))
    rows = 0 if docs is None else len(docs) if P == 1 or len(docs) == len(x) else len(x)
    begin = x.new_empty((rows * P, x.shape[1] // P) if rows else 0, dtype=torch.int32)
    return x.new_empty(len(x), P, count, x.shape[2]), begin


@op("tokens_before_backward")
def tokens_before_backward(grad: Tensor, plan: str, length: int) -> Tensor:
    """The gradients of all halos, sent to the ranks of their tokens."""
    live = plan_of(plan, length, length)
    return halo_of(live, grad.shape[2], grad.device).carry_back(grad.flatten(1, 2), live, 1).contiguous()


@fake("tokens_before_backward")
def _(grad: Tensor, plan: str, length: int) -> Tensor:
    return grad.new_empty(len(grad), length, grad.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *_, ctx.text, _ = inputs
    ctx.plan, ctx.length = ctx.text and of_text(ctx.text), x.shape[1]  # as in attention


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.ringattn.tokens_before_backward(grad, ctx.text, ctx.length), *[None] * 4


differentiate("tokens_before", _save, _backward, count=1)
