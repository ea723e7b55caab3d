"""What a call must satisfy: the first thing that is wrong, as a sentence with the numbers and the remedy."""

from torch import Tensor

from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    spec: AttentionSpec,
    docs: Docs | None,
    key_docs: Docs | None,
    sinks: Tensor | None,
) -> str | None:
    """None for a call that can be served."""
    return (
        of_tensors(q, k, v)
        or of_heads(q, k, v, plan, sinks)
        or of_lengths(q, k, plan, spec)
        or of_docs(q.shape[0], plan, docs, key_docs)
    )


def of_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if x.dim() != 4:
            return f"{name} has shape {tuple(x.shape)}; expected 4 dims [batch, tokens, heads, head_dim]"
        if not x.is_floating_point() or x.element_size() < 2:
            return f"{name} is {x.dtype}; attention takes float16, bfloat16, float32 or float64"
    if len({x.dtype for x in named.values()}) > 1:
        said = ", ".join(f"{n} is {x.dtype}" for n, x in named.items())
        return f"{said}; give all three the same dtype"
    if len({x.device for x in named.values()}) > 1:
        said = ", ".join(f"{n} is on {x.device}" for n, x in named.items())
        return f"{said}; put all three on one device"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}"
    if k.shape[1:3] != v.shape[1:3]:
        return f"k has {k.shape[1]} tokens x {k.shape[2]} heads, v {v.shape[1]} x {v.shape[2]}; they must be the same"
    if q.shape[3] != k.shape[3]:
        return f"head dims differ: q {q.shape[3]}, k {k.shape[3]}; only v may have another"
    return None


def of_heads(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None) -> str | None:
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        return f"{kv_heads} key heads do not divide {heads} query heads"
    if plan.heads is not None and plan.heads != (heads, kv_heads):
        return f"q and k have {heads} and {kv_heads} heads, the plan was made for heads={plan.heads}"
    if plan.head_dim is not None and plan.head_dim != q.shape[3]:
        return f"q has head dim {q.shape[3]}, the plan was made for head_dim={plan.head_dim}"
    if plan.value_dim is not None and plan.value_dim != v.shape[3]:
        return f"v has head dim {v.shape[3]}, the plan was made for value_dim={plan.value_dim}"
    if heads % plan.ulysses:
        best = max(u for u in range(1, plan.ulysses + 1) if heads % u == 0 and (plan.ring * plan.ulysses) % u == 0)
        return (
            f"ulysses={plan.ulysses} does not divide {heads} query heads; "
            f"use ulysses={best}, ring={plan.ring * plan.ulysses // best}"
        )
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not sinks.is_floating_point()):
        return (
            f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; expected one float a query head, ({heads},)"
        )
    if sinks is not None and sinks.device != q.device:
        return f"sinks is on {sinks.device}, q on {q.device}; put both on one device"
    return None


def of_lengths(q: Tensor, k: Tensor, plan: Plan, spec: AttentionSpec) -> str | None:
    for name, x, part in (("q", q, plan), ("k", k, plan.keys)):
        if x.shape[1] != part.local_len:
            whole = x.shape[1] == part.seq_len
            remedy = "pass plan.shard(x)" if whole else f"use plan.for_length(n) for another length than {part.seq_len}"
            return f"{name} has {x.shape[1]} tokens, a rank of this plan holds {part.local_len} ({part}); {remedy}"
    if spec.causal and plan.keys.seq_len != plan.seq_len:
        return (
            f"causal=True with {plan.seq_len} queries and {plan.keys.seq_len} keys: positions of two sequences have no "
            "common order; use AttentionSpec(causal=False), or prefill/decode with a cache"
        )
    return None


def of_docs(batch: int, plan: Plan, docs: Docs | None, key_docs: Docs | None) -> str | None:
    if docs is None:
        return "key_docs needs docs: document i of the queries sees document i of the keys" if key_docs else None
    other = plan.keys.seq_len != plan.seq_len
    if other and key_docs is None:
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
