"""What a call must satisfy: the first thing that is wrong, as a ValueError with the numbers and the remedy."""

import jax.numpy as jnp
from jax import Array

from ringattn.planning import Plan, check_heads
from ringattn.spec import AttentionSpec, Docs


def check(
    arrays: tuple[Array, Array, Array, Array | None],
    plan: Plan,
    lengths: tuple[int, int],
    spec: AttentionSpec,
    docs: Docs | None,
    key_docs: Docs | None,
) -> None:
    """`lengths` are how many tokens q and k must have: all of them, or one device's."""
    q, k, v, sinks = arrays
    problem = (
        of_arrays(q, k, v)
        or of_plan(q, k, v, plan, sinks)
        or of_lengths(q, k, plan, lengths, spec)
        or of_docs(q.shape[0], plan, docs, key_docs)
    )
    if problem:
        raise ValueError(problem)
    check_heads(q.shape[2], k.shape[2], ulysses=plan.ulysses, ring=plan.ring)


def of_arrays(q: Array, k: Array, v: Array) -> str | None:
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.ndim != 4:
            return f"{name} has shape {tuple(x.shape)}; expected 4 dims [batch, tokens, heads, head_dim]"
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            return f"{name} is {x.dtype}; attention takes float16, bfloat16, float32 or float64"
    if len({x.dtype for x in named.values()}) > 1:
        return ", ".join(f"{n} is {x.dtype}" for n, x in named.items()) + "; give all three the same dtype"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}"
    if k.shape[1:3] != v.shape[1:3]:
        return f"k has {k.shape[1]} tokens x {k.shape[2]} heads, v {v.shape[1]} x {v.shape[2]}; they must be the same"
    if q.shape[3] != k.shape[3]:
        return f"head dims differ: q {q.shape[3]}, k {k.shape[3]}; only v may have another"
    return None


def of_plan(q: Array, k: Array, v: Array, plan: Plan, sinks: Array | None) -> str | None:
    heads = q.shape[2], k.shape[2]
    if plan.heads is not None and plan.heads != heads:
        return f"q and k have {heads[0]} and {heads[1]} heads, the plan was made for heads={plan.heads}"
    if plan.head_dim is not None and plan.head_dim != q.shape[3]:
        return f"q has head dim {q.shape[3]}, the plan was made for head_dim={plan.head_dim}"
    if plan.value_dim is not None and plan.value_dim != v.shape[3]:
        return f"v has head dim {v.shape[3]}, the plan was made for value_dim={plan.value_dim}"
    if sinks is not None and (sinks.shape != heads[:1] or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        return f"sinks has shape {sinks.shape} and dtype {sinks.dtype}; expected one float a query head, {heads[:1]}"
    return None


def of_lengths(q: Array, k: Array, plan: Plan, lengths: tuple[int, int], spec: AttentionSpec) -> str | None:
    for name, x, part, length in (("q", q, plan, lengths[0]), ("k", k, plan.keys, lengths[1])):
        if x.shape[1] != length:
            whole = x.shape[1] == part.seq_len
            remedy = "pass plan.shard(x)" if whole else f"use plan.for_length(n) for another length than {part.seq_len}"
            return f"{name} has {x.shape[1]} tokens, this plan {length} ({part}); {remedy}"
    if spec.causal and plan.keys.seq_len != plan.seq_len:
        return (
            f"causal=True with {plan.seq_len} queries and {plan.keys.seq_len} keys: positions of two sequences have no "
            "common order; use AttentionSpec(causal=False)"
        )
    return None


def of_docs(batch: int, plan: Plan, docs: Docs | None, key_docs: Docs | None) -> str | None:
    if docs is None:
        return "key_docs needs docs: document i of the queries sees document i of the keys" if key_docs else None
    if plan.keys.seq_len != plan.seq_len and key_docs is None:
        return f"docs with {plan.seq_len} queries and {plan.keys.seq_len} keys: also say key_docs, the keys' documents"
    for name, packed, length in (("docs", docs, plan.seq_len), ("key_docs", key_docs, plan.keys.seq_len)):
        if packed is None:
            continue
        if packed.length != length:
            return (
                f"{name}: document lengths add up to {packed.length}, the sequence has {length} tokens; "
                f"if the rest is padding say Docs.from_lengths(lengths, pad_to={length})"
            )
        if packed.starts.shape[0] not in (1, batch):
            return f"{name} describes {packed.starts.shape[0]} rows, the batch has {batch}; give 1 row or {batch}"
    if key_docs is not None and key_docs.starts.shape != docs.starts.shape:
        return f"docs and key_docs must have the same number of documents: {docs} and {key_docs}"
    return None
