"""What a model needs around `ringattn.attention`: rotary positions, and the attention layer.

B batch   T this rank's tokens   C width   H query heads   G key/value heads   D head dim
"""

from typing import Any

import torch
from torch import Tensor, nn

from ringattn import api, choosing
from ringattn.check.arguments import has_shape, head_size, of_sizes
from ringattn.kernels.arrays import accumulator
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.models.linear import GatedDeltaNet as GatedDeltaNet
from ringattn.models.linear import GatedLinearAttention as GatedLinearAttention
from ringattn.models.linear import KimiDeltaAttention as KimiDeltaAttention
from ringattn.models.linear import check_input, check_stream
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import Ranks
from ringattn.torch.check import of_types
from ringattn.torch.dispatch import fake, op
from ringattn.torch.handles import plan_of, text_and_handle
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.function import decode, prefill


@op("rope_angles")
def rope_angles(
    positions_T: Tensor, dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, dim / 2] of position * theta^(-2i / dim): the angles in float64, right at any length.

    One node of a compiled graph, which would otherwise compute them again for every head.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions_T.device) / dim
    angles = positions_T.double()[..., None] * theta**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


@fake("rope_angles")
def _(
    positions_T: Tensor, dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    cos = positions_T.new_empty(*positions_T.shape, (dim + 1) // 2, dtype=dtype)
    return cos, torch.empty_like(cos)


def rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) by its angle, in its dtype: a dot product then depends on the distance alone."""
    a, b = x_BTHD.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BTHD.dtype)


@op("positions")
def positions_of(x: Tensor, plan: str, handle: Tensor | None) -> Tensor:
    """plan.positions() on the device of x, as one node of a compiled graph."""
    return plan_of(plan, x.shape[1], x.shape[1], handle).positions().to(x.device, copy=True)


@fake("positions")
def _(x: Tensor, plan: str, handle: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.int64)


class Attention(nn.Module):
    """out(attention(rope(q(x)), rope(k(x)), v(x))), of which this rank computes its plan's tokens."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        spec: AttentionSpec | None = None,
        theta: float = 10000.0,
    ):
        super().__init__()
        head_dim = head_size(d_model, heads, head_dim)
        kv_heads = heads if kv_heads is None else kv_heads
        raise_if(of_sizes(kv_heads=kv_heads))
        if heads % kv_heads:
            raise ValueError(f"heads={heads} and kv_heads={kv_heads}: kv_heads must divide heads")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} is odd; rotary positions turn pairs, so it must be even")
        self.d_model, self.heads, self.kv_heads, self.head_dim, self.theta = d_model, heads, kv_heads, head_dim, theta
        self.spec = AttentionSpec() if spec is None else spec
        self.q = nn.Linear(d_model, heads * head_dim, bias=False)
        self.k = nn.Linear(d_model, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(d_model, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, d_model, bias=False)

    def forward(
        self, x_BTC: Tensor, plan: Plan | None = None, positions: Tensor | None = None, docs: Docs | None = None
    ) -> Tensor:
        """`positions` [T] (or [B, T]) are the plan's, or 0, 1, 2, ... without one, unless they are given."""
        check_input(x_BTC, self.d_model, plan)
        T = x_BTC.shape[1]
        if positions is None and plan is None:
            positions = torch.arange(T, device=x_BTC.device)
        elif positions is None:
            positions = torch.ops.ringattn.positions(x_BTC, *text_and_handle(plan))
        elif problem := of_types(positions=positions):
            raise ValueError(problem)
        elif not has_shape(positions, (T,), (1, T), (len(x_BTC), T)):
            raise ValueError(f"positions have shape {tuple(positions.shape)}; x has {len(x_BTC)} rows of {T} tokens")
        q, k, v = self.projected(x_BTC, positions)
        return self.out(api.attention(q, k, v, plan, spec=self.spec, docs=docs).flatten(2))

    def projected(self, x_BTC: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k and v [B, T, G, D], queries and keys turned to these positions."""
        B, T, _ = x_BTC.shape
        q = self.q(x_BTC).view(B, T, self.heads, self.head_dim)
        cos, sin = torch.ops.ringattn.rope_angles(positions, self.head_dim, self.theta, accumulator(q))
        q = rope(q, cos, sin)
        k = rope(self.k(x_BTC).view(B, T, self.kv_heads, self.head_dim), cos, sin)
        return q, k, self.v(x_BTC).view(B, T, self.kv_heads, self.head_dim)


class StreamingAttention(Attention):
    """Attention that can also process a sequence step by step: `prefill` takes a prompt, or its chunks in order, `step`
    the next tokens, and `reset` drops the sequence. The results equal those of `forward` on the whole sequence.

    The weights are those of `Attention`, under the same names. Keys and values are in `cache`, spread over the ranks of
    the first chunk's plan. It has room for `max_len` tokens, or with a window for the tokens that can still be seen and
    the longest chunk so far.

    Only `forward` is differentiable, and only `forward` takes a spec that is not causal.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        spec: AttentionSpec | None = None,
        theta: float = 10000.0,
        max_len: int = 4096,
    ):
        super().__init__(d_model, heads, kv_heads, head_dim, spec, theta)
        self.max_len = max_len
        self.cache: KVCache | None = None

    @classmethod
    def of(cls, layer: Attention, max_len: int) -> "StreamingAttention":
        """A trained layer's weights, shared and not copied."""
        with torch.device("meta"):
            width = layer.q.in_features
            made = cls(width, layer.heads, layer.kv_heads, layer.head_dim, layer.spec, layer.theta, max_len)
        for name, module in layer.named_children():
            setattr(made, name, module)
        return made

    @torch.no_grad()
    def prefill(self, x_BTC: Tensor, plan: Plan | None = None) -> Tensor:
        """The next chunk of a prompt, of which x is this rank's part under `plan` (None: one device, all of it)."""
        self.check(x_BTC, plan)
        cache, T = self.cache, x_BTC.shape[1]
        if plan is None:
            if cache is not None and cache.ranks > 1:
                raise ValueError(f"the cache is spread over {cache.ranks} ranks: pass the plan of this chunk too")
            plan = choosing.plan(seq_len=T) if cache is None else cache.plan.for_length(T)
        q, k, v = self.projected(x_BTC, plan.positions().to(x_BTC.device) + self.filled)
        cache = self.allocate(k, plan) if cache is None else cache.for_chunk(plan.seq_len)
        out = prefill(q, k, v, plan, cache, spec=self.spec)
        self.cache = cache  # last, so that a refused chunk changes nothing
        return self.out(out.flatten(2))

    @torch.no_grad()
    def step(self, x_BTC: Tensor) -> Tensor:
        """The layer's output for the next tokens; input and output are the same on every rank."""
        self.check(x_BTC)
        if self.cache is None:
            raise ValueError("step before prefill: this layer has seen no prompt; call prefill(x, plan) first")
        q, k, v = self.projected(x_BTC, torch.arange(x_BTC.shape[1], device=x_BTC.device) + self.filled)
        cache = self.cache.for_chunk(x_BTC.shape[1])
        out = decode(q, k, v, cache, spec=self.spec)
        self.cache = cache
        return self.out(out.flatten(2))

    def reset(self) -> None:
        """Drop the sequence, and free its memory."""
        self.cache = None

    @property
    def filled(self) -> Any:
        """How many tokens each batch row has seen: on the device, so that a captured step counts them too."""
        return 0 if self.cache is None else self.cache.filled[:, None]

    def check(self, x: Tensor, plan: Plan | None = None) -> None:
        if not self.spec.causal:
            raise ValueError(
                "the layer's spec has causal=False: tokens see later ones, so prefill and step are not supported; call "
                "forward on the whole sequence"
            )
        check_stream(x, self.d_model, None if self.cache is None else len(self.cache.filled), plan)

    def allocate(self, k: Tensor, plan: Plan) -> KVCache:
        B, _, G, D = k.shape
        device = k.device.type
        if plan.device != device:  # a plan without a mesh does not know where the layer is
            plan = plan.replace(axes=Ranks(plan.axes.ring, plan.axes.ulysses, device=device))
        with torch.cuda.device_of(k):
            return KVCache.allocate(
                plan, batch=B, max_len=self.max_len, kv_heads=G, head_dim=D, dtype=k.dtype,
                window=None if self.spec.first else self.spec.behind, room=max(plan.seq_len, 64),
            )  # fmt: skip
