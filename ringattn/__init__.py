"""Attention over sequences too long for one device: `import ringattn as ra`.

Nothing heavy is imported until it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringattn.extras import naming_extras

if TYPE_CHECKING:
    from ringattn.api import attention as attention
    from ringattn.api import decode as decode
    from ringattn.api import linear_attention as linear_attention
    from ringattn.api import merge as merge
    from ringattn.api import prefill as prefill
    from ringattn.choosing import plan as plan
    from ringattn.comms.mesh import init_mesh as init_mesh
    from ringattn.kernels.partial import Partial as Partial
    from ringattn.layouts.balancing import balance as balance
    from ringattn.masks.slices import Mask as Mask
    from ringattn.masks.spec import AttentionSpec as AttentionSpec
    from ringattn.masks.spec import Docs as Docs
    from ringattn.models import hf as hf
    from ringattn.models import nn as nn
    from ringattn.models.batch import Batch as Batch
    from ringattn.models.batch import local_batch as local_batch
    from ringattn.models.loss import cross_entropy as cross_entropy
    from ringattn.models.loss import token_mean as token_mean
    from ringattn.plans.plan import Plan as Plan
    from ringattn.plans.sizes import Transport as Transport
    from ringattn.serving import KVCache as KVCache

__version__ = "0.1.0"

ROOMS = {
    "api": ["attention", "decode", "linear_attention", "merge", "prefill"],
    "choosing": ["plan"],
    "comms.mesh": ["init_mesh"],
    "kernels.partial": ["Partial"],
    "layouts.balancing": ["balance"],
    "masks.slices": ["Mask"],
    "masks.spec": ["AttentionSpec", "Docs"],
    "models.batch": ["Batch", "local_batch"],
    "models.hf": ["hf"],
    "models.loss": ["cross_entropy", "token_mean"],
    "models.nn": ["nn"],
    "plans.plan": ["Plan"],
    "plans.sizes": ["Transport"],
    "serving": ["KVCache"],
}
PUBLIC = {name: f"ringattn.{room}" for room, names in ROOMS.items() for name in names}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    with naming_extras(f"ringattn.{name}"):
        module = import_module(PUBLIC[name])
    value = module if PUBLIC[name].endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
