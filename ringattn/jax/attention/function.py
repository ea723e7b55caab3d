"""`attention` on JAX arrays: check, then under shard_map: enter, the exchange, leave.

    B batch   T tokens   H query heads   G key/value heads   D head dim   V value dim

The exchange is one custom_vjp around the whole ring or gather: it keeps q, k, v, out and lse, and nothing else that
grows with the sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ringattn.check.attention import of_batch, of_docs, of_dtypes, of_lengths, of_plan, of_sinks
from ringattn.comms.axis import Pending
from ringattn.comms.jax import MeshAxis
from ringattn.jax.attention import ulysses
from ringattn.jax.attention.gather import gather_backward, gather_forward
from ringattn.jax.attention.groups import of_heads, one_ahead
from ringattn.jax.attention.ring import ring_backward, ring_forward
from ringattn.jax.attention.steps import Score, Visible, cut_of, local_positions, shape_of, step_of
from ringattn.jax.lookup import spoiled
from ringattn.jax.sharding import current_mesh, cut_of_tokens, located, on_every_device
from ringattn.kernels.partial import NEVER, add_sinks, empty, sink_gradient
from ringattn.kernels.varying import axes_of, vary
from ringattn.masks.spec import AttentionSpec, Docs, raise_if, register_in_jax
from ringattn.plans.mask import Mask, among_all
from ringattn.plans.plan import Plan
from ringattn.plans.spmd import SharedRecipe

OUT, LSE = "ringattn_out", "ringattn_lse"  # the names of the results for policies of jax.checkpoint

Arrays = tuple[Array, Array, Array, Array | None]  # q, k, v, sinks
# Of the documents, of the keys' documents, int32 [rows, n + 1], and spans [rows, m, 2]; None where there are none.
Starts = tuple[Any, Any, Any]


register_in_jax()


@dataclass(frozen=True)
class Call:
    """All of a call that is not an array: the key of a cached program."""

    mask: Mask
    lse: bool = True  # whether the caller gets the lse, and may differentiate it
    docs_padded: bool = False
    key_docs_padded: bool = False


def attention(
    q: Array, k: Array, v: Array, plan: Plan | None = None, *, spec: AttentionSpec | None = None,
    docs: Docs | None = None, key_docs: Docs | None = None, sinks: Array | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """softmax(scale * q k^T) v on global arrays in the plan's order (`Plan.shard`); inside shard_map, on local ones.

    Without a plan they are in the sequence's own order, on the mesh that their sharding names: a contiguous ring over
    the axes that cut the tokens, none if nothing does.
    """
    plan, inside = located(q, k, v, plan)
    spec = AttentionSpec() if spec is None else spec
    length, key_length = (side.local_len if inside else side.tokens.padded_length for side in (plan, plan.keys))
    raise_if(
        of_dtypes(q, k, v)
        or of_batch(q)
        or of_plan(q, k, v, plan)
        or of_sinks(sinks, q.shape[2])
        or of_lengths(q, k, plan, spec, (length, key_length), docs, key_docs)
        or of_docs(q.shape[0], plan, spec, docs, key_docs)
    )
    eager = is_eager(q) and cut_of(plan) is None
    if eager:
        docs, key_docs = filled(docs), filled(key_docs)
    # Documents that are fixed in the program decide which hops are needed; traced ones do not.
    fixed = (not eager or is_constant(docs)) and untraced(docs) and untraced(key_docs)
    both, among = (docs, key_docs) if fixed else (None, None), None if fixed else among_all(spec, docs, key_docs)
    padded = docs is not None and docs.padded
    key_padded = padded if key_docs is None else key_docs.padded
    call, arrays = Call(Mask(plan, spec, *both, among), return_lse, padded, key_padded), (q, k, v, sinks)
    given = docs and docs.starts, key_docs and key_docs.starts, docs and docs.spans
    if not inside and docs is not None and is_constant(docs) and docs.first is None:
        batch = cut_of_tokens(q, k, plan)[0]
        if batch and MeshAxis(batch, current_mesh(plan)).size > 1:
            raise NotImplementedError(
                f"{docs}: rows with other trees are part of the program, and the batch is cut over {batch!r}; call "
                "attention inside a shard_map over it, with this device's rows"
            )

    def cuts(tokens: P) -> Any:
        return (tokens, tokens, tokens, P(tokens[2])), (tokens, tokens)

    out, lse = on_every_device(on_device, call, plan, inside, arrays, given, cuts, eager)
    return (out, lse) if return_lse else out


def untraced(docs: Docs | None) -> bool:
    """Whether these are no documents, or documents that are not traced."""
    return docs is None or isinstance(docs.starts, np.ndarray)


def is_eager(x: Array) -> bool:
    """Whether this call runs now, perhaps under an eager grad, and is not a part of a larger program."""
    return not isinstance(x, jax.core.Tracer) or x.to_concrete_value() is not None


def filled(docs: Docs | None) -> Docs | None:
    """Known documents, and empty ones up to 8, 64, 512, ...: one program takes all packings of such a size."""
    if docs is None or not untraced(docs) or is_constant(docs):
        return docs
    size = 8
    while size < docs.starts.shape[1] - 1:
        size *= 8
    more = size + 1 - docs.starts.shape[1]
    return Docs(np.pad(docs.starts, ((0, 0), (0, more)), mode="edge"), docs.length, docs.spans, padded=True)


def is_constant(docs: Docs | None) -> bool:
    """Whether documents are part of the program: trees and slices are."""
    return docs is not None and (docs.parents is not None or docs.slices is not None)


def on_device(call: Call, arrays: Arrays, starts: Starts) -> tuple[Array, Array]:
    """One device's part: its tokens in, its tokens' (out, lse) back."""
    plan, axis = call.mask.plan, call.mask.plan.ulysses_axis
    q, k, v, sinks = vary(arrays, axes_of(arrays, starts, jnp.int32(plan.ring_axis.rank), jnp.int32(axis.rank)))
    real = real_tokens(plan, starts[0], call.docs_padded)
    same_keys = plan.keys is plan and starts[1] is None
    real_keys = real if same_keys else real_tokens(plan.keys, starts[1], call.key_docs_padded)
    if call.mask.seeing is not None:
        begun, over = (jnp.searchsorted(jnp.asarray(x), local_positions(plan), side="right") for x in call.mask.seeing)
        real = (begun > over)[None]
    q, k, v = ulysses.ready(q, k, v, axis, real, real_keys)
    groups = plan.groups_for(shape_of(q, k, v, plan, (q.shape[2], k.shape[2]))) if plan.ulysses > 1 else 1
    if groups > 1:
        out, lse = exchange(call, groups, (q, k, v, sinks), starts)
    else:
        q, k, v = ulysses.enter((q, k, v), axis).wait()
        out, lse = ulysses.leave(exchange(call, 1, (q, k, v, sinks_of(sinks, axis)), starts), axis).wait()
    return spoiled(ulysses.cleared(out, real), *starts[:2]), spoiled(ulysses.cleared(lse, real, NEVER), *starts[:2])


def sinks_of(sinks: Array | None, axis: MeshAxis, group: Any = 0, groups: int = 1) -> Array | None:
    """Those of this rank's heads, of one group."""
    if sinks is None:
        return None
    size = sinks.shape[0] // (axis.size * groups)
    return lax.dynamic_slice_in_dim(sinks, (axis.rank * groups + group) * size, size)


