"""Seconds of a step of Qwen3-8B, all 36 layers, over long sequences, beside other ways to train it over these ranks.

    torchrun --nproc-per-node 2 benchmarks/qwen3_8b.py tokens=131072 out=FILE
    torchrun --nproc-per-node 2 benchmarks/qwen3_8b.py way=accelerate tokens=131072
    torchrun --nproc-per-node 2 benchmarks/qwen3_8b.py documents=8192 window=4096

All ways have FSDP2 by accelerate, which computes in bf16 (`weights` are those that AdamW keeps), the same random
weights and tokens, and MLPs, norms and loss in pieces (hf.in_pieces). On a CPU the model is tiny, and accelerate's own
way cannot.

    ringattn     hf.over_ranks; recompute=all_but_attention keeps attention (hf.keep_attention)
    accelerate   its own context parallelism (torch's); recompute=all, by accelerate, and its own offload
    ringmaster   axolotl-ringmaster, if it is installed, with the same
"""

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from ringattn import hf
from ringattn.launch.bench import stamp
from ringattn.launch.words import answer, option, usage, values

QWEN: dict[str, Any] = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48}
WAYS = "ringattn", "accelerate", "ringmaster"


@dataclass
class Options:
    way: str = option("ringattn", "who spreads the sequence", among=WAYS)
    tokens: int = option(131072, "of the sequence")
    layers: int = option(36, "of the model")
    documents: int = option(0, "tokens of a packed document; 0: one document", least=0)
    window: int = option(0, "how many keys a query sees; 0: all", least=0)
    offload: bool = option(True, "what recomputation keeps waits on the host")
    recompute: str = option("all_but_attention", "what backward computes again", among=("all_but_attention", "all"))
    weights: str = option("float32", "the weights, and the moments of AdamW", among=("float32", "bfloat16"))
    steps: int = option(3, "steps; the fastest counts, but for the first of several", least=1)
    tiny: bool = option(False, "a tiny model, as always on CPUs")
    out: str = option("", "a file to which the row is appended")


def main(options: Options) -> None:
    if options.way != "ringattn" and (options.documents or options.window):
        raise ValueError(f"way={options.way} is measured with one causal document; leave documents and window out")
    on_gpu = torch.cuda.is_available()
    state = PartialState(cpu=not on_gpu)
    if not on_gpu:  # where accelerate has no FSDP2
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    about = {**stamp(), "suite": "qwen3", "ranks": dist.get_world_size(), **asdict(options)}
    if options.way != "ringattn":
        about["recompute"] = "all"
    try:
        row = {**about, **measured(options, state.device, on_gpu)}
    except Exception as error:  # as one of memory, of one rank; torchrun ends the others
        print(json.dumps({**about, "error": f"{type(error).__name__}: {str(error)[:200]}"}), flush=True)
        raise
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if options.out:
            with open(options.out, "a") as lines:
                lines.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def measured(options: Options, device: torch.device, on_gpu: bool) -> dict[str, Any]:
    """Seconds of all steps, the losses, and the most memory of this GPU after the first step."""
    model = made(options, device, options.tiny or not on_gpu)
    losses: list[Tensor] = []  # before a wrapper rounds them
    model.register_forward_hook(lambda module, args, found: losses.append(found.loss.detach().float()))
    accelerator = accelerated(options, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)  # without temporary copies of all weights
    call, optimizer = accelerator.prepare(model, optimizer)
    batch = {name: x.to(device) for name, x in batch_of(options, model.config.vocab_size).items()}
    times, means = [], []
    for step in range(options.steps):
        if on_gpu and step == 1:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        with given_to(options.way, accelerator, model, batch) as given:
            accelerator.backward(call(**given).loss)
        optimizer.step()
        optimizer.zero_grad()
        means.append(float(accelerator.reduce(losses[-1], "mean")))  # waits for the GPU
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    seconds = min(times[1:] or times)
    return {"step_s": seconds, "tokens_per_second": options.tokens / seconds, "times_s": times, "losses": means,
            "memory_gib": memory}  # fmt: skip


