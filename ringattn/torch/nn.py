"""What a model needs around `ringattn.attention`: rotary positions, and the attention layer.

B batch   T this rank's tokens   C width   H query heads   G key/value heads   D head dim
"""

import torch
from torch import Tensor, nn

from ringattn import api
from ringattn.planning import LIVE, Plan
from ringattn.spec import AttentionSpec, Docs


def rope_angles(positions_T: Tensor, dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T, dim / 2] of position * theta^(-2i / dim): the angles in float64, right at any length."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions_T.device) / dim
    angles = positions_T.double()[..., None] * theta**-exponents
    return angles.cos().float(), angles.sin().float()


def rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) by its angle, in float32: a dot product then depends on the distance alone."""
    a, b = x_BTHD.float().chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BTHD.dtype)


@torch.library.custom_op("ringattn::positions", mutates_args=())
def positions_of(x: Tensor, plan: int) -> Tensor:
    """plan.positions() on the device of x, as one node of a compiled graph; the plan comes as its handle."""
    return LIVE[plan].positions().to(x.device, copy=True)


@positions_of.register_fake
def _(x: Tensor, plan: int) -> Tensor:
    return x.new_empty(LIVE[plan].local_len, dtype=torch.int64)


class Attention(nn.Module):
    """out(attention(rope(q(x)), rope(k(x)), v(x))), of which this rank computes its plan's tokens."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        spec: AttentionSpec | None = None,
        theta: float = 10000.0,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.theta = heads, kv_heads, head_dim, theta
        self.spec = AttentionSpec() if spec is None else spec
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(
        self, x_BTC: Tensor, plan: Plan | None = None, positions: Tensor | None = None, docs: Docs | None = None
    ) -> Tensor:
        """`positions` [T] (or [B, T]) are the plan's, or 0, 1, 2, ... without one, unless they are given."""
        B, T, _ = x_BTC.shape
        if positions is None:
            positions = torch.arange(T, device=x_BTC.device) if plan is None else positions_of(x_BTC, plan.handle)
        cos, sin = rope_angles(positions, self.head_dim, self.theta)
        q = rope(self.q(x_BTC).view(B, T, self.heads, self.head_dim), cos, sin)
        k = rope(self.k(x_BTC).view(B, T, self.kv_heads, self.head_dim), cos, sin)
        v = self.v(x_BTC).view(B, T, self.kv_heads, self.head_dim)
        return self.out(api.attention(q, k, v, plan, spec=self.spec, docs=docs).flatten(2))
