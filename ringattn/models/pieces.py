"""Recomputation: functions of single tokens for a few tokens at a time, and layers without their attention.

Backward computes each piece again. Where a whole layer is recomputed (torch.utils.checkpoint), that recomputation ends
before it comes here, if nothing after this function is kept for backward: a piece runs twice in all, not three times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringattn.torch.attention.public
import ringattn.torch.linear.public  # noqa: F401 (their ops are named below)
from ringattn.models.offload import keep_too

LOGITS = 2**28  # the most logits at a time


def tokens_at_once(numbers: int, width: int, batch: int) -> int:
    """The most tokens for which a tensor of this width has at most `numbers` numbers."""
    return max(1, numbers // (width * max(1, batch)))


def in_pieces(function: Callable[..., Tensor], tokens: int, *given: Tensor, weights: Sequence[Tensor] | None) -> Tensor:
    """`function` of a few tokens at a time; `given` are [B, T, ...].

    `weights` are all tensors beside `given` that it has gradients for. Without them torch's checkpoint recomputes each
    piece: it finds them, and adds up their gradients in their dtype.
    """
    if given[0].shape[1] <= tokens:
        return function(*given)
    if not torch.is_grad_enabled():
        return torch.cat([function(*some) for some in split(given, tokens)], 1)
    if weights is None or torch.compiler.is_compiling() or not all(w.is_leaf for w in weights):  # views, as FSDP1 has
        return torch.cat([checkpoint(function, *some, use_reentrant=False) for some in split(given, tokens)], 1)
    kept = Kept.apply(torch.empty(0, requires_grad=True), *given)
    return Pieces.apply([kept], function, tokens, len(given), *given, *weights)


def split(given: Sequence[Tensor], tokens: int) -> Any:
    return zip(*(x.split(tokens, 1) for x in given), strict=True)


class Kept(torch.autograd.Function):
    """A node that only keeps tensors. What recomputes a layer stops when it has made the last tensor that was kept."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return dummy.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on what this node gives")


class Pieces(torch.autograd.Function):
    """A function of tokens, piece by piece; `kept` holds the result of the node that keeps its arguments."""

    @staticmethod
    def forward(ctx: Any, kept: Any, function: Callable[..., Tensor], tokens: int, n: int, *tensors: Tensor) -> Tensor:
        given, weights = tensors[:n], tensors[n:]
        ctx.kept, ctx.function, ctx.tokens, ctx.weights = kept, function, tokens, weights
        kind = given[0].device.type
        enabled, cache = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        ctx.cast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled, cache)
        first, *others = split(given, tokens)
        filled = function(*first)
        out = filled.new_empty(filled.shape[0], given[0].shape[1], *filled.shape[2:])
        places = out.split(tokens, 1)
        places[0].copy_(filled)
        for room, some in zip(places[1:], others, strict=True):
            room.copy_(function(*some))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        """The gradients of the given tensors, a piece at a time, and of the weights, which add up over the pieces."""
        given = [x.detach() for x in ctx.kept[0].grad_fn.saved_tensors]
        wants = ctx.needs_input_grad[4:]
        grads = [torch.empty_like(x) if want else None for x, want in zip(given, wants, strict=False)]
        places = list(split([g for g in grads if g is not None], ctx.tokens))
        weights = [w for w, want in zip(ctx.weights, wants[len(given) :], strict=True) if want]
        sums: list[Any] = [None] * len(weights)
        with ctx.cast, torch.enable_grad():
            for i, (*some, d) in enumerate(split([*given, dout], ctx.tokens)):
                asked = [x.requires_grad_() for x, g in zip(some, grads, strict=True) if g is not None] + weights
                out = ctx.function(*some)
                if i == 0:
                    refuse_others(out, asked)
                of_piece = torch.autograd.grad(out, asked, d, allow_unused=True)
                for room, g in zip(places[i] if places else (), of_piece, strict=False):
                    room.copy_(g)
                sums = [added(total, g) for total, g in zip(sums, of_piece[len(asked) - len(weights) :], strict=True)]
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.kept = None  # frees what was kept
        of_weights = iter(x if x is None else x.to(w.dtype) for x, w in zip(sums, weights, strict=True))
        return None, None, None, None, *grads, *(next(of_weights) if want else None for want in wants[len(given) :])


def refuse_others(out: Tensor, asked: Sequence[Tensor]) -> None:
    """An error if a result has gradients for tensors that were not named: they would be lost."""
    waiting, seen, expected = [out.grad_fn], set(), {id(x) for x in asked}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in expected:
            raise RuntimeError(f"a weight of shape {tuple(node.variable.shape)} is not among those of this function")
        waiting += [other for other, _ in node.next_functions]


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return grad if total is None else total
    return (total.float() if total.dtype.itemsize < 4 else total).add_(grad)


def keep_attention(*others: Any) -> Any:
    """The `context_fn` of torch's checkpoint with which backward recomputes everything but attention.

    The work of attention grows with the square of the length; what is kept of it is as large as a layer's input.
    `others` are further ops whose results are kept.
    """
    ours = torch.ops.ringattn
    kept = {ours.attention.default, ours.linear_attention.default, *others}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = create_selective_checkpoint_contexts(policy)
    keep_too(contexts[0])
    return contexts
