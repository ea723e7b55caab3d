"""Gated linear attention in PyTorch: each rank's pass from zero, the exchange of states, each rank's output.

    B batch   T this rank's tokens   H heads   K key dim   V value dim   P segments a rank

One op for torch.compile and one function for autograd, as in attention. Kept for backward are the inputs and, where
they are small beside the inputs, the states before all chunks. Where they are large it is the state before each
segment, and those in between are computed again.
"""

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.check import of_choice, of_linear, of_scale, of_state
from ringattn.kernels import linear
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear import Room
from ringattn.kernels.protocol import LinearKernel
from ringattn.planning import Plan, of_text
from ringattn.segments import BEFORE, WAYS, choose, order, segments
from ringattn.spec import Docs
from ringattn.torch import agree
from ringattn.torch.attention.function import autocast
from ringattn.torch.attention.ulysses import Real, cleared
from ringattn.torch.check import have_tangents, of_dense, of_tangents, of_tensors
from ringattn.torch.dispatch import differentiate, fake, no_autocast, op
from ringattn.torch.handles import docs_of, plan_of, spread, starts_of, text_of, whole_on_one
from ringattn.torch.linear import states
from ringattn.torch.sharding import local_positions, real_tokens

SHARE = 0.5  # of the bytes of q, k, v and the gates: states of up to so many are kept for backward


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    plan: Plan | None = None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T v_t and o_t = scale * q_t S_t; this rank holds its plan's tokens."""
    plan = whole_on_one(q, q) if plan is None else plan
    text = text_of(plan)
    q, k, v = autocast(q, k, v)
    compiling = torch.compiler.is_compiling()
    keep = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, v, log_decay, initial_state) if x is not None
    )
    look = q.device.type == "cpu" and not compiling if check is None else check
    if not compiling:
        settle(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan, keep, look, return_state)
    elif look:
        raise ValueError("check=True reads the gates, which a compiled graph cannot; check outside torch.compile")
    elif found := problem(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan):
        raise ValueError(found)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, end, *_ = torch.ops.ringattn.linear_attention(
        q, k, v, log_decay, initial_state, starts_of(docs), text, compiling, scale, kernel, scan, return_state, keep
    )
    return (out, end) if return_state else out


def settle(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, plan: Plan, initial_state: Tensor | None,
    docs: Docs | None, scale: float | None, kernel: str, scan: str, keep: bool, look: bool, return_state: bool,
) -> None:  # fmt: skip
    """Raise on all ranks alike if this call cannot be. One whose like was right before is looked up, but for its gates
    where they are to be looked at.
    """
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": initial_state}
    asked = f"{scale} {kernel} {scan} {return_state}"
    kind = asked, docs, keep, *(x if x is None else (x.shape, x.dtype, x.device) for x in tensors.values())
    unlike = have_tangents(*tensors.values())
    known = not unlike and kind in (plan.agreed if docs is None else plan.right)
    found = None if known else problem(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan)
    if found is None and look and log_decay is not None:
        found = of_gates(log_decay, real_tokens(plan, docs, q.device))
    if known and found is None:
        return
    words = agree.describe(plan, None, tensors, docs, call="linear_attention", gradients=keep, asked=asked)
    agree.agree(plan, words, found)
    if not unlike:
        agree.remember(plan, kind, docs is not None)


def problem(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, plan: Plan, initial_state: Tensor | None,
    docs: Docs | None, scale: float | None, kernel: str, scan: str,
) -> str | None:  # fmt: skip
    """The first thing that is wrong with a call, as far as shapes, dtypes and devices show it."""
    found = (
        of_linear(q, k, v, log_decay, plan, docs)
        or of_tensors(q, k, v)
        or of_tangents(log_decay=log_decay, initial_state=initial_state)
        or of_dense(log_decay=log_decay, initial_state=initial_state)
        or of_scale(scale, q.shape[-1])
        or of_choice("kernel", kernel, ("auto", *(one.name for one in linear.TABLE)))
        or of_choice("scan", scan, ("auto", *WAYS))
    )
    if found is None and initial_state is not None:
        found = of_state("initial_state", initial_state, q, v, accumulator(q))
    for name, x in (("log_decay", log_decay), ("initial_state", initial_state)):
        if found is None and x is not None:
            if not x.is_floating_point():
                found = f"{name} is {x.dtype}; expected floats"
            elif x.device != q.device:
                found = f"{name} is on {x.device}, q on {q.device}; put both on one device"
    return found


