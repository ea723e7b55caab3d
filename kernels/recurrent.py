"""Gated linear attention from its definition, token by token. The truth, by autograd.

It takes `start` [B, H, K, V], the state before the first token, and gives (out [B, T, H, V], the state behind the
last one), in float32 (float64 for float64 inputs).
"""

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, start: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T v_t and o_t = scale * q_t S_t, where a document's first token finds S = 0."""
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
    """All in the accumulator's dtype, a gate for every key channel, and a state of zeros if there is none."""
    B, _, H, K = q.shape
    q, k, v = (x.to(accumulator(x)) for x in (q, k, v))
    g = torch.zeros_like(k) if g is None else g.to(q.dtype)
    g = (g if g.dim() == 4 else g[..., None]).expand_as(k)
    return q, k, v, g, q.new_zeros(B, H, K, v.shape[-1]) if start is None else start.to(q.dtype)
