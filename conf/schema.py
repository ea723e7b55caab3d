"""The configuration of a training run: dataclasses that define every key, its type, default and meaning.

The YAML files beside this one only choose values. Nothing here needs Hydra: `Train(steps=3)` is a whole configuration.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def key(default: Any, help: str) -> Any:
    """A key with its default and the line that --help shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class Model:
    """A decoder: RoPE, grouped-query attention, SwiGLU, RMSNorm; linear attention in some blocks or none."""

    dim: int = key(128, "width of the residual stream")
    layers: int = key(2, "number of blocks")
    heads: int = key(4, "query heads")
    kv_heads: int = key(2, "key and value heads")
    head_dim: int | None = key(None, "size of a head; by default dim / heads")
    hidden: int = key(384, "width inside the feed-forward layer")
    vocab: int = key(256, "number of tokens; 256 for bytes")
    rope_theta: float = key(10000.0, "base of the rotary frequencies")
    window: int | None = key(None, "how many keys a query sees; by default all")
    softcap: float | None = key(None, "soft cap of the scores")
    softmax_every: int = key(1, "one block in so many attends with softmax, the others with linear attention")
    rule: str = key("gated", "linear attention: gated, delta (as Qwen3-Next) or kimi (as Kimi Linear)")
    convolution: int = key(0, "tokens of the causal convolution of linear attention; 0 for none")


@dataclass
class Strategy:
    """How a sequence, and the weights, are spread over the ranks."""

    data: int = key(1, "ranks that hold different sequences")
    ring: int | None = key(None, "ranks along the ring; by default all remaining ranks")
    ulysses: int | None = key(1, "ranks that trade sequence for heads; null: all remaining ranks, and a ring of 1")
    keys: str = key("auto", "how keys meet queries: auto, ring, gather or ulysses")
    layout: str = key("auto", "auto, contiguous, striped or zigzag")
    kernel: str = key("auto", "auto, or the name of an attention kernel")
    recompute: str = key("none", "in the backward pass: none, pointwise, cheap (all but attention), block (all of it)")


@dataclass
class Cluster:
    """Who starts the ranks."""

    kind: str = key("local", "local starts them here; torchrun finds them started; ray has Ray's workers be them")
    timeout: float = key(600.0, "seconds after which waiting for another rank is an error")
    address: str | None = key(None, "of the Ray cluster, or auto; by default one is started for this run")
    failures: int = key(3, "how many failures Ray answers with another attempt; -1 for all")
    at_least: int | None = key(None, "go on with as few ranks as this when Ray has no more; by default nproc")
    resize_every: float = key(60.0, "seconds between looks whether Ray could start more ranks, up to nproc")
    placement: str = key("PACK", "Ray's ranks: PACK on few nodes, SPREAD over many, or STRICT_PACK, STRICT_SPREAD")


@dataclass
class Data:
    """What is learned."""

    path: str = key("stdlib", "a folder, or one file; stdlib: the sources of the Python standard library")
    suffix: str = key("", "of a folder, only the files whose name ends so")
    tokens: str | None = key(None, "the file holds tokens of this type (uint8, uint16, uint32, int32), not bytes")
    documents: str = key("", "what does not see each other: files, or what this token ends")
    held_out: int = key(4, "sequences kept for evaluation")


@dataclass
class Optimizer:
    """AdamW with warm-up and a cosine."""

    lr: float = key(6e-3, "highest learning rate")
    final: float = key(0.1, "the last learning rate, as a part of the highest")
    warmup: int = key(5, "steps of linear warm-up")
    weight_decay: float = key(0.1, "on matrices only")
    beta1: float = key(0.9, "decay of the mean gradient")
    beta2: float = key(0.95, "decay of the mean square gradient")
    clip: float = key(1.0, "largest norm of the gradient")


@dataclass
class Train:
    """A training run."""

    model: Model = field(default_factory=Model)
    strategy: Strategy = field(default_factory=Strategy)
    cluster: Cluster = field(default_factory=Cluster)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    nproc: int | None = key(None, "ranks to start here; by default every GPU, or 2 without GPUs")
    device: str = key("auto", "auto, cpu or cuda")
    precision: str = key("auto", "float32, or bfloat16 with float32 master weights; auto: bfloat16 on GPUs")
    compile: bool = key(False, "fuse what is between matrix products, with torch.compile: half a minute at the start")
    seq_len: int = key(8192, "tokens of a sequence")
    batch: int = key(1, "sequences a step and data rank")
    accumulate: int = key(1, "how many such batches make one step")
    steps: int = key(40, "steps of the optimizer")
    seed: int = key(0, "of weights and of the order of the data")
    folder: str = key("runs", "where runs are kept")
    run: str | None = key(None, "this run's name; by default the time")
    resume: str | None = key(None, "auto: from this run's newest checkpoint; or a checkpoint's folder")
    save_every: int = key(0, "steps between checkpoints, the last step's beside them; 0: only when a SIGTERM asks")
    keep: int = key(2, "checkpoints kept")
    eval_every: int = key(0, "steps between evaluations; 0 for one at the end")
    log_every: int | None = key(None, "log every N steps; null: all in metrics.jsonl, every 50th without a terminal")
    reference: bool = key(True, "also train on one rank, and measure memory at shorter sequences, for the picture")
    picture: bool = key(True, "draw the loss and the memory at the end, where matplotlib is installed")
    profile: bool = key(False, "a profiler trace of steps 2 to 4")
    snapshot: bool = key(False, "a snapshot of GPU memory after the last step")
    tensorboard: bool = key(False, "also write TensorBoard events")
    wandb: str | None = key(None, "also log to this Weights & Biases project")
    dry_run: bool = key(False, "print shapes, memory and the plan, and stop")


