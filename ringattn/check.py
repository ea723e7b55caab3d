"""Checks of a call by shapes alone. Each returns the first problem, with its numbers and the remedy, or None.

They work on tensors of any framework and read only shapes; ringattn.torch and ringattn.jax check dtypes and devices.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringattn.planning import Plan
from ringattn.segments import segments_problem
from ringattn.sizes import dtype_name, groups_problem, heads_problem
from ringattn.slices import Mask
from ringattn.spec import AttentionSpec, Docs, is_number, is_traced, of_factor, whole
from ringattn.transport import Transport

PACKED = Docs, "pass Docs.from_lengths([...]) or Docs.from_cu_seqlens(...)"
SAY = "pass True or False"
MANY_HEADS = 512
WORDS: dict[str, tuple[type, str]] = {
    "plan": (Plan, "make one with ringattn.plan(mesh, seq_len=...)"),
    "spec": (AttentionSpec, "pass AttentionSpec(causal=..., window=..., chunk=..., softcap=..., scale=...)"),
    "docs": PACKED,
    "key_docs": PACKED,
    "mask": (Mask, "make one with ringattn.Mask.from_slices(q_ranges, k_ranges, kinds, total)"),
    "transport": (Transport, "give Transport(route=..., hosts=..., together=..., groups=..., ...)"),
    "return_lse": (bool, SAY),
    "check": (bool, SAY),
}


def of_arguments(required: bool = False, **words: Any) -> str | None:
    """Arguments that are no tensors have the types that their names require."""
    for name, value in words.items():
        kind, remedy = WORDS[name]
        if (value is not None or required) and not isinstance(value, kind):
            other = next((word for word, (its, _) in WORDS.items() if isinstance(value, its) and its is not bool), None)
            return f"{name} is of type {type(value).__name__}; {remedy if other is None else f'pass it as {other}='}"
    return None


BY_PARENTS = "a tree of drafts is parents=[...], the number of each token's parent, or -1"
NO_DROPOUT = "attention dropout is not supported: it has no exact form over ranks"
NO_ALIBI = "ALiBi is not supported: use rotary positions (plan.positions())"
MASKS = "masks are those of spec=, docs= and mask=ringattn.Mask.from_slices(...)"
NO_BIAS = f"an additive bias is not supported: {MASKS}"
NO_MASK = f"an arbitrary mask is not supported: {MASKS}"
BY_PLAN = "pass plan=ringattn.plan(mesh, seq_len=...)"
ALWAYS_CAUSAL = "linear attention is causal, over all tokens; leave it out"
REFUSED = {  # other libraries' arguments
    **dict.fromkeys(("dropout", "dropout_p"), NO_DROPOUT),
    **dict.fromkeys(("alibi", "alibi_slopes"), NO_ALIBI),
    **dict.fromkeys(("bias", "attn_bias"), NO_BIAS),
    "attn_mask": NO_MASK,
}
INSTEAD = {  # of those, the ones that an argument of ours replaces
    "spec": {
        **dict.fromkeys(("causal", "is_causal"), "pass spec=AttentionSpec(causal=...)"),
        **dict.fromkeys(("window", "window_size"), "pass spec=AttentionSpec(window=...)"),
        "softcap": "pass spec=AttentionSpec(softcap=...)",
        **dict.fromkeys(("scale", "softmax_scale"), "pass spec=AttentionSpec(scale=...)"),
        "enable_gqa": "k and v may always have fewer heads than q; leave it out",
    },
    "plan": dict.fromkeys(("mesh", "device_mesh", "group", "process_group", "cp_group"), BY_PLAN),
    "docs": {"cu_seqlens": "pass docs=Docs.from_cu_seqlens(...)"},
    "transport": dict.fromkeys(
        ("route", "hosts", "together", "groups", "grads"), "it is part of transport=Transport(...)"
    ),
    "log_decay": {
        **dict.fromkeys(("g", "gk", "gate", "gates", "decay"), "pass log_decay=, the logarithm of the decay"),
        **dict.fromkeys(("causal", "is_causal", "spec", "window"), ALWAYS_CAUSAL),
        "output_final_state": "pass return_state=True",
    },
    "tree": dict.fromkeys(("tree", "tree_mask", "tree_attention_mask"), f"pass parents=: {BY_PARENTS}"),
}


def of_unknown(function: str, unknown: dict[str, Any], *takes: str) -> str | None:
    """Every argument that a function does not take, and what to use instead, out of what it `takes`."""
    if not unknown:
        return None
    known = dict(REFUSED)
    for argument in takes:
        known |= INSTEAD[argument]
    return "; ".join(f"{name}: {known.get(name, f'{function} has no such argument')}" for name in unknown)


def kind(x: Any) -> str | None:
    """The framework of an array: "torch", "jax", or None."""
    for name, array in (("torch", "Tensor"), ("jax", "Array")):
        if name in sys.modules and isinstance(x, getattr(sys.modules[name], array)):
            return name
    return None


def of_kinds(*arrays: Any) -> str | None:
    """All are tensors of one framework."""
    kinds = [kind(x) for x in arrays]
    if kinds[0] is not None and kinds.count(kinds[0]) == len(kinds):
        return None
    return f"expected torch tensors or jax arrays, got {', '.join(type(x).__name__ for x in arrays)}"


def of_partials(a: Any, b: Any) -> str | None:
    """Two partials over the same rows."""
    for name, x in (("a", a), ("b", b)):
        if getattr(x, "_fields", None) != ("out", "lse"):
            return f"{name} is of type {type(x).__name__}; pass Partial(out, lse)"
    if found := of_kinds(*a, *b):
        return found
    (out_a, lse_a), (out_b, lse_b) = ([tuple(x.shape) for x in side] for side in (a, b))
    if out_a == out_b and out_a[:-1] == lse_a == lse_b:
        return None
    return (
        f"a has out {out_a} and lse {lse_a}, b has out {out_b} and lse {lse_b}; both must have the same rows: "
        "out [batch, tokens, heads, value_dim], lse [batch, tokens, heads]"
    )


def of_arrays(arrays: dict[str, Any], optional: dict[str, Any], plan: Plan | None = None) -> str | None:
    """All are tensors of one framework, that of the plan; the required ones have 4 dims."""
    if found := of_kinds(*arrays.values()):
        return found
    framework: Any = kind(next(iter(arrays.values())))
    what = {"torch": "a torch tensor", "jax": "a jax array"}[framework]
    for name, x in optional.items():
        if x is not None and kind(x) != framework:
            remedy = "pass it as plan=" if isinstance(x, Plan) else f"it must be {what}, as {next(iter(arrays))} is"
            return f"{name} is of type {type(x).__name__}; {remedy}"
    if plan is not None and plan.framework != framework:
        devices = {"torch": "a torch mesh, or none", "jax": "a mesh of jax devices"}[framework]
        return (
            f"the plan was made for a {plan.framework} mesh, and {next(iter(arrays))} is {what}; give plan() {devices}"
        )
    return of_dims(**arrays)


def of_dims(**arrays: Any) -> str | None:
    for name, x in arrays.items():
        if getattr(x, "is_nested", False):
            return f"{name} is a nested tensor; put its rows one after the other and pass docs=Docs.from_lengths(...)"
        if hasattr(x, "to_local"):
            return f"{name} is a DTensor; give {name}.to_local(), this rank's tokens under the plan"
        if len(x.shape) != 4:
            return f"{name} has shape {tuple(x.shape)}; expected 4 dims [batch, tokens, heads, head_dim]"
    return None


def has_shape(x: Any, *shapes: Any) -> bool:
    """Whether x has one of these shapes. While torch.compile traces, `in` knows no symbolic sizes; == does."""
    return any([tuple(x.shape) == shape for shape in shapes])


def of_choice(name: str, value: Any, choices: Sequence[str]) -> str | None:
    if isinstance(value, str) and value in choices:
        return None
    return f"{name}={value!r}: choose one of {', '.join(choices)}"


def of_shapes(q: Any, k: Any, v: Any, linear: bool = False) -> str | None:
    """q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] match; in linear attention k's heads divide those of v."""
    if found := of_dims(q=q, k=k, v=v):
        return found
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
    if plan.heads is not None and plan.heads != heads:
        found = f"q and k have {heads[0]} and {heads[1]} heads, the plan was made for heads={plan.heads}"
        return of_exchanged(q, k, plan) or found
    if plan.head_dim is not None and plan.head_dim != q.shape[3]:
        return f"q has head dim {q.shape[3]}, the plan was made for head_dim={plan.head_dim}"
    if plan.value_dim is not None and plan.value_dim != v.shape[3]:
        return f"v has head dim {v.shape[3]}, the plan was made for value_dim={plan.value_dim}"
    problem = heads_problem(*heads, ulysses=plan.ulysses, ring=plan.ring)
    if problem:
        return of_exchanged(q, k, plan) or problem
    return groups_problem(plan.transport.groups, heads[1], plan.ulysses)


