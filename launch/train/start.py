"""Train a decoder whose sequence is spread over ranks: `ringattn train`, or `torchrun ... -m ringattn.launch.train`.

This file starts the ranks and sums up; each of them runs trainer.work. Into folder/NAME/ go config.json,
metrics.jsonl, checkpoints/ and picture.svg.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.comms import lost, messages
from ringattn.conf.schema import Strategy, Train
from ringattn.launch import processes
from ringattn.launch.train import configured, data, torchrun
from ringattn.launch.train.metrics import echo
from ringattn.launch.train.report import again, checkpoints_of, finish, plural


def main(words: list[str] | None = None) -> int:
    """Compose the configuration and run it where it says."""
    words = sys.argv[1:] if words is None else words
    if torchrun.started():
        torchrun.end_on_signals()

    def task(config: Train) -> int | None:
        return under_torchrun(config) if torchrun.started() else here(config)

    status = configured.run(words, task)
    if status is None:
        sys.stdout.flush()
        os._exit(0)  # an ordinary end would wait for the fork server's imports; it ends by itself
    return status


def work(*arguments: Any, **more: Any) -> dict[str, Any]:
    """trainer.work. A process that only starts ranks does not import it: that takes longer than torch."""
    from ringattn.launch.train import trainer

    return trainer.work(*arguments, **more)


def here(config: Train) -> int | None:
    """Start the ranks, and beside them, for the picture, one rank with the same seed.

    Returns the exit status, or None if a signal stopped it.
    """
    folder: Path | None = None
    try:
        if config.cluster.kind == "torchrun":
            raise ValueError("cluster=torchrun, and no ranks were started; run torchrun ... -m ringattn.launch.train")
        if config.cluster.kind == "ray" and not config.dry_run:
            from ringattn.launch.train import ray

            summary, folder = ray.fit(config, work, new_folder)
            finish(config, folder, {"Ray": folder}, summary)
            return None if summary["stopped"] else 0
        config = configured.resolved(config, None)
        ranks = config.nproc or 1
        folder = new_folder(config)
        check(config)
        if config.dry_run:
            return foresee(config)
        announce(config, folder)
        summary = trained(config, folder)
        beside, stopped = {plural(ranks): folder}, summary["stopped"]
        if config.reference and ranks > 1 and not stopped and config.resume is None:
            reference = compared(config, folder / "one-rank")
            beside, stopped = beside | reference, not reference
        finish(config, folder, beside, summary)
        return None if stopped else 0
    except torchrun.Stopped:
        echo("stopped before the first step; there is nothing to save", sys.stdout)
        return None
    except (processes.RankError, *processes.BAD) as error:
        status = processes.status(error)
        echo(f"ringattn train: {processes.sentence(error) or error}")
        if status == processes.FAILED and folder is not None and checkpoints_of(folder):
            echo(again(config, folder))
        return status


def check(config: Train) -> None:
    """Check what can be checked without ranks: the data and the checkpoint."""
    data.of(config)
    if config.resume not in (None, "auto"):
        from ringattn.launch.train.checkpoint import read_state

        read_state(Path(config.resume))


def foresee(config: Train) -> int:
    """A dry run, for which no rank is needed, nor what they would run on."""
    from ringattn.launch.train import dry

    print(dry.report(config))
    return 0


def announce(config: Train, folder: Path) -> None:
    """Print what begins now, and where it writes."""
    what = f"{config.model.layers} blocks of width {config.model.dim} on {config.data.path}"
    where = f"sequences of {config.seq_len:,} tokens over {plural(config.nproc or 1)} on {config.device}"
    echo(f"trains {what}, {where}; writes to {folder}")


def trained(config: Train, folder: Path) -> dict[str, Any]:
    """The figures of rank 0, of ranks that are started here."""
    limit = config.cluster.timeout
    began = time.time()
    return torchrun.local(work, config.nproc or 1, config.device, config, str(folder), began, patience=limit)[0]


def compared(config: Train, folder: Path) -> dict[str, Path]:
    """The same training on one rank, by its name; nothing if it was stopped, which is reported."""
    echo("the same on one rank:")
    try:
        summary = trained(on_one_rank(config), folder)
    except torchrun.Stopped:
        summary = {"stopped": True, "step": 0}
    if summary["stopped"]:
        echo(f"the comparison was stopped after step {summary['step']}", sys.stdout)
        return {}
    return {"1 rank": folder}


def under_torchrun(config: Train) -> int:
    """One rank among those that torchrun started; the first rank that fails tells torchrun why, the others a line."""
    from torch.distributed.elastic.multiprocessing.errors import record

    rank = torchrun.rank()
    try:
        began = time.time()
        config = configured.resolved(config, int(os.environ["WORLD_SIZE"]))
        if config.dry_run:
            return foresee(config) if rank == 0 else 0
        torchrun.join(config.device, config.cluster.timeout)
        folder = shared(config)
        if rank == 0:
            announce(config, folder)
        summary = record(work)(config, str(folder), began)
        if rank == 0:
            finish(config, folder, {plural(dist.get_world_size()): folder}, summary or {})
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        status, text = processes.status(error), next(iter(str(error).splitlines()), "")
        if processes.sentence(error) is not None:
            configured.complain(text, status)
        else:
            kind = "" if isinstance(error, ConnectionError) else f"{type(error).__name__}: "
            print(f"ringattn train: rank {rank}: {kind}{text}", file=sys.stderr, flush=True)
        os._exit(status)  # other ranks may hang in a collective: do not wait for them
    return 0


def on_one_rank(config: Train) -> Train:
    """The same training, the same batches, on one rank; no checkpoint is made, also when it is stopped."""
    strategy = Strategy(ring=1, kernel=config.strategy.kernel, recompute=config.strategy.recompute)
    batch = config.batch * config.strategy.data
    return dataclasses.replace(config, strategy=strategy, nproc=1, batch=batch, save_every=0, keep=0)


def new_folder(config: Train) -> Path:
    """The folder of this run: that of its name, or a new one named after the time; never another run's."""
    name = config.run or torchrun.run_name()
    if name is None and config.resume == "auto":
        raise ValueError("resume=auto goes on with a run by its name, and none was given; use run=NAME")
    name = name or time.strftime("%Y%m%d-%H%M%S")
    folder, again = Path(config.folder) / name, 1
    while config.run is None and not torchrun.started() and folder.exists():
        folder, again = Path(config.folder) / f"{name}-{again}", again + 1
    log = folder / "metrics.jsonl"
    taken = (log.is_file() and log.stat().st_size) or checkpoints_of(folder)
    if taken and config.resume != "auto" and torchrun.attempt() == 0:
        raise ValueError(f"{folder} holds a run; use resume=auto to go on, or another run=NAME")
    return folder


def shared(config: Train) -> Path:
    """Rank 0's choice of folder on every rank. What it refuses, later attempts refuse too."""
    folder = problem = ""
    if dist.get_rank() == 0:
        notes = torchrun.notes()
        try:
            problem = notes.get("refused").decode() if notes.check(["refused"]) else ""
            folder = str(new_folder(config))
        except ValueError as error:
            problem = str(error)
            notes.set("refused", problem)
    with lost.missing_named("before the training"):
        folder, problem = messages.gather([folder, problem])[0]
    if problem:
        raise ValueError(problem)
    return Path(folder)
