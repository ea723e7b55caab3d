"""A decoder whose sequence may be spread over ranks: RMSNorm, attention, SwiGLU; and its weights.

Attention is softmax with RoPE in every block, or in every n-th, and linear attention in the others.

B batch   T this rank's tokens   C width   V vocabulary
"""

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringattn.torch.attention.compiled
import ringattn.torch.linear.compiled  # noqa: F401 (their ops are named below)
from ringattn.conf.schema import Model
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch.models.nn import Attention, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from ringattn.torch.models.pieces import LOGITS, in_pieces, tokens_at_once

AT_ONCE = 2**30  # the most numbers of a gate at a time, if memory matters most


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), optionally for a few tokens at a time, whose gate has at most `at_once` numbers."""

    def __init__(self, dim: int, hidden: int, at_once: int | None = None):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.at_once = at_once

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.at_once is None:
            return self.of(x_BTC)
        return in_pieces(self.of, tokens_at_once(self.at_once, self.gate.out_features, len(x_BTC)), x_BTC)

    def of(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `recompute` is what the backward pass recomputes."""

    def __init__(self, model: Model, recompute: str = "none", linear: bool = False):
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.mlp_norm = nn.RMSNorm(model.dim), nn.RMSNorm(model.dim)
        self.attention = linear_attention(model) if linear else softmax_attention(model)
        self.mlp = SwiGLU(model.dim, model.hidden, AT_ONCE if recompute in ("cheap", "block") else None)

    def forward(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None = None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.apply_to(x, plan, positions, docs)
        again: Any = {} if self.recompute == "block" else {"context_fn": partial(keep, self.recompute)}
        return checkpoint(self.apply_to, x, plan, positions, docs, use_reentrant=False, **again)

    def apply_to(self, x: Tensor, plan: Plan | None, positions: Tensor | None, docs: Docs | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), plan, positions, docs)
        return x + self.mlp(self.mlp_norm(x))


def softmax_attention(model: Model) -> nn.Module:
    spec = AttentionSpec(window=model.window, softcap=model.softcap)
    return Attention(model.dim, model.heads, model.kv_heads, head_dim(model), spec=spec, theta=model.rope_theta)


