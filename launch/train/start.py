"""Train a decoder whose sequence is spread over ranks: `ringattn train`, or `torchrun ... -m ringattn.launch.train`.

This file starts the ranks and sums up; each of them runs trainer.work. Into folder/NAME/ go config.json,
metrics.jsonl, checkpoints/ and picture.svg.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ringattn.comms import lost
from ringattn.conf.schema import Train
from ringattn.launch import processes
from ringattn.launch.train import configured, data, metrics, torchrun
from ringattn.launch.train.configured import new_folder, on_one_rank, plural, resolved
from ringattn.launch.train.metrics import echo, mfu, writing


def main(words: list[str]) -> int:
    """Compose the configuration and run it where it says."""
    if not torchrun.started():
        with processes.handling(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):  # until there are ranks
            return configured.run(words, local)
    torchrun.follow_launcher()
    return configured.run(words, under_torchrun)


def work(*arguments: Any, **more: Any) -> dict[str, Any]:
    """trainer.work. A process that only starts ranks does not import it: that takes longer than torch."""
    from ringattn.launch.train import trainer

    return trainer.work(*arguments, **more)


def local(config: Train) -> int:
    """Start the ranks, here or by Ray; the exit status."""
    folder: Path | None = None
    try:
        if config.cluster.kind == "torchrun":
            raise ValueError("cluster=torchrun, and no ranks were started; run torchrun ... -m ringattn.launch.train")
        if config.cluster.kind == "ray" and not config.dry_run:
            from ringattn.launch.train import ray

            summary, folder = ray.fit(config, work)
            finish(config, folder, {"Ray": folder}, summary)
            return 0
        config = resolved(config)
        folder = new_folder(config)
        data.of(config)  # which is an error where it is missing or too short
        if config.dry_run:
            return foresee(config)
        announce(config, folder)
        train_and_compare(config, folder)
    except (processes.RankError, ModuleNotFoundError, *processes.BAD) as error:
        status = processes.status(error)
        echo(f"ringattn train: {processes.sentence(error) or error}")
        if status == processes.FAILED and folder is not None and (folder / "checkpoints").exists():
            echo(again(config, folder))
        return status
    return 0


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


def train_and_compare(config: Train, folder: Path) -> None:
    """Train, and then, for the picture, the same with the same seed on one rank."""

    def trained(config: Train, folder: Path) -> dict[str, Any]:
        given = (config, str(folder), time.time())
        return torchrun.local(work, config.nproc or 1, config.device, *given, patience=config.cluster.timeout)[0]

    ranks = config.nproc or 1
    summary, runs = trained(config, folder), {plural(ranks): folder}
    if config.reference and ranks > 1 and not summary["stopped"] and config.resume is None:
        echo("the same on one rank:")
        if trained(on_one_rank(config), folder / "one-rank")["stopped"]:
            echo("the comparison was stopped", sys.stdout)
        else:
            runs["1 rank"] = folder / "one-rank"
    finish(config, folder, runs, summary)


def under_torchrun(config: Train) -> int:
    """One rank among those that torchrun started; the first rank that fails tells torchrun why, the others a line."""
    from torch.distributed.elastic.multiprocessing.errors import record

    rank, began = torchrun.rank(), time.time()
    try:
        config = resolved(config, int(os.environ["WORLD_SIZE"]))
        if config.dry_run:
            return foresee(config) if rank == 0 else 0
        processes.join(config.device, config.cluster.timeout)
        with lost.missing_named("before the training"):  # rank 0 chooses
            folder = Path(torchrun.together(lambda: str(new_folder(config)) if rank == 0 else "")[0])
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


def finish(config: Train, folder: Path, runs: dict[str, Path], summary: dict[str, Any]) -> None:
    """The summary of the first of the runs, and the picture of all beside each other, from their logs."""
    step = summary["step"]
    if summary["stopped"]:
        return echo(f"stopped after step {step} of {config.steps}, saved; {again(config, folder)}", sys.stdout)
    if "first_step" not in summary:
        return echo(f"nothing to train: already at step {step} of {config.steps}; give steps=N to go on", sys.stdout)
    rows = {name: metrics.read(path / "metrics.jsonl") for name, path in runs.items()}
    main, *others = ([row for row in each if row["kind"] == "step"] for each in rows.values())
    median = {name: np.median([row[name] or 0.0 for row in main]) for name in ("tokens_per_second", "mfu")}
    held_out = f", {summary['held_out']:.4f} on held-out text" if "held_out" in summary else ""
    lines = [
        f"loss {main[0]['loss']:.4f} -> {main[-1]['loss']:.4f} in {len(main)} steps{held_out}",
        f"{median['tokens_per_second']:,.0f} tokens/s{mfu(median['mfu'])}, "
        f"rank 0 held {max(row['memory_mib'] for row in main):,.0f} MiB at most, "
        f"first step after {summary['first_step']:.1f} s",
    ]
    for other in others:
        gap = max(abs(a["loss"] - b["loss"]) for a, b in zip(main, other, strict=True))
        lines.append(f"on one rank the loss is the same to {gap:.1e} at every step")
    lines.append(f"written to {folder}{picture(folder, rows) if config.picture else ''}")
    echo("\n".join(lines), sys.stdout)


def again(config: Train, folder: Path) -> str:
    """How to go on with a run: the words about model and data must be given again."""
    return f"go on with the same words and folder={config.folder} run={folder.name} resume=auto"


def picture(folder: Path, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Draw picture.svg, each run's loss and measured memory; in words, where it is."""
    try:
        import matplotlib

        from ringattn.launch.commands.plot import STYLE, write
    except ImportError:
        return "; no picture: matplotlib cannot be imported (pip install 'ringattn[plot]')"
    with matplotlib.rc_context(STYLE), writing(folder / "picture.svg"):
        write(figure_of(runs), folder / "picture.svg")
    return f", picture {folder / 'picture.svg'}"


def figure_of(runs: dict[str, list[dict[str, Any]]]) -> Any:
    """The picture's panels: loss over steps, and where it was measured memory over lengths."""
    from ringattn.launch.commands.plot import RANKS, panels

    count = 1 + any(row["kind"] == "memory" for rows in runs.values() for row in rows)
    figure, (axes,) = panels(1, count, 4.5 * count, 3.4, wspace=0.25)
    for i, (name, rows) in enumerate(runs.items()):
        style = {"linewidth": 4, "alpha": 0.4} if i else {"zorder": 3}
        for panel, kind, x, y, more in (
            (axes[0], "step", "step", "loss", style),
            (axes[-1], "memory", "seq_len", "memory_mib", {"marker": "o"}),
        ):
            points = [(row[x], row[y]) for row in rows if row["kind"] == kind]
            if points:
                panel.plot(*zip(*points, strict=True), color=RANKS[i % len(RANKS)], label=name, **more)
    axes[0].set(xlabel="step", ylabel="loss (nats a token)", title="loss")
    axes[0].locator_params("x", integer=True)
    axes[0].legend(loc="upper right")
    for right in axes[1:]:
        right.set(title="memory that one pass adds", xlabel="sequence length", ylim=(0, None))
        right.set_ylabel("MiB a rank, beside what it held before")
        if len(right.lines) > 1:
            right.legend()
    return figure
