"""Attention over sequences too long for one device: `import ringattn as ra`.

Nothing heavy is imported until it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringattn.api import attention, decode, init_mesh, linear_attention, merge, prefill
    from ringattn.choosing import plan
    from ringattn.jax.aot import aot_report
    from ringattn.kernels.partial import Partial
    from ringattn.planning import Plan, Transport
    from ringattn.serving import KVCache
    from ringattn.spec import AttentionSpec, Docs
    from ringattn.torch.attention.one_device import attend
    from ringattn.torch.models import hf, nn
    from ringattn.torch.models.loss import cross_entropy, token_mean

__version__ = "0.1.0"

PUBLIC = {
    "AttentionSpec": "ringattn.spec",
    "Docs": "ringattn.spec",
    "KVCache": "ringattn.serving",
    "Partial": "ringattn.kernels.partial",
    "Plan": "ringattn.planning",
    "Transport": "ringattn.planning",
    "aot_report": "ringattn.jax.aot",
    "attend": "ringattn.torch.attention.one_device",
    "attention": "ringattn.api",
    "cross_entropy": "ringattn.torch.models.loss",
    "decode": "ringattn.api",
    "hf": "ringattn.torch.models.hf",
    "init_mesh": "ringattn.api",
    "linear_attention": "ringattn.api",
    "merge": "ringattn.api",
    "nn": "ringattn.torch.models.nn",
    "plan": "ringattn.choosing",
    "prefill": "ringattn.api",
    "token_mean": "ringattn.torch.models.loss",
}
__all__ = [
    "AttentionSpec",
    "Docs",
    "KVCache",
    "Partial",
    "Plan",
    "Transport",
    "aot_report",
    "attend",
    "attention",
    "cross_entropy",
    "decode",
    "hf",
    "init_mesh",
    "linear_attention",
    "merge",
    "nn",
    "plan",
    "prefill",
    "token_mean",
]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    module = import_module(PUBLIC[name])
    value = module if PUBLIC[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