def linear_attention(model: Model) -> nn.Module:
    """Keys of half a head's size, as the state has a key dim times a value dim."""
    value_dim = head_dim(model)
    layers: dict[str, Any] = {"gated": GatedLinearAttention, "delta": GatedDeltaNet, "kimi": KimiDeltaAttention}
    sizes: Any = {"key_dim": max(1, value_dim // 2), "value_dim": value_dim, "convolution": model.convolution}
    return layers[model.rule](model.dim, model.heads, **sizes)


def keep(recompute: str) -> Any:
    """The ops of a block whose results are kept: attention, whose work grows with the square of the length; and every
    exchange and matrix product if only pointwise work is recomputed."""
    ours = torch.ops.ringattn
    kept = {ours.attention.default, ours.linear_attention.default}
    if recompute == "pointwise":
        kept |= {ours.tokens_before.default, torch.ops.aten.mm.default}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Head(nn.Linear):
    """Logits; or the cross entropy of given labels, for a few tokens at a time, whose logits take at most a GiB."""

    def forward(self, x_BTC: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return super().forward(x_BTC)
        return in_pieces(self.losses, tokens_at_once(LOGITS, self.out_features, len(x_BTC)), x_BTC, labels_BT)

    def losses(self, x_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        logits = super().forward(x_BTC).float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), reduction="none")
        return losses.view_as(labels_BT).clone()  # FSDP2 puts a hook on a module's output, which must not be a view


class Decoder(nn.Module):
    """Logits [B, T, V] of the next token; or its cross entropy [B, T], where the labels are given."""

    def __init__(self, model: Model, recompute: str = "none"):
        super().__init__()
        self.embed = nn.Embedding(model.vocab, model.dim)
        self.blocks = nn.ModuleList(
            Block(model, recompute, linear=(i + 1) % model.softmax_every != 0) for i in range(model.layers)
        )
        self.norm = nn.RMSNorm(model.dim)
        self.head = Head(model.dim, model.vocab, bias=False)

    def forward(
        self, tokens_BT: Tensor, plan: Plan | None = None, docs: Docs | None = None, labels_BT: Tensor | None = None
    ) -> Tensor:
        positions = None
        if plan is not None:
            _ = (
                plan.local_len,
                plan.padded,
                plan.keys.local_len,
                plan.keys.padded,
            )  # a compiled block cannot compute them
            positions = plan.positions().to(tokens_BT.device)
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x, plan, positions, docs)
        return self.head(self.norm(x), labels_BT)


def head_dim(model: Model) -> int:
    return model.head_dim or model.dim // model.heads


def build(model: Model, seed: int, device: torch.device, mesh: Any = None, **choices: Any) -> Decoder:
    """The decoder, with weights that depend on the seed alone, sharded over all ranks of `mesh` (FSDP2).

    It is made part by part, so that no rank ever holds more than its shard and one whole block.
    `choices`: recompute; precision, "float32" or "bfloat16" (the master weights are float32 in either case); compile.
    """
    precision, compiled = choices.pop("precision", "float32"), choices.pop("compile", False)
    with torch.device("meta"):
        decoder = Decoder(model, **choices)
    cut = partial(shard, mesh=mesh, precision=precision) if mesh is not None else None
    for name, part in parts(decoder):
        part.to_empty(device=device, recurse=name != "")
        initialise(part, name, seed, model.layers, (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1))
        if compiled and isinstance(part, Block):
            part.compile(fullgraph=True)
        if cut:
            cut(part)
    return decoder


def parts(decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """The modules that FSDP2 shards as units: each block, the embedding, the norm, the head; the whole model last."""
    for i, block in enumerate(decoder.blocks):
        yield f"blocks.{i}", block
    for name in ("embed", "norm", "head"):
        yield name, getattr(decoder, name)
    yield "", decoder


@torch.no_grad()
def initialise(part: nn.Module, name: str, seed: int, layers: int, shard: tuple[int, int]) -> None:
    """Norms 1, biases 0; matrices normal with deviation 1 / sqrt(inputs), over sqrt(2 layers) where they end a residual
    branch; the embedding 0.5; the head such that the logits have 0.22 at any width, and the first guess is even.

    Drawn on the CPU from a stream of each weight's own, so that no sharding, device or order changes them; and only the
    rows that rank `shard[0]` of `shard[1]` keeps.
    """
    if not name or next(part.parameters()).is_meta:  # no weights to draw
        return
    for own, weight in part.named_parameters():
        if weight.dim() == 1:
            weight.fill_(0.0 if own.endswith("bias") else 1.0)
            continue
        ends = own.endswith(("attention.out.weight", "mlp.down.weight"))
        rows, width = len(weight), weight[0].numel()
        deviation = {"embed": 0.5, "head": (20 * width) ** -0.5}.get(
            name, weight.shape[1] ** -0.5 / ((2 * layers) ** 0.5 if ends else 1)
        )
        each = -(-rows // shard[1])
        first, last = min(rows, shard[0] * each), min(rows, (shard[0] + 1) * each)
        drawn = normal(f"{seed} {name}.{own}", first * width, last * width)
        weight[first:last].copy_(drawn.view(-1, *weight.shape[1:]).mul_(deviation))


def normal(name: str, begin: int, end: int, piece: int = 2**16) -> Tensor:
    """Numbers [begin, end) of an endless normal sequence that depends on its name alone; threads draw a piece each."""
    low, high = begin // piece, -(-end // piece)
    drawn = torch.empty((high - low) * piece)

    def draw(i: int) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {low + i}".encode()))
        drawn[i * piece : (i + 1) * piece].normal_(generator=generator)

    with ThreadPoolExecutor() as threads:
        list(threads.map(draw, range(high - low)))
    return drawn[begin - low * piece : end - low * piece]


def shard(part: nn.Module, mesh: Any, precision: str) -> None:
    """FSDP2 over all ranks. Gradients are summed, never averaged: each rank's loss is its share of the mean."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(part, mesh=mesh, mp_policy=policy)
    part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    part.set_gradient_divide_factor(1.0)  # type: ignore[operator]


def train_flops(model: Model, documents: Sequence[int]) -> float:
    """Flops of one sequence of documents, forward and backward: 6 a weight and token, 12 a visible pair, head and head
    dim. Whole sequences are one document.

    Linear attention is counted as its recurrence: 12 per token, head and number in a state.
    """
    dim, inner = head_dim(model), head_dim(model) * model.heads
    softmax = model.layers // model.softmax_every
    linear = model.layers - softmax
    matrices = (
        softmax * model.dim * (2 * inner + 2 * model.kv_heads * dim)
        + linear * model.dim * 4 * inner  # q and k of half the size, v, the output's gate, out
        + model.layers * 3 * model.dim * model.hidden
        + model.dim * model.vocab
    )
    pairs = sum(visible(n, model.window or n) for n in documents)
    seq_len = sum(documents)
    states = seq_len * max(1, dim // 2)
    return 6.0 * matrices * seq_len + 12.0 * inner * (softmax * pairs + linear * states)


def visible(tokens: int, window: int) -> int:
    """How many (query, key) pairs a causal window leaves, for `tokens` tokens."""
    window = min(window, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window
