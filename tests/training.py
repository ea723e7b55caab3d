"""What the tests of training share: a model that trains in a second, and its runs over ranks."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ringattn.conf.schema import Data, Model, Optimizer, Strategy, Train
from ringattn.launch.train import configured, metrics, torchrun
from ringattn.launch.train.trainer import work

SOURCES = str(Path(json.__file__).parent)


TINY = Train(
    model=Model(dim=32, layers=2, heads=4, kv_heads=2, hidden=48),
    data=Data(path=SOURCES, suffix=".py", held_out=1),
    optimizer=Optimizer(warmup=2),
    seq_len=96,
    steps=5,
    reference=False,
)


def over(ranks: int, jobs: dict[str, Train], folder: Path) -> dict[str, list[float]]:
    """The losses of each job, one after the other on the same ranks."""
    configs = {name: configured.resolved(config, ranks) for name, config in jobs.items()}
    torchrun.local(several, ranks, "cpu", configs, str(folder))
    return {name: losses(folder / name) for name in jobs}


def several(configs: dict[str, Train], folder: str) -> None:
    for name, config in configs.items():
        work(config, f"{folder}/{name}", time.time())


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "step"]


def where(**choices) -> Train:
    return dataclasses.replace(TINY, strategy=Strategy(**choices))


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
