"""`attention` in PyTorch: check, then three torch ops: enter, the exchange, leave.

    B batch   T this rank's tokens   H query heads   G key/value heads   D head dim   V value dim

The ops are registered with torch.library: torch.compile sees one node each, autograd one function each. A compiled
graph holds tensors and numbers, so a plan goes in as its handle and documents as their starts.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Solo
from ringattn.cost import replicas
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import Partial
from ringattn.planning import LIVE, Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch import agree, check, ulysses
from ringattn.torch.gather import gather_backward, gather_forward
from ringattn.torch.ring import ring_backward, ring_forward
from ringattn.torch.sharding import real_tokens
from ringattn.torch.steps import Mask, global_intervals, ring_run, score_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None = None,
    *,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, of which this rank holds its plan's part."""
    spec = AttentionSpec() if spec is None else spec
    plan = single_device(q.shape[1], k.shape[1]) if plan is None else plan
    q, k, v = autocast(q, k, v)
    problem = check.problem(q, k, v, plan, spec, docs, key_docs, sinks)
    compiling = torch.compiler.is_compiling()  # then the ops themselves ask the other ranks, when they run
    if compiling and problem:
        raise ValueError(problem)
    if not compiling:
        named = {"q": q, "k": k, "v": v, "sinks": sinks}
        agree.agree(plan, agree.describe(plan, spec, named, docs), problem)

    starts, key_starts = (None if d is None else torch.as_tensor(d.starts) for d in (docs, key_docs))
    crosses = plan.ulysses > 1 or plan.padded or plan.keys.padded or (docs is not None and docs.padded)
    if crosses:
        q, k, v = torch.ops.ringattn.enter(q, k, v, starts, key_starts, plan.handle, compiling)
        if sinks is not None and plan.ulysses > 1:
            sinks = sinks.chunk(plan.ulysses)[plan.ulysses_axis.rank]
    out, lse = torch.ops.ringattn.exchange(
        q, k, v, sinks, starts, key_starts, plan.handle, compiling, spec.causal, spec.window, spec.softcap, spec.scale
    )
    if crosses:
        out, lse = torch.ops.ringattn.leave(out, lse, starts, plan.handle)
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def single_device(seq_len: int, key_len: int) -> Plan:
    """The plan of one rank: the same function, no communication. A compiled graph holds it as a constant."""
    return kept_plan(seq_len, key_len)


@lru_cache(maxsize=256)
def kept_plan(seq_len: int, key_len: int) -> Plan:
    return Plan(seq_len, key_len=key_len, axes=(Solo("ring"), Solo("ulysses")))


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, inputs in its dtype, as torch's own attention takes them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def docs_of(starts: Tensor | None, length: int) -> Docs | None:
    return None if starts is None else Docs(starts.numpy(force=True), length)


def reals(plan: Plan, docs: Tensor | None, key_docs: Tensor | None, batch: int) -> tuple[ulysses.Real, ulysses.Real]:
    """The real tokens among this rank's queries and among its keys."""
    mine = docs_of(docs, plan.seq_len)
    return real_tokens(plan, mine), real_tokens(
        plan.keys, mine if plan.keys is plan else docs_of(key_docs, plan.keys.seq_len)
    )


