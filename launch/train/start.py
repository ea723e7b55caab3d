"""Train a decoder whose sequence is spread over ranks: `ringattn train`, or `torchrun ... -m ringattn.launch.train`.

This file starts the ranks and sums up; each of them runs trainer.work. Into folder/NAME/ go config.json,
metrics.jsonl, checkpoints/ and picture.svg.
"""

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.comms import lost, messages
from ringattn.conf.schema import Strategy, Train
from ringattn.launch import processes
from ringattn.launch.train import configured, data, metrics, torchrun
from ringattn.launch.train.metrics import echo
from ringattn.launch.train.report import again, checkpoints_of, finish, of_sweep, plural


def main(words: list[str] | None = None) -> int:
    """Compose the configuration and run it where it says."""
    words = sys.argv[1:] if words is None else words
    if torchrun.started():
        torchrun.end_on_signals()
    begun = iter([metrics.process_began()])  # the second run of a sweep begins when its turn comes

    runs: list[dict[str, Any]] = []

    def task(config: Train, swept: str) -> int | None:
        began = next(begun, None)
        return under_torchrun(config, began) if torchrun.started() else here(config, began, swept, runs)

    status = configured.run(words, task)
    if len(runs) > 1:
        echo(f"\n{of_sweep(runs)}", sys.stdout)
    if status is None:
        sys.stdout.flush()
        os._exit(0)  # an ordinary end would wait for the fork server's imports; it ends by itself
    return status


def work(*arguments: Any, **more: Any) -> dict[str, Any]:
    """trainer.work. A process that only starts ranks does not import it: that takes longer than torch."""
    from ringattn.launch.train import trainer

    return trainer.work(*arguments, **more)


def here(
    config: Train, began: float | None = None, swept: str = "", runs: list[dict[str, Any]] | None = None
) -> int | None:
    """Start the ranks, and beside them, for the picture, one rank with the same seed.

    Returns the exit status, or None if a signal stopped it. `swept`: the words that a sweep adds for this run alone,
    whose figures are added to `runs`.
    """
    folder: Path | None = None
    kept = [] if runs is None else runs
    try:
        if config.cluster.kind == "torchrun":
            raise ValueError("cluster=torchrun, and no ranks were started; run torchrun ... -m ringattn.launch.train")
        if config.cluster.kind == "ray" and not config.dry_run:
            from ringattn.launch.train import ray

            summary, folder = ray.fit(config, work, new_folder)
            kept.append({"swept": swept, **finish(config, folder, {"Ray": folder}, summary, swept)})
            return None if summary.get("stopped") else 0
        config = resolved(config, None)
        ranks = config.nproc or 1
        folder = new_folder(config)
        check(config)
        if ended(config, folder):
            echo(f"nothing to train: already at step {config.steps} of {config.steps} in {folder}", sys.stdout)
            return 0
        if config.dry_run:
            return foresee(config)
        announce(config, folder)
        summary = trained(config, folder, began or time.time())
        beside, stopped = {plural(ranks): folder}, summary["stopped"]
        if config.reference and ranks > 1 and not stopped and config.resume is None:
            reference = compared(config, folder / "one-rank")
            beside, stopped = beside | reference, not reference
        kept.append({"swept": swept, **finish(config, folder, beside, summary, swept)})
        return None if stopped else 0
    except torchrun.Stopped:
        echo("stopped before the first step; there is nothing to save", sys.stdout)
        return None
    except (processes.RankError, *processes.BAD) as error:
        status = processes.status(error)
        echo(f"ringattn train: {processes.sentence(error) or error}")
        if status == processes.FAILED and folder is not None and checkpoints_of(folder):
            echo(again(config, folder, swept))
        kept.append({"swept": swept, "ended": "failed", "folder": folder})
        return status


def check(config: Train) -> None:
    """Check what can be checked without ranks: the data, the checkpoint, and whether loggers are installed."""
    data.of(config)
    if config.resume not in (None, "auto"):
        from ringattn.launch.train.checkpoint import read_state

        read_state(Path(config.resume))
    metrics.loggers(config)


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


def trained(config: Train, folder: Path, began: float) -> dict[str, Any]:
    """The figures of rank 0, of ranks that are started here."""
    limit = config.cluster.timeout
    return torchrun.local(work, config.nproc or 1, config.device, config, str(folder), began, patience=limit)[0]


def compared(config: Train, folder: Path) -> dict[str, Path]:
    """The same training on one rank, by its name; nothing if it was stopped, which is reported."""
    echo("the same on one rank:")
    try:
        summary = trained(on_one_rank(config), folder, time.time())
    except torchrun.Stopped:
        summary = {"stopped": True, "step": 0}
    if summary["stopped"]:
        echo(f"the comparison was stopped after step {summary['step']}", sys.stdout)
        return {}
    return {"1 rank": folder}