GROUPS = ("model", "strategy", "cluster", "data", "experiment")

CHOICES = {
    "model.rule": ("gated", "delta", "kimi"),
    "strategy.keys": ("auto", "ring", "gather", "ulysses"),
    "strategy.layout": ("auto", "contiguous", "striped", "zigzag"),
    "strategy.recompute": ("none", "pointwise", "cheap", "block"),
    "cluster.kind": ("local", "torchrun", "ray"),
    "cluster.placement": ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "data.tokens": (None, "uint8", "uint16", "uint32", "int32"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bfloat16"),
}
POSITIVE = ("model.dim", "model.layers", "model.heads", "model.kv_heads", "model.head_dim", "model.hidden",
            "model.vocab", "model.window", "model.softcap", "model.rope_theta", "model.softmax_every", "nproc",
            "seq_len", "batch", "accumulate", "steps", "keep", "log_every", "strategy.data", "strategy.ring",
            "strategy.ulysses", "cluster.timeout", "cluster.resize_every", "optimizer.lr",
            "optimizer.clip")  # fmt: skip
BELOW_1 = ("optimizer.beta1", "optimizer.beta2")
NOT_NEGATIVE = ("model.convolution", "data.held_out", "optimizer.final", "optimizer.warmup", "optimizer.weight_decay",
                "seed", "save_every", "eval_every", *BELOW_1)  # fmt: skip


def every_key(kind: type = Train, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every key with its full name, in the order of the dataclasses."""
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(f.type):
            yield from every_key(f.type, f"{prefix}{f.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + f.name, f


def get(config: Train, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def check(config: Train) -> Train:
    """The configuration itself, if every value can be; otherwise a ValueError that says which one and why."""
    for name, allowed in CHOICES.items():
        if get(config, name) not in allowed:
            hint = nearest(str(get(config, name)), [str(a) for a in allowed])
            raise ValueError(f"{name}={get(config, name)}: choose one of {', '.join(map(str, allowed))}{hint}")
    for name, _ in every_key():
        if isinstance(value := get(config, name), float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: must be a number, and finite")
    for name in POSITIVE:
        value = get(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")
    for name in NOT_NEGATIVE:
        if not get(config, name) >= 0:
            raise ValueError(f"{name}={get(config, name)}: must be 0 or above")
    for name in BELOW_1:
        if not get(config, name) < 1:
            raise ValueError(f"{name}={get(config, name)}: must be below 1")
    check_documents(config.data, config.model.vocab)
    model = config.model
    if model.head_dim is None and model.dim % model.heads:
        raise ValueError(f"model.heads={model.heads} does not divide model.dim={model.dim}; say model.head_dim")
    if model.heads % model.kv_heads:
        raise ValueError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}")
    least, most = config.cluster.at_least, config.nproc
    if least is not None and (least < 1 or most is None or least > most):
        raise ValueError(f"cluster.at_least={least} and nproc={most}: say both, 1 <= cluster.at_least <= nproc")
    if config.run is not None and ("/" in config.run or config.run in ("", ".", "..")):
        raise ValueError(f"run={config.run!r} is a name inside folder={config.folder}, not a path; say folder=PATH")
    return config


def check_documents(data: Data, vocab: int) -> None:
    """Refuse what ends no document: a word, or a token that the data cannot hold."""
    if data.documents in ("", "files"):
        return
    if not data.documents.isdecimal():
        raise ValueError(f"data.documents={data.documents}: say files, or the number of the token that ends one")
    what, most = ("bytes", 255) if data.tokens is None else (f"tokens of model.vocab={vocab}", vocab - 1)
    if int(data.documents) > most:
        raise ValueError(f"data.documents={data.documents} ends no document: {what} are 0 to {most}")


def unknown(name: str) -> str | None:
    """Why there is no such key, with the nearest one; None for a key, a group, or a part of a key's name."""
    names = [n for n, _ in every_key()]
    if name in names or name in GROUPS or any(n.startswith(f"{name}.") for n in names):
        return None
    section, dot, end = name.rpartition(".")
    inside = [n.removeprefix(f"{section}.") for n in names if dot and n.startswith(f"{section}.")]
    by_end = {n.rsplit(".", 1)[-1]: n for n in names}
    if inside:
        close = [f"{section}.{e}" for e in difflib.get_close_matches(end, inside, 1)]
    else:
        close = difflib.get_close_matches(name, names if dot else [*names, *GROUPS], 1, 0.7)
    close = close or [by_end[e] for e in difflib.get_close_matches(end, by_end, 1)]
    rest = f"{section} has {', '.join(inside)}" if inside else "--help lists the keys"
    return f"no key {name!r}; " + (f"did you mean {close[0]!r}?" if close else rest)


def from_dict(values: Mapping[str, Any], kind: type = Train, prefix: str = "") -> Any:
    """A configuration from nested plain values, as saved with a run."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise ValueError(unknown(prefix + name) or f"no key {prefix + name!r}")
    return kind(**{
        name: from_dict(value, fields[name].type, f"{prefix}{name}.")  # type: ignore[arg-type]
        if dataclasses.is_dataclass(fields[name].type) else value
        for name, value in values.items()
    })  # fmt: skip


ALSO = {"gpu": "cuda"}  # what some call it


def nearest(word: str, among: Iterable[str]) -> str:
    """What was probably meant, as the end of a sentence."""
    names = list(among)
    close = [ALSO[word]] if ALSO.get(word) in names else difflib.get_close_matches(word, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain() -> str:
    """Every key with its default and meaning, as aligned lines."""
    rows = [(f"{name}={'null' if f.default is None else f.default}", f.metadata["help"]) for name, f in every_key()]
    return "\n".join(f"  {left:<28} {right}" for left, right in rows)