def detached(results: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """An op's results may not be its inputs: copies of those that are."""
    return tuple(x.clone() if any(x is y for y in inputs) else x for x in results)


@torch.library.custom_op("ringattn::enter", mutates_args=())
def enter(
    q: Tensor, k: Tensor, v: Tensor, docs: Tensor | None, key_docs: Tensor | None, plan: int, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    live = LIVE[plan]
    if check:
        agree.agree(live, agree.describe(live, None, {"q": q, "k": k, "v": v}, docs_of(docs, live.seq_len)))
    results = ulysses.enter(q, k, v, live.ulysses_axis, *reals(live, docs, key_docs, q.shape[0]))
    return detached(results, q, k, v)  # type: ignore[return-value]


@enter.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, docs: Any, key_docs: Any, plan: int, check: bool) -> tuple[Tensor, ...]:
    size = LIVE[plan].ulysses
    times = replicas(k.shape[2], size)

    def entered(x: Tensor, times: int) -> Tensor:
        B, T, H, D = x.shape
        return x.new_empty(B, T * size, H * times // size, D)

    return entered(q, 1), entered(k, times), entered(v, times)


@torch.library.custom_op("ringattn::enter_backward", mutates_args=())
def enter_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, docs: Tensor | None, key_docs: Tensor | None, plan: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    live = LIVE[plan]
    reals_ = reals(live, docs, key_docs, dq.shape[0])
    return detached(ulysses.enter_backward(dq, dk, dv, live.ulysses_axis, *reals_, kv_heads), dq, dk, dv)  # type: ignore[return-value]


@enter_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, docs: Any, key_docs: Any, plan: int, kv_heads: int) -> tuple[Tensor, ...]:
    size = LIVE[plan].ulysses

    def left(x: Tensor, heads: int) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // size, heads, x.shape[3])

    return left(dq, dq.shape[2] * size), left(dk, kv_heads), left(dv, kv_heads)


@torch.library.custom_op("ringattn::leave", mutates_args=())
def leave(out: Tensor, lse: Tensor, docs: Tensor | None, plan: int) -> tuple[Tensor, Tensor]:
    live = LIVE[plan]
    return detached(
        ulysses.leave(out, lse, live.ulysses_axis, real_tokens(live, docs_of(docs, live.seq_len))), out, lse
    )  # type: ignore[return-value]


@leave.register_fake
def _(out: Tensor, lse: Tensor, docs: Any, plan: int) -> tuple[Tensor, Tensor]:
    size = LIVE[plan].ulysses
    B, T, H, V = out.shape
    return out.new_empty(B, T // size, H * size, V), lse.new_empty(B, T // size, H * size)


@torch.library.custom_op("ringattn::leave_backward", mutates_args=())
def leave_backward(dout: Tensor, dlse: Tensor, docs: Tensor | None, plan: int) -> tuple[Tensor, Tensor]:
    live = LIVE[plan]
    real = real_tokens(live, docs_of(docs, live.seq_len))
    return detached(ulysses.leave_backward(dout, dlse, live.ulysses_axis, real), dout, dlse)  # type: ignore[return-value]


@leave_backward.register_fake
def _(dout: Tensor, dlse: Tensor, docs: Any, plan: int) -> tuple[Tensor, Tensor]:
    size = LIVE[plan].ulysses
    B, T, H, V = dout.shape
    return dout.new_empty(B, T * size, H // size, V), dlse.new_empty(B, T * size, H // size)


@torch.library.custom_op("ringattn::exchange", mutates_args=())
def exchange(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    docs: Tensor | None,
    key_docs: Tensor | None,
    plan: int,
    check: bool,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of a ring shard's queries over the keys of the whole ring: (out in q's dtype, lse)."""
    live, spec = LIVE[plan], AttentionSpec(causal, window, softcap, scale)
    packed = docs_of(docs, live.seq_len)
    if check:
        agree.agree(live, agree.describe(live, spec, {"q": q, "k": k, "v": v, "sinks": sinks}, packed))
    with torch.autocast(q.device.type, enabled=False):
        mask = Mask(live, spec, packed, docs_of(key_docs, live.keys.seq_len))
        axis, start = live.ring_axis, None if sinks is None else sink_partial(q, sinks, v.shape[-1])
        if live.strategy == "gather":
            where = global_intervals(mask, axis.rank, q.device)
            score = score_of(q, k, v, spec, live.kernel, [where])
            part = gather_forward(q, k, v, axis, live.keys.tokens, where, score, start)
        else:
            run = ring_run(mask, axis.rank, q.device)
            score = score_of(q, k, v, spec, live.kernel, [where for _, where in run])
            part = ring_forward(q, k, v, axis, run, score, start)
    return part.out.to(q.dtype), part.lse


@exchange.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, H, dtype=accumulator(q))


@torch.library.custom_op("ringattn::exchange_backward", mutates_args=())
def exchange_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    docs: Tensor | None,
    key_docs: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    plan: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) in the dtypes of their inputs, accumulated in float32 on the way."""
    live, spec = LIVE[plan], AttentionSpec(causal, window, softcap, scale)
    with torch.autocast(q.device.type, enabled=False):
        mask = Mask(live, spec, docs_of(docs, live.seq_len), docs_of(key_docs, live.keys.seq_len))
        axis = live.ring_axis
        if live.strategy == "gather":
            where = global_intervals(mask, axis.rank, q.device)
            score = score_of(q, k, v, spec, live.kernel, [where])
            rows = (dout, lse, score.row_delta(out, dout, dlse))
            grads = gather_backward(q, k, v, axis, live.keys.tokens, where, score, rows)
        else:
            run = ring_run(mask, axis.rank, q.device)
            score = score_of(q, k, v, spec, live.kernel, [where for _, where in run])
            rows = (dout, lse, score.row_delta(out, dout, dlse))
            grads = ring_backward(q, k, v, axis, run, score, rows)
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
        dsinks = q.new_empty(0) if sinks is None else sink_gradient(sinks, lse, rows[2])
    return dq, dk, dv, dsinks


@exchange_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    contiguous = torch.contiguous_format
    return *(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v)), dsinks


def sink_partial(q: Tensor, sinks: Tensor, value_dim: int) -> Partial:
    """What every query has seen before its first key: the sink's logit, and a value of zero."""
    B, T, H, _ = q.shape
    out = torch.zeros(B, T, H, value_dim, dtype=accumulator(q), device=q.device)
    return Partial(out, sinks.to(out.dtype).expand(B, T, H).clone())


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """d loss / d sink = -sum over the rows of exp(sink - lse) * delta: the sink is a key whose value is zero."""
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum((0, 1)).to(sinks.dtype)


def _save_enter(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, k, _, docs, key_docs, ctx.plan, _ = inputs
    ctx.kv_heads = k.shape[2]
    ctx.save_for_backward(docs, key_docs)


def _enter_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    docs, key_docs = ctx.saved_tensors
    given = torch.ops.ringattn.enter_backward(*grads, docs, key_docs, ctx.plan, ctx.kv_heads)
    return *given, None, None, None, None


def _save_leave(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, docs, ctx.plan = inputs
    ctx.save_for_backward(docs)


def _leave_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    (docs,) = ctx.saved_tensors
    return *torch.ops.ringattn.leave_backward(dout, dlse, docs, ctx.plan), None, None


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.plan, _, ctx.causal, ctx.window, ctx.softcap, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _exchange_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    rest = (ctx.plan, ctx.causal, ctx.window, ctx.softcap, ctx.scale)
    *grads, dsinks = torch.ops.ringattn.exchange_backward(*ctx.saved_tensors, dout, dlse, *rest)
    return *grads, dsinks if ctx.needs_input_grad[3] else None, *[None] * 8


enter.register_autograd(_enter_backward, setup_context=_save_enter)
leave.register_autograd(_leave_backward, setup_context=_save_leave)
exchange.register_autograd(_exchange_backward, setup_context=_save_exchange)
