"""Steps of Qwen3-8B and Llama-3-8B over long sequences on two GPUs, beside accelerate's own context parallelism.

    python benchmarks/qwen3_8b.py out=FILE                                 # two GPUs, about four minutes
    python benchmarks/qwen3_8b.py device=cpu cells=qwen3:64:1,qwen3:64:2   # a tiny model: that it runs

Contestants, all with FSDP2, mixed precision bf16 (float32 weights and AdamW), recomputation, the same random weights
and the same tokens in every step:

    ringattn     accelerate, with hf.over_ranks
    in_pieces    the same, and hf.in_pieces: MLPs and loss in pieces
    attention    the same, and recomputation that keeps attention (hf.keep_attention)
    by_hand      accelerate, ra.attention called from the model and ra.local_batch: what hf.prepare adds to it
    accelerate   its own context parallelism (torch's)
    small_loss   the same with a loss of a few tokens at a time, where transformers' needs more memory than there is

Two GPUs do not hold all 36 layers and their optimizer. A step or the memory of all follows from those of a and b
layers: x(36) = x(b) + (36 - b) * (x(b) - x(a)) / (b - a).
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import ringattn as ra
from ringattn import hf
from ringattn.launch.bench import measure, over_ranks
from ringattn.launch.rows import Row
from ringattn.launch.words import answer, option
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once

WAYS = ("ringattn", "in_pieces", "attention", "by_hand", "accelerate", "small_loss")
COLUMNS = ["model", "tokens", "layers", "way", "step_s", "tokens_per_second", "memory_gib", "losses", "error"]
CELLS = ["llama:131072:4", "qwen3:131072:4", "qwen3:131072:8", "qwen3:32768:4"]
EVERY = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
SHAPES = {
    "qwen3": {**EVERY, "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6},
    "llama": {**EVERY, "intermediate_size": 14336, "vocab_size": 32000, "rope_theta": 5e5},
}
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48,
        "vocab_size": 64}  # fmt: skip


@dataclass
class Options:
    ways: list[str] = option(list(WAYS), "contestants, in this order", among=WAYS)
    cells: list[str] = option(CELLS, "MODEL:TOKENS:LAYERS, in this order, of qwen3 and llama")
    steps: int = option(3, "steps; the fastest counts but for the first one", least=2)
    ranks: int = option(2, "GPUs, or processes on a CPU")
    device: str = option("cuda", "where it runs; on a CPU the models are tiny", among=("cuda", "cpu"))
    timeout: float = option(600.0, "seconds for all")


def run(options: Options) -> Iterator[Row]:
    yield from over_ranks(cells, options)


def cells(options: Options) -> Iterator[Row]:
    """One rank: all cells of every contestant."""
    for way, cell in product(options.ways, options.cells):
        name, tokens, layers = cell.split(":")
        row: Row = {"suite": "qwen3", "model": name, "tokens": int(tokens), "layers": int(layers), "way": way}
        try:
            row |= measured(way, name, int(tokens), int(layers), options)
        except (torch.OutOfMemoryError, NotImplementedError, ValueError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        yield row


def measured(way: str, name: str, tokens: int, layers: int, options: Options) -> Row:
    """Seconds of a step, the peak memory of this rank, and the losses of all steps."""
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    losses: list[Any] = []
    model = random_weights(name, tokens, layers, device, options.device == "cpu")
    model.register_forward_hook(  # not rounded
        lambda module, args, found: losses.append(found.loss if found.loss is None else found.loss.detach())
    )
    step = STEPS[way](model, device)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    times = []
    for i in range(options.steps):
        if on_gpu and i == 1:
            torch.cuda.reset_peak_memory_stats()  # without what made and sharded the model
        dist.barrier()
        start = time.perf_counter()
        if (loss := step(ids)) is not None:
            losses[-1] = loss.detach()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    found = torch.stack([loss.float() for loss in losses])
    if way in ("accelerate", "small_loss"):  # of each rank's tokens
        dist.all_reduce(found)
        found /= dist.get_world_size()
    seconds = min(times[1:])
    return {
        "step_s": seconds, "tokens_per_second": tokens / seconds, "times_s": times,
        "losses": [round(x, 4) for x in found.tolist()],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }  # fmt: skip


def random_weights(name: str, tokens: int, layers: int, device: torch.device, tiny: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kind, made = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[name]
    shape = {**SHAPES[name], **(TINY if tiny else {})}
    config = kind(
        num_hidden_layers=layers, max_position_embeddings=tokens, use_cache=False, tie_word_embeddings=False,
        attn_implementation="sdpa", **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return made(config).train()


def loss_in_pieces(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **others: Any) -> Any:
    """transformers' loss, whose float32 logits are of a few tokens at a time."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    at_once = tokens_at_once(LOGITS, vocab_size, len(logits))
    return in_pieces(entropies, at_once, logits, targets).sum() / (targets != -100).sum()


