"""The documents and positions of a batch: by a padding mask, position_ids, what collators give, and the model's rules.

B batch   T all tokens
"""

from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ringattn.masks.spec import Docs

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # beside position_ids, from DataCollatorWithFlattening
UNUSED = ("max_length_q", "max_length_k")  # the others contain it already
RULE = "create_position_ids_from_"  # and input_ids or inputs_embeds


def documents(B: int, T: int, attention_mask: Any, position_ids: Tensor | None, more: dict[str, Any]) -> Docs | None:
    """The documents of every row; None where each is one whole document.

    A row is cut where padding begins or ends, where a position is not the one before plus one, and where `more` begins
    a document.
    """
    refuse_mask(attention_mask)
    if attention_mask is not None and tuple(attention_mask.shape) != (B, T):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected ({B}, {T}), 1 where a token is real: "
            "give packed documents by position_ids, and other masks by the model's configuration"
        )
    cuts = packing(B, T, more)
    if position_ids is not None and position_ids.dim() == 3:  # M-RoPE: the first of 4 rows counts tokens of text
        position_ids = position_ids[0] if len(position_ids) == 4 else None
    if position_ids is not None:
        positions = position_ids.expand(B, T).numpy(force=True)
        cuts[:, 1:] |= np.diff(positions, axis=1) != 1
    if attention_mask is not None:
        cuts |= padded(attention_mask)
    if not cuts.any():
        return None
    return Docs.from_lengths([np.diff([0, *np.flatnonzero(row), T]).tolist() for row in cuts])


def given_documents(docs: Any, shape: tuple[int, int], attention_mask: Any, more: dict[str, Any]) -> Docs:
    """The documents that a caller describes; a ValueError about others, or what else would say where they begin."""
    if not isinstance(docs, Docs):
        raise ValueError(f"docs is of type {type(docs).__name__}; pass ringattn.Docs of the whole sequences")
    if docs.length != shape[1] or len(docs.starts) not in (1, shape[0]):
        raise ValueError(f"docs are {docs}; expected those of {shape[0]} rows, or one, of {shape[1]} tokens")
    others = [name for name in PACKING if more.get(name) is not None]
    if others or attention_mask is not None:
        raise ValueError(
            f"docs and {', '.join(others) or 'attention_mask'} both say where documents begin or end; leave that out "
            "(Docs.from_lengths and Docs.tree take pad_to=)"
        )
    return docs


def places(docs: Docs | None, at: Tensor) -> Tensor:
    """The position in its document, in trees along its branch, of each of these tokens [1, n]."""
    if docs is None:
        return at
    if docs.depths is not None:
        return torch.from_numpy(docs.depths.reshape(-1, docs.length).copy()).to(at)[:, at[0]]
    starts = torch.tensor(docs.starts.tolist(), device=at.device)
    at = at.expand(len(starts), -1).contiguous()
    return at - starts.gather(1, torch.searchsorted(starts, at, right=True) - 1)


def refuse_mask(attention_mask: Any) -> None:
    """A ValueError about what is no tensor, as a mask for each type of layer."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is of type {type(attention_mask).__name__}; expected a tensor [batch, tokens], 1 where a "
            "token is real: windows come from the model's configuration, and packed documents from position_ids"
        )


def padded(attention_mask: Tensor) -> np.ndarray:
    real = attention_mask.bool().numpy(force=True)
    cuts = changes(real)
    if (cuts.sum(1) > 2).any() or ((cuts.sum(1) == 2) & real[:, 0]).any():
        raise ValueError("attention_mask has padding between real tokens; it may stand before or after them")
    return cuts


def changes(x_BT: np.ndarray) -> np.ndarray:
    return np.pad(x_BT[:, 1:] != x_BT[:, :-1], ((0, 0), (1, 0)))


def packing(B: int, T: int, more: dict[str, Any]) -> np.ndarray:
    """Where documents begin [B, T], except the first of a row, by any of the arguments of PACKING."""
    cuts = np.zeros((B, T), bool)
    for name in PACKING:
        if more.get(name) is None:
            continue
        x = torch.as_tensor(more[name]).numpy(force=True)
        if name == "seq_idx":
            if x.shape != (B, T):
                raise ValueError(f"seq_idx has shape {x.shape}; expected ({B}, {T}), the document of each token")
            cuts |= changes(x)
            continue
        if B != 1 or x.ndim != 1 or not x.size or x[0] != 0 or x[-1] != T or (np.diff(x) < 0).any():
            raise ValueError(
                f"{name}={x.tolist()} with {B} rows of {T} tokens: it must rise from 0 to the number of tokens in one "
                "row, as DataCollatorWithFlattening packs them"
            )
        cuts[0, x[(x > 0) & (x < T)]] = True
    return cuts


def counted(model: Any, x: dict[str, Tensor], attention_mask: Tensor | None) -> Tensor | None:
    """The positions that a model gives whole sequences, if that is not one after the other."""
    if model.ringattn.counted and attention_mask is not None:
        return (attention_mask.cumsum(1) * attention_mask).long() - 1
    return numbered(model.ringattn_numbering, x)


def numbered(embeddings: Any, x: dict[str, Tensor]) -> Tensor | None:
    """The positions of whole sequences by the rule of these embeddings, if there is one."""
    if embeddings is None:
        return None
    name = "inputs_embeds" if "inputs_embeds" in x else "input_ids"
    return getattr(embeddings, f"{RULE}{name}")(x[name], embeddings.padding_idx)


def numbering_of(model: nn.Module) -> nn.Module | None:
    """The embeddings that give whole sequences positions by a rule of their own, as RoBERTa's do, if there are any."""
    return next((m for m in model.modules() if hasattr(m, f"{RULE}input_ids")), None)


def is_counted(model: nn.Module) -> bool:
    """Whether positions are counted over the real tokens: an embedding of positions that takes the padding mask."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return any("attention_mask" in signature(m.forward).parameters for m in embeddings)
