"""The modules of a model and their configs: found inside of wrappers, changed, and changed back."""

from copy import deepcopy
from typing import Any

from torch import nn

MISSING = "no attribute of its own"


def inner(model: Any) -> Any:
    """The model inside of peft's adapters and of torch.compile."""
    while "_orig_mod" in getattr(model, "_modules", {}):
        model = model._orig_mod
    return inner(model.get_base_model()) if hasattr(model, "get_base_model") else model


def replace(module: nn.Module, **new: Any) -> None:
    """Give a module other attributes, as methods and not closures: a copy of it runs its own weights."""
    vars(module)["ringattn_own"] = {name: vars(module).get(name, MISSING) for name in new}
    vars(module).update(new)


def restore(model: nn.Module) -> None:
    """Give all modules of a model their own attributes back."""
    for module in model.modules():
        for name, x in vars(module).pop("ringattn_own", {}).items():
            vars(module).pop(name, None)
            if x is not MISSING:
                vars(module)[name] = x


def give_own_configs(model: nn.Module) -> None:
    """Replace each config that modules hold by a copy, so that no other model that was made from it changes."""
    copies: dict[int, Any] = {}  # of deepcopy: what was shared within the model stays shared
    for module in model.modules():
        for name, x in vars(module).items():
            if hasattr(x, "sub_configs"):
                vars(module)[name] = deepcopy(x, copies)


def configs_of(model: nn.Module) -> list[Any]:
    """Every config whose attention `set_attn_implementation` may change, once."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in waiting:
        if id(config) not in configs and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())