def entropies(logits: Any, targets: Any) -> Any:
    found = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    return found.view_as(targets)


# How each contestant takes a step over whole sequences.


def accelerated(model: Any, prepare: Any, recompute: bool = True) -> tuple[Any, Any, Any]:
    """(accelerator, model, optimizer), with what `prepare(accelerator)` puts into the place of accelerate's own.

    `recompute`: accelerate has each layer recomputed whole.
    """
    from accelerate import Accelerator, ParallelismConfig, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    rank, ranks, cpu = dist.get_rank(), dist.get_world_size(), model.device.type == "cpu"
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({key: str(value) for key, value in started.items()})  # as torchrun does; nobody connects
    state = PartialState(cpu=cpu)
    if cpu:  # where accelerate has no FSDP2
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=recompute, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )  # fmt: skip
    config = ParallelismConfig(cp_size=ranks)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, parallelism_config=config)
    prepare(accelerator)
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def by_ringattn(model: Any, device: torch.device, recompute: bool = True) -> Any:
    accelerator, call, optimizer = accelerated(model, hf.over_ranks, recompute)

    def step(ids: Any) -> None:
        accelerator.backward(call(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_pieces(model: Any, device: torch.device) -> Any:
    return by_ringattn(hf.in_pieces(model), device)


def keeping_attention(model: Any, device: torch.device) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": hf.keep_attention})
    return by_ringattn(hf.in_pieces(model), device, recompute=False)


def by_hand(model: Any, device: torch.device) -> Any:
    from transformers import AttentionInterface

    accelerator, call, optimizer = accelerated(model, lambda accelerator: None)
    config, mesh = model.config, ra.init_mesh(sequence=dist.get_world_size(), device_type=device.type)
    plans, spec = {}, ra.AttentionSpec(causal=True)

    def plan(tokens: int) -> Any:
        if tokens not in plans:
            heads = config.num_attention_heads, config.num_key_value_heads
            plans[tokens] = ra.plan(mesh, seq_len=tokens, heads=heads, head_dim=config.head_dim, spec=spec)
        return plans[tokens]

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **others: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ra.attention(q, k, v, plan(q.shape[1] * dist.get_world_size()), spec=spec), None

    AttentionInterface.register("by_hand", attend)
    model.set_attn_implementation("by_hand")

    def step(ids: Any) -> Any:
        batch = ra.local_batch(ids, plan(ids.shape[1]))
        loss = batch.loss(call(input_ids=batch.tokens, position_ids=batch.positions[None]).logits)
        accelerator.backward(loss * dist.get_world_size())  # FSDP2 averages the gradients
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def shifted(ids: Any) -> dict[str, Any]:
    """As transformers' Trainer makes a batch for context parallelism."""
    after = F.pad(ids[:, 1:], (0, 1), value=-100)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    return {"input_ids": ids.clone(), "labels": ids.clone(), "shift_labels": after, "position_ids": places}


def by_accelerate(model: Any, device: torch.device) -> Any:
    accelerator, call, optimizer = accelerated(model, lambda accelerator: None)

    def step(ids: Any) -> None:
        given = {**shifted(ids), "attention_mask": torch.ones_like(ids)}  # without one, these positions are packed ones
        buffers = list(given.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            accelerator.backward(call(**given).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_small_loss(model: Any, device: torch.device) -> Any:
    model.loss_function = loss_in_pieces
    return by_accelerate(model, device)


STEPS = dict(zip(WAYS, (by_ringattn, by_pieces, keeping_attention, by_hand, by_accelerate, by_small_loss), strict=True))

if __name__ == "__main__":
    sys.exit(answer("qwen3_8b", lambda: measure("qwen3_8b", sys.modules[__name__], sys.argv[1:])))
