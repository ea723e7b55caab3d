"""The functions of ring_flash_attn, by their names and signatures: `from ringattn.compat.ring_flash_attn import ...`.

Each name says which tokens a rank holds:

    ring_*            one block of the sequence                    q [B, t, H, D]
    zigzag_ring_*     block r from the front and from the back     q [B, t, H, D]
    stripe_*          every n-th token                             q [B, t, H, D]
    ring_*_varlen     one block of every document                  q [t, H, D]
    zigzag_*_varlen   two blocks of every document                 q [t, H, D]
    llama3_*_varlen   one block of all documents, one by one       q [t, H, D]

`group` is a process group, None for all ranks, or a mesh with an axis "ring". Windows are exact over ranks, `softcap=`
(a keyword) too, and the lse of `return_attn_probs=True` is differentiable: (out, lse, None), lse [B, H, t] or [H, t].
The varlen functions that cut every document use a plan that does so (`plan.for_docs`). `dropout_p` and `alibi_slopes`
are refused. `deterministic`, `max_seqlen` and `heads_k_stride` are accepted and change nothing.

`substitute_hf_flash_attn` is for scripts that cut the batches of transformers' models themselves; `ringattn.hf.prepare`
does the cutting too, and needs none of this.
"""

from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ringattn import api, choosing
from ringattn.check.arguments import NO_ALIBI, NO_DROPOUT
from ringattn.comms.local import LocalMesh
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.hf import attention as hf_attention
from ringattn.plans.plan import Plan
from ringattn.torch.agree import refuse

Function = Callable[..., Any]

untraced = torch.compiler.disable(reason="a plan is looked up by group and length; ra.attention with a plan is traced")
PLANS_KEPT = 64  # by length and documents, for each group and layout
PLANS: Any = WeakIdKeyDictionary()  # by group, as long as it lives
NUMBERS: Any = WeakIdKeyDictionary()  # by cu_seqlens: its version, and its numbers on the host
PREPARED: Any = WeakIdKeyDictionary()  # by the cu_seqlens_q that prepare made: its numbers, and all documents


def plan_over(
    group: Any, device: str, local_len: int, layout: str, strategy: str = "ring", local_keys: int | None = None,
    axis: str = "ring", docs: Docs | None = None,
) -> Plan:  # fmt: skip
    """The plan of sequences of which every rank of the group holds `local_len` tokens: the same one each time.

    With `docs` that of a sequence of these documents, each of which is cut over all ranks.

    The group is a process group (or None for all ranks), which becomes this axis, or a mesh with axes "ring" and/or
    "ulysses".
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("no ranks were started: call torch.distributed.init_process_group first, or give group=")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: make the call on the ranks of the group only")
    if not isinstance(group, (dist.ProcessGroup, DeviceMesh, LocalMesh)):
        raise ValueError(f"group={group!r}: pass a process group, a mesh with an axis {axis!r}, or None for all ranks")
    plans = PLANS.setdefault(group, {}).setdefault((device, layout, strategy, axis), {})
    if not plans:
        mesh = group
        if isinstance(group, dist.ProcessGroup):
            mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(axis,))
        plans[0] = choosing.plan(mesh, seq_len=1, layout=layout, strategy=strategy)  # keeps the axes
    lengths = local_len, local_len if local_keys is None else local_keys
    kind = (*lengths, docs)
    if kind not in plans:
        if len(plans) > PLANS_KEPT:
            del plans[list(plans)[1]]
        ranks = plans[0].ring * plans[0].ulysses
        whole = plans[0].for_length(lengths[0] * ranks, key_len=lengths[1] * ranks)
        plans[kind] = whole if docs is None else whole.for_docs(docs)
    plan: Plan = plans[kind]
    if (plan.local_len, plan.keys.local_len) != lengths:
        raise ValueError(f"{local_len} tokens a rank: {layout} needs an even number, two parts of the same length")
    return plan


class Options(NamedTuple):
    """What functions take last; `softcap` by name only."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Any = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Any = None
    softcap: float = 0.0

    @property
    def spec(self) -> AttentionSpec:
        if self.dropout_p:
            raise ValueError(f"dropout_p={self.dropout_p}: {NO_DROPOUT}")
        if self.alibi_slopes is not None:
            raise ValueError(f"alibi_slopes: {NO_ALIBI}")
        left, right = self.window_size
        causal = self.causal or right == 0
        window: Any = left + 1 if left >= 0 else None  # flash attention does not count the query's own key
        if not causal and (left >= 0 or right >= 0):  # negative: without a limit
            window = tuple(n if n >= 0 else 2**62 for n in (left, right))
        return AttentionSpec(causal, window, softcap=self.softcap or None, scale=self.softmax_scale)


