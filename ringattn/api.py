"""The public functions: each finds the framework of its arguments and calls that framework's function of that name."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ringattn.check.arguments import LINEAR, of_arguments, of_arrays, of_returned, of_unknown
from ringattn.check.attention import of_mask, of_partials
from ringattn.check.linear import Given, Settings
from ringattn.kernels.arrays import is_torch
from ringattn.kernels.partial import Partial
from ringattn.kernels.partial import merge as merged
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.plans.plan import Plan
from ringattn.serving import KVCache


def attention(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan | None = None,
    *,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    mask: Mask | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, exact, whichever rank holds which part of it.

    q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] are this rank's tokens under `plan` (see `Plan.shard`); G divides
    H. Without a plan they are the whole sequence: on one device, or, for jax arrays, on the mesh of their sharding.
    Returns out [B, T, H, V] in q's dtype, and with `return_lse` also lse [B, T, H], the natural log-sum-exp in float32,
    differentiable.

    spec      causal, window, chunk, first, softcap, scale; causal by default
    docs      packed documents, the same on every rank, perhaps with a prefix, with spans, or as segments of trees;
              `key_docs`: those of the keys, if keys are another sequence. The last query of a document is at the
              position of its last key: with Lq queries and Lk keys, causal, query i sees the keys up to i + Lk - Lq,
              and the first Lq - Lk queries see none
    mask      slices of queries and keys, instead of docs (which may be one too) and of causal: a query sees what is in
              a slice and also in the spec's window, chunk or first keys; `window=n` takes away only keys before the
              last n
    sinks     [H], one logit per head that takes part in the softmax with a value of zero
    """
    if unknown or mask is not None:
        refuse(of_unknown("attention", unknown) or of_mask(mask, docs, key_docs), plan)
        docs = docs if mask is None else mask
    function: Any  # import statements, since torch.compile cannot trace import_module
    if is_torch(q):  # torch checks the arguments of each new kind of call
        from ringattn.torch.attention.public import attention as function
    else:
        problem = of_arguments(plan=plan, spec=spec, docs=docs, key_docs=key_docs, return_lse=return_lse)
        refuse(problem or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan), plan)
        from ringattn.jax import attention as function
    return function(q, k, v, plan, spec=spec, docs=docs, key_docs=key_docs, sinks=sinks, return_lse=return_lse)


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any = None,
    plan: Plan | None = None,
    *,
    beta: Any = None,
    initial_state: Any = None,
    return_state: bool | str = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
    **unknown: Any,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t, over the whole sequence, exact.

    u_t is v_t: gated linear attention. With `beta` it is beta_t (v_t - k_t exp(log_decay_t) S_{t-1}): the delta rule,
    as in DeltaNet, Gated DeltaNet and Kimi Delta Attention. k is used as it is; these models normalise it before.

    q, k [B, T, G, K] and v [B, T, H, V] are this rank's tokens under `plan`, whose layout is contiguous or zigzag;
    without a plan they are the whole sequence. G divides H. Returns out [B, T, H, V] in q's dtype, and with
    `return_state` also the state after the last token [B, H, K, V], the same on every rank, in float32 (float64 for
    float64 inputs); with documents perhaps the state behind each of them, [documents, H, K, V].

    log_decay       [B, T, H, K] one gate per key channel, [B, T, H] one per head, None for no decay; natural logarithm,
                    at most 0; -inf forgets all
    beta            [B, T, H], in [0, 2]
    initial_state   the state before the first token, the same on every rank; its gradient is this rank's share (for
                    global JAX arrays: all of it). With docs it may be the state before each document
    return_state    True, False, or with docs "documents": the state behind each document's last token. True means the
                    same if initial_state is one a document. The state behind an empty document is that before it
    docs            packed documents: where one begins the state is its initial state; if initial_state is one a row,
                    it is that of the row's first document, even an empty one, and zero for the others. States of
                    documents come row by row, as many for each row: document i of row b has number
                    b * (documents of a row) + i, and rows with fewer end in empty ones
    scale           of q; 1 / sqrt(K) by default
    kernel          auto, triton or chunkwise; in JAX auto, pallas (TPUs) or chunkwise
    scan            how states travel from rank to rank: auto, gather, ring or pipeline
    check           check every gate and beta, which waits for the device; by default on CPUs only
    """
    if unknown:
        refuse(of_unknown("linear_attention", unknown, LINEAR), plan)
    x, asked = Given(q, k, v, log_decay, beta, initial_state), Settings(docs, scale, kernel, scan, check, return_state)
    function: Any
    if is_torch(q):
        from ringattn.torch.linear.public import linear_attention as function
    else:
        optional = {"log_decay": log_decay, "beta": beta, "initial_state": initial_state}
        problem = of_arguments(plan=plan, docs=docs, check=check) or of_returned(return_state, docs)
        refuse(problem or of_arrays({"q": q, "k": k, "v": v}, optional, plan), plan)
        from ringattn.jax.linear.function import linear_attention as function
    return function(x, plan, asked)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys, exact, from the partials of both; differentiable.

    out [B, T, H, V] and lse [B, T, H] come from `attention` with return_lse=True. A row whose lse is
    -inf has seen no key.
    """
    raise_if(of_partials(a, b))
    return merged(a, b)