def real_tokens(plan: Plan, starts: Any, docs_padded: bool) -> ulysses.Real:
    """Which of this device's tokens are real, [1 or rows, T_local]; None when all of them are, on all devices."""
    if not (plan.padded or docs_padded):
        return None
    limit = jnp.int32(plan.seq_len) if starts is None else jnp.minimum(plan.seq_len, starts[:, -1:])
    return local_positions(plan)[None] < limit


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(call: Call, groups: int, arrays: Arrays, starts: Starts) -> tuple[Array, Array]:
    """(out in q's dtype, lse) of a ring shard's queries over the keys of the whole ring.

    With several groups of heads arrays and results are those outside of Ulysses: one group enters, and another leaves,
    beside the work of a third. Backward exchanges them all again, which kernels hide.
    """
    return attended(call, arrays, starts) if groups == 1 else attended_in_groups(call, groups, arrays, starts)


def exchange_forward(call: Call, groups: int, arrays: Arrays, starts: Starts) -> tuple[tuple[Array, Array], Any]:
    """The residuals, including the lse, are differentiated too in second derivatives."""
    out, lse = exchange(replace(call, lse=True), groups, arrays, starts)
    name = call.mask.plan.saved_as
    results = checkpoint_name(out, name or OUT), checkpoint_name(lse, name or LSE)
    return results, (arrays, starts, results)


def exchange_backward(call: Call, groups: int, saved: Any, given: tuple[Array, Array]) -> tuple[Arrays, None]:
    """Gradients in the dtypes of their inputs, accumulated in float32."""
    (q, k, v, sinks), starts, results = saved
    step = partial(step_of, mask=call.mask, given=starts, heads=None if groups == 1 else (q.shape[2], k.shape[2]))
    rows, dsinks = rows_of(call, step(q, k, v)[1], q, sinks, results, given)
    backward = gradients if groups == 1 else partial(gradients_in_groups, call.mask.plan.ulysses_axis, groups)
    dq, dk, dv = (x.astype(y.dtype) for x, y in zip(backward(step, (q, k, v), rows), (q, k, v), strict=True))
    return (dq, dk, dv, dsinks), None


