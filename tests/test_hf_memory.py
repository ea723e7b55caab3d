"""Models of transformers in pieces, and recomputation that keeps attention: the same numbers, fewer of them at once."""

from copy import deepcopy

import pytest
import torch
from hf_ranks import same, trained
from test_hf import T, batch, build
from torch.utils._python_dispatch import TorchDispatchMode

import ringattn as ra
from ringattn import hf
from ringattn.comms.local import run
from ringattn.models.hf import memory

AGAIN = {"use_reentrant": False, "context_fn": hf.keep_attention}


class Ops(TorchDispatchMode):
    """The most numbers of any result, and how often attention ran."""

    def __init__(self):
        super().__init__()
        self.most = self.attentions = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        outs = out if isinstance(out, tuple) else (out,)
        self.most = max([self.most, *(x.numel() for x in outs if T in getattr(x, "shape", ()))])
        self.attentions += op is torch.ops.ringattn.attention.default
        return out


def cast(model) -> list[torch.dtype]:
    """As FSDP2 with an output dtype (accelerate's): what the head gives is cast, its weights gathered by a hook on it.

    Returns the dtypes of the gradients that came to this hook, which grow.
    """
    gathered: list[torch.dtype] = []

    def hook(module, args, out):
        out = out.bfloat16()
        if out.requires_grad:
            out.register_hook(lambda gradient: gathered.append(gradient.dtype))
        return out

    model.get_output_embeddings().register_forward_hook(hook)
    return gathered


@pytest.mark.parametrize(
    ("name", "padded", "wrapped"),
    [
        *((name, padded, False) for name in ("Llama", "Gemma2", "Qwen2Moe", "Qwen3_5") for padded in (False, True)),
        ("Llama", False, True),
    ],
)
def test_in_pieces_is_the_same_model(name, padded, wrapped, monkeypatch):
    """Gemma 2 caps its logits, Qwen 2 has experts. Losses stay exact where a wrapper casts them, in every call."""
    monkeypatch.setattr(memory, "NUMBERS", 200)
    monkeypatch.setattr(memory, "LOGITS", 64 * 5)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, T // 2 :] = 1 - int(padded)
    given = {"input_ids": batch(), "labels": batch().masked_fill(mask == 0, -100), "attention_mask": mask}
    single = build(name)
    copies = [deepcopy(single) for _ in range(2)]
    expected = single(**given, use_cache=False).loss
    expected.backward()

    def one_rank(mesh):
        model = hf.prepare(hf.in_pieces(copies[mesh.rank]), mesh)
        model.gradient_checkpointing_enable(AGAIN)
        gathered = cast(model) if wrapped else []
        for count in range(1, 2 + wrapped):
            model.zero_grad()
            loss, logits, grads = trained(model.train(), **given)
            assert (logits is None) == (name != "Gemma2") and gathered == [torch.bfloat16] * count * wrapped
        with torch.no_grad():
            assert hf.whole(model, model(**given).logits).shape == (2, T, 64)
        return loss, logits, grads

    same(run(one_rank, sequence=2), expected, single)


def test_what_is_large_and_what_is_recomputed(monkeypatch):
    """A gate of 48 numbers a token and 64 logits a token are never there as a whole; attention runs once a layer."""
    monkeypatch.setattr(memory, "NUMBERS", 200)
    monkeypatch.setattr(memory, "LOGITS", 64 * 5)
    seen = {}
    for small in (False, True):
        model = build("Llama").train()
        model = hf.prepare(hf.in_pieces(model) if small else model, ra.plan(seq_len=T))
        model.gradient_checkpointing_enable(AGAIN if small else {"use_reentrant": False})
        with Ops() as seen[small]:
            model(batch()[:1], labels=batch()[:1]).loss.backward()
    layers = model.config.num_hidden_layers
    assert seen[False].most >= T * 64 and seen[True].most < T * 48
    assert (seen[False].attentions, seen[True].attentions) == (2 * layers, layers)
