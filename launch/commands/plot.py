"""Draw the figures of a file: `ringattn plot FILE.jsonl`.

Benchmark lines become bars: a panel a direction and figure, a group a case, a colour an implementation. Of lines that
measured the same thing the last one counts. The metrics.jsonl of a training run becomes a line over its steps.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ringattn.launch.rows import Row, read
from ringattn.launch.words import option, writable

# What lines are made of, by the names that suites give it: the first that is found counts.
SERIES = ("impl", "who", "name", "way", "kernel", "strategy")
PANELS = ("mode", "pass")
METRICS = ("tflop", "tb_per_s", "gb_per_s", "tokens_per_s", "peak", "ms", "us", "seconds", "bytes", "mb", "ratio")
STAMP = ("commit", "device", "torch", "triton", "jax", "python", "cuda", "date", "time", "suite")
HOW = ("repeats", "warmup", "floor", "alone", "steps", "note")  # it was measured, which makes it no other case
WORDS = {
    "tflops": "TFLOP/s",
    "tokens_per_second": "tokens/s",
    "tokens_per_us": "tokens a microsecond",
    "peak": "peak memory over what it must hold",
    "peak_mib": "peak memory, MiB",
    "peak_gib": "peak memory, GiB",
    "memory_mib": "memory of a rank, MiB",
    "ms": "milliseconds",
    "floor_ms": "floor, milliseconds",
    "MB": "MB sent",
    "ratio": "of the floor",
    "loss": "loss, nats a token",
    "norm": "norm of the gradient",
    "lr": "learning rate",
    "mfu": "MFU",
}
KINDS = {"step": "trained", "eval": "held out", "save": "saved"}  # rows of a training run
RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#77aadd")
INK = "#333333"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    **dict.fromkeys(("axes.edgecolor", "text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "ringattn", "savefig.facecolor": "white", "axes.facecolor": "none", "legend.frameon": False,
}  # fmt: skip
# What a picture's style sheet changes for readers whose screen is dark; a white line is a gap in the background.
DARK = {
    INK: "#d5d7da", "#d9d9d9": "#4a4f57", "#f4f4f4": "#2a2e35", "#a9c1dc": "#3a5a80", "#c3c8ce": "#565c66",
    "stroke: #ffffff": "#1e2129",
}  # fmt: skip
MARGIN = 0.35  # inches above and below the panels, for titles and ticks


@dataclass(frozen=True)
class Options:
    source: str = option("", "a file of benchmark lines, or the metrics.jsonl of a training run")
    out: str | None = option(None, "where to (FILE.svg)")
    metric: str | None = option(None, "which figure of the lines to draw (default: the first known kind)")


def run(options: Options) -> int:
    """Draw the lines and print the name of the file."""
    matplotlib.use("Agg")
    rows = read(Path(options.source))
    path = writable(Path(options.out or Path(options.source).with_suffix(".svg")))
    with matplotlib.rc_context(STYLE):
        save((curve if all("kind" in r and "step" in r for r in rows) else bars)(rows, options.metric), path)
    return 0


def panels(rows: int, columns: int, width: float, height: float, **grid_options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid_options or None)


def save(figure: Figure, path: Path) -> None:
    """Write a picture and print its name."""
    write(figure, path)
    print(path)


def write(figure: Figure, path: Path) -> None:
    """Write a picture: an SVG is transparent and follows the reader's colour scheme."""
    svg = path.suffix == ".svg"
    metadata = {"Date": None} if svg else None  # the same picture is the same file
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08, metadata=metadata, dpi=150, transparent=svg)
    if svg:
        path.write_text(themed(path.read_text()))


def themed(svg: str) -> str:
    """A transparent picture whose ink and paper follow the reader's colour scheme."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for name, dark in DARK.items()
        for kind, light in ([name.split(": ")] if ": " in name else [("fill", name), ("stroke", name)])
    ]
    sheet = "<style>@media (prefers-color-scheme: dark) { " + " ".join(rules) + " }</style>\n <defs>"
    return svg.replace("<defs>", sheet, 1)


def bars(rows: list[Row], metric: str | None = None) -> Figure:
    """Grouped bars of the rows' figures; rows that have none are left out."""
    metrics = figures_of(rows, metric)
    rows = [r for r in rows if any(number(r.get(m)) for m in metrics)]
    series, panel = first_of(SERIES, rows), first_of(PANELS, rows)
    named, usual = case_names(rows, {series, panel, *metrics})
    drawn = [
        (", ".join(filter(None, [value, WORDS.get(m, m)])), m, [(r, c) for r, c in named if r.get(panel) == value])
        for m in metrics
        for value in distinct(r.get(panel) for r in rows)
    ]
    drawn = [(title, m, some) for title, m, some in drawn if any(number(r.get(m)) for r, _ in some)]
    names = distinct(str(r.get(series, "")) for r in rows)
    cases = distinct(case for _, case in named)
    places = [(c, n) for c in cases for n in names if any(c == d and n == str(r.get(series, "")) for r, d in named)]
    height = 0.8 + 0.2 * len(places) + 0.14 * len(cases)
    figure, axes = panels(1, len(drawn), 2 + 4 * len(drawn), height, wspace=0.12)
    figure.subplots_adjust(bottom=MARGIN / height, top=1 - MARGIN / height)
    if usual:
        common = " ".join(f"{k}={v}" for k, v in usual.items())
        figure.suptitle(f"unless noted: {common}", y=1, va="bottom", fontsize="medium")
    for ax, (title, m, some) in zip(axes[0], drawn, strict=True):
        groups(ax, places, {(c, str(r.get(series, ""))): float(r[m]) for r, c in some if number(r.get(m))}, names)
        ax.set_title(title)
        if ax is not axes[0][0]:
            ax.set_yticklabels([])
    if len(names) > 1:
        handles = [Patch(color=RANKS[i % len(RANKS)], label=n or "default") for i, n in enumerate(names)]
        figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(len(names), 6))
    return figure


