"""`attention` in PyTorch: check, then one torch op: group by group of heads enter, attend, leave.

    B batch   T this rank's tokens   H query heads   G key/value heads   D head dim   V value dim

The op is told to torch directly (ringattn.torch.dispatch), and plans and documents go in as numbers
(ringattn.torch.handles).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Pending, one_ahead
from ringattn.cost import Shape, replicas
from ringattn.kernels import is_narrow
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import NEVER, Partial, sink_gradient
from ringattn.mask import Mask
from ringattn.planning import LIVE, Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch import agree, check
from ringattn.torch.dispatch import differentiate, fake, no_autocast, op
from ringattn.torch.gather import gather_backward, gather_forward
from ringattn.torch.handles import constant, docs_of, handle_of, numbered, plain, spread, starts_of, whole_on_one
from ringattn.torch.ring import (
    direct_backward,
    direct_forward,
    levels_backward,
    levels_forward,
    queries_backward,
    relay_backward,
    relay_forward,
)
from ringattn.torch.sharding import real_tokens
from ringattn.torch.steps import (
    Entered,
    Grads,
    Score,
    Seen,
    delta_of,
    direct_run,
    global_intervals,
    levels_run,
    queries_run,
    relay_run,
    score_of,
)
from ringattn.torch.ulysses import Real, cleared, enter, joined, leave, repeated, summed

PLAIN = AttentionSpec()

FORWARD: dict[str, Callable[..., Partial]] = {
    "direct": direct_forward, "relay": relay_forward, "levels": levels_forward,
}  # fmt: skip
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "direct": direct_backward, "relay": relay_backward, "levels": levels_backward,
}  # fmt: skip


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
    spec = PLAIN if spec is None else spec
    plan = whole_on_one(q, k) if plan is None else plan
    handle = handle_of(plan)
    q, k, v = autocast(q, k, v)
    compiling = torch.compiler.is_compiling()  # then the op itself asks the other ranks, when it runs
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks) if x is not None)
    if not compiling:
        settle(q, k, v, plan, spec, docs, key_docs, sinks, keep)
    elif problem := check.problem(q, k, v, plan, spec, docs, key_docs, sinks):
        raise ValueError(problem)

    groups = groups_of(handle, plain(q.shape[0]), q.shape[2], *k.shape[2:], v.shape[3], q.itemsize) if plan.swaps else 1
    out, lse, _ = torch.ops.ringattn.exchange(
        q, k, v, sinks, starts_of(docs), starts_of(key_docs), handle, groups, compiling, keep,
        spec.causal, spec.window, spec.softcap, spec.scale,
    )  # fmt: skip
    return (out, lse.contiguous()) if return_lse else out


def settle(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None,
    sinks: Tensor | None, keep: bool,
) -> None:  # fmt: skip
    """Raise on all ranks alike if this call cannot be. One whose like was right before is looked up."""
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    kind = spec, docs, key_docs, keep, *(x if x is None else (x.shape, x.dtype, x.device) for x in tensors.values())
    with_docs = docs is not None or key_docs is not None
    unlike = check.have_tangents(q, k, v, sinks)
    if not unlike and kind in (plan.right if with_docs else plan.agreed):
        return
    problem = check.problem(q, k, v, plan, spec, docs, key_docs, sinks)
    words = agree.describe(plan, spec, tensors, docs, key_docs, call="attention", gradients=keep)
    agree.agree(plan, words, problem)
    if not unlike:
        agree.remember(plan, kind, with_docs)


@constant
def groups_of(plan: int, batch: int, heads: int, kv_heads: int, head_dim: int, value_dim: int, itemsize: int) -> int:
    """In how many groups of heads a call goes. A compiled graph holds it as a constant."""
    return kept_groups(plan, batch, heads, kv_heads, head_dim, value_dim, itemsize)


@lru_cache(maxsize=256)
def kept_groups(plan: int, batch: int, heads: int, kv_heads: int, head_dim: int, value_dim: int, itemsize: int) -> int:
    live = LIVE[plan]
    lengths = live.seq_len, live.keys.seq_len
    return live.groups_for(Shape(*lengths, heads, kv_heads, head_dim, value_dim, itemsize, batch))


def autocast(*tensors: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Under torch.autocast, inputs in its dtype, as torch's own attention takes them, or in this one."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = dtype or torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


@dataclass(frozen=True, eq=False)
class Call:
    """What one call is, apart from its tensors. The same one for all alike: what it needs is looked up by itself."""

    mask: Mask
    groups: int
    real: Real
    real_keys: Real
    device: torch.device

    @property
    def plan(self) -> Plan:
        return self.mask.plan

    def entering(self, tensors: tuple[Tensor, ...], real: tuple[Real, ...]) -> Iterator[list[Tensor]]:
        """The tensors of each group of heads, of the whole ring shard."""
        axis, groups = self.plan.ulysses_axis, self.groups
        return one_ahead(enter(tensors, real, axis, g, groups) for g in range(groups))

    def own(self, sinks: Tensor) -> Tensor:
        """This rank's sinks, [groups, h]; a view."""
        axis = self.plan.ulysses_axis
        return sinks.view(self.groups, axis.size, -1)[:, axis.rank]

    def score(self, intervals: Iterable[Intervals | None], q: Tensor, k: Tensor, v: Tensor) -> Score:
        return score_of(q, k, v, self.mask.spec, self.plan.kernel, intervals)


