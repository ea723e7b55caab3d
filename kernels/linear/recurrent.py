"""Linear attention by its definition, token by token, with gradients by autograd: the reference of its kernels.

`start` [B, H, K, V] is the state before the first token. The results are out [B, T, H, V] and the state behind the last
token, in float32 (float64 for float64 inputs).
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear.maps import Inputs, of_values


def recurrent(x: Inputs, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t^T u_t and o_t = scale * q_t S_t; each document starts with S = 0.

    u_t is v_t, or with beta, by the delta rule, beta_t (v_t - k_t exp(g_t) S_{t-1}).
    """
    q, k, v = (t.to(accumulator(t)) for t in x[:3])
    q, k = (of_values(t, v.shape[2], 2) for t in (q, k))
    g = torch.zeros_like(k) if x.g is None else x.g.to(q.dtype)
    g = (g if g.dim() == 4 else g[..., None]).expand_as(k)  # a gate of every key channel
    beta = None if x.beta is None else x.beta.to(q.dtype)
    B, _, H, K = k.shape
    state, out = q.new_zeros(B, H, K, v.shape[-1]) if start is None else start.to(q.dtype), []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        if x.begin is not None:
            state = torch.where((x.begin[:, t] == t)[:, None, None, None], 0.0, state)
        u = v[:, t, :, None]
        if beta is not None:
            u = beta[:, t, :, None, None] * (u - k[:, t, :, None] @ state)
        state = state + k[:, t, :, :, None] * u
        out.append(x.scale * (q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(out, 1), state


def few_tokens(x: Inputs, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """`recurrent` in generation: one kernel where Triton runs, which reads and writes the state once."""
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x[:5], start))
    if start is None or tracked or not x.q.is_cuda or start.dtype != torch.float32 or find_spec("triton") is None:
        return recurrent(x, start)
    from ringattn.kernels.linear.triton.delta_decode import decode

    return decode(x, start)
