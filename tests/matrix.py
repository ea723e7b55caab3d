"""Cells of the matrix of configurations in which people train: each one step, the loss and every gradient.

A cell is (integration, wrapper, precision, recomputation, batch). `run_cell` runs it on the ranks that were started;
`alone` is the same model on one rank, in plain torch or transformers, without ringattn over ranks.

    python tests/matrix.py   # every cell on two CPU ranks: half an hour

    B batch   T tokens   C width   V vocabulary
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from itertools import combinations, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import hf, kernels
from ringattn.compat import ring_flash_attn as compat
from ringattn.models.hf import memory
from ringattn.models.nn import Attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = os.environ.get("MATRIX_DEVICE", "cpu")
if os.environ.get("MATRIX_LIBRARIES"):
    kernels.VENDOR_ROWS = 0
S = 8 if DEVICE == "cuda" else 1  # GPU kernels have larger heads
T, C, D, V, IGNORED = 32 * S, 32 * S, 8 * S, 64, -100
LENGTHS = [12 * S, 20 * S]  # of packed documents, and of padded rows: multiples of what zigzag cuts them into
memory.NUMBERS = memory.LOGITS = 16 * C * S  # hf.in_pieces makes pieces of so few tokens

INTEGRATIONS = "prepare", "Trainer", "accelerate", "SFT", "compat", "attention", "nn"
WRAPPERS = "DDP", "FSDP2 summed", "FSDP2 averaged"
PRECISIONS = "float32", "bf16 weights", "mixed bf16", "autocast bf16", "fp16 scaler"
RECOMPUTING = "kept", "checkpointing", "compile", "both"
BATCHES = "whole", "packed", "padded"
AXES = INTEGRATIONS, WRAPPERS, PRECISIONS, RECOMPUTING, BATCHES
BY_HAND = "compat", "attention", "nn"
BY_OTHERS = "Trainer", "accelerate", "SFT"  # integrations that wrap the model themselves


class Cell(NamedTuple):
    integration: str
    wrapper: str
    precision: str
    recomputing: str
    batch: str

    @property
    def compiled(self) -> bool:
        return self.recomputing in ("compile", "both")

    @property
    def layers(self) -> int:
        return 1 if self.compiled else 2  # each is compiled anew

    @property
    def recomputed(self) -> bool:
        return self.recomputing in ("checkpointing", "both")

    @property
    def possible(self) -> bool:
        """accelerate averages gradients, scales losses on GPUs only, and has its own mixed precision; DDP has none."""
        if self.integration in BY_OTHERS:
            return self.wrapper != "FSDP2 summed" and self.precision not in ("fp16 scaler", "autocast bf16")
        return (self.wrapper, self.precision) != ("DDP", "mixed bf16")


def covering() -> list[Cell]:
    """Cells in which every possible pair of choices of two axes is met; the same list in every run."""
    every = [cell for cell in starmap(Cell, product(*AXES)) if cell.possible]

    def pairs(cell: Cell) -> set[tuple[int, str, int, str]]:
        return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(AXES)), 2)}

    left, results = set().union(*map(pairs, every)), []
    while left:
        best = max(every, key=lambda cell: (len(pairs(cell) & left), cell.recomputing in ("kept", "checkpointing")))
        results.append(best)
        left -= pairs(best)
    return results


# The data: one batch a kind, whole, the same on every rank.


def batch_of(kind: str) -> dict[str, Tensor]:
    draw, rows = torch.Generator().manual_seed(7), 1 if kind == "packed" else 2
    tokens = torch.randint(3, V, (rows, T), generator=draw)
    labels = tokens.clone()
    labels[:, 5] = IGNORED
    given = {"input_ids": tokens, "labels": labels}
    if kind == "packed":
        labels[0, LENGTHS[0]] = IGNORED
        given["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[1, LENGTHS[1] :] = 0
        labels.masked_fill_(mask == 0, IGNORED)
        given["attention_mask"] = mask
    return {name: x.to(DEVICE) for name, x in given.items()}


def docs_of(kind: str) -> Any:
    lengths = {"packed": [LENGTHS], "padded": [[T], [LENGTHS[1], T - LENGTHS[1]]]}.get(kind)
    return None if lengths is None else ra.Docs.from_lengths(lengths[0] if kind == "packed" else lengths)


def targets_of(given: dict[str, Tensor]) -> Tensor:
    return F.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)


# The models: transformers' Llama, and a plain one.


def llama(cell: Cell) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V, hidden_size=C, intermediate_size=48, num_hidden_layers=cell.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=D, max_position_embeddings=T, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return made(partial(LlamaForCausalLM, config), cell)


class Block(nn.Module):
    """Attention of one of the three integrations, and a gate."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.norm, self.mlp = kind, nn.RMSNorm(C), nn.Linear(C, C, bias=False)
        self.layer = Attention(C, 4, 2) if kind == "nn" else nn.Linear(C, 8 * D, bias=False)
        self.out = nn.Identity() if kind == "nn" else nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor, plan: Any, docs: Any) -> Tensor:
        return x + self.mlp(F.silu(self.out(self.attended(self.norm(x), plan, docs))))

    def attended(self, x: Tensor, plan: Any, docs: Any) -> Tensor:
        if self.kind == "nn":
            return self.layer(x, plan, docs=docs)
        q, k, v = self.layer(x).unflatten(-1, (8, D)).split([4, 2, 2], 2)
        if self.kind == "attention" or plan is None:
            return ra.attention(q, k, v, plan, docs=docs).flatten(2)
        if len(x) > 1:  # padding behind the tokens is not seen by them
            return compat.zigzag_ring_flash_attn_func(q, k, v, causal=True).flatten(2)
        lengths = [n // plan.ring for n in (LENGTHS if docs is not None else [T])]
        ends = torch.tensor([0, *lengths], device=x.device).cumsum(0).int()
        call = compat.zigzag_ring_flash_attn_varlen_func
        return call(q[0], k[0], v[0], ends, max(lengths), causal=True).flatten(1)[None]


class Plain(nn.Module):
    """Embedding, blocks, head and loss; `again` recomputes the blocks."""

    def __init__(self, kind: str, layers: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        self.layers = nn.ModuleList(Block(kind) for _ in range(layers))
        self.again = False

    def forward(self, tokens: Tensor, targets: Tensor, plan: Any, docs: Any) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            call = partial(checkpoint, layer, use_reentrant=False) if self.again else layer
            x = call(x, plan, docs)
        if plan is None:
            return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())
        return ra.cross_entropy(self.head(x), targets, plan)


def made(build: Callable[[], Any], cell: Cell) -> Any:
    """The model with weights that bf16 holds exactly, so that all precisions start from the same ones."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.dim() == 1 else None
            p.copy_(p.bfloat16())
    return model.to(DEVICE, BF16 if cell.precision == "bf16 weights" else None)


# One rank.


class Found(NamedTuple):
    loss: float
    grads: dict[str, Any]  # numpy, by the parameter's name


def found_of(loss: Any, named: Any, scale: float = 1.0) -> Found:
    grads = {}
    for name, p in named:
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        bare = name
        for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
            bare = bare.replace(wrapper, "")
        grads[bare] = (grad.float() / scale).cpu().numpy().copy()
    return Found(float(loss), grads)


def casting(precision: str) -> Any:
    dtype = {"autocast bf16": BF16, "fp16 scaler": FP16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(DEVICE, dtype)


def alone(cell: Cell) -> Found:
    """The cell's model on one rank, in its precision (mixed precision casts the weights, too)."""
    cell, given = cell._replace(precision=cell.precision.replace("mixed bf16", "bf16 weights")), batch_of(cell.batch)
    with casting(cell.precision):
        if cell.integration in BY_HAND:
            model = made(partial(Plain, cell.integration, cell.layers), cell)
            loss = model(given["input_ids"], targets_of(given), None, docs_of(cell.batch))
        else:
            model = llama(cell)
            loss = model(**given).loss
    loss.backward()
    return found_of(loss.detach(), model.named_parameters())


# Over ranks.


def run_cell(cell: Cell) -> Found:
    torch.manual_seed(0)
    torch._dynamo.reset()
    run = {"Trainer": by_trainer, "SFT": by_trainer, "accelerate": by_accelerate, "prepare": by_prepare}
    return run.get(cell.integration, by_hand)(cell)


def shielded(model: nn.Module, layers: Any, cell: Cell, mesh: Any) -> nn.Module:
    """Compiled layers, then the wrapper."""
    if cell.compiled:
        for layer in layers:
            layer.compile(backend="aot_eager")
    if cell.wrapper == "DDP":
        return DistributedDataParallel(model)
    wide = {"reduce_dtype": BF16, "output_dtype": BF16} if cell.integration in BY_OTHERS else {"reduce_dtype": FP32}
    mixed = MixedPrecisionPolicy(param_dtype=BF16, **wide) if cell.precision == "mixed bf16" else None
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, **({} if mixed is None else {"mp_policy": mixed}))
        if cell.wrapper == "FSDP2 summed":
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def stepped(cell: Cell, call: Any, forward: Callable[[], Tensor]) -> Found:
    """Backward of the loss; with a scaler, of the scaled one, which is then unscaled."""
    with casting(cell.precision):
        loss = forward()
    scale = 1024.0 if cell.precision == "fp16 scaler" else 1.0
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, enabled=scale > 1)
    scaler.scale(loss).backward()
    if scale > 1:
        optimizer = torch.optim.SGD(call.parameters(), lr=0.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale, "a gradient is infinite"
    return found_of(loss.detach(), call.named_parameters())


def by_prepare(cell: Cell) -> Found:
    mesh = ra.init_mesh(sequence=dist.get_world_size(), device_type=DEVICE)
    model = hf.prepare(llama(cell), mesh, averaged=cell.wrapper != "FSDP2 summed")
    if cell.recomputed:
        keep = {"context_fn": hf.keep_attention} if cell.recomputing == "checkpointing" else {}
        hf.in_pieces(model).gradient_checkpointing_enable({"use_reentrant": False, **keep})
    call = shielded(model, model.model.layers, cell, mesh["sequence"])
    return stepped(cell, call, lambda: call(**batch_of(cell.batch)).loss)


def by_hand(cell: Cell) -> Found:
    mesh = ra.init_mesh(ring=dist.get_world_size(), device_type=DEVICE)
    plan, docs = ra.plan(mesh, seq_len=T, strategy="ring", layout="zigzag"), docs_of(cell.batch)
    if cell.integration == "compat" and cell.batch == "packed":
        plan = plan.for_docs(docs)  # each document cut over all ranks
    model = made(partial(Plain, cell.integration, cell.layers), cell)
    model.again = cell.recomputed
    call = shielded(model, model.layers, cell, mesh["ring"])

    def forward() -> Tensor:
        given = batch_of(cell.batch)
        loss = call(plan.shard(given["input_ids"]), plan.shard(targets_of(given) - IGNORED) + IGNORED, plan, docs)
        return loss if cell.wrapper == "FSDP2 summed" else loss + (plan.ring - 1) * (loss - loss.detach())

    return stepped(cell, call, forward)


def as_gpus(on: bool) -> None:
    """accelerate has FSDP2 and context parallelism on GPUs only; gloo carries them here."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in started.items()})  # as torchrun does; nobody connects
    PartialState(cpu=DEVICE == "cpu")
    if on and DEVICE == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


WRAP = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}


def by_accelerate(cell: Cell) -> Found:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    model, ranks = llama(cell), dist.get_world_size()
    options: dict[str, Any] = {"mixed_precision": "bf16" if cell.precision == "mixed bf16" else "no"}
    if cell.compiled:
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager")
    as_gpus(cell.wrapper != "DDP")
    if cell.wrapper == "DDP":  # the recipe of CPUs
        accelerator = Accelerator(cpu=True, **options)
        model = hf.prepare(model, ra.init_mesh(sequence=ranks, device_type="cpu"), averaged=True)
        if cell.recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=cell.recomputed, **WRAP)
        accelerator = hf.over_ranks(
            Accelerator(parallelism_config=ParallelismConfig(cp_size=ranks), fsdp_plugin=plugin, **options)
        )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    given = batch_of(cell.batch)
    with accelerator.maybe_context_parallel(buffers=list(given.values()), buffer_seq_dims=[1] * len(given)):
        loss = model(**given).loss
        accelerator.backward(loss)
    result = found_of(loss.detach(), model.named_parameters())
    optimizer.step()
    return result


def by_trainer(cell: Cell) -> Found:
    """OverRanks with transformers' Trainer or TRL's SFTTrainer, and a ParallelismConfig on CPUs (DDP) or as on GPUs."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Kept(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            kept.append(found_of(0.0, given["model"].named_parameters()))

    kept: list[Found] = []
    model = llama(cell)
    options: dict[str, Any] = {
        "use_cpu": DEVICE == "cpu", "bf16": cell.precision == "mixed bf16", "max_steps": 1, "optim": "adamw_torch",
        "learning_rate": 0.0, "lr_scheduler_type": "constant",
        "logging_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "max_grad_norm": 0.0, "ddp_find_unused_parameters": False,
        "gradient_checkpointing": cell.recomputed, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "remove_unused_columns": False,
    }  # fmt: skip
    if cell.compiled:
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if cell.wrapper != "DDP":
        wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        wrap |= {"activation_checkpointing": cell.recomputed}
        options |= {"fsdp": True, "fsdp_config": wrap, "gradient_checkpointing": False}
    as_gpus(cell.wrapper != "DDP")
    kind, arguments, more = Trainer, TrainingArguments, {}
    rows: Any = [{"input_ids": list(range(T))}] * 22  # the collator makes the batches
    if cell.integration == "SFT":
        import trl
        from datasets import Dataset

        kind, arguments, rows = trl.SFTTrainer, trl.SFTConfig, Dataset.from_list(rows)
        more["processing_class"] = tokenizer()
        options |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    args = arguments("/nonexistent", **options)
    args.parallelism_config = ParallelismConfig(cp_size=dist.get_world_size())

    def collate(rows: Any) -> dict[str, Tensor]:
        given = batch_of(cell.batch)
        if cell.integration == "SFT" and not {"attention_mask", "position_ids"} & set(given):
            given["attention_mask"] = torch.ones_like(given["input_ids"])  # as TRL's collator makes them
        return {name: x.cpu() for name, x in given.items()}

    over_ranks = type("OverRanks", (hf.OverRanks, kind), {})
    trainer = over_ranks(model=model, args=args, train_dataset=rows, data_collator=collate, callbacks=[Kept()], **more)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Found(losses[-1], kept[0].grads)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(V)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", pad_token="w1", eos_token="w2")


TENSOR_PARALLEL = Cell("prepare", "FSDP2 summed", "mixed bf16", "kept", "packed")


def by_tensor_parallel() -> Found:
    """FSDP2 over a ring of 2, tensor parallelism over 2: heads and MLP are cut, and both have the same loss."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cell = TENSOR_PARALLEL
    model = llama(cell)
    names = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
    names |= {"o_proj": RowwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            parallelize_module(module, mesh["tp"], {n: how for n, how in names.items() if hasattr(module, n)})
    hf.prepare(model, ra.plan(mesh, axes={"ring": "cp"}, seq_len=T))
    call = shielded(model, model.model.layers, cell, mesh["cp"])
    return stepped(cell, call, lambda: call(**batch_of(cell.batch)).loss)


def work(cells: list[Cell]) -> list[Any]:
    """Each cell's result on this rank, or the sentence that refuses it."""
    warnings.simplefilter("ignore")
    results: list[Any] = []
    for cell in cells:
        try:
            results.append(run_cell(cell))
        except (ValueError, NotImplementedError) as error:
            results.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return results if dist.get_rank() == 0 else []


# What is found, beside one rank.

EPS = {"float32": 2e-6 if DEVICE == "cpu" else 1e-5, "fp16 scaler": 1e-4}  # others: bf16


def errors_of(cell: Cell, result: Found, single: Found, truth: Found) -> dict[str, tuple[float, float]]:
    """Of the loss, of all gradients together and of the worst one: twice those of one rank in the same precision.

    A small gradient is measured against a twentieth of the largest one: what it adds up from may cancel.
    """
    assert result.grads.keys() == truth.grads.keys(), result.grads.keys() ^ truth.grads.keys()
    size = {name: np.linalg.norm(g) for name, g in truth.grads.items()}
    least, total, eps = max(size.values()) / 20, np.linalg.norm([*size.values()]), EPS.get(cell.precision, 1e-3)

    def off(of: Found) -> tuple[float, float, float]:
        gaps = {name: np.linalg.norm(of.grads[name] - g) for name, g in truth.grads.items()}
        worst = max(gap / max(size[name], least) for name, gap in gaps.items())
        return abs(of.loss - truth.loss), float(np.linalg.norm([*gaps.values()]) / total), float(worst)

    limits = [2 * error + eps for error in off(single)]
    if cell.integration in BY_OTHERS and cell.wrapper != "DDP" and cell.precision == "mixed bf16":
        limits[0] += abs(truth.loss) / 2**8  # accelerate's FSDP2 policy casts what the model returns, its loss, too
    return dict(zip(("loss", "gradients", "worst"), zip(off(result), limits, strict=True), strict=True))


def check(cells: list[Cell], tensor_parallel: bool = False, device: str = "cpu", libraries: bool = False) -> str:
    """The table, made in processes that DistributedDataParallel survives; an AssertionError about what is wrong.

    With `libraries`, kernels of libraries serve short sequences, too, as they do long ones.
    """
    script = f"import matrix; matrix.main({[*map(tuple, cells)]!r}, {tensor_parallel})"
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF", "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1",
        "MATRIX_DEVICE": device, "MATRIX_LIBRARIES": "1" * libraries, "PYTHONPATH": ":".join(filter(None, path)),
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def main(cells: list[Any], tensor_parallel: bool) -> None:
    """All cells over two ranks (processes), in one start of them, each beside one rank; exits with 1 if one is off."""
    from ringattn.launch.processes import run

    torch.set_num_threads(1)
    names = ["transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate"]
    if DEVICE == "cuda":  # importing transformers asks it for devices, and ranks forked after that cannot use them
        names = []
    start = partial(run, preload=names, backend="nccl" if DEVICE == "cuda" else "gloo", timeout=1800.0)
    cells = [Cell(*cell) for cell in cells]
    results, single, bad = start(work, 2, cells)[0], cache(lambda *key: alone(Cell(*key))), 0
    if tensor_parallel:
        cells, results = [*cells, TENSOR_PARALLEL], [*results, start(by_tensor_parallel, 4)[0]]
    for cell, result in zip(cells, results, strict=True):
        found, good = result, False
        if not isinstance(result, str):
            kind = cell.integration if cell.integration in BY_HAND else "prepare"
            how = "compile" if cell.compiled else ""
            own, truth = (single(kind, "", precision, how, cell.batch) for precision in (cell.precision, "float32"))
            errors = errors_of(cell, result, own, truth)
            good = all(error <= limit for error, limit in errors.values())
            found = "  ".join(f"{name} {error:.1e} of {limit:.1e}" for name, (error, limit) in errors.items())
        print("pass" if good else "FAIL", *(f"{text:<14}" for text in cell), found, sep="  ")
        bad += not good
    sys.exit(bad > 0)


if __name__ == "__main__":
    import matrix  # read anew, and by its name, under which ranks find it

    matrix.main([c for c in matrix.covering() if c.integration != "SFT" or find_spec("trl")], False)