def call_of(
    q: Tensor, k: Tensor, docs: Tensor | None, key_docs: Tensor | None, plan: int, groups: int, *spec: Any
) -> Call:
    live = numbered(plan, q.shape[1], k.shape[1])
    return kept_call(
        live.handle, docs_of(docs, live.seq_len), docs_of(key_docs, live.keys.seq_len), q.device, groups, *spec
    )


@lru_cache(maxsize=8)
def kept_call(
    plan: int, docs: Docs | None, key_docs: Docs | None, device: torch.device, groups: int, *spec: Any
) -> Call:
    """The call on this plan, by its number: equal plans may be of other ranks. The last few plans live on by this."""
    mask = Mask(LIVE[plan], AttentionSpec(*spec), docs, key_docs)
    keys = mask.plan.keys
    held = docs if key_docs is None and keys is mask.plan else key_docs
    return Call(mask, groups, real_tokens(mask.plan, docs, device), real_tokens(keys, held, device), device)


@op("exchange")
def exchange(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    docs: Tensor | None,
    key_docs: Tensor | None,
    plan: int,
    groups: int,
    check: bool,
    keep: bool,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out in q's dtype, lse) of this rank's queries over all keys; to `keep`, what backward finds entered already.

    A group of heads enters, and another leaves, while one is attended to.
    """
    call = call_of(q, k, docs, key_docs, plan, groups, causal, window, softcap, scale)
    if check:
        named, mask = {"q": q, "k": k, "v": v, "sinks": sinks}, call.mask
        asked = mask.spec, named, mask.docs, mask.key_docs
        agree.agree(mask.plan, agree.describe(mask.plan, *asked, call="attention", gradients=keep))
    axis, kept = call.plan.ulysses_axis, []
    keep = keep and axis.size > 1

    def entering() -> Iterator[Entered]:
        tensors = q, repeated(k, axis), repeated(v, axis)
        for g, group in enumerate(call.entering(tensors, (call.real, call.real_keys, call.real_keys))):
            if keep:
                kept.append(group)
            yield *group, None if sinks is None else sink_partial(group[0], call.own(sinks)[g], v.shape[-1])
            del group

    def leaving() -> Iterator[Pending]:
        for g, part in enumerate(attended(call, entering())):
            results = [part.out.to(q.dtype), part.lse]
            if keep:
                kept[g] += results
            yield leave(results, axis)

    with no_autocast(q.device):
        outs, lses = zip(*one_ahead(leaving()), strict=True)
        out, lse = cleared(joined(outs), call.real), cleared(joined(lses), call.real, NEVER)
    saved = [x.contiguous() for group in kept for x in group]
    return out.contiguous(), by_heads(lse), saved  # as a compiled graph expects them


def by_heads(lse: Tensor) -> Tensor:
    """[B, T, H] in memory as [B, H, T], as kernels write it."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


@fake("exchange")
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, docs: Any, key_docs: Any, plan: int, groups: int, check: bool,
    keep: bool, *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    B, T, H, D = q.shape
    V, size, exact = v.shape[3], spread(plan).ulysses, accumulator(q)
    h, g = H // size // groups, k.shape[2] * replicas(k.shape[2], size) // size // groups
    saved = [] if size == 1 or not keep else [
        x
        for _ in range(groups)
        for x in (
            q.new_empty(B, T * size, h, D),
            k.new_empty(B, k.shape[1] * size, g, D),
            v.new_empty(B, k.shape[1] * size, g, V),
            q.new_empty(B, T * size, h, V),
            q.new_empty(B, T * size, h, dtype=exact),
        )
    ]  # fmt: skip
    return q.new_empty(B, T, H, V), q.new_empty(B, H, T, dtype=exact).transpose(1, 2), saved


@op("exchange_backward")
def exchange_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    docs: Tensor | None,
    key_docs: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    plan: int,
    groups: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) in the dtypes of their inputs, accumulated in float32 on the way."""
    call = call_of(q, k, docs, key_docs, plan, groups, causal, window, softcap, scale)
    axis, real, real_keys = call.plan.ulysses_axis, call.real, call.real_keys
    tensors, reals = ((), ()) if saved else ((q, k, v, out, lse), (real, real_keys, real_keys, None, None))
    given = (dout,) if dlse is None else (dout, dlse)
    lses, deltas = [], []

    def entering() -> Iterator[Seen]:
        for g, group in enumerate(call.entering((*tensors, *given), (*reals, real, real)[: len(tensors + given)])):
            group = [*saved[5 * g : 5 * g + 5], *group]
            lses.append(group[4])
            yield group if dlse is not None else (*group, None)

    def leaving() -> Iterator[Pending]:
        for dq, dk, dv, delta in gradients(call, entering(), asked=sinks is not None):
            deltas.append(delta)
            yield leave([dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)], axis)

    with no_autocast(q.device):
        dq, dk, dv = map(joined, zip(*one_ahead(leaving()), strict=True))
        grads = zip((dq, summed(dk, k.shape[2]), summed(dv, k.shape[2])), (real, real_keys, real_keys), strict=True)
        dq, dk, dv = (cleared(x, r).contiguous() for x, r in grads)
        dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(sinks)
        if sinks is not None:
            own = call.own(sinks).flatten()
            call.own(dsinks).copy_(sink_gradient(own, joined(lses), joined(deltas)).view(groups, -1))
    return dq, dk, dv, dsinks


@fake("exchange_backward")
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    contiguous = torch.contiguous_format
    return *(torch.empty_like(x, memory_format=contiguous) for x in (q, k, v)), dsinks


def attended(call: Call, groups: Iterable[Entered]) -> Iterator[Partial]:
    """Attention of each group's queries over the keys of the whole ring."""
    plan, axis = call.plan, call.plan.ring_axis
    if plan.strategy == "gather":
        where = global_intervals(call.mask, axis.rank, call.device)
        yield from gather_forward(groups, axis, plan.keys.tokens, where, partial(call.score, [where]))
        return
    for q, k, v, start in groups:
        run, intervals = run_of(call, k.nbytes + v.nbytes)
        yield FORWARD[plan.route](q, k, v, axis, run, call.score(intervals, q, k, v), start)
        del q, k, v, start  # before the group after the next is made room for