def of_gates(log_decay: Tensor, real: Real) -> str | None:
    """The first gate that is not a finite number of at most 0. Reads them all, and so waits for the device."""
    bad = ~((log_decay <= 0) & (log_decay > float("-inf")))
    if real is not None:
        bad &= real.reshape(*real.shape, *[1] * (bad.dim() - 2))
    if not bool(bad.any()):
        return None
    at = tuple(bad.nonzero()[0].tolist())
    return (
        f"log_decay{list(at)} = {float(log_decay[at].detach()):g}: a log decay is finite and at most 0, as logsigmoid "
        "gives it; growth overflows, and a document's border is said with docs="
    )


class Call:
    """What an op knows of its call beside the tensors."""

    def __init__(self, q: Tensor, v: Tensor, docs: Tensor | None, plan: str, kernel: str, scan: str):
        self.plan = plan_of(plan, q.shape[1], q.shape[1])
        self.docs = docs_of(docs, self.plan.seq_len)
        self.alone = self.plan.ring * self.plan.ulysses == 1
        self.parts = segments(self.plan)
        self.batch = q.shape[0]
        self.real = real_tokens(self.plan, self.docs, q.device)
        self.place = self.plan.ring_axis.rank, self.plan.ulysses_axis.rank
        self.begin = begins(self.plan, self.docs, *self.place, q.shape[0], q.device)
        self.kernel = selected(q, v, kernel)
        size = 8 if q.dtype == torch.float64 else 4
        bytes_a_state = q.shape[0] * q.shape[2] * q.shape[3] * v.shape[3] * size
        self.way = choose(self.plan, scan, bytes_a_state, q.shape[3])

    def exchange(self, own: linear.State, start: Tensor | None, **how: bool) -> states.Here | states.Exchange:
        """What is before each segment, on its way."""
        return states.Here(own, start) if self.alone else states.Exchange(self.plan, own, start, self.way, **how)

    def folded(self, *tensors: Tensor | None) -> list[Any]:
        """This rank's segments as rows of the batch, [B * P, T / P, ...], padding zeroed."""
        return [None if x is None else rows(cleared(x, self.real), self.parts) for x in tensors]

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `folded`."""
        return x.unflatten(0, (self.batch, self.parts)).flatten(1, 2)


def selected(q: Tensor, v: Tensor, kernel: str) -> LinearKernel:
    """The kernel. It is chosen by numbers, also where a compiler traces with symbols."""
    problem = kernels.Problem(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=int(q.shape[-1]),
        value_dim=int(v.shape[-1]),
        heads=int(q.shape[2]),
        kv_heads=int(q.shape[2]),
        arch=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
    )
    found: LinearKernel = linear.select(problem, kernel).load()
    return found


def rows(x: Tensor, parts: int) -> Tensor:
    """The segments of each row, as rows."""
    return x.unflatten(1, (parts, -1)).flatten(0, 1)


def empty_states(kernel: LinearKernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> Tensor | None:
    """Room for the states before all chunks, if they are small beside the inputs, which backward needs in any case."""
    room: Room = kernel.room(k, v)
    sizes, dtype = room
    inputs = sum(prod(x.shape) * x.itemsize for x in (q, k, v, g) if x is not None)
    return q.new_empty(sizes, dtype=dtype) if prod(sizes) * dtype.itemsize <= SHARE * inputs else None


@lru_cache(maxsize=32)
def begins(
    plan: Plan, docs: Docs | None, ring_rank: int, ulysses_rank: int, batch: int, device: torch.device
) -> Tensor | None:
    """Where each token's document began, counted from its segment's first token, [1 or B * P, T / P]; None: before it.

    Padding goes on with the last document; the first document goes on with what was before the sequence.
    """
    if docs is None:
        return None
    at = local_positions(plan, ring_rank, ulysses_rank)
    own = [np.minimum(at, max(row[-1] - 1, 0)) for row in docs.starts]
    starts = np.stack([r[np.searchsorted(r, p, "right") - 1] for r, p in zip(docs.starts, own, strict=True)])
    P = segments(plan)
    starts, at = starts.reshape(len(starts), P, -1), at.reshape(P, -1)
    local = np.where(starts == 0, BEFORE, starts - at[:, :1])
    if P > 1 and len(local) < batch:
        local = local.repeat(batch, 0)
    return torch.from_numpy(local.reshape(-1, at.shape[1]).astype(np.int32)).to(device)


@op("linear_attention")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial: Tensor | None,
    docs: Tensor | None,
    plan: str,
    check: bool,
    scale: float,
    kernel: str,
    scan: str,
    return_state: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, the state behind the last token), and for backward, if it will want them: the state before each of this
    rank's segments, or those before each chunk."""
    call = Call(q, v, docs, plan, kernel, scan)
    if check:
        named = {"q": q, "k": k, "v": v, "log_decay": g, "initial_state": initial}
        words = agree.describe(call.plan, None, named, call.docs, call="linear_attention", gradients=keep)
        agree.agree(call.plan, words)
    with no_autocast(q.device):
        q, k, v, g = call.folded(q, k, v, g)
        own = call.kernel.scan_states(k, v, g, call.begin)
        flying = call.exchange(own.end, initial, end_everywhere=return_state)
        kept = empty_states(call.kernel, q, k, v, g) if keep else None
        out = call.kernel.read_out(q, k, v, g, call.begin, own, flying.before, scale, kept)
        start, nothing = flying.before(), own.end.kv.new_empty
        start = start if keep and kept is None and not call.alone else None
        end = flying.behind if return_state else nothing(0)
    start, kept = (nothing(0) if x is None else x for x in (start, kept))
    return call.whole(out).contiguous(), end, start, kept


