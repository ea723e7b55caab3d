"""Gated linear attention from its definition, twice: token by token, and all tokens at once. The truth, by autograd.

Both take `start` [B, H, K, V], the state before the first token, and give (out [B, T, H, V], the state behind the
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


def parallel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, begin: Tensor | None, start: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o_i = scale * sum over j <= i of (q_i . exp(b_i - b_j) k_j) v_j, with b the decays summed from the first token.

    The differences b_i - b_j <= 0 are taken before exp: (q exp(b)) (k exp(-b))^T overflows as soon as -b is large.
    Takes T^2 K numbers a head.
    """
    q, k, v, g, state = prepared(q, k, v, g, start)
    T = q.shape[1]
    b = g.cumsum(1)
    i, j = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)
    first = q.new_full((1, T), -1.0) if begin is None else begin  # of my document; -1: it began earlier
    seen = ((j <= i) & (j >= first[..., None]))[..., None, None]  # [B, i, j, H, K]
    decay = torch.where(seen, b[:, :, None] - b[:, None], 0.0).exp() * seen
    weights = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, decay)
    old = (first < 0)[..., None, None] * b.exp()  # of the start state, as each token sees it
    out = torch.einsum("bhij,bjhv->bihv", weights, v) + torch.einsum("bihk,bhkv->bihv", q * old, state)
    last = decay[:, -1]  # of each token, at the end
    end = old[:, -1, :, :, None] * state + torch.einsum("bjhk,bjhv->bhkv", k * last, v)
    return scale * out, end


def prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in the accumulator's dtype, a gate for every key channel, and a state of zeros if there is none."""
    B, _, H, K = q.shape
    q, k, v = (x.to(accumulator(x)) for x in (q, k, v))
    g = torch.zeros_like(k) if g is None else g.to(q.dtype)
    g = (g if g.dim() == 4 else g[..., None]).expand_as(k)
    return q, k, v, g, q.new_zeros(B, H, K, v.shape[-1]) if start is None else start.to(q.dtype)