def gradients(call: Call, groups: Iterable[Seen], asked: bool) -> Iterator[Grads]:
    """dq, dk, dv of each group, and its delta if that is `asked` for."""
    plan, axis = call.plan, call.plan.ring_axis
    if plan.strategy == "gather":
        where = global_intervals(call.mask, axis.rank, call.device)
        yield from gather_backward(groups, axis, plan.keys.tokens, where, partial(call.score, [where]), asked)
        return
    queries = plan.backward == "queries"
    travel = queries_backward if queries else BACKWARD[plan.route]
    for q, k, v, out, lse, dout, dlse in groups:
        run, intervals = run_of(call, q.nbytes + dout.nbytes if queries else k.nbytes + v.nbytes, backward=True)
        score = call.score(intervals, q, k, v)
        delta = delta_of(score, out, dout, dlse, asked or queries)
        yield *travel(q, k, v, axis, run, score, (dout, lse, delta)), delta


@lru_cache(maxsize=12)
def run_of(call: Call, nbytes: int, backward: bool = False) -> tuple[Any, list[Intervals | None]]:
    """What a ring rank runs on the plan's route, and all of its intervals. A block that travels has `nbytes`.

    A step brings fewer blocks in backward, where gradients in float32 go with them. Not with a vendor's kernel that is
    named: it has its price for every call, and gradients half as wide. Few are kept: with documents each batch has
    another, of two numbers a token and block on the device.
    """
    mask, plan, rank = call.mask, call.plan, call.plan.ring_axis.rank
    if plan.route == "relay":
        relay = relay_run(mask, rank, call.device)
        return relay, [where for _, where in relay]
    count = plan.blocks_at_once(4 * nbytes if backward and not is_narrow(plan.kernel) else nbytes)
    if plan.route == "levels":
        levels = levels_run(mask, rank, call.device, count)
        return levels, [stop.where for level in levels for stop in level.run]
    stops = queries_run if backward and plan.backward == "queries" else direct_run
    run = stops(mask, rank, call.device, count)
    return run, [stop.where for stop in run]