def named(name: str, doc: str, arguments: str, function: Function) -> Function:
    """`function`, which takes these arguments and Options, with the signature of both, and this name."""
    head = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in arguments.split()]
    kinds = {"softcap": Parameter.KEYWORD_ONLY}
    tail = [
        Parameter(n, kinds.get(n, Parameter.POSITIONAL_OR_KEYWORD), default=x)
        for n, x in Options._field_defaults.items()
    ]
    whole = Signature([*head, *tail])

    def call(*args: Any, **given: Any) -> Any:
        bound = whole.bind(*args, **given)
        bound.apply_defaults()
        values = list(bound.arguments.values())
        return function(*values[: len(head)], Options(*values[len(head) :]))

    call.__name__ = call.__qualname__ = name
    call.__doc__, call.__signature__ = doc, whole  # type: ignore[attr-defined]
    return call


def family(name: str, doc: str, function: Function, more: str = "") -> tuple[Function, Function, Function]:
    """NAME_func of q, k, v; of q and kv [.., 2, G, D]; and of qkv [.., 3, H, D]."""
    prefix = name.removesuffix("_func")
    return (
        named(name, doc, f"q k v {more}", function),
        named(f"{prefix}_kvpacked_func", doc, f"q kv {more}", lambda q, kv, *a: function(q, *kv.unbind(-3), *a)),
        named(f"{prefix}_qkvpacked_func", doc, f"qkv {more}", lambda qkv, *a: function(*qkv.unbind(-3), *a)),
    )


