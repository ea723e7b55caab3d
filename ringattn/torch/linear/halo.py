"""The halo of each segment, a few tokens before it that other ranks hold, and the convolution that needs it.

B batch   T this rank's tokens   P segments per rank   W width   C channels
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.planning import Plan, of_text
from ringattn.segments import Place, order, segments
from ringattn.spec import Docs
from ringattn.torch.dispatch import differentiate, fake, op
from ringattn.torch.handles import docs_of, plan_of, spread, starts_of, text_of, whole_on_one
from ringattn.torch.linear.call import begins
from ringattn.torch.linear.states import gathered
from ringattn.torch.sharding import own_positions


def causal_convolution(
    x_BTC: Tensor, weight_CW: Tensor, plan: Plan | None = None, docs: Docs | None = None, first: Tensor | None = None
) -> Tensor:
    """y_t = sum over i < W of weight[:, i] * x_{t-i}, along the whole sequence and within its documents.

    `first` [B, W - 1, C] are the tokens before the sequence, the same on every rank; zeros if not given.
    """
    plan = whole_on_one(x_BTC, x_BTC) if plan is None else plan
    text = text_of(plan)
    if first is not None and first.requires_grad and torch.is_grad_enabled():
        raise ValueError("first has no gradient; pass first.detach()")
    P, W = segments(plan), weight_CW.shape[1]
    halo = torch.ops.ringattn.tokens_before(x_BTC, first, text, W - 1)
    rows = torch.cat([halo, x_BTC.unflatten(1, (P, -1))], 2).flatten(0, 1)  # [B * P, W - 1 + T / P, C]
    length = rows.shape[1] - (W - 1)
    begin = None if docs is None else torch.ops.ringattn.begins(x_BTC, starts_of(docs), text)
    at = torch.arange(length, device=x_BTC.device)
    y = rows[:, W - 1 :] * weight_CW[:, 0]
    for i in range(1, W):
        earlier = rows[:, W - 1 - i : W - 1 - i + length]
        if begin is not None:
            earlier = torch.where((begin <= at - i)[..., None], earlier, 0.0)
        y = y + earlier * weight_CW[:, i]
    return y.unflatten(0, (-1, P)).flatten(1, 2)


def last_tokens(
    x_BTC: Tensor, plan: Plan, count: int, first: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """The last `count` tokens of the whole sequence, on every rank; a short sequence is preceded by `first`.

    With `lengths` [B], the last ones of the first so many tokens of each row, which zeros precede.
    """
    at = torch.from_numpy(own_positions(plan)).to(x_BTC.device).expand(len(x_BTC), -1) + count
    at = at - (plan.seq_len if lengths is None else lengths[:, None])
    row, token = ((at >= 0) & (at < count)).nonzero(as_tuple=True)
    found = x_BTC.new_zeros(len(x_BTC), count, x_BTC.shape[2])
    found[row, at[row, token]] = x_BTC[row, token]
    found = gathered(gathered(found, plan.ulysses_axis).sum(0), plan.ring_axis).sum(0)
    if first is not None and plan.seq_len < count:
        found[:, : count - plan.seq_len] = first[:, plan.seq_len :]
    return found


class Tail(NamedTuple):
    """The last tokens of one segment, which travel to a later one."""

    source: Place
    to: Place
    tokens: int


@lru_cache(maxsize=64)
def tails(plan: Plan, count: int) -> list[Tail]:
    """The tails that segments need to see `count` tokens back, in the order of the sequence."""
    walk, length = order(plan), plan.local_len // segments(plan)
    reach = range(-(-count // length), 0, -1)  # segments back: more than one if they are shorter than `count`
    return [
        Tail(walk[i - d], to, min(length, count - (d - 1) * length))
        for i, to in enumerate(walk)
        for d in reach
        if i >= d
    ]


def carried(plan: Plan, ways: list[Tail], given: dict[Tail, Tensor], like: Tensor) -> dict[Tail, Tensor]:
    """The tails that arrive at this rank, from those that are `given` here: [B, count, C] each, like `like` [B, _, C].

    First to the right Ulysses rank, then to the right ring rank: usually one hop, two if both differ.
    """
    r, u = plan.ring_axis.rank, plan.ulysses_axis.rank
    given = moved(plan.ulysses_axis, [(w, w.source[1], w.to[1]) for w in ways if w.source[0] == r], given, like)
    return moved(plan.ring_axis, [(w, w.source[0], w.to[0]) for w in ways if w.to[1] == u], given, like)


def moved(axis: Axis, ways: list[tuple[Tail, int, int]], given: dict[Tail, Tensor], like: Tensor) -> dict[Tail, Tensor]:
    """Move each tail from one rank of an axis to another, or leave it."""
    out: dict[int, list[Tensor]] = {}
    into: dict[int, list[Tensor]] = {}
    found = {}
    for way, source, to in ways:
        if axis.rank == to:
            found[way] = given[way] if source == to else like.new_empty(len(like), way.tokens, like.shape[2])
        if axis.rank == source != to:
            out.setdefault(to, []).append(given[way])
        if axis.rank == to != source:
            into.setdefault(source, []).append(found[way])
    axis.move(out, into, what="the tokens before a segment").wait()
    return found


@op("tokens_before")
def tokens_before(x: Tensor, first: Tensor | None, plan: str, count: int) -> Tensor:
    """[B, P, count, C]: the tokens just before each segment; `first`, or zeros, before the sequence."""
    live = plan_of(plan, x.shape[1], x.shape[1])
    ways, rows = tails(live, count), x.unflatten(1, (segments(live), -1))
    length = rows.shape[2]
    found = carried(live, ways, {w: rows[:, w.source[2], length - w.tokens :] for w in ways if here(live, w.source)}, x)
    before = x.new_zeros(len(x), count, x.shape[2]) if first is None else first.to(x.dtype)
    halos = []
    for place in mine(live):
        line = torch.cat([before, *(found[w] for w in ways if w.to == place)], 1)
        halos.append(line[:, line.shape[1] - count :])
    return torch.stack(halos, 1)


@fake("tokens_before")
def _(x: Tensor, first: Tensor | None, plan: str, count: int) -> Tensor:
    return x.new_empty(len(x), segments(spread(plan)), count, x.shape[2])


@op("tokens_before_backward")
def tokens_before_backward(grad: Tensor, plan: str, length: int) -> Tensor:
    """The gradients of all halos, sent to the ranks of their tokens."""
    live = plan_of(plan, length, length)
    B, P, count, C = grad.shape
    ways, given = tails(live, count), {}
    for place in mine(live):
        at = count
        for way in reversed([w for w in ways if w.to == place]):
            given[back(way)] = grad[:, place[2], at - way.tokens : at]
            at -= way.tokens
    dx = grad.new_zeros(B, P, length // P, C)
    for way, found in carried(live, [back(w) for w in ways], given, grad[:, 0]).items():
        dx[:, way.to[2], length // P - way.tokens :] += found
    return dx.flatten(1, 2)


@fake("tokens_before_backward")
def _(grad: Tensor, plan: str, length: int) -> Tensor:
    return grad.new_empty(len(grad), length, grad.shape[3])


@op("begins")
def begins_of(x: Tensor, docs: Tensor, plan: str) -> Tensor:
    """`begins` on the device of x, as one node of a compiled graph."""
    live = plan_of(plan, x.shape[1], x.shape[1])
    ranks = live.ring_axis.rank, live.ulysses_axis.rank
    found = begins(live, docs_of(docs, live.seq_len), *ranks, len(x), x.device)
    assert found is not None
    return found.clone()


@fake("begins")
def _(x: Tensor, docs: Tensor, plan: str) -> Tensor:
    P = segments(spread(plan))
    rows = len(docs) if P == 1 or len(docs) == len(x) else len(x)
    return x.new_empty(rows * P, x.shape[1] // P, dtype=torch.int32)


def back(way: Tail) -> Tail:
    """The way of the gradient of a tail."""
    return Tail(way.to, way.source, way.tokens)


def here(plan: Plan, place: Place) -> bool:
    return place[:2] == (plan.ring_axis.rank, plan.ulysses_axis.rank)


def mine(plan: Plan) -> list[Place]:
    """This rank's segments."""
    return [(plan.ring_axis.rank, plan.ulysses_axis.rank, p) for p in range(segments(plan))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.text, _ = inputs
    ctx.plan, ctx.length = ctx.text and of_text(ctx.text), x.shape[1]  # as in attention


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.ringattn.tokens_before_backward(grad, ctx.text, ctx.length), None, None, None


differentiate("tokens_before", _save, _backward)
