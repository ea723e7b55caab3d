"""The configuration of a training run: dataclasses that define every key, its type, default and meaning.

The YAML files beside this one only choose values. Nothing here needs Hydra: `Train(steps=3)` is a whole configuration.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from ringattn.conf.keys import allow, nearest, option
from ringattn.layouts.layout import MAKERS


@dataclass
class Model:
    """A decoder: RoPE, grouped-query attention, SwiGLU, RMSNorm; linear attention in some blocks or none."""

    dim: int = option(128, "width of the residual stream")
    layers: int = option(2, "number of blocks")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key and value heads")
    head_dim: int | None = option(None, "size of a head; by default dim / heads")
    hidden: int = option(384, "width inside the feed-forward layer")
    vocab: int = option(256, "number of tokens; 256 for bytes")
    rope_theta: float = option(10000.0, "base of the rotary frequencies")
    window: int | None = option(None, "how many keys a query sees; by default all")
    softcap: float | None = option(None, "soft cap of the scores")
    softmax_every: int = option(1, "N: every N-th block uses softmax attention, the others linear attention")
    rule: str = option(
        "gated", "of linear attention: delta as Qwen3-Next, kimi as Kimi Linear", among=("gated", "delta", "kimi")
    )
    convolution: int = option(0, "tokens of the causal convolution of linear attention; 0 for none")


@dataclass
class Strategy:
    """How a sequence, and the weights, are spread over the ranks."""

    data: int = option(1, "ranks that hold different sequences")
    ring: int | None = option(None, "ranks along the ring; by default all remaining ranks")
    ulysses: int | None = option(1, "ranks that exchange tokens for heads; null: all remaining ranks, and a ring of 1")
    keys: str = option("auto", "how keys meet queries", among=("auto", "ring", "gather", "ulysses"))
    layout: str = option("auto", "which tokens a rank holds", among=("auto", *MAKERS))
    kernel: str = option("auto", "auto, or the name of an attention kernel")
    graphs: str = option("auto", "short calls of attention that repeat run as CUDA graphs", among=("auto", "off"))
    recompute: str = option(
        "none",
        "what backward computes again: pointwise operations; cheap: all but attention; block: all of a block",
        among=("none", "pointwise", "cheap", "block"),
    )
    offload: bool = option(False, "what blocks keep for that waits in the host's memory while others run")


@dataclass
class Cluster:
    """Who starts the ranks."""

    kind: str = option(
        "local",
        "local starts the ranks here; torchrun: they were started; ray: they are Ray's workers",
        among=("local", "torchrun", "ray"),
    )
    timeout: float = option(600.0, "seconds after which waiting for another rank is an error")
    address: str | None = option(None, "address of the Ray cluster, or auto; by default one is started for this run")
    failures: int = option(3, "after how many failures Ray starts another attempt; -1 for all", least=-1)
    placement: str = option("PACK", "of Ray's ranks: on few nodes, or over many", among=("PACK", "SPREAD"))


@dataclass
class Data:
    """What is learned."""

    path: str = option("stdlib", "a folder, or one file; stdlib: the sources of the Python standard library")
    suffix: str = option("", "only the files of the folder whose names end with this")
    tokens: str | None = option(
        None, "the file holds tokens of this type, not bytes", among=("uint8", "uint16", "uint32", "int32")
    )
    documents: str = option("", "packed documents: files, or the number of the token that ends a document")
    held_out: int = option(4, "sequences kept for evaluation", least=0)


@dataclass
class Optimizer:
    """AdamW with warm-up and a cosine."""

    lr: float = option(6e-3, "highest learning rate")
    final: float = option(0.1, "the last learning rate, as a part of the highest", least=0)
    warmup: int = option(5, "steps of linear warm-up", least=0)
    weight_decay: float = option(0.1, "on matrices only", least=0)
    beta1: float = option(0.9, "decay of the mean gradient", least=0, below=1)
    beta2: float = option(0.95, "decay of the mean square gradient", least=0, below=1)
    clip: float = option(1.0, "largest norm of the gradient")


@dataclass
class Train:
    """A training run."""

    model: Model = field(default_factory=Model)
    strategy: Strategy = field(default_factory=Strategy)
    cluster: Cluster = field(default_factory=Cluster)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    nproc: int | None = option(None, "ranks to start here; by default every GPU, or 2 without GPUs", below=65537)
    device: str = option("auto", "where it runs; auto: on GPUs if there are any", among=("auto", "cpu", "cuda"))
    precision: str = option(
        "auto",
        "of the computation, with float32 master weights; auto: bfloat16 on GPUs",
        among=("auto", "float32", "bfloat16"),
    )
    compile: bool = option(
        False, "fuse operations between matrix products with torch.compile; it takes half a minute at the start"
    )
    seq_len: int = option(8192, "tokens of a sequence")
    batch: int = option(1, "sequences per step and data rank")
    accumulate: int = option(1, "number of such batches in one step")
    steps: int = option(40, "steps of the optimizer")
    seed: int = option(0, "of weights and of the order of the data")
    folder: str = option("runs", "where runs are kept")
    run: str | None = option(None, "this run's name; by default the time")
    resume: str | None = option(None, "auto: from this run's newest checkpoint; or a checkpoint's folder")
    save_every: int = option(0, "steps between checkpoints, also after the last step; 0: only after a SIGTERM")
    keep: int = option(2, "checkpoints kept")
    eval_every: int = option(0, "steps between evaluations; 0 for one at the end")
    reference: bool = option(True, "also train on one rank, and measure memory at shorter sequences, for the picture")
    picture: bool = option(True, "draw the loss and the memory at the end, where matplotlib is installed")
    machine: str | None = option(
        None, "with dry_run: the machine, by a name (h100, h200, ...) or its description's file"
    )
    dry_run: bool = option(False, "print shapes, memory and the plan, and stop")

    @property
    def a_step(self) -> int:
        """Sequences of all ranks in one step of the optimizer."""
        return self.batch * self.accumulate * self.strategy.data


GROUPS = ("model", "strategy", "cluster", "data", "experiment")


def every_key(kind: type = Train, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every key with its full name, in the order of the dataclasses."""
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            yield from every_key(f.type, f"{prefix}{f.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + f.name, f


def check(config: Train) -> Train:
    """The configuration itself, if every value is valid; otherwise a ValueError that names the wrong one and why."""
    for name, f in every_key():
        allow(name, f, attrgetter(name)(config))
    model, data = config.model, config.data
    if model.head_dim is None and model.dim % model.heads:
        raise ValueError(f"model.heads={model.heads} does not divide model.dim={model.dim}; give model.head_dim")
    if model.heads % model.kv_heads:
        raise ValueError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}")
    if data.documents not in ("", "files"):
        if not data.documents.isdecimal():
            raise ValueError(f"data.documents={data.documents}: give files, or the number of the token that ends one")
        last = 255 if data.tokens is None else model.vocab - 1
        if int(data.documents) > last:
            raise ValueError(f"data.documents={data.documents} ends no document: tokens are 0 to {last}")
    if config.strategy.offload and (config.strategy.recompute in ("none", "pointwise") or config.compile):
        raise ValueError("strategy.offload=true takes strategy.recompute=cheap or block, and compile=false")
    if config.run is not None and ("/" in config.run or config.run in ("", ".", "..")):
        raise ValueError(f"run={config.run!r} is a name inside folder={config.folder}, not a path; use folder=PATH")
    return config


def unknown(name: str) -> str | None:
    """Why there is no such key, with the nearest one; None for a key, a group, or a part of a key's name."""
    names = [*(n for n, _ in every_key()), *GROUPS]
    if name in names or any(n.startswith(f"{name}.") for n in names):
        return None
    return f"no key {name!r}{nearest(name, names) or '; --help lists the keys'}"


def choices() -> str:
    """Every group with its files, and what their first line says."""
    lines = []
    for path in sorted(path for group in GROUPS for path in Path(__file__).parent.glob(f"{group}/*.yaml")):
        about = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
        lines.append(f"  {path.parent.name}={path.stem}".ljust(34) + f"  {about[0] if about else ''}")
    return "\n".join(lines)
