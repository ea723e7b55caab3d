"""The modules of a model and their configs: found inside of wrappers, and given configs of their own."""

from copy import deepcopy
from typing import Any

from torch import nn


def inner(model: Any) -> Any:
    """The model inside of peft's adapters and of torch.compile."""
    while "_orig_mod" in getattr(model, "_modules", {}):
        model = model._orig_mod
    return inner(model.get_base_model()) if hasattr(model, "get_base_model") else model


def give_own_configs(model: nn.Module) -> None:
    """Replace each config that modules hold by a copy, so that no other model that was made from it changes."""
    copies: dict[int, Any] = {}  # of deepcopy: what was shared within the model stays shared
    for module in model.modules():
        for name, x in vars(module).items():
            if hasattr(x, "sub_configs"):
                vars(module)[name] = deepcopy(x, copies)
