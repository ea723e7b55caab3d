"""Draw a figure of a file: `ringattn plot FILE.jsonl`.

Benchmark lines become bars: a panel a direction, a group a case, a colour an implementation. Of lines that measured the
same thing the last one counts. The metrics.jsonl of a training run becomes a line over its steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ringattn.launch.rows import Row, read
from ringattn.launch.words import option, writable

# What lines are made of, by the names that suites give it: the first that is found counts.
SERIES = ("impl", "who", "name", "way", "kernel", "strategy")
PANELS = ("mode", "pass")
FIGURES = ("tflops", "tokens_per_us", "tokens_per_second", "ms", "us", "peak", "peak_mib", "peak_gib", "MB", "loss")
# Not in the name of a case: on what, and how it was measured.
ABOUT = ("commit", "device", "torch", "triton", "jax", "suite", "repeats", "warmup", "rounds", "floor", "note")
WORDS = {"tflops": "TFLOP/s", "ms": "milliseconds", "loss": "loss, nats a token", "peak_mib": "peak memory, MiB"}
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


@dataclass(frozen=True)
class Options:
    source: str = option("", "a file of benchmark lines, or the metrics.jsonl of a training run")
    out: str | None = option(None, "where to (FILE.svg)")
    metric: str | None = option(None, f"which figure of the lines to draw (default: the first of {', '.join(FIGURES)})")


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
    """Write a picture: an SVG is transparent, and its ink and paper follow the reader's colour scheme."""
    svg = path.suffix == ".svg"
    metadata = {"Date": None} if svg else None  # the same picture is the same file
    figure.savefig(path, bbox_inches="tight", pad_inches=0.08, metadata=metadata, dpi=150, transparent=svg)
    if svg:
        rules = [
            f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
            for name, dark in DARK.items()
            for kind, light in ([name.split(": ")] if ": " in name else [("fill", name), ("stroke", name)])
        ]
        sheet = "<style>@media (prefers-color-scheme: dark) { " + " ".join(rules) + " }</style>\n <defs>"
        path.write_text(path.read_text().replace("<defs>", sheet, 1))


def bars(rows: list[Row], metric: str | None = None) -> Figure:
    """Grouped bars of one figure of the rows, the same places in every panel; rows that lack it are left out."""
    metric = figure_of(rows, metric)
    rows = [r for r in rows if number(r.get(metric))]
    series, panel = (next((n for n in names if any(n in r for r in rows)), "") for names in (SERIES, PANELS))
    cases = case_names(rows, (series, panel, metric))
    values = {(r.get(panel), case, str(r.get(series, ""))): r[metric] for r, case in zip(rows, cases, strict=True)}
    names, titles = distinct(name for *_, name in values), distinct(title for title, *_ in values)
    places, y = dict[tuple[str, str], float](), 0.0  # of each bar, from top to bottom
    for case in distinct(cases):
        for name in (n for n in names if any((title, case, n) in values for title in titles)):
            places[case, name], y = y, y + 1
        y += 0.7
    figure, axes = panels(1, len(titles), 2 + 4 * len(titles), 0.8 + 0.2 * y, wspace=0.12)
    for ax, title in zip(axes[0], titles, strict=True):
        for (of, case, name), value in values.items():
            if of == title:
                at = places[case, name]
                ax.barh(at, value, height=0.86, color=RANKS[names.index(name) % len(RANKS)])
                text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
                ax.annotate(text, (value, at), (3, 0), textcoords="offset points", va="center", fontsize=7)
        ax.set_yticks([*places.values()], [" ".join(place) for place in places] if ax is axes[0][0] else [])
        ax.set(ylim=(y - 0.9, -0.8), title=", ".join(filter(None, [title, WORDS.get(metric, metric)])))
        ax.tick_params(left=False)
        ax.margins(x=0.12)
    return figure


def curve(rows: list[Row], metric: str | None = None) -> Figure:
    """One figure of a training run over its steps, the loss by default."""
    name = figure_of(rows, metric or "loss")
    figure, ((ax,),) = panels(1, 1, 7, 3.5)
    rows = [r for r in rows if number(r["step"]) and r["step"] >= 0 and number(r.get(name))]
    for color, kind in zip(RANKS, distinct(str(r["kind"]) for r in rows), strict=False):
        points = sorted((r["step"], r[name]) for r in rows if str(r["kind"]) == kind)
        marker = "o" if len(points) == 1 else None
        ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=KINDS.get(kind, kind))
    ax.set(xlabel="step", ylabel=WORDS.get(name, name))
    ax.locator_params("x", integer=True)
    if len(ax.lines) > 1:
        ax.legend()
    return figure


def figure_of(rows: list[Row], metric: str | None) -> str:
    """The key to draw: the one that was chosen, or the first known one."""
    keys = distinct(k for r in rows for k, v in r.items() if number(v))
    metric = metric or next((k for k in FIGURES if k in keys), "figure")
    if metric not in keys:
        raise ValueError(f"no line has a number called {metric!r}; give metric= one of {', '.join(keys)}")
    return metric


def case_names(rows: list[Row], taken: Iterable[str]) -> list[str]:
    """Each row's own name of its case, or else the words and whole numbers in which rows differ."""
    if all("case" in r for r in rows):
        return [str(r["case"]) for r in rows]
    keys = [k for k in distinct(k for r in rows for k in r) if k not in (*taken, *ABOUT, *FIGURES)]
    keys = [k for k in keys if not any(isinstance(r.get(k), float | list | dict) for r in rows)]
    keys = [k for k in keys if len({r.get(k) for r in rows}) > 1]
    return [" ".join(f"{k}={r[k]}" for k in keys if r.get(k)) for r in rows]


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def number(value: Any) -> bool:
    """Whether a value can be drawn: a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
