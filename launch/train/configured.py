"""Run a command whose words make a configuration, such as `ringattn train`, or print one sentence on why not."""

import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from ringattn.conf import schema
from ringattn.conf.schema import Train
from ringattn.launch.processes import WRONG_INPUT, sentence
from ringattn.launch.train import torchrun
from ringattn.launch.train.report import plural

USAGE = """usage: ringattn train [group=choice ...] [key=value ...]    (or torchrun ... -m ringattn.launch.train ...)

Groups choose files of conf/, keys change single values; --cfg job prints the result, --multirun with a=1,2 sweeps,
--config-dir DIR adds your own files.
"""

PATIENCE = 20.0  # seconds that a rank waits for rank 0 to report a problem


def run(words: list[str], task: Callable[[Train], int | None]) -> int | None:
    """`task(config)` for each configuration that the words make; the exit status.

    A wrong configuration is one sentence from rank 0 and status 2. If a task returns None, a signal stopped it: the
    sweep ends too, with the status of the runs before it, None if all were good.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{schema.choices()}\n\n{schema.explain()}")
        return 0
    try:
        from ringattn.conf import compose  # which needs Hydra

        given = compose.options(words)
        if given.multirun and torchrun.started():
            raise ValueError("a sweep starts many runs, and torchrun started the ranks of one; sweep outside torchrun")
        configs = compose.composed(given)
    except (ImportError, ValueError) as error:
        text = sentence(error)
        if text is None:
            raise
        return complain(text)
    if given.cfg:
        for _, config in configs if torchrun.rank() == 0 else ():
            print(compose.as_yaml(config), end="")
        return 0
    statuses: list[int] = []
    for done, (swept, config) in enumerate(configs, 1):
        if swept:
            print(f"{swept}:", file=sys.stderr, flush=True)
        status = task(config)
        if status is None:
            if configs[done:]:
                print(f"the sweep was stopped; not begun: {'; '.join(left for left, _ in configs[done:])}")
            return max(statuses, default=0) or None
        statuses.append(status)
    return max(statuses)


def complain(problem: str, status: int = WRONG_INPUT) -> int:
    """Print the problem once: on rank 0, or on the rank that has it if rank 0 does not; return the exit status.

    A rank that its launcher ends meanwhile has this status: Slurm reports the highest one, and a signal's is higher.
    """
    if rank := torchrun.rank():
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
        time.sleep(PATIENCE)
        problem = f"rank {rank}: {problem}"
    print(f"ringattn train: {problem}", file=sys.stderr, flush=True)
    return status


def resolved(config: Train, ranks: int | None) -> Train:
    """The configuration with every `auto` decided that can be before there are ranks: `nproc` and `device` too."""
    gpus = torch.cuda.device_count()
    device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and not gpus and not config.dry_run:
        raise ValueError("device=cuda, and torch sees no GPU here; use device=cpu, or dry_run=true to look first")
    s = config.strategy
    if s.ulysses is None:
        s = dataclasses.replace(s, ring=s.ring or 1)
    fixed, filled = s.data * (s.ring or 1) * (s.ulysses or 1), s.ring is None or s.ulysses is None
    if ranks is None:
        there = gpus if device == "cuda" else 0
        ranks = config.nproc or there or (math.lcm(2, fixed) if filled else fixed)
        if device == "cuda" and ranks > gpus and not config.dry_run:
            raise ValueError(f"nproc={ranks} ranks need a GPU each, and this machine has {gpus}; use nproc={gpus}")
    if ranks % fixed if filled else fixed != ranks:
        raise ValueError(
            f"strategy.data={s.data} x ring={s.ring} x ulysses={s.ulysses} does not make {plural(ranks)}; "
            f"change these, or start {'a multiple of ' * filled}{fixed}"
        )
    rest = ranks // fixed
    precision = ("bfloat16" if device == "cuda" else "float32") if config.precision == "auto" else config.precision
    strategy = dataclasses.replace(s, ring=s.ring or rest, ulysses=s.ulysses or rest)
    return dataclasses.replace(config, strategy=strategy, precision=precision, device=device, nproc=ranks)
