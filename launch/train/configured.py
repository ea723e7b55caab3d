"""The configuration of a run: from the command's words, with every `auto` decided, and the folder that it names."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ringattn.conf import schema
from ringattn.conf.keys import listed
from ringattn.conf.schema import Strategy, Train
from ringattn.launch.processes import WRONG_INPUT, sentence
from ringattn.launch.train import torchrun

USAGE = """usage: ringattn train [group=choice ...] [key=value ...]    (or torchrun ... -m ringattn.launch.train ...)

Groups choose files of conf/, keys change single values; --cfg job prints the result, --config-dir DIR adds your own
files.
"""

PATIENCE = 20.0  # seconds that a rank waits for rank 0 to report a problem


def run(words: list[str], task: Callable[[Train], int]) -> int:
    """`task(config)` for the configuration that the words make, whose exit status this returns.

    A wrong configuration is one sentence from rank 0 and status 2.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{schema.choices()}\n\n{listed(schema.every_key())}")
        return 0
    try:
        from omegaconf import OmegaConf

        from ringattn.conf.compose import composed

        prints = "--cfg" in words
        config = composed([word for word in words if not (prints and word in ("--cfg", "job"))])
    except (ImportError, ValueError) as error:
        text = sentence(error)
        if text is None:
            raise
        return complain(text)
    if prints:
        if torchrun.rank() == 0:
            print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
        return 0
    return task(config)


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


def resolved(config: Train, ranks: int | None = None, gpus: int | None = None) -> Train:
    """The configuration with every `auto` decided that can be before there are ranks: `nproc` and `device` too.

    `ranks` is given where they were started; `gpus` where they will not run here.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and not gpus and not config.dry_run:
        raise ValueError("device=cuda, and torch sees no GPU; use device=cpu, or dry_run=true to look first")
    s = config.strategy
    if s.ulysses is None:
        s = dataclasses.replace(s, ring=s.ring or 1)
    fixed, flexible = s.data * (s.ring or 1) * (s.ulysses or 1), s.ring is None or s.ulysses is None
    if ranks is None:
        of_gpus = gpus if device == "cuda" else 0
        ranks = config.nproc or of_gpus or (math.lcm(2, fixed) if flexible else fixed)
        if device == "cuda" and ranks > gpus and not config.dry_run:
            raise ValueError(f"nproc={ranks} ranks need a GPU each, and there are {gpus}; use nproc={gpus}")
    if ranks % fixed if flexible else fixed != ranks:
        raise ValueError(
            f"strategy.data={s.data} x ring={s.ring} x ulysses={s.ulysses} does not make {plural(ranks)}; "
            f"change these, or start {'a multiple of ' * flexible}{fixed}"
        )
    remaining = ranks // fixed
    precision = ("bfloat16" if device == "cuda" else "float32") if config.precision == "auto" else config.precision
    strategy = dataclasses.replace(s, ring=s.ring or remaining, ulysses=s.ulysses or remaining)
    return dataclasses.replace(config, strategy=strategy, precision=precision, device=device, nproc=ranks)


def plural(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def on_one_rank(config: Train) -> Train:
    """The same training, the same batches, on one rank; no checkpoint is made, also when it is stopped."""
    s = config.strategy
    strategy = Strategy(ring=1, kernel=s.kernel, recompute=s.recompute, offload=s.offload)
    batch = config.batch * config.strategy.data
    return dataclasses.replace(config, strategy=strategy, nproc=1, batch=batch, save_every=0, keep=0)


def new_folder(config: Train) -> Path:
    """The folder of this run: that of its name, or a new one named after the time; never another run's."""
    name = config.run or torchrun.run_name()
    if name is None and config.resume == "auto":
        raise ValueError("resume=auto goes on with a run by its name, and none was given; use run=NAME")
    folder = Path(config.folder) / (name or time.strftime("%Y%m%d-%H%M%S"))
    log = folder / "metrics.jsonl"
    taken = (log.is_file() and log.stat().st_size) or any(folder.glob("checkpoints/step-*/state.json"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    ours = attempt > 0 and launcher_of(folder) == torchrun.run_name()
    if taken and config.resume != "auto" and not ours:
        raise ValueError(f"{folder} holds a run; use resume=auto to go on, or another run=NAME")
    return folder


def launcher_of(folder: Path) -> str | None:
    """The name of the torchrun whose ranks wrote a run's config.json."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "config.json").read_text()).get("launcher")
    return None