def prefill(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Any = None,
    move: str = "auto",
    keys: int | None = None,
    **unknown: Any,
) -> Any:
    """Append a chunk of the prompt to the cache and attend to everything so far. Returns out; in JAX (out, cache).

    q, k and v are this rank's part of the chunk under `plan`, which is the cache's plan `for_length(chunk)`. Not
    differentiable.

    move      what travels: "queries", "keys", or "auto", which leaves less time exposed
    keys      the most keys of a rank that are attended to, or sent, at once
    """
    problem = of_unknown("prefill", unknown) or of_arguments(required=True, plan=plan, cache=cache)
    function = inference(problem, q, k, v, getattr(cache, "plan", plan), spec, sinks).prefill
    return function(q, k, v, plan, cache, spec=spec, sinks=sinks, move=move, keys=keys)


def decode(
    q: Any, k: Any, v: Any, cache: KVCache, *, spec: AttentionSpec | None = None, sinks: Any = None,
    parents: Sequence[int] | None = None, **unknown: Any,
) -> Any:  # fmt: skip
    """Append the next tokens, the same on every rank, to the cache and attend: out; in JAX (out, cache).

    Several tokens see each other causally. In torch `parents` makes them a tree of drafts: each sees the cache, its
    parent (the number of a token before it, or -1 for none), the parent of that, and so on, and is at the position of
    its depth. Then truncate the cache, and append the keys of the branch that is accepted. Not differentiable.
    """
    plan = getattr(cache, "plan", None)
    function = inference(of_arguments(required=True, cache=cache), q, k, v, plan, spec, sinks).decode
    return function(q, k, v, cache, spec=spec, sinks=sinks, parents=parents, **unknown)


def inference(problem: str | None, q: Any, k: Any, v: Any, plan: Any, spec: Any, sinks: Any) -> Any:
    """The module of inference of the array's framework; raises if the arguments are wrong.

    That of torch checks the arguments of each new kind of call.
    """
    torch = is_torch(q)
    if not torch:
        problem = problem or of_arguments(spec=spec) or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    refuse(problem, plan)
    framework = "torch" if torch else "jax"  # import_module: another thread may have imported half of it
    return import_module(f"ringattn.{framework}.inference.function")


def refuse(problem: str | None, plan: Any) -> None:
    """Raise the problem, if there is one: on all ranks of a torch plan, although only some may have noticed it."""
    if problem and isinstance(plan, Plan) and plan.framework == "torch":
        from ringattn.torch import agree

        agree.refuse(problem, plan)
    raise_if(problem)
