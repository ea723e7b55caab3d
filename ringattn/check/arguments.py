"""What every call checks of an argument: its name, type, framework and number of dims."""

import sys
from typing import Any

from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs, is_number, raise_if
from ringattn.plans.plan import Plan
from ringattn.plans.sizes import Transport

SAY = "pass True or False"
WORDS: dict[str, tuple[type, str]] = {
    "plan": (Plan, "make one with ringattn.plan(mesh, seq_len=...)"),
    "spec": (AttentionSpec, "pass AttentionSpec(causal=..., window=..., chunk=..., softcap=..., scale=...)"),
    **dict.fromkeys(("docs", "key_docs"), (Docs, "pass Docs.from_lengths([...]) or Docs.from_cu_seqlens(...)")),
    "mask": (Mask, "make one with ringattn.Mask.from_slices(q_ranges, k_ranges, kinds, total)"),
    "transport": (Transport, "give Transport(route=..., hosts=..., together=..., groups=..., ...)"),
    **dict.fromkeys(("return_lse", "check"), (bool, SAY)),
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
INSTEAD = {  # of other libraries' arguments
    ("dropout", "dropout_p"): NO_DROPOUT,
    ("alibi", "alibi_slopes"): NO_ALIBI,
    ("bias", "attn_bias"): f"an additive bias is not supported: {MASKS}",
    ("attn_mask",): f"an arbitrary mask is not supported: {MASKS}",
    ("causal", "is_causal"): "pass spec=AttentionSpec(causal=...)",
    ("window", "window_size"): "pass spec=AttentionSpec(window=...)",
    ("softcap",): "pass spec=AttentionSpec(softcap=...)",
    ("scale", "softmax_scale"): "pass spec=AttentionSpec(scale=...)",
    ("enable_gqa",): "k and v may always have fewer heads than q; leave it out",
    ("mesh", "device_mesh", "group", "process_group", "cp_group"): "pass plan=ringattn.plan(mesh, seq_len=...)",
    ("cu_seqlens",): "pass docs=Docs.from_cu_seqlens(...)",
    ("route", "hosts", "together", "groups", "grads"): "it is part of transport=Transport(...) of ringattn.plan",
    ("tree", "tree_mask", "tree_attention_mask"): f"pass parents=: {BY_PARENTS}",
}
LINEAR = {  # of linear attention
    ("g", "gk", "gate", "gates", "decay"): "pass log_decay=, the logarithm of the decay",
    ("causal", "is_causal", "spec", "window"): "linear attention is causal, over all tokens; leave it out",
    ("output_final_state",): "pass return_state=True",
}


def of_unknown(function: str, unknown: dict[str, Any], more: dict[tuple[str, ...], str] | None = None) -> str | None:
    """Every argument that a function does not take, and what to use instead; None if there is none."""
    if not unknown:
        return None
    say = {name: text for names, text in {**INSTEAD, **(more or {})}.items() for name in names}
    return "; ".join(f"{name}: {say.get(name, f'{function} has no such argument')}" for name in unknown)


def kind(x: Any) -> str | None:
    """The framework of an array: "torch", "jax", or None."""
    for name, array in (("torch", "Tensor"), ("jax", "Array")):
        if name in sys.modules and isinstance(x, getattr(sys.modules[name], array)):
            return name
    return None


def of_kinds(*arrays: Any) -> str | None:
    kinds = [kind(x) for x in arrays]
    if kinds[0] is not None and kinds.count(kinds[0]) == len(kinds):
        return None
    return f"expected torch tensors or jax arrays, got {', '.join(type(x).__name__ for x in arrays)}"


def of_arrays(arrays: dict[str, Any], optional: dict[str, Any], plan: Plan | None = None) -> str | None:
    """All are tensors of one framework, that of the plan; the required ones have 4 dims."""
    if problem := of_kinds(*arrays.values()):
        return problem
    first = next(iter(arrays))
    framework = kind(arrays[first])
    what = "a jax array" if framework == "jax" else "a torch tensor"
    for name, x in optional.items():
        if x is not None and kind(x) != framework:
            remedy = "pass it as plan=" if isinstance(x, Plan) else f"it must be {what}, as {first} is"
            return f"{name} is of type {type(x).__name__}; {remedy}"
    if plan is not None and plan.framework != framework:
        return f"the plan was made for a {plan.framework} mesh, and {first} is {what}; give plan() a {framework} mesh"
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


def of_sizes(*optional: str, **sizes: Any) -> str | None:
    """Whole numbers of at least 1; the optional ones may be None."""
    wrong = [name for name, x in sizes.items() if not is_number(x, 1) and not (x is None and name in optional)]
    return f"{wrong[0]}={sizes[wrong[0]]!r}: at least 1, a whole number" if wrong else None


def head_size(d_model: int, heads: int, given: int | None = None) -> int:
    """The size of a layer's head: as given, or its share of d_model."""
    raise_if(of_sizes(d_model=d_model, heads=heads))
    if given is None and heads <= d_model and d_model % heads:
        raise ValueError(f"heads={heads} does not divide d_model={d_model}; give the size of a head")
    size = d_model // heads if given is None else given
    if size < 1:
        raise ValueError(f"d_model={d_model} and heads={heads} make heads of size {size}; it must be 1 or more")
    return size


def of_returned(return_state: Any, docs: Docs | None) -> str | None:
    if return_state is None or isinstance(return_state, bool):
        return None
    if not isinstance(return_state, str) or return_state != "documents" or docs is None:
        return f"return_state={return_state!r}: {SAY}, or with docs 'documents' for the state behind each document"
    return None
