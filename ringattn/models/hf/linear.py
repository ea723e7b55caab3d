"""The linear layers of transformers' models over ranks: the delta rule and Mamba-2, each behind a short convolution.

Such a layer mixes tokens by two functions of its module only, a convolution and a recurrence in chunks. A prepared
layer runs its own forward with these two replaced (`spread`); projections, gates and norms stay the model's.

    B batch   T this rank's tokens   C channels   W width   H heads   G key heads   K key dim   V value dim
"""

import inspect
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn import api
from ringattn.kernels.arrays import in_sums
from ringattn.kernels.linear.maps import Inputs
from ringattn.models.hf.attention import Call, needed
from ringattn.models.linear import continued, convolved
from ringattn.torch.linear.halo import causal_convolution
from ringattn.torch.sharding import own_positions

LAYER = "a linear layer"
EPS = 1e-6  # of the length of q and k, in all these models


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    layer: int, ringattn: Call | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`: [B, C, T] by weight [C, W], whose last column is the token itself."""
    from transformers.activations import ACT2FN

    call, x, weight = needed(ringattn, LAYER), hidden_states.mT, weight.flip(1)
    if call.cache is None:
        y = causal_convolution(x, weight, call.plan, call.docs)
    else:
        tails, plan = call.cache.tails, call.plan if call.spread else None
        y, tails[layer] = convolved(x, weight, plan, tails.get(layer), call.lengths)
    y = y if bias is None else y + bias
    return (y if activation is None else ACT2FN[activation](y)).to(x.dtype).mT


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
    layer: int, use_qk_l2norm_in_kernel: bool = False, ringattn: Call | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Gated DeltaNet (g [B, T, H]) and Kimi Delta Attention (g [B, T, H, K]): q, k [B, T, G, K], v [B, T, H, V]."""
    if use_qk_l2norm_in_kernel:
        query, key = ((in_sums(x) * torch.rsqrt(in_sums(x).square().sum(-1, keepdim=True) + EPS)).to(x.dtype)
                      for x in (query, key))  # fmt: skip
    return attended(needed(ringattn, LAYER), layer, query, key, value, g, beta, key.shape[-1] ** -0.5), None


def mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
    layer: int, D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), ringattn: Call | None = None,
    **others: Any,
) -> Tensor:  # fmt: skip
    """Mamba-2: values x dt [B, T, H, V], log decays A dt, keys B and queries C [B, T, G, K], and x D added."""
    if z is not None:
        raise ValueError("a Mamba-2 layer gates inside of its scan (z), which is not supported over ranks")
    x, dt = hidden_states, in_sums(dt if dt_bias is None else dt + dt_bias.to(dt.dtype))
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    v = (in_sums(x) * dt[..., None]).to(x.dtype)
    out = attended(needed(ringattn, LAYER), layer, C.to(x.dtype), B.to(x.dtype), v, in_sums(A) * dt, None, 1.0)
    return out if D is None else out + x * D[:, None]


def attended(
    call: Call, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float
) -> Tensor:
    """`ringattn.linear_attention`, which with a cache goes on from its state of this layer."""
    cache = call.cache
    if cache is None:
        return api.linear_attention(q, k, v, g, call.plan, beta=beta, docs=call.docs, scale=scale)
    if call.lengths is not None:  # padding behind a prompt leaves the state as it is
        at = torch.from_numpy(own_positions(call.plan)).to(q.device)
        padding = at >= call.lengths[:, None]
        k, g = (x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.dim() - 2)), 0.0) for x in (k, g))
    plan, inputs = call.plan if call.spread else None, Inputs(q, k, v, g, beta, None, scale)
    out, cache.states[layer] = continued(inputs, plan, cache.states.get(layer))
    return out


def nothing(*args: Any, **kwargs: Any) -> None:
    """A fused layer that is not there, so that the layer goes step by step."""


SCANS = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
}  # fmt: skip
CONVOLUTION = "causal_conv1d_fn"
FUSED = "mamba2_split_conv1d_scan_combined"


def linear_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if names(module) & set(SCANS)]


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [child for layer in linear_layers(model) if CONVOLUTION in names(layer) for child in layer.children()]


def names(module: nn.Module) -> set[str]:
    """What the forward of a module refers to."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def spread(layer: Any) -> MethodType:
    """The layer's own forward, which calls these functions in the place of its module's.

    The functions belong to the layer, not to its module: other models, and ranks that are threads, keep theirs.
    """
    run = inspect.unwrap(type(layer).forward)
    replaced: dict[str, Any] = {CONVOLUTION: convolution, **SCANS}
    ours = {name: partial(function, layer=layer.layer_idx) for name, function in replaced.items()}
    scope = {**run.__globals__, **ours, FUSED: nothing}
    scope.pop("__name__")  # by which torch.compile would find the module, and its functions
    forward = FunctionType(run.__code__, scope, run.__name__, run.__defaults__, run.__closure__)
    forward.__kwdefaults__ = run.__kwdefaults__
    return MethodType(forward, layer)