def of_exchanged(q: Any, k: Any, plan: Plan) -> str:
    """The problem if heads and tokens look exchanged, as in [batch, heads, tokens, head_dim]; else empty."""
    (tokens, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    lengths = plan.local_len, plan.seq_len, plan.tokens.padded_length
    grouped = heads == kv_heads > tokens > keys and tokens % keys == 0
    if plan.heads != (tokens, keys) and not grouped and (tokens in lengths or heads not in lengths):
        return ""
    return (
        f"q has shape {tuple(q.shape)}, whose dims 1 and 2 look exchanged: expected [batch, tokens, heads, head_dim], "
        "so pass q, k and v as x.transpose(1, 2)"
    )


def warn_of_exchanged(q: Any, stacklevel: int) -> None:
    """Warn where a call is valid, but its dims 1 and 2 look exchanged: no model has so many heads."""
    tokens, heads = q.shape[1:3]
    if heads > MANY_HEADS and heads > tokens:
        warnings.warn(
            f"q has shape {tuple(q.shape)}: {tokens} tokens and {heads} heads; if dims 1 and 2 are exchanged, pass "
            "q, k and v as x.transpose(1, 2)",
            stacklevel=stacklevel,
        )


def of_sinks(sinks: Any, heads: int, floating: bool) -> str | None:
    """One float per query head."""
    if tuple(sinks.shape) != (heads,) or not floating:
        return f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; expected one per query head, ({heads},)"
    return None


def of_lengths(
    q: Any, k: Any, plan: Plan, spec: AttentionSpec, held: tuple[int, int], key_docs: Docs | None = None
) -> str | None:
    """q and k have the right number of tokens: those of a rank, or in JAX outside of shard_map those of all ranks."""
    for name, x, part, length in (("q", q, plan, held[0]), ("k", k, plan.keys, held[1])):
        if x.shape[1] != length:
            uncut = x.shape[1] == part.seq_len
            remedy = "pass plan.shard(x)" if uncut else f"use plan.for_length(n) for another length than {part.seq_len}"
            holder = "a rank of this plan holds" if length == part.local_len else "this plan's order has"
            found = f"{name} has {x.shape[1]} tokens, {holder} {length} ({part}); {remedy}"
            return of_exchanged(q, k, plan) or found
    placed = spec.causal or spec.window is not None or spec.chunk is not None
    if placed and plan.keys.seq_len != plan.seq_len and key_docs is None:
        word = next(f"{n}={getattr(spec, n)}" for n in ("causal", "window", "chunk") if getattr(spec, n))
        return of_exchanged(q, k, plan) or (
            f"{word} with {plan.seq_len} queries and {plan.keys.seq_len} keys does not say which query is at "
            "which key; for cross attention pass spec=AttentionSpec(causal=False), for later tokens of a sequence use "
            "prefill and decode, and to align their last tokens pass "
            f'docs=Docs.from_lengths([{plan.seq_len}]), key_docs=Docs.from_lengths([{plan.keys.seq_len}]), align="end"'
        )
    return None


def of_packed(name: str, packed: Docs | None, length: int, batch: int) -> str | None:
    """Documents, if there are any, cover `length` tokens, in one row or in one row per batch entry."""
    if packed is None:
        return None
    if packed.length != length:
        return (
            f"{name}: document lengths add up to {packed.length}, the sequence has {length} tokens; "
            f"if the rest is padding pass Docs.from_lengths(lengths, pad_to={length})"
        )
    if packed.starts.shape[0] != 1 and packed.starts.shape[0] != batch:
        rows = f"1 row or {batch}" if batch > 1 else "1 row"
        return f"{name} describes {packed.starts.shape[0]} rows, the batch has {batch}; give {rows}"
    return None


def of_docs(batch: int, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None) -> str | None:
    """Documents cover the sequence, in one row or in one row per batch entry."""
    if docs is None:
        return "key_docs needs docs: document i of the queries sees document i of the keys" if key_docs else None
    if key_docs is not None and not (docs.plain and key_docs.plain):
        return "docs and key_docs: a prefix, spans, trees and slices are of one sequence, whose queries are its keys"
    if spec.chunk is not None and key_docs is not None:
        return f"chunk={spec.chunk} with key_docs: blocks of positions are those of one sequence; leave out chunk"
    if plan.keys.seq_len != plan.seq_len and key_docs is None:
        return f"docs with {plan.seq_len} queries and {plan.keys.seq_len} keys: also pass key_docs, the keys' documents"
    found = of_packed("docs", docs, plan.seq_len, batch) or of_packed("key_docs", key_docs, plan.keys.seq_len, batch)
    if found:
        return found
    if key_docs is not None and key_docs.starts.shape != docs.starts.shape:
        return f"docs and key_docs must have the same number of documents: {docs} and {key_docs}"
    return None


def of_aligned(align: Any, spec: AttentionSpec | None, docs: Any, key_docs: Any) -> str | None:
    """Why `align` is wrong, or missing: causal documents with other numbers of queries than keys need it; else None."""
    if align not in (None, "end"):
        return f'align={align!r}: "end" puts the last query of a document at its last key, else leave it out'
    if not isinstance(docs, Docs) or not isinstance(key_docs, Docs):
        return None if align is None else f"align={align!r} is for docs with key_docs; leave it out"
    spec, queries, keys = AttentionSpec() if spec is None else spec, docs.starts, key_docs.starts
    placed = isinstance(spec, AttentionSpec) and (spec.causal or spec.window is not None)
    refused = not (docs.plain and key_docs.plain) or queries.shape != keys.shape or not placed or spec.chunk is not None
    if align is not None or refused:  # for another reason
        return None
    if not (is_traced(queries) or is_traced(keys)) and (np.diff(queries) == np.diff(keys)).all():
        return None
    return (
        "docs and key_docs have other numbers of queries than of keys and do not say which query is at which key, as "
        'causal and windows need; pass align="end" for the last query of a document at its last key, or '
        "spec=AttentionSpec(causal=False)"
    )


def of_linear(
    q: Any, k: Any, v: Any, log_decay: Any, beta: Any, plan: Plan, docs: Docs | None, held: int | None = None
) -> str | None:
    """q, k [B, T, G, K], v [B, T, H, V], gates and beta match, and each rank's segments are consecutive tokens.

    `held` is the number of tokens that they must have; by default that of a rank.
    """
    held = plan.local_len if held is None else held
    if docs is not None and not docs.plain:
        return f"{docs}: linear attention takes documents alone; leave out prefix, spans, trees and slices"
    found = of_shapes(q, k, v, linear=True) or of_batch(q)
    if found:
        return found
    if q.shape[2] != k.shape[2]:
        return f"q has {q.shape[2]} heads, k {k.shape[2]}; linear attention needs as many query heads as key heads"
    if v.shape[2] % k.shape[2]:
        return f"k has {k.shape[2]} heads, v {v.shape[2]}; the key heads must divide the value heads"
    if q.shape[1] != k.shape[1]:
        return f"q has {q.shape[1]} tokens, k {k.shape[1]}; linear attention needs as many keys as queries"
    heads = tuple(v.shape[:3])
    if log_decay is not None and not has_shape(log_decay, (*heads, k.shape[3]), heads):
        return (
            f"log_decay has shape {tuple(log_decay.shape)}; expected {(*heads, k.shape[3])}, a gate for every key "
            f"channel, or {heads}, one for every head"
        )
    if beta is not None and tuple(beta.shape) != heads:
        return f"beta has shape {tuple(beta.shape)}; expected {heads}, one for every token and value head"
    if problem := segments_problem(plan):
        return problem
    if plan.keys is not plan:
        return f"the plan has {plan.seq_len} queries and {plan.keys.seq_len} keys; linear attention needs as many"
    return of_lengths(q, k, plan, AttentionSpec(), (held, held)) or of_docs(
        q.shape[0], plan, AttentionSpec(), docs, None
    )


def wrong_number(name: str, at: tuple[int, ...], value: float) -> str:
    """What is wrong with this gate or beta."""
    if name == "beta":
        return (
            f"beta{list(at)} = {value:g}: beta is in [0, 2], as sigmoid or 2 * sigmoid gives it; outside of it the "
            "state grows without bound"
        )
    return (
        f"log_decay{list(at)} = {value:g}: a log decay is at most 0, as logsigmoid gives it (of a decay in [0, 1] pass "
        "decay.log()); growth overflows"
    )


def of_scale(scale: float | None, key_dim: int) -> str | None:
    return of_factor("scale", scale, f"None for 1 / sqrt({key_dim})")


def of_state(name: str, state: Any, q: Any, v: Any, dtype: Any, docs: Docs | None = None) -> str | None:
    """A state is [B, H, K, V] in the dtype of states, or with documents [documents, H, K, V], one a document."""
    rows, sizes = v.shape[0], (v.shape[2], q.shape[3], v.shape[3])
    expected = [(rows, *sizes)] + ([] if docs is None else [(rows * width_of(docs), *sizes)])
    if not has_shape(state, *expected):
        found = f"{name} has shape {tuple(state.shape)}; expected {expected[0]}: batch, heads, key dim, value dim"
        if docs is not None and len(set(expected)) > 1:
            found += (
                f"; or {expected[1]}, one a document: {rows} x {width_of(docs)} documents (a row with fewer ends in "
                "empty ones, which count too)"
            )
        return found
    if state.dtype != dtype:
        return f"{name} is {state.dtype}; the state of {q.dtype} inputs is {dtype_name(dtype)}: cast it to that"
    return None


def width_of(docs: Docs) -> int:
    """How many documents each row has, empty ones included."""
    return docs.starts.shape[1] - 1


def of_returned(return_state: Any, docs: Docs | None) -> str | None:
    """`return_state` is True, False or "documents"."""
    if return_state is None or isinstance(return_state, bool):
        return None
    if not (isinstance(return_state, str) and return_state == "documents"):
        kind = type(return_state).__name__
        return f"return_state is of type {kind}; {SAY}, or 'documents' for the state behind each document"
    if docs is None:
        return "return_state='documents' without docs: there is one state a row; pass docs, or return_state=True"
    return None


def returned_states(return_state: bool | str, initial_state: Any, docs: Docs | None, batch: int) -> str:
    """Which states a call returns: "" for none, one behind each of the "rows", or one behind each of the "documents".

    Rows of one document each have the same states either way, so no shape has two meanings.
    """
    if not return_state or docs is None or width_of(docs) == 1:
        return "rows" if return_state else ""
    return "documents" if return_state == "documents" or by_document(initial_state, docs, batch) else "rows"


def by_document(initial_state: Any, docs: Docs | None, batch: int) -> bool:
    """Whether a state of the right shape is one a document, of rows of several documents."""
    if initial_state is None or docs is None or width_of(docs) == 1:
        return False
    return bool(initial_state.shape[0] == batch * width_of(docs))


def each(given: Any, rows: int) -> list[int] | None:
    """A whole number for each row, from one for all rows or one per row; None for anything else."""
    given = given.tolist() if hasattr(given, "tolist") else given
    many = list(given) if isinstance(given, (list, tuple)) else [given] * rows
    found = [n for n in map(whole, many) if n is not None]
    return found if len(found) == len(many) == rows else None


def of_start(start: int | Sequence[int] | None, lengths: np.ndarray | None) -> str | None:
    """A chunk begins where the rows of its cache end, if both are known."""
    if start is None or lengths is None:
        return None
    if each(start, len(lengths)) is None:
        return f"start={start!r}: where the chunk begins, one whole number, or one for each of {len(lengths)} rows"
    if (np.asarray(start) == lengths).all():
        return None
    word = "skips" if (np.asarray(start) > lengths).any() else "overlaps"
    return f"a chunk at {start} {word} positions: the rows of the cache end at {lengths.tolist()}"


def of_kept(name: str, x: Any, mine: Any) -> str | None:
    """New tokens [B, n, G, D] have the shape of the tokens in a cache."""
    if len(x.shape) == 4 and (x.shape[0], *x.shape[2:]) == (mine.shape[0], *mine.shape[2:]):
        return None
    B, _, G, D = mine.shape
    hint = ": dims 1 and 2 look exchanged" if len(x.shape) == 4 and x.shape[1] == G else ""
    return f"{name} has shape {tuple(x.shape)}; this cache takes [{B}, tokens, {G}, {D}]{hint}"


def of_pair(k: Any, v: Any) -> str | None:
    """There is at least one new token, and each has a key and a value."""
    if k.shape[1] == v.shape[1] > 0:
        return None
    return f"k has {k.shape[1]} tokens, v {v.shape[1]}; every new token has both, and there must be at least one"


def of_sizes(**sizes: Any) -> str | None:
    """Whole numbers of at least 1."""
    wrong = (name for name, value in sizes.items() if (whole(value) or 0) < 1)
    return next((f"{name}={sizes[name]!r}: at least 1, a whole number" for name in wrong), None)


def of_memory(room: Any, **sizes: Any) -> str | None:
    """The sizes of a cache; value_dim, window and room are optional."""
    found = of_sizes(**{n: x for n, x in sizes.items() if x is not None or n not in ("value_dim", "window")})
    if found is None and room is not None and (whole(room) is None or room < 0):
        return f"room={room!r}: the longest chunk that will be appended at once, a whole number"
    return found


def of_fork(copies: Any, max_len: Any, lengths: np.ndarray | None) -> str | None:
    """There are copies, and the rows fit in them."""
    found = of_sizes(copies=copies, max_len=max_len)
    if found is None and lengths is not None and max_len < lengths.max():
        return f"max_len={max_len}: the rows hold up to {lengths.max()} tokens already; pass more, or truncate first"
    return found


def of_saved(state: Any, *names: str) -> str | None:
    """A state has all the entries that a cache of this framework saves."""
    missing = [name for name in names if not isinstance(state, dict) or name not in state]
    return f"the state has no {', '.join(missing)}; pass what state_dict() of such a cache gave" if missing else None


def of_loaded(state: dict[str, Any], cache: Any, lengths: np.ndarray | None) -> str | None:
    """A saved state comes from a cache with this one's shapes and window, and its rows fit, if they are known."""
    if state["window"] != cache.window:
        return f"the state is of a cache with window={state['window']}, this one's is {cache.window}; allocate it so"
    if state["k"].shape != cache.k.shape or state["v"].shape != cache.v.shape:
        return f"the state holds k {tuple(state['k'].shape)}, this cache {tuple(cache.k.shape)}"
    if (state["k"].dtype, state["v"].dtype) != (cache.k.dtype, cache.v.dtype):
        return f"the state is of {state['k'].dtype}, this cache of {cache.k.dtype}; allocate it with that"
    if lengths is None:
        return None
    if lengths.shape != tuple(cache.lengths.shape) or lengths.dtype.kind != "i" or lengths.min() < 0:
        return f"the state's lengths are {lengths.tolist()}; expected a whole number of at least 0 for each row"
    if lengths.max() > cache.max_len:
        return f"the state's rows hold up to {lengths.max()} tokens, this cache max_len={cache.max_len}; allocate more"
    return None


def of_truncated(given: Any, rows: int) -> str | None:
    """One length for all rows, or one per row."""
    if each(given, rows) is not None:
        return None
    return f"truncate to {given!r}: one whole number, or one for each of {rows} rows"


def of_keys(keys: Any) -> str | None:
    """How many keys at once; optional."""
    if keys is None or (whole(keys) or 0) >= 1:
        return None
    return f"keys={keys!r}: the most keys at once, at least 1, a whole number"


def of_filled(lengths: np.ndarray | None) -> str | None:
    """There is something to decode after, if that is known."""
    if lengths is None or all(lengths.tolist()):  # faster than numpy for a few numbers
        return None
    return f"decode before prefill: the cache holds {lengths.tolist()} tokens; prefill a prompt first"


def of_room(n: int, lengths: np.ndarray | None, max_len: int) -> str | None:
    if lengths is None or max(lengths.tolist()) + n <= max_len:
        return None
    return (
        f"{n} more token{'s do' if n > 1 else ' does'} not fit: rows hold up to {lengths.max()} of "
        f"max_len={max_len}; allocate a larger max_len, or truncate"
    )


def beside_window(n: int, window: int, apart: int = 0) -> str:
    """`apart`: how many tokens the longest row has more than the shortest one."""
    rows = f" in rows whose lengths differ by {apart}" * (apart > 0)
    return (
        f"{n} tokens at once do not fit beside a window of {window}{rows}; allocate(room={n + apart}), or append fewer "
        "at once"
    )


def of_mask(mask: Any, spec: AttentionSpec | None, docs: Any, key_docs: Any = None) -> str | None:
    """A mask of slices replaces documents, and all that a spec says of who sees whom."""
    if mask is None:
        return None
    if found := of_arguments(mask=mask):
        return found
    names = ["docs"] * (docs is not None) + ["key_docs"] * (key_docs is not None)
    names += [name for name in ("window", "chunk", "first") if spec is not None and getattr(spec, name, None)]
    return f"mask says who sees whom; leave out {' and '.join(names)}" if names else None


def drafts(parents: Any) -> tuple[int, ...] | None:
    """Parents as plain numbers."""
    return None if parents is None else tuple(map(int, parents))


def of_parents(parents: Any, tokens: int) -> str | None:
    """The parents of a tree of drafts: one number for each token, of a token before it, or -1."""
    if parents is None:
        return None
    if not isinstance(parents, (list, tuple)) or not all(is_number(n, -1) for n in parents):
        return f"parents={parents!r}: {BY_PARENTS}, as a list"
    if len(parents) != tokens:
        return f"parents has {len(parents)} numbers for {tokens} tokens; {BY_PARENTS}"
    if wrong := [i for i, parent in enumerate(parents) if parent >= i]:
        return f"parents are not a tree: token {wrong[0]} has parent {parents[wrong[0]]}, which does not come before it"
    return None


def of_window(kept: int | None, spec: AttentionSpec) -> str | None:
    """A cache that keeps a window serves specs that see no further back."""
    if kept is not None and spec.first:
        return f"the cache keeps a window of {kept} keys, and the first {spec.first} leave it; allocate without window"
    if kept is None or (spec.behind is not None and spec.behind <= kept):
        return None
    return (
        f"the cache keeps a window of {kept} keys, the spec sees window={spec.window}; pass "
        f"spec=AttentionSpec(window={kept}) or less, or allocate the cache with another window"
    )


def of_back(new: np.ndarray | None, lengths: np.ndarray | None, first: np.ndarray | None) -> str | None:
    """Rows are truncated to lengths that they can return to, if those are known."""
    if new is None or lengths is None or first is None:
        return None
    if (new <= lengths).all() and (new >= first).all():
        return None
    return f"truncate to {new.tolist()}: the rows can go back from {lengths.tolist()} to {first.tolist()} tokens"
