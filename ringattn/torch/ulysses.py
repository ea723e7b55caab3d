"""Ulysses: trade a slice of the sequence with all heads for the whole ring shard with a slice of the heads.

`enter` runs before the ring and `leave` after it; each is the other's adjoint. Key heads are repeated where the
Ulysses size does not divide them, and the gradients of the copies are summed. Padding is cleared on the way, forward
and backward, so that whatever a caller's padding holds, even NaN, never meets a real token.
"""

import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.cost import replicas
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.partial import NEVER

Real = Tensor | None  # [1 or B, T_local]: which tokens are real; None when all are


def enter(q: Tensor, k: Tensor, v: Tensor, axis: Axis, real: Real, real_keys: Real) -> list[Tensor]:
    """[B, T / U, H, D] of every rank -> [B, T, H / U, D], padding zeroed."""
    times = replicas(k.shape[2], axis.size)
    k, v = (cleared(x, real_keys).repeat_interleave(times, 2) if times > 1 else cleared(x, real_keys) for x in (k, v))
    return exchange([cleared(q, real), k, v], axis, split=2, join=1)


def enter_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, axis: Axis, real: Real, real_keys: Real, kv_heads: int
) -> list[Tensor]:
    """The gradients where the inputs were, those of a head's copies summed in float32."""
    dq, dk, dv = exchange([dq, dk, dv], axis, split=1, join=2)
    dk, dv = (summed(x, kv_heads) for x in (dk, dv))
    return [cleared(dq, real), cleared(dk, real_keys), cleared(dv, real_keys)]


def leave(out: Tensor, lse: Tensor, axis: Axis, real: Real) -> list[Tensor]:
    """[B, T, H / U, V] of every rank -> [B, T / U, H, V]; a row of padding is 0 with an lse of -inf."""
    out, lse = exchange([out, lse], axis, split=1, join=2)
    return [cleared(out, real), cleared(lse, real, NEVER)]


def leave_backward(dout: Tensor, dlse: Tensor, axis: Axis, real: Real) -> list[Tensor]:
    return exchange([cleared(dout, real), cleared(dlse, real)], axis, split=2, join=1)


def exchange(tensors: list[Tensor], axis: Axis, split: int, join: int) -> list[Tensor]:
    """All of them at once; what goes in never comes out as the same tensor, as a torch op promises."""
    if axis.size == 1:
        return tensors
    pending = [axis.all_to_all(x, split, join) for x in tensors]
    return [p.wait() for p in pending]


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the copies of each key head."""
    times = x.shape[2] // kv_heads
    if times == 1:
        return x
    return x.unflatten(2, (kv_heads, times)).sum(3, dtype=accumulator(x)).to(x.dtype)


def cleared(x: Tensor, real: Real, fill: float = 0.0) -> Tensor:
    """`x` [B, T, ...] with `fill` where tokens are padding."""
    return x if real is None else torch.where(real.reshape(*real.shape, *[1] * (x.dim() - 2)), x, fill)