@fake("linear_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Any, initial: Any, docs: Any, plan: str, check: bool, scale: float,
    kernel: str, scan: str, return_state: bool, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, T, H, K), V, live, dtype = q.shape, v.shape[3], spread(plan), accumulator(q)
    P = segments(live)
    end = q.new_empty(B, H, K, V, dtype=dtype) if return_state else q.new_empty(0, dtype=dtype)
    folded = rows(q, P), rows(k, P), rows(v, P), None if g is None else rows(g, P)
    found = empty_states(selected(q, v, kernel), *folded) if keep else None
    walked = keep and found is None and live.ring * live.ulysses > 1
    start = q.new_empty(B * P, H, K, V, dtype=dtype) if walked else q.new_empty(0, dtype=dtype)
    return q.new_empty(B, T, H, V), end, start, q.new_empty(0, dtype=dtype) if found is None else found


@op("linear_attention_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial: Tensor | None,
    docs: Tensor | None,
    start: Tensor,
    kept: Tensor,
    dout: Tensor,
    dend: Tensor | None,
    plan: str,
    scale: float,
    kernel: str,
    scan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dg, this rank's share of the initial state's gradient); `dend` is this rank's share too."""
    call = Call(q, v, docs, plan, kernel, scan)
    with no_autocast(q.device):
        q, k, v, g, dout = call.folded(q, k, v, g, dout)
        back = call.kernel.scan_gradients(q, dout, g, call.begin, scale)
        last, first = order(call.plan)[-1], order(call.plan)[0]
        if dend is not None and not call.alone:
            dend = states.total_at(call.plan, dend, call.way, last[0])
        flying = call.exchange(back.end, dend, backward=True)
        own = kept
        if not kept.numel():  # walked again, while the gradients of the states are on their way
            own = call.kernel.scan_states(k, v, g, call.begin)
        before = initial if call.alone else start
        dq, dk, dv, dg = call.kernel.gradients(q, k, v, g, call.begin, own, before, back, dout, flying.before, scale)
        flying.before()
        dinitial = start.new_empty(0)
        if initial is not None:
            dinitial = flying.behind if call.place == first[:2] else torch.zeros_like(flying.behind)
        # the gates of padding lie before the end state, and have gradients
        dg = start.new_empty(0) if dg is None else cleared(call.whole(dg), call.real)
    dq, dk, dv, dg = (x.contiguous() for x in (call.whole(dq), call.whole(dk), call.whole(dv), dg))
    return dq, dk, dv, dg, dinitial


@fake("linear_attention_backward")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, docs: Any, start: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(x, memory_format=contiguous) for x in (q, k, v)]
    for x in (g, initial):
        grads.append(start.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous))
    return tuple(grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.text, _, ctx.scale, ctx.kernel, ctx.scan, ctx.return_state, _ = inputs
    ctx.plan = ctx.text and of_text(ctx.text)  # as in attention
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)  # no zeros as large as the states


def _backward(ctx: Any, dout: Tensor | None, dend: Tensor | None) -> tuple[Any, ...]:
    q, k, v, g, initial, docs, *kept = ctx.saved_tensors
    dout = torch.zeros_like(v) if dout is None else dout
    if not ctx.return_state:
        dend = None
    elif dend is None:  # not used here, but perhaps on another rank
        dend = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[3], dtype=accumulator(q))
    dq, dk, dv, dg, dinitial = torch.ops.ringattn.linear_attention_backward(
        q, k, v, g, initial, docs, *kept, dout, dend, ctx.text, ctx.scale, ctx.kernel, ctx.scan
    )
    return dq, dk, dv, None if g is None else dg, None if initial is None else dinitial, *[None] * 8


differentiate("linear_attention", _save, _backward, shown=2)
