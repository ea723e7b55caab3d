"""Linear attention as layers: over ranks in training, with a state of fixed size in generation.

B batch   T this rank's tokens   C width   H heads   G key heads   K key dim   V value dim
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn import api
from ringattn.check.arguments import head_size, of_arguments, of_sizes
from ringattn.check.attention import of_packed
from ringattn.kernels.arrays import in_sums
from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.recurrent import few_tokens
from ringattn.masks.spec import Docs, raise_if, whole
from ringattn.plans.plan import Plan
from ringattn.torch.check import of_types
from ringattn.torch.linear.halo import causal_convolution, last_tokens

GATE_RANK, TEMPERATURE = 16, 16.0  # of GatedLinearAttention, as it was published
STEP_TOKENS = 8  # at most so many are taken one by one


def check_input(x: Tensor, d_model: int, plan: Plan | None = None, docs: Docs | None = None) -> None:
    """A ValueError unless x is a rank's [batch, tokens, d_model] and documents match its sequence."""
    raise_if(of_types(x=x) or of_arguments(plan=plan, docs=docs))
    if x.dim() != 3 or x.shape[2] != d_model:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [batch, tokens, {d_model}]")
    if torch.compiler.is_compiling():  # a compiled graph leaves lengths to the ops
        return
    if plan is not None and x.shape[1] != plan.local_len:
        raise ValueError(
            f"x has {x.shape[1]} tokens, a rank of this plan holds {plan.local_len}; pass plan.shard(x), and for "
            "another length plan.for_length(n)"
        )
    raise_if(of_packed("docs", docs, x.shape[1] if plan is None else plan.seq_len, len(x)))


def check_stream(x: Tensor, d_model: int, rows: int | None, plan: Plan | None = None) -> None:
    """A ValueError if x cannot continue a sequence with `rows` batch rows (None: it begins here)."""
    check_input(x, d_model, plan)
    if x.requires_grad:
        raise ValueError(
            "x requires gradients, but prefill and step have none: call them in torch.no_grad(), or train with forward"
        )
    if rows is not None and len(x) != rows:
        raise ValueError(f"x has {len(x)} batch rows, the sequence so far {rows}; reset() first")


