"""Less memory for long sequences of transformers' models: what is of single tokens is computed in pieces.

A long sequence's largest tensors are not those of attention: an MLP has several numbers for each of a token's, a norm
computes in float32, and a token's logits are as many as there are words. All are of single tokens, so they can be
computed for a few tokens at a time, and again in backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.models.hf.choice import compiled, inner
from ringattn.models.hf.targets import Wanted, changed
from ringattn.models.loss import token_losses
from ringattn.models.offload import offloaded
from ringattn.models.pieces import LOGITS, tokens_at_once
from ringattn.models.pieces import in_pieces as applied

NAMES = "mlp", "feed_forward"  # of a decoder layer's MLP
RECOMPUTED, WRAPPED = "_gradient_checkpointing_func", "checkpoint_fn"  # of transformers' layers, of torch's wrappers
NUMBERS = 2**26  # the most of an MLP's hidden layer, or a norm's, at a time


def in_pieces(model: Any) -> Any:
    """The same transformers model, whose MLPs and norms run for a few tokens at a time, recomputed in backward.

    Once it is prepared, so does the loss of a call with labels and gradients: its logits are never there as a whole,
    and the output has none. Mixtures of experts stay whole, and so do the logits of models that change them after their
    head (soft caps, scales). Call it before the model is wrapped in DDP or FSDP. Beside it, let the layers recompute
    all but attention: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": hf.keep_attention})`.
    """
    bare = inner(model)
    head = bare.get_output_embeddings() if hasattr(bare, "get_decoder") else None
    if head is None:
        raise ValueError(f"{type(model).__name__} is not a transformers model that predicts tokens")
    decoder = bare.get_decoder()
    mlps = [getattr(layer, name, None) for layer in decoder.modules() for name in NAMES]
    norms = [m for m in decoder.modules() if type(m).__name__.endswith("Norm")]
    for module in (*mlps, *norms):
        if isinstance(module, nn.Module) and of_single_tokens(module):
            give(module, by_pieces)
    give(head, losses_or_logits)
    return model


def give(module: Any, forward: Any) -> None:
    if "ringattn_whole" not in vars(module):
        count = len(list(module.parameters()))  # now, since wrappers change them
        new = {"ringattn_whole": module.forward, "ringattn_weights": count, "ringattn_width": width(module)}
        vars(module).update(new, forward=MethodType(forward, module))


def of_single_tokens(module: Any) -> bool:
    """Whether a norm or an MLP is a function of single tokens and nothing else, of a known width."""
    draws = any(isinstance(x, nn.Dropout) and x.p for x in module.modules())
    unary = len(signature(module.forward).parameters) == 1
    return bool(unary and not draws and not hasattr(module, "experts") and width(module))


def width(module: nn.Module) -> int:
    """The most numbers that a token has within an MLP, a norm or a head."""
    sizes = [getattr(m, name, 0) for m in module.modules() for name in ("out_features", "nf")]  # Linear, Conv1D
    return max([*sizes, *(len(p) for p in module.parameters() if p.dim() == 1)], default=0)


def pieces_of(module: Any, function: Any, numbers: int, *given: Tensor) -> Tensor:
    """A function of single tokens, for a few at a time, with the weights that are trained of this module.

    torch's checkpoint finds the weights if a wrapper replaced them (FSDP1).
    """
    weights = list(module.parameters())
    trained = [w for w in weights if w.requires_grad] if len(weights) == module.ringattn_weights else None
    return applied(function, tokens_at_once(numbers, module.ringattn_width, len(given[0])), *given, weights=trained)


def by_pieces(self: Any, x: Tensor) -> Any:
    if x.dim() != 3:  # a norm of single heads
        return self.ringattn_whole(x)
    return pieces_of(self, self.ringattn_whole, NUMBERS, x)


@torch.compiler.disable
def losses_or_logits(self: Any, x: Tensor) -> Any:
    """What the head of a model gives: logits, or within `run` the loss of each token."""
    labels = vars(self).get("ringattn_labels")
    if labels is None:
        return self.ringattn_whole(x)

    def losses(x: Tensor, labels: Tensor) -> Tensor:
        return token_losses(self.ringattn_whole(x), labels).clone()  # no view: FSDP2 puts a hook on what a module gives

    self.ringattn_losses = pieces_of(self, losses, LOGITS, x, labels.to(x.device))
    return self.ringattn_losses


@torch.compiler.disable(recursive=False)
def run(model: Any, given: dict[str, Any], asked: Wanted | None) -> Any:
    """The model's output; its head in pieces computes losses in place of logits in training, of one label a token.

    A wrapper of the head may cast them (FSDP2 with an output dtype), which is undone. A model that changes them gives
    logits instead, from then on.
    """
    head = vars(model.get_output_embeddings() or model)
    may = "ringattn_whole" in head and head.get("ringattn_cast") is not False and torch.is_grad_enabled()
    if asked is None or asked.others is not None or not may:
        return model.local_forward(**given)
    head["ringattn_labels"] = asked.labels
    try:
        output = model.local_forward(**given)
    finally:
        del head["ringattn_labels"]
    made, result = head.pop("ringattn_losses", None), output.logits
    if made is None or (result.data_ptr() == made.data_ptr() and result.shape == made.shape):
        return output
    if "ringattn_cast" not in head:  # compared once, for which a GPU is waited for
        same = result.shape == made.shape and torch.allclose(result, made.to(result.dtype), 0.0, 0.0, equal_nan=True)
        head["ringattn_cast"] = same
    if head["ringattn_cast"]:
        return changed(output, logits=BeforeCast.apply(result, made))
    return model.local_forward(**given)


@contextmanager
def offloading(model: Any) -> Iterator[None]:
    """Within it, what recomputed layers keep for backward is offloaded, if the model was prepared so."""
    found: list[Any] = []
    if model.ringattn.offload and model.training and torch.is_grad_enabled():
        modules = [vars(m) for m in model.modules()]
        name = WRAPPED if any(WRAPPED in m for m in modules) else RECOMPUTED
        found = [(m, m[name]) for m in modules if name in m and m.get("gradient_checkpointing", True)]
        if not found or compiled(model):
            raise ValueError("offload=True takes model.gradient_checkpointing_enable(), and no torch.compile")
    try:
        for module, checkpoint in found:
            module[name] = partial(offloaded, checkpoint)
        yield
    finally:
        for module, checkpoint in found:
            module[name] = checkpoint


class BeforeCast(torch.autograd.Function):
    """What was cast, as it was before. The cast gets zeros in backward, so that hooks on it run: FSDP2's gather."""

    @staticmethod
    def forward(ctx: Any, cast: Tensor, made: Tensor) -> Tensor:
        ctx.dtype = cast.dtype
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return torch.zeros_like(dout, dtype=ctx.dtype), dout
