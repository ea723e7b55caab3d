"""`attention` in PyTorch. In eager mode a call is one autograd function (function.py); else it is one op.

Ops are for torch.compile and all else that sees them: selective checkpoints, fake tensors, tracers. A compiled graph
holds tensors and numbers, so a plan is passed as its text, or where each batch has its own as a number to look it up
by, and documents as their starts (`ringattn.torch.handles`). When an op runs, it turns them back and binds the call.
"""

from typing import Any

import torch
from torch import Tensor

from ringattn.check.arguments import of_arguments, of_arrays
from ringattn.kernels.arrays import accumulator, fine
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank
from ringattn.plans.plan import Plan
from ringattn.torch import check
from ringattn.torch.attention.call import CAUSAL, bind, bound
from ringattn.torch.attention.function import Attention, backward, forward
from ringattn.torch.dispatch import autocast, differentiate, fake, gradients_like, op, traced
from ringattn.torch.handles import docs_of, of_text, plan_of, spread, starts_of, text_and_handle, whole_on_one

# The arguments of both ops: the tensors, and at the end the fields of a spec.
TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? docs, Tensor? key_docs, Tensor? handle"
SPEC = "bool causal, SymInt[]? window, SymInt? chunk, SymInt first, float? softcap, float? scale"


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None = None, *, spec: AttentionSpec | None = None,
    docs: Docs | None = None, key_docs: Docs | None = None, sinks: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`ringattn.attention` in torch."""
    q, k, v = autocast(q, k, v)
    if traced(q, k, v, sinks):
        out, lse = attention_op(q, k, v, plan, spec, docs, key_docs, sinks, return_lse)
    else:
        gradients = torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in (q, k, v, sinks)])
        call = bind(q, k, v, plan, spec, docs, key_docs, sinks, gradients, return_lse=return_lse)
        out, lse = Attention.apply(call, q, k, v, sinks) if gradients else forward(call, q, k, v, sinks)[:2]
    return (out, lse.to(accumulator(q)).contiguous()) if return_lse else out


def attention_op(
    q: Tensor, k: Tensor, v: Tensor, plan: Any, spec: AttentionSpec | None, docs: Docs | None, key_docs: Docs | None,
    sinks: Tensor | None, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) by the op `ringattn::attention`."""
    problem = of_arguments(plan=plan, spec=spec, docs=docs, key_docs=key_docs, return_lse=return_lse)
    raise_if(problem or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan))
    spec = CAUSAL if spec is None else spec
    plan = whole_on_one(q, k) if plan is None else plan
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, sinks) if x is not None)
    keys = not torch.compiler.is_compiling() and torch._guards.detect_fake_mode((q, k, v)) is None
    text, handle = text_and_handle(plan)
    if handle is None:  # else the op checks: no graph may depend on the documents of one batch
        raise_if(check.problem(q, k, v, plan, spec, docs, key_docs, sinks))
    window = (spec.window,) if isinstance(spec.window, int) else spec.window
    out, lse, _ = torch.ops.ringattn.attention(
        q, k, v, sinks, starts_of(docs), starts_of(key_docs), handle, text, keep, keys, return_lse,
        spec.causal, window, spec.chunk, spec.first, spec.softcap, spec.scale,
    )  # fmt: skip
    return out, lse


def arguments(
    q: Tensor, k: Tensor, docs: Any, key_docs: Any, handle: Tensor | None, plan: str, causal: bool, window: Any,
    *rest: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The plan, spec, docs and key_docs that the arguments of an op stand for."""
    live = plan_of(plan, q.shape[1], k.shape[1], handle)
    reach = window if window is None else window[0] if causal else tuple(window)
    return live, AttentionSpec(causal, reach, *rest), docs_of(docs, live.seq_len), docs_of(key_docs, live.keys.seq_len)


@op("attention", f"({TENSORS}, str plan, bool keep, bool keys, bool return_lse, {SPEC}) -> (Tensor, Tensor, Tensor[])")
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, docs: Any, key_docs: Any, handle: Any, plan: str, keep: bool,
    keys: bool, return_lse: bool, *spec: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(out in q's dtype, lse) of this rank's queries over all keys; with `keep`, also the tensors that entered.

    With `keys`, those that arrive may be among them. How many there are is not known while a graph is traced.
    """
    given = arguments(q, k, docs, key_docs, handle, plan, *spec)
    return forward(bind(q, k, v, *given, sinks, keep, return_lse, keys), q, k, v, sinks)


@fake("attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, docs: Any, key_docs: Any, handle: Any, plan: str, keep: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    B, T, H, D = q.shape
    V, exact, live = v.shape[3], fine(q), spread(plan)
    kept: list[Tensor] = []
    if keep and live.ulysses > 1:
        size, lengths = live.ulysses, (live.seq_len, live.keys.seq_len)
        groups = live.transport.groups or 1  # as in of_handle
        if handle is None:
            batch = range(B).stop  # of a symbolic number, its value
            groups = live.groups_for(Shape(*lengths, H, k.shape[2], D, V, q.itemsize, batch))
        h, g = heads_of_group(H, k.shape[2], size, groups)
        shared = kv_heads_of_a_rank(k.shape[2], size) < groups  # by all groups
        for i in range(groups):
            keys = k.new_empty(B, k.shape[1] * size, g, D), v.new_empty(B, k.shape[1] * size, g, V)
            kept += [
                q.new_empty(B, T * size, h, D),
                *(keys if i == 0 or not shared else ()),
                q.new_empty(B, T * size, h, V),
                q.new_empty(B, T * size, h, dtype=exact),
            ]
    return q.new_empty(B, T, H, V), q.new_empty(B, H, T, dtype=exact).transpose(1, 2), kept


@op(
    "attention_backward",
    f"({TENSORS}, Tensor[] kept, Tensor? dout, Tensor? dlse, str plan, bool keys, bool return_lse, {SPEC})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward_op(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, docs: Any, key_docs: Any, handle: Any, kept: list[Tensor],
    dout: Any, dlse: Any, plan: str, keys: bool, return_lse: bool, *spec: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv, dsinks) in the dtypes of their inputs, from what forward `kept`; q, k, v only give shapes."""
    given = arguments(q, k, docs, key_docs, handle, plan, *spec)
    call = bound(q, k, v, *given, sinks, return_lse, keys)
    dq, dk, dv, dsinks = backward(call, kept, sinks, dout, dlse)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@fake("attention_backward")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return gradients_like(inputs[:4], inputs[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    (q, k, v, *rest), (ctx.text, _, *ctx.numbers) = inputs[:7], inputs[7:]
    ctx.plan = ctx.text and of_text(ctx.text)  # keeps its ranks alive until backward
    out, lse, kept = output
    ctx.set_materialize_grads(False)  # saved outputs have no gradients
    ctx.shapes = [x.shape for x in (q, k, v)]
    entered = ctx.plan and ctx.plan.ulysses > 1
    ctx.save_for_backward(*rest, *kept if entered else (q, k, v, out, lse, *kept))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    sinks, docs, key_docs, handle, *kept = ctx.saved_tensors
    q, k, v = (x.new_empty(()).expand(shape) for x, shape in zip(kept[:3], ctx.shapes, strict=True))
    *grads, dsinks = torch.ops.ringattn.attention_backward(
        q, k, v, sinks, docs, key_docs, handle, kept, dout, dlse, ctx.text, *ctx.numbers
    )
    return *grads, dsinks if ctx.needs_input_grad[3] else None, *[None] * 13


differentiate("attention", _save, _backward, count=2)
