"""A decoder whose sequence may be spread over ranks: RMSNorm, attention with RoPE, SwiGLU; and how its weights are.

B batch   T this rank's tokens   C width   V vocabulary
"""

import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn.conf.schema import Model
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch.nn import Attention


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `recompute` says what the backward pass computes again."""

    def __init__(self, model: Model, recompute: str = "none"):
        super().__init__()
        self.recompute = recompute
        spec = AttentionSpec(window=model.window, softcap=model.softcap)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(model.dim), nn.RMSNorm(model.dim)
        self.attention = Attention(
            model.dim, model.heads, model.kv_heads, head_dim(model), spec=spec, theta=model.rope_theta
        )
        self.mlp = SwiGLU(model.dim, model.hidden)

    def forward(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None = None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.apply_to(x, plan, positions, docs)
        again: Any = {"context_fn": keep_attention} if self.recompute == "cheap" else {}
        return checkpoint(self.apply_to, x, plan, positions, docs, use_reentrant=False, **again)

    def apply_to(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), plan, positions, docs)
        return x + self.mlp(self.mlp_norm(x))


def keep_attention() -> Any:
    """Recompute everything but attention, whose work grows with the square of the length."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.ringattn.exchange.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Decoder(nn.Module):
    """Logits [B, T, V] of the next token."""

    def __init__(self, model: Model, recompute: str = "none"):
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.dim)
        self.blocks = nn.ModuleList(Block(model, recompute) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.dim)
        self.head = nn.Linear(model.dim, model.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, plan: Plan | None = None, docs: Docs | None = None) -> Tensor:
        positions = None if plan is None else plan.positions().to(tokens_BT.device)
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x, plan, positions, docs)
        return self.head(self.norm(x))


def head_dim(model: Model) -> int:
    return model.head_dim or model.dim // model.heads


def build(model: Model, seed: int, device: torch.device, mesh: Any = None, **choices: Any) -> Decoder:
    """The decoder, its weights drawn from the seed alone, and cut over all ranks of `mesh` (FSDP2).

    Made one part after the other, so that no rank ever holds more than its shard and one whole block.
    `choices`: recompute, and precision, "float32" or "bfloat16" (the master weights are float32 in either case).
    """
    precision = choices.pop("precision", "float32")
    with torch.device("meta"):
        decoder = Decoder(model, **choices)
    cut = partial(shard, mesh=mesh, precision=precision) if mesh is not None else None
    for name, part in parts(decoder):
        part.to_empty(device=device, recurse=name != "")
        initialise(part, name, seed, model.layers)
        if cut:
            cut(part)
    return decoder


def parts(decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What is sharded together: each block, the embedding, the norm and the head; last of all, the whole."""
    for i, block in enumerate(decoder.blocks):
        yield f"blocks.{i}", block
    for name in ("embed", "norm", "head"):
        yield name, getattr(decoder, name)
    yield "", decoder


@torch.no_grad()
def initialise(part: nn.Module, name: str, seed: int, layers: int) -> None:
    """Norms 1; matrices normal with deviation 1 / sqrt(inputs), over sqrt(2 layers) where they end a residual branch;
    the embedding 0.5, the head 0.02 so that the first guess is even.

    Drawn on the CPU from a stream of each weight's own, so that no sharding, device or order changes them.
    """
    if not name:
        return
    for own, weight in part.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}.{own}".encode()))
        ends = own.endswith(("attention.out.weight", "mlp.down.weight"))
        deviation = {"embed": 0.5, "head": 0.02}.get(
            name, weight.shape[1] ** -0.5 / ((2 * layers) ** 0.5 if ends else 1)
        )
        weight.copy_(torch.empty(weight.shape).normal_(0.0, deviation, generator=generator))


def shard(part: nn.Module, mesh: Any, precision: str) -> None:
    """FSDP2 over all ranks. Gradients are summed, never averaged: each rank's loss is its share of the mean."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(part, mesh=mesh, mp_policy=policy)
    part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    part.set_gradient_divide_factor(1.0)  # type: ignore[operator]


def train_flops(model: Model, seq_len: int) -> float:
    """Flops of one sequence, forward and backward: 6 a weight and token, and 12 a visible pair, head and head dim."""
    dim, inner = head_dim(model), head_dim(model) * model.heads
    matrices = (
        model.layers * (model.dim * (2 * inner + 2 * model.kv_heads * dim) + 3 * model.dim * model.hidden)
        + model.dim * model.vocab
    )
    window = min(model.window or seq_len, seq_len)
    pairs = window * (window + 1) // 2 + (seq_len - window) * window
    return 6.0 * matrices * seq_len + 12.0 * model.layers * inner * pairs
