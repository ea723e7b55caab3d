"""Prepared models over ranks that are threads, beside the same model on one rank."""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

import ringattn as ra
from ringattn.comms.local import run
from ringattn.models import hf

SMALL = {  # a configuration
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {  # and of linear layers
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def on_each(model, call: Callable, seq_len: int, ranks: dict[str, int], **plan) -> list:
    """What `call(prepared)` gives on each rank, of copies that are prepared over these ranks."""
    copies = [deepcopy(model) for _ in range(math.prod(ranks.values()))]
    return run(lambda mesh: call(hf.prepare(copies[mesh.rank], ra.plan(mesh, seq_len=seq_len, **plan))), **ranks)


def trained(model, **given) -> tuple[float, torch.Tensor | None, dict[str, torch.Tensor]]:
    """The loss of a prepared model, the logits of all tokens, and this rank's gradients."""
    result = model(**given)
    result.loss.backward()
    logits = None if result.logits is None else hf.whole(model, result.logits.detach())
    return float(result.loss.detach()), logits, gradients(model)


def same(results, loss, plain, logits=None, real=..., averaged: bool = False, atol=2e-6) -> None:
    """Each rank has this loss, and these logits where tokens are real; the sum of gradients is that of one rank."""
    for of_rank, rows, _ in results:
        assert of_rank == pytest.approx(float(loss.detach()), abs=2e-6)
        if logits is not None:
            torch.testing.assert_close(rows[real], logits.detach()[real], rtol=1e-5, atol=1e-5)
    for weight, gradient in gradients(plain).items():
        total = sum(g[weight] for *_, g in results) / (len(results) if averaged else 1)
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=atol, msg=lambda m, w=weight: f"{w}: {m}")
