"""Train a decoder whose sequence is spread over ranks: `ringattn train`, or `torchrun ... -m ringattn.launch.train`.

This file starts the ranks and sums up; each of them runs trainer.work. Into folder/NAME/ go config.json,
metrics.jsonl, checkpoints/ and picture.svg.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.comms import lost, messages
from ringattn.conf.schema import Train
from ringattn.launch import processes
from ringattn.launch.train import configured, data, torchrun
from ringattn.launch.train.configured import new_folder, on_one_rank, plural, resolved
from ringattn.launch.train.metrics import echo
from ringattn.launch.train.report import again, finish


def main(words: list[str] | None = None) -> int:
    """Compose the configuration and run it where it says."""
    words = sys.argv[1:] if words is None else words
    if torchrun.started():
        torchrun.end_on_signals()
    status = configured.run(words, under_torchrun if torchrun.started() else local)
    if status is None:
        sys.stdout.flush()
        os._exit(0)  # an ordinary end would wait for the fork server's imports; it ends by itself
    return status


def work(*arguments: Any, **more: Any) -> dict[str, Any]:
    """trainer.work. A process that only starts ranks does not import it: that takes longer than torch."""
    from ringattn.launch.train import trainer

    return trainer.work(*arguments, **more)


def local(config: Train) -> int | None:
    """Start the ranks; the exit status, or None if a signal stopped them."""
    folder: Path | None = None
    try:
        if config.cluster.kind == "torchrun":
            raise ValueError("cluster=torchrun, and no ranks were started; run torchrun ... -m ringattn.launch.train")
        if config.cluster.kind == "ray" and not config.dry_run:
            from ringattn.launch.train import ray

            summary, folder = ray.fit(config, work)
            finish(config, folder, {"Ray": folder}, summary)
            return None if summary["stopped"] else 0
        config = resolved(config, None)
        folder = new_folder(config)
        check(config)
        if config.dry_run:
            return foresee(config)
        announce(config, folder)
        return trained_and_compared(config, folder)
    except torchrun.Stopped:
        echo("stopped before the first step; there is nothing to save", sys.stdout)
        return None
    except (processes.RankError, ModuleNotFoundError, *processes.BAD) as error:
        status = processes.status(error)
        echo(f"ringattn train: {processes.sentence(error) or error}")
        if status == processes.FAILED and folder is not None and (folder / "checkpoints").exists():
            echo(again(config, folder))
        return status


def check(config: Train) -> None:
    """Check what can be checked without ranks: the data, and the checkpoint."""
    data.of(config)
    if config.resume not in (None, "auto"):
        from ringattn.launch.train.checkpoint import read_state

        read_state(Path(config.resume))


def foresee(config: Train) -> int:
    """A dry run, for which no rank is needed, nor what they would run on."""
    from ringattn.launch.train import estimate

    print(estimate.report(config))
    return 0


def announce(config: Train, folder: Path) -> None:
    """Print what begins now, and where it writes."""
    what = f"{config.model.layers} blocks of width {config.model.dim} on {config.data.path}"
    where = f"sequences of {config.seq_len:,} tokens over {plural(config.nproc or 1)} on {config.device}"
    echo(f"trains {what}, {where}; writes to {folder}")


def trained(config: Train, folder: Path) -> dict[str, Any]:
    """The figures of rank 0, of ranks that are started here."""
    limit, now = config.cluster.timeout, time.time()
    return torchrun.local(work, config.nproc or 1, config.device, config, str(folder), now, patience=limit)[0]


def trained_and_compared(config: Train, folder: Path) -> int | None:
    """Train, and then, for the picture, the same with the same seed on one rank; None if a signal stopped either."""
    ranks = config.nproc or 1
    summary = trained(config, folder)
    runs, stopped = {plural(ranks): folder}, summary["stopped"]
    if config.reference and ranks > 1 and not stopped and config.resume is None:
        echo("the same on one rank:")
        try:
            stopped = trained(on_one_rank(config), folder / "one-rank")["stopped"]
        except torchrun.Stopped:
            stopped = True
        if stopped:
            echo("the comparison was stopped", sys.stdout)
        else:
            runs["1 rank"] = folder / "one-rank"
    finish(config, folder, runs, summary)
    return None if stopped else 0


def under_torchrun(config: Train) -> int:
    """One rank among those that torchrun started; the first rank that fails tells torchrun why, the others a line."""
    from torch.distributed.elastic.multiprocessing.errors import record

    rank, began = torchrun.rank(), time.time()
    try:
        config = resolved(config, int(os.environ["WORLD_SIZE"]))
        if config.dry_run:
            return foresee(config) if rank == 0 else 0
        torchrun.join(config.device, config.cluster.timeout)
        folder = shared_folder(config)
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


def shared_folder(config: Train) -> Path:
    """Rank 0's choice of folder on every rank, or its refusal."""
    folder = problem = ""
    if dist.get_rank() == 0:
        try:
            folder = str(new_folder(config))
        except ValueError as error:
            problem = str(error)
    with lost.missing_named("before the training"):
        folder, problem = messages.gather([folder, problem])[0]
    if problem:
        raise ValueError(problem)
    return Path(folder)