exchange.defvjp(exchange_forward, exchange_backward)


def attended(call: Call, arrays: Arrays, starts: Starts, heads: tuple[int, int] | None = None) -> tuple[Array, Array]:
    """(out in q's dtype, lse) of the heads that this rank has, or of one group of them; `heads` are all of the call."""
    q, k, v, sinks = arrays
    recipe, score, visible = step_of(q, k, v, call.mask, starts, heads)
    start = None if sinks is None else add_sinks(empty(q, v.shape[-1]), sinks)
    forward = gather_forward if recipe.gathers else ring_forward
    part = forward(q, k, v, recipe, visible, score, start)
    return part.out.astype(q.dtype), part.lse


def attended_in_groups(call: Call, groups: int, arrays: Arrays, starts: Starts) -> tuple[Array, Array]:
    (q, k, v, sinks), axis = arrays, call.mask.plan.ulysses_axis.rotating
    heads = q.shape[2], k.shape[2]
    receive, shared = of_groups((q, k, v), heads, axis, groups)

    def work(group: Any, arrived: list[Array]) -> tuple[Any, Any, Any]:
        q, k, v = [*arrived, *shared]
        return attended(call, (q, k, v, sinks_of(sinks, axis, group, groups)), starts, heads), (), ()

    (out, lse), _, _ = one_ahead(receive, work, partial(ulysses.leave, axis=axis), groups, axis.size)
    return out, lse


def of_groups(
    arrays: Sequence[Array], heads: tuple[int, int], axis: MeshAxis, groups: int
) -> tuple[Callable[[Any], Pending], list[Array]]:
    """Of arrays that end with keys and values, how those of a group are received, and those that have arrived for all.

    A rank's only key head arrives first, for all groups of its query heads.
    """
    size = len(arrays) if heads[1] >= groups * axis.size else len(arrays) - 2

    def receive(group: Any) -> Pending:
        return ulysses.enter(of_heads(arrays[:size], group, groups, axis.size), axis)

    return receive, ulysses.enter(arrays[size:], axis).wait()


def rows_of(
    call: Call, score: Score, q: Array, sinks: Array | None, results: tuple[Array, Array], given: tuple[Array, Array]
) -> tuple[tuple[Any, ...], Array | None]:
    """The queries and the rows that the steps of a backward pass take, and the gradient of the sinks."""
    (out, lse), (dout, dlse) = results, given
    lse = jnp.where(lse == NEVER, 0, lse)  # of empty rows, so that exp(-inf - lse) has a derivative
    delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
    delta = delta - dlse if call.lse else delta
    rows = score.prepare(q, dout, lse, delta, out, dlse if call.lse else None)
    return rows, None if sinks is None else sink_gradient(sinks, lse, delta)


Step = Callable[..., tuple[SharedRecipe, Score, Visible]]  # of (q, k, v)


def gradients(step: Step, arrays: tuple[Array, Array, Array], rows: Sequence[Any]) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in float32; the first of the rows are the queries as the kernel wants them."""
    (recipe, score, visible), (_, k, v), (ready, *others) = step(*arrays), arrays, rows
    backward = gather_backward if recipe.gathers else ring_backward
    return backward(ready, k, v, recipe, visible, score, tuple(others))


def gradients_in_groups(
    axis: MeshAxis, groups: int, step: Step, arrays: tuple[Array, Array, Array], rows: Sequence[Any]
) -> list[Array]:
    """(dq, dk, dv) in the dtypes in which they leave."""
    q, k, v = arrays
    axis, (every, form) = axis.rotating, jax.tree.flatten((rows, arrays))
    receive, shared = of_groups(every, (q.shape[2], k.shape[2]), axis, groups)
    each = 3 - len(shared)  # of the gradients belong to a group, the others to all

    def work(group: Any, arrived: list[Array]) -> tuple[Any, Any, Any]:
        rows, local = jax.tree.unflatten(form, [*arrived, *shared])
        grads = gradients(step, local, rows)
        return [x.astype(y.dtype) for x, y in zip(grads[:each], arrays, strict=False)], (), grads[each:]

    leave = partial(ulysses.leave, axis=axis)
    returned, _, sums = one_ahead(receive, work, leave, groups, axis.size)
    return returned + leave([x.astype(y.dtype) for x, y in zip(sums, (k, v), strict=False)]).wait()
