"""Steps of Qwen3-8B and Llama-3-8B over 131,072 tokens on two GPUs, beside other ways to have long sequences there.

    python benchmarks/qwen3_8b.py out=FILE                     # two GPUs, about four minutes
    python benchmarks/qwen3_8b.py device=cpu                   # a tiny model: that it runs

Contestants, all with FSDP2, mixed precision bf16 (float32 weights and AdamW), recomputation, the same random weights
and the same tokens in every step:

    ringattn     accelerate, with hf.over_ranks
    in_pieces    the same, and hf.in_pieces: MLPs and loss in pieces
    attention    the same, and recomputation that keeps attention (hf.keep_attention)
    by_hand      accelerate, ra.attention called from the model and ra.local_batch: what hf.prepare adds to it
    accelerate   its own context parallelism (torch's)
    ringmaster   axolotl-ringmaster with accelerate, if it is installed
    single       plain transformers on one GPU, where it fits: the losses that are right

Two GPUs do not hold all 36 layers and their optimizer. Steps and memory are measured with a and b layers, and the line
through both gives those of 36: x(36) = x(b) + (36 - b) * (x(b) - x(a)) / (b - a). A rival that has not the memory for
transformers' loss runs again with a loss of a few tokens at a time, as `single` does.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import ringattn as ra
from ringattn import hf
from ringattn.launch.bench import stamp
from ringattn.launch.processes import RankError, run
from ringattn.launch.rows import read, table
from ringattn.launch.words import answer, option, usage, values
from ringattn.models.pieces import LOGITS, in_pieces, tokens_at_once

WAYS = ("ringattn", "in_pieces", "attention", "by_hand", "accelerate", "ringmaster", "single")
RIVALS = WAYS[4:]
COLUMNS = [
    "model",
    "tokens",
    "layers",
    "way",
    "loss_by",
    "step_s",
    "tokens_per_second",
    "memory_gib",
    "losses",
    "error",
]
LAYERS = {"qwen3": 36, "llama": 32}  # of the models as published
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
    cells: list[str] = option(
        ["llama:131072:4", "qwen3:131072:4", "qwen3:131072:8", "qwen3:32768:4"], "MODEL:TOKENS:LAYERS, in this order"
    )
    steps: int = option(3, "steps; the fastest counts but for the first one")
    ranks: int = option(2, "GPUs, or processes on a CPU")
    device: str = option("cuda", "where it runs; on a CPU the models are tiny", among=("cuda", "cpu"))
    timeout: float = option(110.0, "seconds for all cells of a contestant")
    out: str = option("", "a file to which each row is appended as it comes")

    def __post_init__(self) -> None:
        bad = [c for c in self.cells if c.count(":") != 2 or c.split(":")[0] not in SHAPES]
        if bad:
            raise ValueError(f"cells={bad[0]}: MODEL:TOKENS:LAYERS, of {', '.join(SHAPES)}, as in qwen3:131072:4")


def main(options: Options) -> None:
    out = Path(options.out or os.devnull)
    first = len(read(out)) if out.is_file() and out.stat().st_size else 0
    about, printed = stamp(), []
    for way in options.ways:
        if way == "ringmaster" and find_spec("ringmaster") is None:
            print("ringmaster is not installed; left out", file=sys.stderr)
            continue
        backend, ranks = "nccl" if options.device == "cuda" else "gloo", 1 if way == "single" else options.ranks
        start = time.monotonic()
        try:
            given = way, options, {**about, "suite": "qwen3", "ranks": ranks}
            rows = run(contestant, ranks, *given, backend=backend, timeout=options.timeout)[0]
        except RankError as error:
            rows = [{"way": way, "error": error.summary}]
            print(f"{way}: {error}", file=sys.stderr)
        printed += rows
        print(f"{way}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    rows = read(out)[first:] if options.out else printed
    print(table(rows, COLUMNS))
    for text in whole_models(rows):
        print(text)


def contestant(way: str, options: Options, about: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank: all cells of a contestant. Rank 0 writes each row as soon as it is there."""
    rows: list[dict[str, Any]] = []
    left = list(options.cells)
    in_pieces_only = set(left) if way == "single" else set()
    while left:
        cell = left.pop(0)
        name, tokens, layers = cell.split(":")
        if way == "single" and options.device == "cuda" and (name, tokens) == ("qwen3", "131072"):
            continue  # its logits alone fill the memory
        loss_by = "pieces" if cell in in_pieces_only else "its own"
        row = {**about, "model": name, "tokens": int(tokens), "layers": int(layers), "way": way, "loss_by": loss_by}
        try:
            row |= measured(way, name, int(tokens), int(layers), loss_by, options)
        except (torch.OutOfMemoryError, NotImplementedError, ValueError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            if isinstance(error, torch.OutOfMemoryError) and loss_by == "its own" and way in RIVALS:
                in_pieces_only |= {other for other in options.cells if other.startswith(f"{name}:{tokens}:")}
                left.insert(0, cell)
        rows.append(row)
        if dist.get_rank() == 0:
            print(table([row], COLUMNS), file=sys.stderr, flush=True)
            if options.out:
                with Path(options.out).open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
    return rows


def measured(way: str, name: str, tokens: int, layers: int, loss_by: str, options: Options) -> dict[str, Any]:
    """Seconds of a step, the peak memory of this rank, and the losses of all steps."""
    free()
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    losses: list[Any] = []
    model = random_weights(name, tokens, layers, device, options.device == "cpu")
    if loss_by == "pieces":
        model.loss_function = loss_in_pieces
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
    if way in ("accelerate", "ringmaster"):  # of each rank's tokens
        dist.all_reduce(found)
        found /= dist.get_world_size()
    seconds = min(times[1:])
    return {
        "step_s": seconds, "tokens_per_second": tokens / seconds, "times_s": times,
        "losses": [round(x, 4) for x in found.tolist()],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }  # fmt: skip


def free() -> None:
    """What an earlier cell left goes, also after an error."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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


def by_ringmaster(model: Any, device: torch.device) -> Any:
    from ringmaster import RingmasterConfig
    from ringmaster.adapters.accelerate import context_parallel_region, setup_from_accelerate

    def prepare(accelerator: Any) -> None:
        config = RingmasterConfig(size=dist.get_world_size())
        heads = model.config.num_key_value_heads
        runtime = setup_from_accelerate(accelerator, config, num_kv_heads=heads, inner_attn="sdpa")
        model.set_attn_implementation(runtime.attn_implementation)
        accelerator._prepare_cp = lambda *given: given

    accelerator, call, optimizer = accelerated(model, prepare)

    def step(ids: Any) -> None:
        with context_parallel_region(shifted(ids)) as part:
            accelerator.backward(call(**part).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone(model: Any, device: torch.device) -> Any:
    """FSDP2 of one rank, for the same mixed precision."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    optimizer = optimizer_of(model)

    def step(ids: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS = dict(
    zip(WAYS, (by_ringattn, by_pieces, keeping_attention, by_hand, by_accelerate, by_ringmaster, alone), strict=True)
)


def whole_models(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A step and its memory with all layers, by the line through two numbers of layers."""
    by: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if "step_s" in row:
            by.setdefault((row["way"], row["loss_by"], row["model"], row["tokens"]), []).append(row)
    for (way, loss_by, model, tokens), found in by.items():
        if len(found) < 2:
            continue
        a, b = sorted(found, key=lambda row: row["layers"])[:: len(found) - 1]
        n, text = LAYERS[model], []
        for key, unit in (("step_s", "s"), ("memory_gib", "GiB")):
            if a[key] is not None:
                each = (b[key] - a[key]) / (b["layers"] - a["layers"])
                whole = b[key] + (n - b["layers"]) * each
                text.append(f"{b[key]:.3f} + {n - b['layers']} x {each:.3f} = {whole:.2f} {unit}")
        yield f"{model}, {tokens} tokens, {n} layers, {way} (loss: {loss_by}): {'; '.join(text)}"


if __name__ == "__main__":
    words = sys.argv[1:]
    if any(w in ("-h", "--help") for w in words):
        print(usage("qwen3_8b", __doc__ or "", Options))
        sys.exit(0)
    if "device=cpu" in words and not any(w.startswith("cells=") for w in words):
        words.append("cells=qwen3:64:1,qwen3:64:2")
    sys.exit(answer("qwen3_8b", lambda: main(Options(**values(words, Options)))))
