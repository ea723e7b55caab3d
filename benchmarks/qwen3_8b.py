"""Seconds of a step of Qwen3-8B and Llama-3-8B over long sequences, beside accelerate's own context parallelism.

    torchrun --nproc-per-node 2 benchmarks/qwen3_8b.py ringattn qwen3 131072 4     # with 4 of the 36 layers

All ways have FSDP2, mixed precision bf16 (float32 weights and AdamW) and the same weights and tokens; all but
`attention` recompute layers whole. On a CPU the model is tiny, and accelerate cannot.

    ringattn     accelerate, with hf.over_ranks
    attention    the same, hf.in_pieces, and a recomputation that keeps attention (hf.keep_attention)
    accelerate   its own context parallelism (torch's)

Two GPUs do not hold all 36 layers and their optimizer. A step or the memory of all follows from those of a and b
layers: x(36) = x(b) + (36 - b) * (x(b) - x(a)) / (b - a).
"""

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ringattn import hf

SHAPE: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48}
MODELS: dict[str, Any] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": 14336, "vocab_size": 32000, "rope_theta": 5e5}),
}


def main(way: str, name: str, tokens: int, layers: int) -> None:
    on_gpu = torch.cuda.is_available()
    state, ranks = PartialState(cpu=not on_gpu), dist.get_world_size()
    if not on_gpu:  # where accelerate has no FSDP2
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    made, kind, sizes = MODELS[name]
    how = {"num_hidden_layers": layers, "max_position_embeddings": tokens, "tie_word_embeddings": False}
    torch.manual_seed(0)
    with state.device:
        model = kind(made(**how, **{**SHAPE, **sizes, **({} if on_gpu else TINY)}, use_cache=False)).train()
    losses: list[torch.Tensor] = []  # not rounded
    model.register_forward_hook(lambda module, args, found: losses.append(found.loss.detach()))
    if way == "attention":
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": hf.keep_attention})
        model = hf.in_pieces(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=way != "attention", auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )  # fmt: skip
    accelerator = Accelerator(
        mixed_precision="bf16", fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=ranks)
    )
    if way != "accelerate":
        hf.over_ranks(accelerator)
    call, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(0, sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        batch = {"input_ids": ids.to(state.device), "labels": ids.to(state.device)}
        if way == "accelerate":  # as transformers' Trainer makes a batch for context parallelism
            batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            batch["position_ids"] = torch.arange(tokens, device=state.device)[None]
            batch["attention_mask"] = torch.ones_like(batch["labels"])  # else these positions are packed ones
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start, cut = time.perf_counter(), list(batch.values()) if way == "accelerate" else []
        with accelerator.maybe_context_parallel(
            buffers=cut, buffer_seq_dims=[1] * len(cut), no_restore_buffers=set(cut)
        ):
            accelerator.backward(call(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        value = float(accelerator.reduce(losses[-1].float(), "mean"))  # waits for the GPU
        seconds, memory = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        if dist.get_rank() == 0:
            print(f"step {step}: {seconds:.3f} s, {memory:.1f} GiB, loss {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
