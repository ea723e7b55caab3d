"""What calls must satisfy: shapes, the plan, lengths, documents and masks; and what cuts sequences or joins them."""

from typing import Any

from ringattn.check.arguments import of_arguments, of_dims, of_kinds
from ringattn.kernels.arrays import is_floating
from ringattn.masks.spec import AttentionSpec, Docs, whole
from ringattn.plans.plan import Plan
from ringattn.plans.sizes import groups_problem, heads_problem


def of_partials(a: Any, b: Any) -> str | None:
    if wrong := [x for x in (a, b) if getattr(x, "_fields", None) != ("out", "lse")]:
        return f"expected Partial(out, lse), got {type(wrong[0]).__name__}"
    if problem := of_kinds(*a, *b):
        return problem
    (out_a, lse_a), (out_b, lse_b) = ([tuple(x.shape) for x in side] for side in (a, b))
    if out_a == out_b and out_a[:-1] == lse_a == lse_b:
        return None
    return f"a has out {out_a} and lse {lse_a}, b has out {out_b} and lse {lse_b}; both must have the same rows"


def of_shapes(q: Any, k: Any, v: Any, linear: bool = False) -> str | None:
    """q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] match; in linear attention k's heads divide those of v."""
    if problem := of_dims(q=q, k=k, v=v):
        return problem
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}"
    if k.shape[1] != v.shape[1] or (k.shape[2] != v.shape[2] and not linear):
        return f"k has {k.shape[1]} tokens x {k.shape[2]} heads, v {v.shape[1]} x {v.shape[2]}; they must be the same"
    if q.shape[3] != k.shape[3]:
        return f"head dims differ: q {q.shape[3]}, k {k.shape[3]}; only v may have another"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if 0 in x.shape[2:]:
            return f"{name} has shape {tuple(x.shape)}; heads and head dim must be at least 1"
    return None


def of_batch(q: Any) -> str | None:
    return None if q.shape[0] else f"q has shape {tuple(q.shape)}; the batch must be at least 1"


def of_plan(q: Any, k: Any, v: Any, plan: Plan) -> str | None:
    """The heads can be spread over the ranks, and are those that the plan was made for."""
    heads = q.shape[2], k.shape[2]
    problem = heads_problem(*heads, ulysses=plan.ulysses, ring=plan.ring)
    if plan.heads is not None and plan.heads != heads:
        problem = f"q and k have {heads[0]} and {heads[1]} heads, the plan was made for heads={plan.heads}"
    if problem:
        return of_exchanged(q, k, plan) or problem
    for name, x, word, dim in (("q", q, "head_dim", plan.head_dim), ("v", v, "value_dim", plan.value_dim)):
        if dim not in (None, x.shape[3]):
            return f"{name} has head dim {x.shape[3]}, the plan was made for {word}={dim}"
    return groups_problem(plan.transport.groups, heads, plan.ulysses, plan.ring)