def curve(rows: list[Row], metric: str | None = None) -> Figure:
    """One figure of a training run over its steps, the loss by default."""
    (name,) = figures_of(rows, metric or "loss")
    figure, ((ax,),) = panels(1, 1, 7, 3.5)
    rows = [r for r in rows if number(r["step"]) and r["step"] >= 0 and number(r.get(name))]
    if not rows:
        raise ValueError(f"no line of a step has a number called {name!r}")
    for color, kind in zip(RANKS, distinct(str(r["kind"]) for r in rows), strict=False):
        points = sorted((r["step"], r[name]) for r in rows if str(r["kind"]) == kind)
        marker = "o" if len(points) == 1 else None
        ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=KINDS.get(kind, kind))
    ax.set(xlabel="step", ylabel=WORDS.get(name, name))
    ax.locator_params("x", integer=True)
    if len(ax.lines) > 1:
        ax.legend()
    return figure


Place = tuple[str, str]  # a case, and the name of an implementation


def groups(ax: Axes, places: list[Place], values: dict[Place, float], names: list[str]) -> None:
    """Horizontal bars, a group a case from top to bottom, each with its number; the same places in every panel."""
    y, at = 0.0, dict[str, list[float]]()
    for i, (case, name) in enumerate(places):
        y += 0.7 if i and places[i - 1][0] != case else 0
        at.setdefault(case, []).append(y)
        if (case, name) in values:
            value = values[case, name]
            ax.barh(y, value, height=0.86, color=RANKS[names.index(name) % len(RANKS)])
            text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            ax.annotate(text, (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
        y += 1
    ax.set_yticks([sum(ys) / len(ys) for ys in at.values()], list(at))
    ax.set(ylim=(y - 0.2, -0.8), xlim=(0, 1.12 * max(values.values()) or 1))
    ax.tick_params(left=False)


def figures_of(rows: list[Row], metric: str | None) -> list[str]:
    """The keys to draw: the one that was chosen, or all of the first known kind."""
    keys = distinct(k for r in rows for k, v in r.items() if number(v))
    if not keys:
        raise ValueError("there is nothing to draw: the lines hold no numbers")
    if metric is not None:
        if metric not in keys:
            raise ValueError(f"no line has a number called {metric!r}; they have {', '.join(keys)}")
        return [metric]
    figures = next((some for kind in METRICS if (some := [k for k in keys if is_kind(kind, k)])), None)
    if figures is None:
        raise ValueError(f"no known figure in the lines; give metric= one of {', '.join(keys)}")
    return figures


def case_names(rows: list[Row], taken: set[str]) -> tuple[list[tuple[Row, str]], dict[str, str]]:
    """Each row with the name of its case, and what nine in ten rows have in common, which no name repeats.

    A name is the row's own, or what differs between the rows apart from what was measured. What is 0, false or nothing
    is left out: older rows lack keys that newer ones have, and are no other case for that.
    """
    if all("case" in r for r in rows):
        return [(r, str(r["case"])) for r in rows], {}
    free = [k for k in distinct(k for r in rows for k in r) if k not in {*taken, *STAMP, *HOW}]
    free = [k for k in free if not any(is_kind(kind, k) for kind in METRICS)]
    free = [k for k in free if not any(isinstance(r.get(k), float) for r in rows)]
    differ = [k for k in free if len({str(r[k] or "") for r in rows if k in r}) > 1]
    most = {k: Counter(str(r[k]) for r in rows if r.get(k)).most_common(1) for k in differ}
    usual = {k: value for k, ((value, count),) in most.items() if count >= 0.9 * len(rows)}
    return [(r, " ".join(f"{k}={r[k]}" for k in differ if r.get(k) and str(r[k]) != usual.get(k))) for r in rows], usual


def is_kind(kind: str, key: str) -> bool:
    """Whether a key is a figure of this kind: it holds the word (but `params` does not hold `ms`)."""
    return kind in key.lower().split("_") or (len(kind) > 2 and kind in key.lower())


def first_of(names: Iterable[str], rows: list[Row]) -> str:
    return next((n for n in names if any(n in r for r in rows)), "")


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def number(value: Any) -> bool:
    """Whether a value can be drawn: a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