def of_batch(layout: str, axis: str = "ring") -> Function:
    """Attention over sequences whose tokens lie in this layout; `axis` is what a process group becomes."""

    @untraced
    def function(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
        spec = options.spec
        plan = plan_over(options.group, q.device.type, q.shape[1], layout, local_keys=k.shape[1], axis=axis)
        if (spec.causal or spec.window) and q.shape[1] != k.shape[1]:
            what = "causal" if spec.causal else "a window"
            raise ValueError(f"{what}: {q.shape[1]} queries a rank and {k.shape[1]} keys; they must be the same tokens")
        return attended(q, k, v, plan, spec, None, options.return_attn_probs)

    return function


def attended(q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs | None, probs: bool) -> Any:
    """out; if probabilities are requested (out, lse with heads before tokens, None)."""
    if not probs:
        return api.attention(q, k, v, plan, spec=spec, docs=docs)
    out, lse = api.attention(q, k, v, plan, spec=spec, docs=docs, return_lse=True)
    return out, lse.mT, None


def packed(q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs, probs: bool) -> Any:
    result = attended(q[None], k[None], v[None], plan, spec, docs, probs)
    return (result[0][0], result[1][0], None) if probs else result[0]


def on_host(cu_seqlens: Tensor) -> list[int]:
    """Its numbers; a GPU is waited for once, and not in each layer. An inference tensor does not show that it changed.

    Nor does a tensor on the host that numpy writes to, and reading it costs nothing.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens={cu_seqlens!r}: pass a tensor of whole numbers [0, n1, n1 + n2, ...]")
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():
        return cu_seqlens.tolist()
    at, numbers = NUMBERS.get(cu_seqlens, (None, None))
    if at != cu_seqlens._version:
        NUMBERS[cu_seqlens] = cu_seqlens._version, (numbers := cu_seqlens.tolist())
    return numbers


def of_cut_documents(layout: str) -> Function:
    """Attention within documents, of each of which every rank holds its part in this layout."""

    @untraced
    def function(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, options: Options) -> Any:
        spec, local = options.spec, on_host(cu_seqlens)
        plan = plan_over(options.group, q.device.type, len(q), layout)
        if problem := of_cut(q, k, v, local, layout):
            refuse(problem, plan)
        docs = docs_over(plan.ring, tuple(local))
        plan = plan_over(options.group, q.device.type, len(q), layout, docs=docs)
        return packed(q, k, v, plan, spec, docs, options.return_attn_probs)

    return function


@lru_cache(maxsize=64)
def docs_over(ranks: int, local: tuple[int, ...]) -> Docs:
    return Docs.from_cu_seqlens([ranks * start for start in local])


def of_cut(q: Tensor, k: Tensor, v: Tensor, local: list[int], layout: str) -> str | None:
    if not len(q) == len(k) == len(v) == local[-1]:
        return (
            f"q has {len(q)} tokens on this rank, k {len(k)}, v {len(v)}, and cu_seqlens ends with {local[-1]}; "
            "cu_seqlens are this rank's: those of the whole divided by the number of ranks"
        )
    if layout == "zigzag" and any(start % 2 for start in local):
        return (
            f"cu_seqlens={local}: zigzag cuts each document into two parts a rank; pad documents to a multiple of "
            "twice the number of ranks"
        )
    return None


@untraced
def llama3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, options: Options,
) -> Any:  # fmt: skip
    """Attention within documents that lie one after the other over the ranks."""
    spec = options.spec
    plan = plan_over(options.group, q.device.type, len(q), "contiguous", "gather")
    numbers, docs = PREPARED.get(cu_seqlens_q, (None, None))
    if docs is None or numbers != on_host(cu_seqlens_q):  # changed or copied: the ranks exchange their documents
        starts = [local_k_slice.start + start for start in on_host(cu_seqlens_k)[:-1]]
        everyone = {start for each in plan.ring_axis.exchange_words(starts) for start in each}
        docs = Docs.from_cu_seqlens([*sorted(everyone), plan.seq_len])
    return packed(q, k, v, plan, spec, docs, options.return_attn_probs)


@untraced
def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Tensor, causal: bool, rank: int, world_size: int) -> Any:
    """One rank's cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and local_k_slice, of those of all documents.

    Rank r has block r of the packed documents; its keys begin with its first document, and end with its last query,
    or with its last document where not `causal`.
    """
    whole = on_host(cu_seqlens)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: ranks are counted from 0 to world_size - 1")
    if whole[-1] % world_size:
        raise ValueError(f"{whole[-1]} tokens over {world_size} ranks: pad them to a multiple of the number of ranks")
    begin, end = (r * whole[-1] // world_size for r in (rank, rank + 1))
    first = max(i for i, start in enumerate(whole[:-1]) if start <= begin)
    last = next(i for i, stop in enumerate(whole) if stop >= end)
    queries = cu_seqlens[first : last + 1].clamp(begin, end) - begin
    limit = end if causal else whole[last]
    keys = cu_seqlens[first : last + 1].clamp(max=limit) - whole[first]
    PREPARED[queries] = on_host(queries), Docs.from_cu_seqlens(whole)
    longest = (int(x.diff().max()) for x in (queries, keys))
    return queries, keys, *longest, slice(whole[first], limit)


BATCH: list[tuple[Docs, Any]] = []  # the documents of the current batch, and the group that its tokens are spread over
DOCS_OF: Any = WeakIdKeyDictionary()  # by position_ids, the documents that they came with


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int = 1) -> None:
    """Replace transformers' flash_attention_2, for all models, by attention over the ranks of the group.

    Every rank gives its models block r of a packed row [1, t], and passes the documents and the group to
    `update_ring_flash_attn_params`. How many heads travel at once is chosen by predicted time, whatever
    `heads_k_stride` is. `restore_hf_flash_attn` undoes it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = attend


def restore_hf_flash_attn() -> None:
    """Give transformers its own flash_attention_2 back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]  # ours hides transformers' own
    BATCH.clear()


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """The documents of the next batch, all of them: [0, n1, n1 + n2, ...], the same on every rank."""
    BATCH[:] = [(Docs.from_cu_seqlens(cu_seqlens), process_group)]


@torch.compiler.disable(reason="the documents of a batch are not part of a graph; ringattn.hf.prepare can be compiled")
def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
    """transformers' attention interface: [1, H, t, D] in, [1, t, H, V] out."""
    if not BATCH:
        raise ValueError("call update_ring_flash_attn_params(cu_seqlens, group) before the model, for each batch")
    (docs, group), at = BATCH[0], given.get("position_ids")
    if isinstance(at, Tensor) and DOCS_OF.setdefault(at, docs) != docs:
        raise ValueError(
            "these position_ids came with other documents before: update_ring_flash_attn_params was called between "
            "forward and a backward that recomputes activations; call it after backward"
        )
    if len(query) != 1:
        raise ValueError(f"a batch of {len(query)} rows: pack them into one, whose documents cu_seqlens gives")
    plan = plan_over(group, query.device.type, query.shape[2], "contiguous", "gather")
    if plan.seq_len != docs.length:
        raise ValueError(
            f"cu_seqlens ends with {docs.length}, and {plan.ring} ranks with {query.shape[2]} tokens each have "
            f"{plan.seq_len}; cut each batch into as many equal blocks as there are ranks"
        )
    call = hf_attention.Call(plan, docs)
    return hf_attention.attend(module, query, key, value, attention_mask, ringattn=call, **given)


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = family(
    "ring_flash_attn_func", "Rank r has block r of the sequence.", of_batch("contiguous")
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = family(
    "zigzag_ring_flash_attn_func", "Of 2n blocks, rank r has r and 2n - 1 - r.", of_batch("zigzag")
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = family(
    "stripe_flash_attn_func", "Rank r has tokens r, r + n, r + 2n and so on.", of_batch("striped")
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = family(
    "ring_flash_attn_varlen_func",
    "Rank r has block r of each document; cu_seqlens are those of this rank's tokens.",
    of_cut_documents("contiguous"),
    "cu_seqlens max_seqlen",
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = family(
    "zigzag_ring_flash_attn_varlen_func",
    "Of 2n blocks of each document, rank r has r and 2n - 1 - r; cu_seqlens are those of this rank's tokens.",
    of_cut_documents("zigzag"),
    "cu_seqlens max_seqlen",
)
llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = family(
    "llama3_flash_attn_varlen_func",
    "Rank r has block r of the packed documents; llama3_flash_attn_prepare_cu_seqlens makes its arguments.",
    llama3,
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice",
)

__all__ = sorted(name for name in globals() if "flash_attn" in name)
