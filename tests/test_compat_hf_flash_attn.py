"""`substitute_hf_flash_attn`: models with flash_attention_2 over a process group equal themselves on one rank."""

import pytest
import torch
import torch.distributed as dist
from hf_ranks import SMALL, gradients

from ringattn.compat.ring_flash_attn import (
    restore_hf_flash_attn,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ringattn.launch import processes

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}
LENGTHS = [13, 21, 6]
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def build(name, attention):
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    for each in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        each._attn_implementation_internal = attention  # set_attn_implementation wants flash_attn to be installed
    return model


def tokens():
    return torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))


def weights():
    return torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))


def positions():
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


def spread():
    """One rank as a script for ring_flash_attn has it: logits and gradients of each model."""
    group, rank, results = dist.new_group([0, 1]), dist.get_rank(), []
    substitute_hf_flash_attn(group, 1)
    update_ring_flash_attn_params(CU, group)
    for model in (build(name, "flash_attention_2") for name in MODELS):
        ids, at, w = (x.chunk(2, 1)[rank] for x in (tokens(), positions(), weights()))
        logits = model(input_ids=ids, position_ids=at, use_cache=False).logits
        (logits * w).sum().backward()
        results.append((logits.detach(), gradients(model)))
    return results


def test_logits_and_every_gradient_are_those_of_one_rank():
    for name, *results in zip(MODELS, *processes.run(spread, 2), strict=True):
        model, expected = build(name, "eager"), []
        for ids, w in zip(tokens().split(LENGTHS, 1), weights().split(LENGTHS, 1), strict=True):
            expected.append(model(ids, use_cache=False).logits)
            (expected[-1] * w).sum().backward()
        torch.testing.assert_close(torch.cat([x for x, _ in results], 1), torch.cat(expected, 1), rtol=1e-5, atol=1e-5)
        for weight, gradient in gradients(model).items():
            total, of = sum(g[weight] for _, g in results), f"{name}, {weight}"
            torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5, msg=lambda m, of=of: f"{of}: {m}")


def refused():
    """Every call that would be wrong, in a process group of one rank: the words of its error."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build("Llama", "flash_attention_2").train()
    row = {"position_ids": positions(), "use_cache": False}
    messages, before = [], ALL_ATTENTION_FUNCTIONS["flash_attention_2"]

    def of(call):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))

    def recomputed():
        update_ring_flash_attn_params(CU, None)
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
        loss = model(tokens(), **row).logits.sum()
        update_ring_flash_attn_params(torch.tensor([0, 40]), None)
        loss.backward()

    substitute_hf_flash_attn(None, 1)
    of(lambda: model(tokens(), **row))
    update_ring_flash_attn_params(torch.tensor([0, 20, 39]), None)
    of(lambda: model(tokens(), use_cache=False))
    update_ring_flash_attn_params(CU, None)
    of(lambda: model(tokens().expand(2, -1), use_cache=False))
    of(recomputed)
    restore_hf_flash_attn()
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is before
    return messages


def test_what_would_be_wrong_is_refused():
    (messages,) = processes.run(refused, 1)
    expected = (
        "call update_ring_flash_attn_params(cu_seqlens, group) before the model",
        "cu_seqlens ends with 39, and 1 ranks with 40 tokens each have 40",
        "a batch of 2 rows: pack them into one",
        "between forward and a backward that recomputes activations",
    )
    assert all(words in message for message, words in zip(messages, expected, strict=True)), messages
