"""A decoder whose sequence may be spread over ranks: RMSNorm, attention, SwiGLU. Its weights: parallelize.py.

Attention is softmax with RoPE in every block, or in every n-th, and linear attention in the others.

B batch   T this rank's tokens   C width   V vocabulary
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringattn.conf.schema import Model
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.models.loss import token_losses
from ringattn.models.nn import Attention, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from ringattn.models.offload import offloaded
from ringattn.models.pieces import LOGITS, in_pieces, keep_attention, tokens_at_once
from ringattn.plans.plan import Plan

# Kept beside attention if only pointwise work is recomputed: what travelled, and matrix products.
PRODUCTS = torch.ops.ringattn.tokens_before.default, torch.ops.aten.mm.default
GATE_LIMIT = 2**30  # numbers of a gate at a time, if memory matters most


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), optionally for a few tokens at a time: at most `gate_limit` numbers of a gate."""

    def __init__(self, dim: int, hidden: int, gate_limit: int | None = None):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.gate_limit = gate_limit

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.gate_limit is None:
            return self.of(x_BTC)
        tokens = tokens_at_once(self.gate_limit, self.gate.out_features, len(x_BTC))
        return in_pieces(self.of, tokens, x_BTC, weights=list(self.parameters()))

    def of(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `recompute` is what the backward pass recomputes.

    What it keeps for that waits on the host with `offload`.
    """

    def __init__(self, model: Model, recompute: str = "none", linear: bool = False, offload: bool = False):
        super().__init__()
        self.recompute = recompute
        self.checkpoint = partial(offloaded, checkpoint) if offload else checkpoint
        self.attention_norm, self.mlp_norm = nn.RMSNorm(model.dim), nn.RMSNorm(model.dim)
        spec, heads = AttentionSpec(window=model.window, softcap=model.softcap), (model.heads, model.kv_heads)
        softmax = partial(Attention, model.dim, *heads, head_dim(model), spec=spec, theta=model.rope_theta)
        self.attention = linear_attention(model) if linear else softmax()
        self.mlp = SwiGLU(model.dim, model.hidden, GATE_LIMIT if recompute in ("cheap", "block") else None)

    def forward(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None = None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.apply_to(x, plan, positions, docs)
        more = PRODUCTS if self.recompute == "pointwise" else ()
        again: Any = {} if self.recompute == "block" else {"context_fn": partial(keep_attention, *more)}
        return self.checkpoint(self.apply_to, x, plan, positions, docs, use_reentrant=False, **again)

    def apply_to(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), plan, positions, docs)
        return x + self.mlp(self.mlp_norm(x))


def linear_attention(model: Model) -> nn.Module:
    """Keys of half a head's size, as the state has a key dim times a value dim."""
    value_dim = head_dim(model)
    layers: dict[str, Any] = {"gated": GatedLinearAttention, "delta": GatedDeltaNet, "kimi": KimiDeltaAttention}
    sizes: Any = {"key_dim": max(1, value_dim // 2), "value_dim": value_dim, "convolution": model.convolution}
    return layers[model.rule](model.dim, model.heads, **sizes)


class Head(nn.Linear):
    """Logits; or the cross entropy of given labels, for a few tokens at a time, whose logits take at most a GiB."""

    def forward(self, x_BTC: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return super().forward(x_BTC)
        tokens = tokens_at_once(LOGITS, self.out_features, len(x_BTC))
        return in_pieces(self.losses, tokens, x_BTC, labels_BT, weights=list(self.parameters()))

    def losses(self, x_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        losses = token_losses(super().forward(x_BTC), labels_BT)
        return losses.clone()  # FSDP2 puts a hook on a module's output, which must not be a view


class Decoder(nn.Module):
    """Logits [B, T, V] of the next token; or its cross entropy [B, T], where the labels are given."""

    def __init__(self, model: Model, recompute: str = "none", offload: bool = False):
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.dim)
        self.blocks = nn.ModuleList(
            Block(model, recompute, (i + 1) % model.softmax_every != 0, offload) for i in range(model.layers)
        )
        self.norm = nn.RMSNorm(model.dim)
        self.head = Head(model.dim, model.vocab, bias=False)

    def forward(
        self, tokens_BT: Tensor, plan: Plan | None = None, docs: Docs | None = None, labels_BT: Tensor | None = None
    ) -> Tensor:
        positions = None
        if plan is not None:
            for each in (plan, plan.keys):
                _ = each.local_len, each.padded  # a compiled block cannot compute them
            positions = plan.positions().to(tokens_BT.device)
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x, plan, positions, docs)
        return self.head(self.norm(x), labels_BT)


def head_dim(model: Model) -> int:
    return model.head_dim or model.dim // model.heads
