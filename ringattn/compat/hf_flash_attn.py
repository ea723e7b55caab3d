"""transformers' flash_attention_2 over the ranks of a process group, for scripts that cut their batches themselves.

`ringattn.hf.prepare` does the cutting too, and needs none of this.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.compat.process_groups import plan_over
from ringattn.masks.spec import Docs
from ringattn.models.hf import attention as hf_attention

NAME = "flash_attention_2"


class Batch(NamedTuple):
    """The documents of the current batch, and the group that its tokens are spread over."""

    docs: Docs
    group: Any


BATCHES: list[Batch] = []  # the current one
BATCH_OF: Any = WeakIdKeyDictionary()  # by position_ids, the batch that they came with


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int = 1) -> None:
    """Replace transformers' flash_attention_2, for all models, by attention over the ranks of the group.

    Every rank gives its models block r of a packed row [1, t], and passes the documents and the group to
    `update_ring_flash_attn_params`. How many heads travel at once is chosen by predicted time, whatever
    `heads_k_stride` is. `restore_hf_flash_attn` undoes it.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = attend


def restore_hf_flash_attn() -> None:
    """Give transformers its own flash_attention_2 back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    del ALL_ATTENTION_FUNCTIONS[NAME]  # ours hides transformers' own
    BATCHES.clear()


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any) -> None:
    """The documents of the next batch, all of them: [0, n1, n1 + n2, ...], the same on every rank."""
    BATCHES[:] = [Batch(Docs.from_cu_seqlens(cu_seqlens), process_group)]


@torch.compiler.disable(reason="the documents of a batch are not part of a graph; ringattn.hf.prepare can be compiled")
def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
    """transformers' attention interface: [1, H, t, D] in, [1, t, H, V] out."""
    if not BATCHES:
        raise ValueError("call update_ring_flash_attn_params(cu_seqlens, group) before the model, for each batch")
    (batch,), at = BATCHES, given.get("position_ids")
    if isinstance(at, Tensor) and BATCH_OF.setdefault(at, batch).docs != batch.docs:
        raise ValueError(
            "these position_ids came with other documents before: update_ring_flash_attn_params was called between "
            "forward and a backward that recomputes activations; call it after backward"
        )
    if len(query) != 1:
        raise ValueError(f"a batch of {len(query)} rows: pack them into one, whose documents cu_seqlens gives")
    plan = plan_over(batch.group, query.device.type, query.shape[2], "contiguous", "gather")
    if plan.seq_len != batch.docs.length:
        raise ValueError(
            f"cu_seqlens ends with {batch.docs.length}, and {plan.ring} ranks with {query.shape[2]} tokens each have "
            f"{plan.seq_len}; cut each batch into as many equal blocks as there are ranks"
        )
    call = hf_attention.Call(plan, batch.docs)
    return hf_attention.attend(module, query, key, value, attention_mask, ringattn=call, **given)