def convolved(
    x: Tensor, weight: Tensor, plan: Plan | None, first: Tensor | None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The convolution of the next tokens, behind `first`, and the last of them all, which later tokens still need.

    Without a plan every rank has all of the tokens. With `lengths`, only so many of each row are real.
    """
    W = weight.shape[1]
    if plan is not None:
        return causal_convolution(x, weight, plan, first=first), last_tokens(x, plan, W - 1, first, lengths)
    rows = F.pad(x, (0, 0, W - 1, 0)) if first is None else torch.cat([first, x], 1)
    y = F.conv1d(rows.mT.to(weight.dtype), weight.flip(1)[:, None], groups=rows.shape[2]).mT
    return y, rows[:, x.shape[1] :]


def continued(x: Inputs, plan: Plan | None, state: Tensor | None, kernel: str = "auto") -> tuple[Tensor, Tensor]:
    """Linear attention of the next tokens, and the state behind them; without a plan every rank has all of them."""
    if plan is None and x.q.shape[1] <= STEP_TOKENS:
        out, state = few_tokens(x, state)
        return out.to(x.v.dtype), state
    out, state = api.linear_attention(
        x.q, x.k, x.v, x.g, plan, beta=x.beta, scale=x.scale, initial_state=state, return_state=True, kernel=kernel
    )
    return out, state


class LinearLayer(nn.Module):
    """What layers of linear attention share: projections, a convolution, the call over ranks, and streams.

    A subclass defines `gates` and `finished`. Only `forward` is differentiable. `prefill`, `step` and `reset` process a
    sequence step by step, as in `StreamingAttention`, and keep the state, which is the same on every rank.
    """

    def __init__(
        self, d_model: int, heads: int, key_heads: int | None, key_dim: int | None, value_dim: int | None,
        convolution: int, kernel: str,
    ):  # fmt: skip
        super().__init__()
        if whole(convolution) is None or convolution < 0:
            raise ValueError(f"convolution={convolution!r} must be a whole number, at least 0")
        self.value_dim = head_size(d_model, heads, value_dim)
        self.key_dim = head_size(d_model, heads, max(1, d_model // heads // 2) if key_dim is None else key_dim)
        self.key_heads = heads if key_heads is None else key_heads
        raise_if(of_sizes(key_heads=self.key_heads))
        if heads % self.key_heads:
            raise ValueError(f"key_heads={self.key_heads} must divide heads={heads}")
        self.d_model, self.heads, self.convolution, self.kernel = d_model, heads, convolution, kernel
        keys, values = self.key_heads * self.key_dim, heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        if convolution:
            self.mix = nn.Parameter(torch.randn(2 * keys + values, convolution) * convolution**-0.5)
        self.out = nn.Linear(values, d_model, bias=False)
        self.state: Tensor | None = None  # [B, H, K, V], float32
        self.tail: Tensor | None = None  # the last tokens, which the convolution will still need

    def gates(self, x_BTC: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The log decay and beta in float32: sums of gates near zero lose precision in 16 bits."""
        raise NotImplementedError

    def finished(self, out_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        """Each head normalised, gated, and all projected."""
        raise NotImplementedError

    def forward(
        self, x_BTC: Tensor, plan: Plan | None = None, positions: Tensor | None = None, docs: Docs | None = None
    ) -> Tensor:
        """This rank's tokens of the layer's output. `positions` are not needed: order is in the state."""
        check_input(x_BTC, self.d_model, plan, docs)
        mixed = self.qkv(x_BTC)
        if self.convolution:
            mixed = F.silu(causal_convolution(mixed, self.mix, plan, docs))
        log_decay, beta = self.gates(x_BTC)
        out = api.linear_attention(*self.by_heads(mixed), log_decay, plan, beta=beta, docs=docs, kernel=self.kernel)
        return self.finished(out, x_BTC)

    @torch.no_grad()
    def prefill(self, x_BTC: Tensor, plan: Plan | None = None) -> Tensor:
        """The next chunk of a prompt, of which x is this rank's part under `plan` (None: all of it, on every rank)."""
        check_stream(x_BTC, self.d_model, None if self.state is None else len(self.state), plan)
        mixed, tail = self.qkv(x_BTC), self.tail
        if self.convolution:
            mixed, tail = convolved(mixed, self.mix, plan, self.tail)
            mixed = F.silu(mixed)
        inputs = Inputs(*self.by_heads(mixed), *self.gates(x_BTC), None, self.key_dim**-0.5)
        out, state = continued(inputs, plan, self.state, self.kernel)
        self.state, self.tail = state, tail  # last, so that a refused chunk changes nothing
        return self.finished(out, x_BTC)

    def step(self, x_BTC: Tensor) -> Tensor:
        """The layer's output for the next tokens; input and output are the same on every rank."""
        if self.state is None:
            raise ValueError("step before prefill: this layer has seen no prompt; call prefill(x, plan) first")
        return self.prefill(x_BTC)

    def reset(self) -> None:
        """Drop the sequence."""
        self.state, self.tail = None, None

    def by_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, T, G, K] and v [B, T, H, V]."""
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.heads * self.value_dim], -1)
        q, k = (x.unflatten(-1, (self.key_heads, -1)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.heads, -1))


class GatedLinearAttention(LinearLayer):
    """out(swish(w x) * norm(linear_attention(qkv(x), log decay))), of which this rank has its plan's tokens.

    The log decay is logsigmoid(up(down(x))) / TEMPERATURE, one gate per key channel (gate="channel") or per head
    ("head"). With `convolution` = W > 0, q, k and v first pass a causal convolution over W tokens.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate: str = "channel",
        convolution: int = 0,
        kernel: str = "auto",
    ):
        if gate not in ("channel", "head"):
            raise ValueError(f"gate={gate!r}: choose 'channel' or 'head'")
        super().__init__(d_model, heads, None, key_dim, value_dim, convolution, kernel)
        self.gate, values = gate, heads * self.value_dim
        self.down = nn.Linear(d_model, GATE_RANK, bias=False)
        self.up = nn.Linear(GATE_RANK, heads * self.key_dim if gate == "channel" else heads)
        self.swish = nn.Linear(d_model, values, bias=False)
        self.norm = nn.GroupNorm(heads, values)  # a group is a head

    def gates(self, x_BTC: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g = F.logsigmoid(in_sums(self.up(self.down(x_BTC)))) / TEMPERATURE
        return g.unflatten(-1, (self.heads, -1)) if self.gate == "channel" else g, None

    def finished(self, out_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        rows = out_BTHV.flatten(0, 1).flatten(1)
        return self.out(F.silu(self.swish(x_BTC)) * self.norm(rows).view(*out_BTHV.shape[:2], -1))


class GatedDeltaNet(LinearLayer):
    """out(norm(linear_attention(q, k, v, log decay, beta)) * swish(w x)): the delta rule with a gate a head.

    As in Qwen3-Next, with `key_heads` heads of q and k: they have length 1 after the convolution, beta is
    sigmoid(b x), and the log decay -exp(log_rate) * softplus(decay(x) + bias). This rank has its plan's tokens.
    """

    decay: nn.Module

    def __init__(
        self,
        d_model: int,
        heads: int,
        key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        convolution: int = 4,
        kernel: str = "auto",
    ):
        super().__init__(d_model, heads, key_heads, key_dim, value_dim, convolution, kernel)
        self.beta, self.decay = (nn.Linear(d_model, heads, bias=False) for _ in range(2))
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.bias = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-6)
        self.swish = nn.Linear(d_model, heads * self.value_dim, bias=False)

    def gates(self, x_BTC: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g = F.softplus(in_sums(self.decay(x_BTC)) + in_sums(self.bias)).unflatten(-1, (self.heads, -1))
        g = -g * in_sums(self.log_rate).exp()[:, None]
        return g[..., 0] if g.shape[3] == 1 else g, in_sums(self.beta(x_BTC)).sigmoid()

    def by_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().by_heads(mixed)
        q, k = (x * torch.rsqrt(in_sums(x).square().sum(-1, keepdim=True) + 1e-6).to(x.dtype) for x in (q, k))
        return q, k, v

    def finished(self, out_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        return self.out(self.norm(out_BTHV).flatten(2) * F.silu(self.swish(x_BTC)))


class KimiDeltaAttention(GatedDeltaNet):
    """out(norm(linear_attention(q, k, v, log decay, beta)) * sigmoid(gate(x))): with a gate a key channel.

    The delta rule as in Kimi Linear; the projections of both gates have the rank of a value head. This rank has its
    plan's tokens.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        convolution: int = 4,
        kernel: str = "auto",
    ):
        super().__init__(d_model, heads, None, key_dim, value_dim, convolution, kernel)
        keys, values, rank = heads * self.key_dim, heads * self.value_dim, self.value_dim
        self.decay = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, keys, bias=False))
        self.bias = nn.Parameter(torch.zeros(keys))
        del self.swish
        self.gate = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, values))

    def finished(self, out_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        return self.out(self.norm(out_BTHV).flatten(2) * self.gate(x_BTC).sigmoid())
