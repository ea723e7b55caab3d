"""What a run says about itself at its end: what it did, and the picture of it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.conf.schema import Train
from ringattn.launch.train import metrics
from ringattn.launch.train.metrics import echo, writing

Rows = list[dict[str, Any]]


def finish(config: Train, folder: Path, runs: dict[str, Path], summary: dict[str, Any]) -> None:
    """The summary of the first of the runs, and the picture of all beside each other, from their logs."""
    step = summary["step"]
    if summary["stopped"]:
        return echo(f"stopped after step {step} of {config.steps}, saved; {again(config, folder)}", sys.stdout)
    rows = {name: metrics.read(path / "metrics.jsonl") for name, path in runs.items()}
    main, *others = ([r for r in each if r["kind"] == "step" and r["step"] <= step] for each in rows.values())
    if "first_step" not in summary or not main:
        return echo(f"nothing to train: already at step {step} of {config.steps}; give steps=N to go on", sys.stdout)
    speed = np.median([row["tokens_per_second"] for row in main])
    used = None if main[0]["mfu"] is None else float(np.median([row["mfu"] for row in main]))
    held_out = f", {summary['held_out']:.4f} on held-out text" if "held_out" in summary else ""
    lines = [
        f"loss {main[0]['loss']:.4f} -> {main[-1]['loss']:.4f} in {len(main)} steps{held_out}",
        f"{speed:,.0f} tokens/s{metrics.mfu(used)}, "
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


def picture(folder: Path, runs: dict[str, Rows]) -> str:
    """Draw picture.svg, each run's loss and measured memory; in words, where it is."""
    try:
        import matplotlib

        from ringattn.launch.commands.plot import STYLE, write
    except ImportError:
        return "; no picture: matplotlib cannot be imported (pip install 'ringattn[plot]')"
    with matplotlib.rc_context(STYLE), writing(folder / "picture.svg"):
        write(figure_of(runs), folder / "picture.svg")
    return f", picture {folder / 'picture.svg'}"


def figure_of(runs: dict[str, Rows]) -> Any:
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
