"""Gated linear attention by its definition, token by token, with gradients by autograd: the reference of its kernels.

`start` [B, H, K, V] is the state before the first token. The results are out [B, T, H, V] and the state behind the last
token, in float32 (float64 for float64 inputs).
"""

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, start: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T v_t and o_t = scale * q_t S_t; each document starts with S = 0."""
    q, k, v, g, state = prepared(q, k, v, g, start)
    out = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        if begin is not None:
            state = torch.where((begin[:, t] == t)[:, None, None, None], 0.0, state)
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(out, 1), state


def prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The inputs in the accumulator's dtype, with a gate for every key channel, and by default a state of zeros."""
    B, _, H, K = q.shape
    q, k, v = (x.to(accumulator(x)) for x in (q, k, v))
    g = torch.zeros_like(k) if g is None else g.to(q.dtype)
    g = (g if g.dim() == 4 else g[..., None]).expand_as(k)
    return q, k, v, g, q.new_zeros(B, H, K, v.shape[-1]) if start is None else start.to(q.dtype)
