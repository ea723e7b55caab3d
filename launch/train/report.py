"""What a run says about itself: what it did, and the picture of it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.conf.schema import Train
from ringattn.launch.bench import table
from ringattn.launch.train import metrics
from ringattn.launch.train.metrics import columns, echo, writing


def finish(
    config: Train, folder: Path, runs: dict[str, Path], summary: dict[str, Any], swept: str = ""
) -> dict[str, Any]:
    """The summary, and the picture of all runs beside each other; returns the figures for the table of a sweep."""
    step = summary["step"]
    rows = {
        name: [row for row in metrics.read(path / "metrics.jsonl") if row["step"] <= step]
        for name, path in runs.items()
    }  # those beyond are of an attempt that went further, and was given up
    main, *others = (columns_of(r) for r in rows.values())
    if summary["stopped"]:
        echo(f"stopped after step {step} of {config.steps}, saved; {again(config, folder, swept)}", sys.stdout)
        return {"ended": "stopped", "folder": folder}
    if not main["loss"]:
        echo(f"nothing to train: already at step {step} of {config.steps}; give steps=N to go on", sys.stdout)
        return {"ended": "nothing to train", "folder": folder}
    loss = f"loss {main['loss'][0]:.4f} -> {main['loss'][-1]:.4f} in {len(main['loss'])} steps"
    if "held_out" in summary:
        loss += f", {summary['held_out']:.4f} on held-out text"
    speed = [
        f"{np.median(main['tokens_per_second']):,.0f} tokens/s",
        *metrics.mfu(float(np.median(main["mfu"])), config.device),
    ]
    speed.append(f"rank 0 held {max(main['memory_mib']):,.0f} MiB at most")
    trained = "first_step" in summary
    began = f", first step after {summary['first_step']:.1f} s" if trained else "; nothing was left to train"
    lines = [f"{loss} (how often each token occurs is worth {summary['entropy']:.4f})", ", ".join(speed) + began]
    for other in others:
        gap = max(abs(a - b) for a, b in zip(main["loss"], other["loss"], strict=True))
        lines.append(f"on one rank the loss is the same to {gap:.1e} at every step")
    where = f"written to {folder}"
    if config.picture and (trained or not (folder / "picture.svg").exists()):
        if drawn := picture(folder, rows, summary["entropy"]):
            where += f", picture {drawn}"
        else:
            lines.append("no picture: matplotlib cannot be imported (pip install 'ringattn[plot]')")
    lines.append(where)
    if not checkpoints_of(folder):
        lines.append("no weights were kept; save_every=N saves them every N steps and at the end")
    echo("\n".join(lines), sys.stdout)
    return {
        "loss": main["loss"][-1], "held_out": summary.get("held_out"), "folder": folder,
        "tokens/s": float(np.median(main["tokens_per_second"])), "MiB": max(main["memory_mib"]),
    }  # fmt: skip


def of_sweep(runs: list[dict[str, Any]]) -> str:
    """The runs of a sweep as a table, the best loss first; those that did not end last."""
    names = ("swept", "loss", "held_out", "tokens/s", "MiB", "folder")
    order = sorted(runs, key=lambda run: run.get("held_out") or run.get("loss") or float("inf"))
    spelled = {n: "{:,.4f}" if n in ("loss", "held_out") else "{:,.0f}" for n in names[1:-1]}
    rows = [
        {"loss": run.get("ended"), **run, **{n: s.format(run[n]) for n, s in spelled.items() if run.get(n) is not None}}
        for run in order
    ]
    return table(rows, names)


def again(config: Train, folder: Path, swept: str = "") -> str:
    """How to go on with a run: the words about model and data must be given again.

    A sweep whose words name its runs goes on as a whole.
    """
    if swept and config.run:
        return "go on with the same words and resume=auto"
    single = f", without --multirun, with {swept}" if swept else ""
    where = f"folder={config.folder} " * (config.folder != Train().folder)
    return f"go on with the same words{single} and {where}run={folder.name} resume=auto"


def checkpoints_of(folder: Path) -> list[Path]:
    """A run's complete checkpoints."""
    if not (folder / "checkpoints").is_dir():
        return []
    from ringattn.launch.train.checkpoint import complete

    return complete(folder / "checkpoints")


def plural(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    names = ("loss", "tokens_per_second", "mfu", "memory_mib")
    steps = [r for r in rows if r["kind"] == "step" and r.keys() >= {*names}]
    return dict(zip(names, columns(steps, *names), strict=True))


def picture(folder: Path, runs: dict[str, list[dict[str, Any]]], entropy: float) -> Path | None:
    """picture.svg: each run's loss and measured memory. None without matplotlib."""
    try:
        import matplotlib

        from ringattn.launch.commands.plot import STYLE, write
    except ImportError:
        return None
    with matplotlib.rc_context(STYLE):
        figure = figure_of(runs, entropy)
        with writing(folder / "picture.svg"):
            write(figure, folder / "picture.svg")
    return folder / "picture.svg"


def figure_of(runs: dict[str, list[dict[str, Any]]], entropy: float) -> Any:
    """The picture's panels: loss over steps, and where it was measured memory over lengths."""
    from ringattn.launch.commands.plot import INK, RANKS, panels

    probes = {name: [r for r in rows if r["kind"] == "memory"] for name, rows in runs.items()}
    count = 1 + any(probes.values())
    figure, (axes,) = panels(1, count, 4.5 * count, 3.4, wspace=0.25)
    left = axes[0]
    for i, (name, rows) in enumerate(runs.items()):
        steps = [r for r in rows if r["kind"] == "step"]
        style = {"linewidth": 4, "alpha": 0.4} if i else {"zorder": 3}
        left.plot(*columns(steps, "step", "loss"), color=RANKS[i % len(RANKS)], label=name, **style)
    left.axhline(entropy, color=INK, lw=0.8, linestyle=":", label="by how often each token occurs")
    left.set(xlabel="step", ylabel="loss (nats a token)", title="loss")
    left.locator_params("x", integer=True)
    left.legend(loc="upper right")
    for right in axes[1:]:
        for color, (name, memory) in zip(RANKS, probes.items(), strict=False):
            if memory:
                right.plot(*columns(memory, "seq_len", "memory_mib"), color=color, marker="o", label=name)
        right.set(title="memory that one pass adds", xlabel="sequence length", ylim=(0, None))
        right.set_ylabel("MiB a rank, beside what it held before")
        if len(right.lines) > 1:
            right.legend()
    return figure
