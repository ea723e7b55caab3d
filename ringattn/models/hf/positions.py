"""The positions of whole sequences, of models that do not count one token after another."""

from inspect import signature
from typing import Any

from torch import Tensor, nn

RULES = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"


def counted(model: Any, x: dict[str, Tensor], attention_mask: Tensor | None) -> Tensor | None:
    """The positions that a model gives whole sequences, if that is not one after the other."""
    positions = numbered(model.ringattn_before.rule, x.get("input_ids"), x.get("inputs_embeds"))
    if positions is None and model.ringattn.counted and attention_mask is not None:
        return (attention_mask.cumsum(1) * attention_mask).long() - 1
    return positions


def rule_of(model: nn.Module) -> nn.Module | None:
    """The embeddings that give whole sequences positions by a rule of their own, as RoBERTa's do, if there are any."""
    return next((m for m in model.modules() if hasattr(m, RULES[0])), None)


def numbered(embeddings: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
    """The positions by that rule; None without one."""
    name, x = (RULES[0], input_ids) if inputs_embeds is None else (RULES[1], inputs_embeds)
    rule = getattr(embeddings, name, None)
    return None if rule is None else rule(x, embeddings.padding_idx)


def is_counted(model: nn.Module) -> bool:
    """Whether positions are counted over the real tokens: an embedding of positions that takes the padding mask."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return any("attention_mask" in signature(m.forward).parameters for m in embeddings)
