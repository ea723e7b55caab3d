"""Train a transformers model on one long sequence that is spread over ranks, its weights cut by FSDP2.

torchrun --nproc-per-node 8 examples/finetune_hf.py MODEL TEXT 131072     # without arguments: a tiny Llama on this file
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn import hf


def load(name: str | None, text: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """A pretrained model and the text's tokens; or a tiny model over bytes."""
    if name:
        tokens = AutoTokenizer.from_pretrained(name)(text.read_text(), return_tensors="pt").input_ids
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), tokens
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **shape))
    return model, torch.tensor(list(text.read_bytes()))[None]


def main(name: str | None = None, text: str = __file__, seq_len: str = "2048", steps: str = "10") -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if where == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type=where)
    model, tokens = load(name, Path(text))
    tokens = tokens[:, : int(seq_len)].to(where)
    plan = ra.plan(mesh, seq_len=tokens.shape[1])
    model = hf.in_pieces(hf.prepare(model.to(where), plan))  # MLPs, norms and the loss: a few tokens at a time
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": hf.keep_attention})
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["ring"])
        part.set_force_sum_reduction_for_comms(True)  # a rank's gradient is its share of the mean over all tokens:
        part.set_gradient_divide_factor(1.0)  # shares are summed, never averaged
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if name else 3e-3)
    for step in range(int(steps)):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {plan.local_len} of {plan.seq_len} tokens a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
    main(*sys.argv[1:])