def sink_partial(q: Tensor, sinks: Tensor, value_dim: int) -> Partial:
    """What every query has seen before its first key: the sink's logit, and a value of zero."""
    B, T, H, _ = q.shape
    out = torch.zeros(B, T, H, value_dim, dtype=accumulator(q), device=q.device)
    return Partial(out, sinks.to(out.dtype).expand(B, T, H).clone())


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.handle, ctx.groups, _, _, ctx.causal, ctx.window, ctx.softcap, ctx.scale = inputs
    ctx.plan = LIVE.get(ctx.handle)  # lives until backward, which finds it by its number: the caller may let go of it
    out, lse, saved = output
    ctx.set_materialize_grads(False)  # nobody differentiates what is saved
    q, k, v, *rest = tensors
    if saved:  # backward takes those; of these it asks for shapes and dtypes
        shaped = q, k, v, out, lse
        ctx.shapes = [x.shape for x in shaped]
        q, k, v, out, lse = (x.new_empty(0) for x in shaped)
    ctx.save_for_backward(q, k, v, *rest, out, lse, *saved)


def _exchange_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    q, k, v, *rest, out, lse = kept[:8]
    if len(kept) > 8:
        q, k, v, out, lse = (
            x.new_empty(()).expand(shape) for x, shape in zip((q, k, v, out, lse), ctx.shapes, strict=True)
        )
    dout = torch.zeros_like(out, memory_format=torch.contiguous_format) if dout is None else dout
    if dlse is None and len(kept) > 8:  # heads are exchanged, on all ranks alike
        dlse = torch.zeros_like(lse, memory_format=torch.contiguous_format)
    *grads, dsinks = torch.ops.ringattn.exchange_backward(
        q, k, v, *rest, out, lse, list(kept[8:]), dout, dlse,
        ctx.handle, ctx.groups, ctx.causal, ctx.window, ctx.softcap, ctx.scale,
    )  # fmt: skip
    return *grads, dsinks if ctx.needs_input_grad[3] else None, *[None] * 10


differentiate("exchange", _save_exchange, _exchange_backward, shown=2)