def made(options: Options, device: torch.device, tiny: bool) -> Any:
    sizes: dict[str, Any] = {**QWEN, **(TINY if tiny else {}), "num_hidden_layers": options.layers, "use_cache": False}
    if options.window:
        kinds = ["sliding_attention"] * options.layers
        sizes |= {"layer_types": kinds, "sliding_window": options.window, "use_sliding_window": True}
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=options.tokens))
    return hf.in_pieces(model.to(getattr(torch, options.weights)).train())


def accelerated(options: Options, model: Any) -> Any:
    """The accelerator of this way, which recomputes layers: those of accelerate by its own wrapper and offload."""
    ours, ranks = options.way == "ringattn", dist.get_world_size()
    by_model = ours and options.recompute == "all_but_attention"
    if by_model:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": hf.keep_attention})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=not by_model,
        activation_checkpointing_offload=options.offload and not ours, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )  # fmt: skip
    mixed = "bf16" if options.weights == "float32" else "no"  # accelerate makes others float32
    accelerator = Accelerator(
        mixed_precision=mixed, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=ranks)
    )
    if ours:
        return hf.over_ranks(accelerator, offload=options.offload)
    model.loss_function = lambda logits, *args, **others: logits.float().mean()  # losses, as the head gives them
    if options.way == "ringmaster":
        from ringmaster import RingmasterConfig
        from ringmaster.adapters.accelerate import setup_from_accelerate

        heads = model.config.num_key_value_heads
        runtime = setup_from_accelerate(accelerator, RingmasterConfig(ranks), num_kv_heads=heads, inner_attn="sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        accelerator._prepare_cp = lambda *given: given
    return accelerator


def batch_of(options: Options, vocab: int) -> dict[str, Tensor]:
    """Whole sequences: random tokens, and positions that start again in each document."""
    ids = torch.randint(0, vocab, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    if not options.documents:
        return {"input_ids": ids, "labels": ids.clone()}
    positions = torch.arange(options.tokens)[None] % options.documents
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def given_to(way: str, accelerator: Any, model: Any, batch: dict[str, Tensor]) -> AbstractContextManager[Any]:
    """A block within which the model takes what it gives: whole sequences, or where it says so this rank's part."""
    if way == "ringattn":
        return nullcontext(batch)
    following = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    places = torch.arange(following.shape[1], device=following.device)[None]
    given = {"input_ids": batch["input_ids"].clone(), "position_ids": places, "shift_labels": following}
    given["labels"] = given["shift_labels"].clone()
    if way == "ringmaster":
        from ringmaster.adapters.accelerate import context_parallel_region

        return Cut(model, context_parallel_region(given))
    given["attention_mask"] = torch.ones_like(following)  # without one, these positions are packed ones
    cut, dims = list(given.values()), [1] * len(given)
    region = accelerator.maybe_context_parallel(buffers=cut, buffer_seq_dims=dims, no_restore_buffers=set(cut))
    return Cut(model, region, given)


class Cut(AbstractContextManager[Any]):
    """Within the block the head of the model computes the losses of the labels that are left of the batch."""

    def __init__(self, model: Any, region: Any, given: Any = None):
        self.head, self.region, self.given = vars(model.get_output_embeddings()), region, given

    def __enter__(self) -> Any:
        entered = self.region.__enter__()
        given = self.given or entered
        self.head["ringattn_labels"] = given["shift_labels"]
        return given

    def __exit__(self, *error: Any) -> Any:
        del self.head["ringattn_labels"]
        return self.region.__exit__(*error)


if __name__ == "__main__":
    if any(word in ("-h", "--help") for word in sys.argv[1:]):
        print(usage("qwen3_8b", __doc__ or "", Options))
        sys.exit(0)
    sys.exit(answer("qwen3_8b", lambda: main(Options(**values(sys.argv[1:], Options)))))