def of_exchanged(q: Any, k: Any, plan: Plan) -> str:
    """The problem if heads and tokens look exchanged, as in [batch, heads, tokens, head_dim]; else empty."""
    (tokens, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    lengths = plan.local_len, plan.seq_len, plan.tokens.padded_length
    grouped = heads == kv_heads > tokens > keys and tokens % keys == 0
    if plan.heads != (tokens, keys) and not grouped and (tokens in lengths or heads not in lengths):
        return ""
    return f"q has shape {tuple(q.shape)}, whose dims 1 and 2 look exchanged: pass q, k and v as x.transpose(1, 2)"


def of_dtypes(q: Any, k: Any, v: Any) -> str | None:
    """All three are floats of one dtype."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not is_floating(x) or x.dtype.itemsize < 2:
            return f"{name} is {x.dtype}; attention takes float16, bfloat16, float32 or float64"
    if len({x.dtype for x in named.values()}) > 1:
        return ", ".join(f"{n} is {x.dtype}" for n, x in named.items()) + "; give all three the same dtype"
    return None


def of_sinks(sinks: Any, heads: int) -> str | None:
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not is_floating(sinks)):
        return f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; expected one per query head, ({heads},)"
    return None


def of_lengths(
    q: Any, k: Any, plan: Plan, spec: AttentionSpec, lengths: tuple[int, int], docs: Docs | None = None,
    key_docs: Docs | None = None,
) -> str | None:  # fmt: skip
    """q and k have the right number of tokens: those of a rank, or in JAX outside of shard_map those of all ranks."""
    for name, x, side, length in (("q", q, plan, lengths[0]), ("k", k, plan.keys, lengths[1])):
        if x.shape[1] != length:
            uncut = x.shape[1] == side.seq_len
            remedy = "pass plan.shard(x)" if uncut else f"use plan.for_length(n) for another length than {side.seq_len}"
            holder = "a rank of this plan holds" if length == side.local_len else "this plan's order has"
            problem = f"{name} has {x.shape[1]} tokens, {holder} {length} ({side}); {remedy}"
            return of_exchanged(q, k, plan) or problem
    placed = spec.causal or spec.window is not None or spec.chunk is not None
    placed = placed and key_docs is None and (docs is None or docs.slices is None)
    if placed and plan.keys.seq_len != plan.seq_len:
        word = next(f"{n}={getattr(spec, n)}" for n in ("causal", "window", "chunk") if getattr(spec, n))
        return of_exchanged(q, k, plan) or (
            f"{word} with {plan.seq_len} queries and {plan.keys.seq_len} keys does not say which query is at "
            "which key; for cross attention pass spec=AttentionSpec(causal=False), for later tokens of a sequence use "
            "prefill and decode, and to align their last tokens pass "
            f"docs=Docs.from_lengths([{plan.seq_len}]), key_docs=Docs.from_lengths([{plan.keys.seq_len}])"
        )
    return None


def of_packed(name: str, packed: Docs | None, length: int, batch: int) -> str | None:
    """Documents, if there are any, cover `length` tokens, in one row or in one row per batch entry."""
    if packed is None:
        return None
    if packed.length != length:
        total = f"{name}: document lengths add up to {packed.length}, the sequence has {length} tokens"
        return f"{total}; if the rest is padding pass Docs.from_lengths(lengths, pad_to={length})"
    if packed.rows != 1 and packed.rows != batch:  # `in` knows no symbolic sizes
        return f"{name} describes {packed.rows} rows, the batch has {batch}; give 1 row or {batch}"
    return None


def of_docs(batch: int, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None) -> str | None:
    if docs is None:
        return "key_docs needs docs: document i of the queries sees document i of the keys" if key_docs else None
    queries, keys = plan.seq_len, plan.keys.seq_len
    if (key_docs is not None or queries != keys) and not (docs.plain and (key_docs is None or key_docs.plain)):
        return (
            f"{docs} with {queries} queries and {keys} keys: a mask, a prefix, spans and trees are of one sequence, "
            "whose queries are its keys; pad both to one length, and leave out key_docs and key_len"
        )
    if queries != keys and key_docs is None:
        return f"docs with {queries} queries and {keys} keys: also pass key_docs, the keys' documents"
    if spec.chunk is not None and key_docs is not None:
        return f"chunk={spec.chunk} with key_docs: blocks of positions are those of one sequence; leave out chunk"
    if key_docs is not None and key_docs.starts.shape != docs.starts.shape:
        return f"docs and key_docs must have the same number of documents: {docs} and {key_docs}"
    return of_packed("docs", docs, queries, batch) or of_packed("key_docs", key_docs, keys, batch)


def of_mask(mask: Any, docs: Any, key_docs: Any = None) -> str | None:
    if mask is None:
        return None
    names = ["docs"] * (docs is not None) + ["key_docs"] * (key_docs is not None)
    other = f"mask says who sees whom; leave out {' and '.join(names)}" if names else None
    return of_arguments(mask=mask) or other


def of_dim(x: Any, dim: Any) -> str | None:
    number = whole(dim)
    if number is not None and -x.ndim <= number < x.ndim:
        return None
    return f"dim={dim!r}: x has shape {tuple(x.shape)}; say which of its {x.ndim} dims is the sequence"


def of_whole(x: Any, dim: int, plan: Plan, part: int) -> str | None:
    """Dim `dim` of x has the whole sequence; `part`: how many tokens it has once it is sharded."""
    count = x.shape[dim]
    if count == plan.seq_len:
        return None
    hint = "it is already sharded: shard x once" if count == part else f"use plan.for_length({count})"
    return f"dim {dim} of x has {count} tokens, the plan is for {plan.seq_len}; {hint}"


def of_part(x: Any, dim: int, plan: Plan, part: int, holder: str) -> str | None:
    """Dim `dim` of x has as many tokens as what `plan.shard` gives."""
    count = x.shape[dim]
    if count == part:
        return None
    hint = "; x is the whole sequence: pass plan.shard(x)" if count == plan.seq_len else ""
    return f"dim {dim} of x has {count} tokens; {holder} {part} ({plan}){hint}"


def of_roll(x: Any, dim: int, plan: Plan, shift: Any, docs: Docs | None) -> str | None:
    if whole(shift) is None:
        return f"shift={shift!r}: how many places tokens move, a whole number"
    problem = of_arguments(docs=docs) or of_packed("docs", docs, plan.seq_len, x.shape[0])
    if problem is None and docs is not None and docs.rows > 1 and dim % x.ndim == 0:
        return f"dim={dim!r}: {docs} are of the rows of dim 0, which cannot also be the sequence"
    return problem