def under_torchrun(config: Train, began: float | None = None) -> int:
    """One rank among those that torchrun started; the first rank that fails tells torchrun why, the others a line."""
    from torch.distributed.elastic.multiprocessing.errors import record

    rank = torchrun.rank()
    try:
        config = resolved(config, int(os.environ["WORLD_SIZE"]))
        if config.dry_run:
            return foresee(config) if rank == 0 else 0
        torchrun.join(config.device, config.cluster.timeout)
        folder, started_at = shared(config, began or time.time())
        if rank == 0:
            announce(config, folder)
        summary = record(work)(config, str(folder), started_at)
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
    if filled and ranks % fixed:
        other = f"ulysses={s.ulysses}" if s.ring is None else f"ring={s.ring}"
        raise ValueError(
            f"strategy.data={s.data} x {other} does not divide {plural(ranks)}; start a multiple of {fixed}"
        )
    if not filled and fixed != ranks:
        raise ValueError(
            f"strategy.data={s.data} x ring={s.ring} x ulysses={s.ulysses} is {fixed}, not the {plural(ranks)}; "
            f"make the product {ranks}, or start {plural(fixed)}"
        )
    rest = ranks // fixed
    if s.keys == "ulysses" and (s.ring or rest) > 1:
        raise ValueError(
            f"strategy.keys=ulysses has no ring, but the ring has {s.ring or rest} ranks; "
            "use strategy=ulysses or strategy.keys=ring"
        )
    precision = ("bfloat16" if device == "cuda" else "float32") if config.precision == "auto" else config.precision
    strategy = dataclasses.replace(s, ring=s.ring or rest, ulysses=s.ulysses or rest)
    return dataclasses.replace(config, strategy=strategy, precision=precision, device=device, nproc=ranks)


def on_one_rank(config: Train) -> Train:
    """The same training, the same batches, on one rank; no checkpoint is made, also when it is stopped."""
    strategy = Strategy(ring=1, kernel=config.strategy.kernel, recompute=config.strategy.recompute)
    batch = config.batch * config.strategy.data
    return dataclasses.replace(config, strategy=strategy, nproc=1, batch=batch, save_every=0, keep=0, profile=False)


def new_folder(config: Train) -> Path:
    """The folder of this run: that of its name, or a new one named after the time; never another run's."""
    name = config.run or torchrun.run_name()
    if name is None and config.resume == "auto":
        runs = sorted(path.name for path in Path(config.folder).glob("*") if checkpoints_of(path))
        there = f"; {config.folder} has {', '.join(runs[-3:])}" if runs else ""
        raise ValueError(f"resume=auto goes on with a run by its name, and none was given; use run=NAME{there}")
    name = name or time.strftime("%Y%m%d-%H%M%S")
    folder, again = Path(config.folder) / name, 1
    while config.run is None and not torchrun.started() and folder.exists():
        folder, again = Path(config.folder) / f"{name}-{again}", again + 1
    log, own, resume = folder / "metrics.jsonl", folder / "checkpoints", config.resume
    goes_on = resume is not None and (resume == "auto" or Path(resume).absolute().parent == own.absolute())
    taken = (log.is_file() and log.stat().st_size) or checkpoints_of(folder)
    if taken and not goes_on and torchrun.attempt() == 0:
        raise ValueError(f"{folder} holds a run; use resume=auto to go on, or another run=NAME")
    return folder


def ended(config: Train, folder: Path) -> bool:
    """Whether resume=auto finds a finished run of this very configuration, which saves no checkpoints."""
    about, log = folder / "config.json", folder / "metrics.jsonl"
    if config.resume != "auto" or config.save_every or not (about.is_file() and log.is_file()):
        return False
    try:
        saved = {**json.loads(about.read_text())["config"], "resume": "auto"}
    except (ValueError, KeyError, TypeError):  # torn: it is written anew
        return False
    return saved == dataclasses.asdict(config) and any(row["step"] == config.steps for row in metrics.read(log))


def shared(config: Train, began: float) -> tuple[Path, float]:
    """Rank 0's choice of folder, and when its first attempt began, on every rank.

    What it refuses, later attempts refuse too.
    """
    choice: dict[str, Any] = {"folder": "", "problem": "", "started_at": began}
    if dist.get_rank() == 0:
        refused, notes = "refused", torchrun.notes()
        choice["started_at"] = float(notes.compare_set("started_at", "", str(began)))
        try:
            choice["problem"] = notes.get(refused).decode() if notes.check([refused]) else ""
            choice["folder"] = str(new_folder(config))
        except ValueError as error:
            choice["problem"] = str(error)
            notes.set(refused, str(error))
    with lost.missing_named("before the training"):
        choice = messages.gather(choice)[0]
    if choice["problem"]:
        raise ValueError(choice["problem"])
    return Path(choice["folder"]), choice["started_at"]
