"""Gated linear attention as a layer: over ranks in training, with a state of fixed size in generation.

B batch   T this rank's tokens   C width   H heads   K key dim   V value dim
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn import api
from ringattn.check import of_arguments, of_packed, of_sizes
from ringattn.kernels.linear import Inputs
from ringattn.kernels.recurrent import recurrent
from ringattn.planning import Plan
from ringattn.spec import Docs, of_factor, whole
from ringattn.torch.check import of_types
from ringattn.torch.handles import whole_on_one
from ringattn.torch.linear.halo import causal_convolution, last_tokens

FEW = 8  # tokens that `step` takes one by one


def head_size(d_model: int, heads: int, said: int | None = None) -> int:
    """The size of a head: as given, or its share of d_model."""
    if found := of_sizes(d_model=d_model, heads=heads):
        raise ValueError(found)
    size = d_model // heads if said is None else said
    if size < 1:
        raise ValueError(f"d_model={d_model} and heads={heads} make heads of size {size}; it must be 1 or more")
    return size


def check_input(x: Tensor, d_model: int, plan: Plan | None = None, docs: Docs | None = None) -> None:
    """A ValueError unless x is a rank's [batch, tokens, d_model] and documents match its sequence."""
    problem = of_types(x=x) or of_arguments(plan=plan, docs=docs) or of_input(x, d_model, plan, docs)
    if problem:
        raise ValueError(problem)


def of_input(x: Tensor, d_model: int, plan: Plan | None, docs: Docs | None) -> str | None:
    """Its shape; a compiled graph leaves lengths to the ops."""
    if x.dim() != 3 or x.shape[2] != d_model:
        return f"x has shape {tuple(x.shape)}; expected [batch, tokens, {d_model}]"
    if torch.compiler.is_compiling():
        return None
    if plan is not None and x.shape[1] != plan.local_len:
        return (
            f"x has {x.shape[1]} tokens, a rank of this plan holds {plan.local_len}; pass plan.shard(x), and for "
            "another length plan.for_length(n)"
        )
    return of_packed("docs", docs, x.shape[1] if plan is None else plan.seq_len, len(x))


def check_stream(x: Tensor, d_model: int, rows: int | None, plan: Plan | None = None) -> None:
    """A ValueError if x cannot continue a sequence with `rows` batch rows (None: it begins here)."""
    check_input(x, d_model, plan)
    if not x.shape[1]:
        raise ValueError("x has no tokens; a chunk or a step has 1 or more")
    if x.requires_grad:
        raise ValueError(
            "x requires gradients, but prefill and step have none: call them under torch.no_grad(), or train with "
            "forward"
        )
    if rows is not None and len(x) != rows:
        raise ValueError(f"x has {len(x)} batch rows, the sequence so far {rows}; reset() first")


class GatedLinearAttention(nn.Module):
    """out(swish(w x) * norm(linear_attention(qkv(x), log decay))), of which this rank has its plan's tokens.

    The log decay is logsigmoid(up(down(x))) / temperature, one gate per key channel (gate="channel") or per head
    ("head"), or none (None). With `convolution` = W > 0, q, k and v first pass a causal convolution over W tokens.

    Only `forward` is differentiable. `prefill`, `step` and `reset` process a sequence step by step, as in
    `StreamingAttention`, and keep the state, which is the same on every rank.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate: str | None = "channel",
        gate_rank: int = 16,
        temperature: float = 16.0,
        convolution: int = 0,
        kernel: str = "auto",
    ):
        super().__init__()
        if gate not in ("channel", "head", None):
            raise ValueError(f"gate={gate!r}: choose 'channel', 'head' or None")
        if found := of_sizes(gate_rank=gate_rank):
            raise ValueError(found)
        wrong = temperature is None or of_factor("temperature", temperature)
        if wrong or whole(convolution) is None or convolution < 0:
            raise ValueError(f"temperature={temperature!r} must be above 0, convolution={convolution!r} at least 0")
        self.d_model, self.heads, self.gate, self.temperature = d_model, heads, gate, temperature
        self.convolution, self.kernel = convolution, kernel
        self.value_dim = head_size(d_model, heads, value_dim)
        self.key_dim = head_size(d_model, heads, max(1, d_model // heads // 2) if key_dim is None else key_dim)
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        if gate:
            self.down = nn.Linear(d_model, gate_rank, bias=False)
            self.up = nn.Linear(gate_rank, keys if gate == "channel" else heads)
        if convolution:
            self.mix = nn.Parameter(torch.randn(2 * keys + values, convolution) * convolution**-0.5)
        self.swish = nn.Linear(d_model, values, bias=False)
        self.norm = nn.GroupNorm(heads, values)  # a group is a head
        self.out = nn.Linear(values, d_model, bias=False)
        self.state: Tensor | None = None  # [B, H, K, V], float32
        self.tail: Tensor | None = None  # the last tokens, which the convolution will still need

    def forward(
        self, x_BTC: Tensor, plan: Plan | None = None, positions: Tensor | None = None, docs: Docs | None = None
    ) -> Tensor:
        """This rank's tokens of the layer's output. `positions` are not needed: order is in the state."""
        check_input(x_BTC, self.d_model, plan, docs)
        mixed = self.qkv(x_BTC)
        if self.convolution:
            mixed = F.silu(causal_convolution(mixed, self.mix, plan, docs))
        out = api.linear_attention(*self.parted(mixed), self.log_decay(x_BTC), plan, docs=docs, kernel=self.kernel)
        return self.finished(out, x_BTC)

    @torch.no_grad()
    def prefill(self, x_BTC: Tensor, plan: Plan | None = None) -> Tensor:
        """The next chunk of a prompt, of which x is this rank's part under `plan` (None: one device, all of it)."""
        self.check(x_BTC, plan)
        plan = whole_on_one(x_BTC, x_BTC) if plan is None else plan
        mixed, tail = self.qkv(x_BTC), self.tail
        if self.convolution:
            tail = last_tokens(mixed, plan, self.convolution - 1, self.tail)
            mixed = F.silu(causal_convolution(mixed, self.mix, plan, first=self.tail))
        q, k, v = self.parted(mixed)
        out, state = api.linear_attention(
            q, k, v, self.log_decay(x_BTC), plan, initial_state=self.state, return_state=True, kernel=self.kernel
        )
        self.state, self.tail = state, tail  # last, so that a refused chunk changes nothing
        return self.finished(out, x_BTC)

    @torch.no_grad()
    def step(self, x_BTC: Tensor) -> Tensor:
        """The layer's output for the next tokens; input and output are the same on every rank."""
        self.check(x_BTC)
        if self.state is None:
            raise ValueError("step before prefill: this layer has seen no prompt; call prefill(x, plan) first")
        if x_BTC.shape[1] > FEW:
            return self.prefill(x_BTC)
        mixed, tail = self.qkv(x_BTC), self.tail
        if self.convolution:
            assert tail is not None
            rows = torch.cat([tail, mixed], 1)
            tail = rows[:, x_BTC.shape[1] :]
            mixed = F.silu(F.conv1d(rows.mT, self.mix.flip(1)[:, None], groups=rows.shape[2]).mT)
        q, k, v = self.parted(mixed)
        out, state = recurrent(Inputs(q, k, v, self.log_decay(x_BTC), None, None, self.key_dim**-0.5), self.state)
        self.state, self.tail = state, tail  # last, so that a failed step changes nothing
        return self.finished(out.to(x_BTC.dtype), x_BTC)

    def reset(self) -> None:
        """Drop the sequence."""
        self.state, self.tail = None, None

    def check(self, x: Tensor, plan: Plan | None = None) -> None:
        check_stream(x, self.d_model, None if self.state is None else len(self.state), plan)

    def parted(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [B, T, H, K] and v [B, T, H, V]."""
        keys = self.heads * self.key_dim
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)) for x in mixed.split([keys, keys, self.heads * self.value_dim], -1)
        )
        return q, k, v

    def log_decay(self, x_BTC: Tensor) -> Tensor | None:
        """The log decay in float32: sums of gates near zero lose precision in 16 bits."""
        if self.gate is None:
            return None
        g = F.logsigmoid(self.up(self.down(x_BTC)).float()) / self.temperature
        return g.unflatten(-1, (self.heads, -1)) if self.gate == "channel" else g

    def finished(self, out_BTHV: Tensor, x_BTC: Tensor) -> Tensor:
        """Each head normalised, gated, and all projected."""
        rows = out_BTHV.flatten(0, 1).flatten(1)
        return self.out(F.silu(self.swish(x_BTC)) * self.norm(rows).view(*out_BTHV.shape[:2], -1))
