"""The pictures of docs/, each computed by the code that it explains.

Layouts come from ringattn.layouts, tiles from kernels/attention/tiled.py, steps from ringattn.steps: a picture cannot
show what the code does not do. Figures come from benchmarks/. `make pictures`, or `python docs/pictures/draw.py
[FOLDER]`, draws them all.
"""

import runpy
import sys
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ringattn.kernels.attention import tiled
from ringattn.kernels.intervals import Intervals
from ringattn.launch.commands.plot import INK, RANKS, STYLE, bars, panels, read, save
from ringattn.layouts.layout import LAYOUTS, Layout
from ringattn.masks.bands import bounds_at, families, joined
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.steps.rank import steps_of
from ringattn.steps.reads import seen
from ringattn.steps.table import build

FAINT, PAPER, TILE, OTHER = "#d9d9d9", "#f4f4f4", "#a9c1dc", "#c3c8ce"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DIGIT = {"#ccbb44": "#222222", "#66ccee": "#222222"}  # on pale colours; white on the others, in both schemes


def masks() -> Figure:
    """Five masks of 12 queries and keys; each row is one interval."""
    docs, padded = Docs.from_lengths([5, 3, 4]), Docs.from_lengths([5, 4], pad_to=12)
    kinds = {
        "causal": (AttentionSpec(), None),
        "window of 4": (AttentionSpec(window=4), None),
        "3 documents": (AttentionSpec(), docs),
        "3 documents, full": (AttentionSpec(causal=False), docs),
        "2 documents, padded": (AttentionSpec(), padded),
    }
    return of_masks(kinds, *panels(1, len(kinds), 10, 2.3))


def mask_kinds() -> Figure:
    """Eight masks of 12 queries and keys; each colour is a family, one interval a query."""
    answers = Docs.tree([4, 2, 3, 3], [-1, 0, 0, 2])
    slices = [
        ((0, 4), (0, 4), "causal"),
        ((4, 8), (0, 4), "both"),
        ((4, 8), (4, 8), "causal"),
        ((8, 12), (2, 8), "inverse"),
    ]
    kinds = {
        "window of 3 and 2": (AttentionSpec(causal=False, window=(3, 2)), None),
        "chunks of 5": (AttentionSpec(chunk=5), None),
        "first 2, window of 4": (AttentionSpec(window=4, first=2), None),
        "prefix of 4 and 2": (AttentionSpec(), Docs.from_lengths([7, 5], prefix=[4, 2])),
        "spans in a window": (AttentionSpec(window=4), Docs.from_lengths([12], spans=[(2, 5), (7, 11)])),
        "3 answers, one continued": (AttentionSpec(), answers),
        "first 1, window 4, in a tree": (AttentionSpec(window=4, first=1), answers),
        "slices": (AttentionSpec(), Mask.from_slices(*zip(*slices, strict=True), total=12)),
    }
    return of_masks(kinds, *panels(2, len(kinds) // 2, 10, 5.2, hspace=0.35))


def of_masks(kinds: dict[str, tuple[AttentionSpec, Docs | Mask | None]], figure: Figure, axes: np.ndarray) -> Figure:
    """Masks of 12 queries and keys, a panel each."""
    T = 12
    for ax, (title, (spec, docs)) in zip(axes.flat, kinds.items(), strict=True):
        grid(ax, T, T, title)
        for family, color in zip(families(spec, T, docs=docs), RANKS, strict=False):
            for t, (b, e) in enumerate(zip(*(side[0] for side in bounds_at(family, np.arange(T))), strict=True)):
                ax.add_patch(Rectangle((b, t + 0.12), max(0, e - b), 0.76, color=color, lw=0))
    axes[0][0].set_ylabel("queries")
    axes[-1][0].set_xlabel("keys")
    return figure


def tiling() -> Figure:
    """The tiles of 13 queries and 14 keys in blocks of 5 x 4, in the order in which they are visited."""
    T, S, block_q, block_k = 13, 14, 5, 4
    docs = Docs.from_lengths([6, 7], pad_to=T)
    kinds = {
        "all keys": bounds_at(*families(AttentionSpec(causal=False), T, S), np.arange(T)),
        "causal": bounds_at(*families(AttentionSpec(), T, S), np.arange(T)),
        "causal, window of 4": bounds_at(*families(AttentionSpec(window=4), T, S), np.arange(T)),
        "two documents": bounds_at(*families(AttentionSpec(), T, S, docs, Docs.from_lengths([6, 8])), np.arange(T)),
    }
    figure, axes = panels(1, len(kinds), 10, 2.6)
    for ax, (title, (begin, end)) in zip(axes[0], kinds.items(), strict=True):
        grid(ax, T, S, title)
        where, count = Intervals(torch.from_numpy(begin), torch.from_numpy(end)), 0
        for t, (b, e) in enumerate(zip(begin[0], end[0], strict=True)):
            ax.add_patch(Rectangle((b, t), e - b, 1, color=TILE, lw=0))
        for queries in tiled.blocks(T, block_q):
            seen = tiled.seen_blocks(tiled.rows_of(where, queries), S, block_k)
            for keys in tiled.blocks(S, block_k):
                width, height = keys.stop - keys.start, queries.stop - queries.start
                ax.add_patch(Rectangle((keys.start, queries.start), width, height, fill=False, ec=INK, lw=1))
                if keys in seen:
                    count += 1
                    ax.text(keys.start + width / 2, queries.start + height / 2, str(count), ha="center", va="center")
    axes[0][0].set_ylabel("queries, 5 at a time")
    axes[0][0].set_xlabel("keys, 4 at a time")
    return figure


def layouts() -> Figure:
    """Who holds what, and when each of 4 ranks works: a step lasts as long as its busiest rank."""
    ring, T = 4, 16
    figure, axes = panels(2, len(LAYOUTS), 10, 5.2, height_ratios=[3, 1.3], hspace=0.2)
    for name, mask, time in zip(LAYOUTS, *axes, strict=True):
        small = Layout(name, T, ring)
        owner = np.empty(T, int)
        for rank in range(ring):
            owner[small.positions(rank)] = rank
        grid(mask, T, T, name)
        mask.set_ylim(T, -1.8)
        begin, end = bounds_at(*families(AttentionSpec(), T), np.arange(T))
        for t, color in enumerate(RANKS[i] for i in owner):
            mask.add_patch(Rectangle((t, -1.6), 1, 1.1, fc=color, ec="white", lw=1))
            mask.text(
                t + 0.5, -1.02, str(owner[t]), ha="center", va="center", color=DIGIT.get(color, "white"), fontsize=8
            )
            mask.add_patch(Rectangle((begin[0, t], t), end[0, t] - begin[0, t], 1, fc=color, ec="white", lw=0.6))
        timeline(time, Layout(name, 4096, ring), AttentionSpec())
    axes[0][0].set_ylabel("queries")
    axes[0][0].set_xlabel("keys")
    axes[1][0].set_ylabel("rank")
    ranks = [Patch(color=RANKS[r], label=f"rank {r}") for r in range(ring)]
    title = "who holds the token (top strip) and its query (rows)"
    figure.legend(handles=[*ranks, Patch(color=FAINT, label="waits")], title=title, loc="lower center", ncols=5)
    figure.subplots_adjust(bottom=0.22)
    return figure


def timeline(ax: Axes, layout: Layout, spec: AttentionSpec) -> None:
    """One bar a rank and step, pale where the rank waits; the clock is a rank's time if all had the same work."""
    counts = seen_pairs(layout, layout, spec)
    mean, start, ring = counts.sum() / layout.ring, 0.0, layout.ring
    for d in range(ring):
        work = np.array([counts[r, (r - d) % ring] for r in range(ring)]) / mean
        for rank in range(ring):
            for width, color in ((work.max(), FAINT), (work[rank], RANKS[rank])):
                ax.add_patch(Rectangle((start, rank + 0.1), width, 0.8, fc=color, ec="white", lw=1))
        start += work.max()
    ax.axvline(1, color=INK, lw=0.8, ls=":")
    ax.set(xlim=(0, 1.8), ylim=(ring, 0), yticks=np.arange(ring) + 0.5, xticks=[0, 1])
    ax.set_yticklabels([str(r) for r in range(ring)])
    ax.tick_params(left=False)
    ax.set_xlabel(f"4 steps take {start:.2f} x the ideal time")


def ring() -> Figure:
    """Which keys each of 4 ranks meets at each step, and which of the pairs it sees; a colour is a block of keys."""
    size, T, dx, dy = 4, 40, 1.2, 1.42
    kinds = (
        ("contiguous, causal", "contiguous", AttentionSpec()),
        ("zigzag, causal", "zigzag", AttentionSpec()),
        ("contiguous, window of 8", "contiguous", AttentionSpec(window=8)),
    )
    figure, axes = panels(1, len(kinds), 10, 3.9, wspace=0.12)
    for ax, (title, name, spec) in zip(axes[0], kinds, strict=True):
        layout = Layout(name, T, size)
        begin, end = bounds_at(*families(spec, T), np.arange(T))
        shards = [layout.shard(r) for r in range(size)]
        table = build(seen(joined([one for (one,) in families(spec, T)]), shards, shards), size)
        blank(ax, size * dx, size * dy)
        ax.set_title(title, pad=30)
        for i, d in enumerate(table.distances):
            if ax is axes[0][0]:
                ax.text(-0.15, d * dy + 0.5, f"step {d}", ha="right", va="center")
            for rank in range(size):
                phase, at = steps_of(table, shards, rank)[i].phase, (rank * dx, d * dy)
                color = RANKS[phase.block] if phase.held else "#888888"
                text = f"keys {phase.block}" if phase.held else "not sent"
                meet(ax, at, (begin[0], end[0]), layout.positions(rank), layout.positions(phase.block), color)
                ax.text(at[0] + 0.5, at[1] - 0.04, text, ha="center", va="bottom", fontsize=7, color=color)
        for d in set(range(size)) - set(table.distances):
            ax.text(size * dx / 2 - 0.1, d * dy + 0.5, "no step: nobody sees anything", ha="center", va="center")
        for rank in range(size):
            ax.text(rank * dx + 0.5, -0.38, f"rank {rank}", ha="center", va="bottom", fontsize=8)
    return figure


def meet(
    ax: Axes,
    at: tuple[float, float],
    mask: tuple[np.ndarray, np.ndarray],
    queries: np.ndarray,
    keys: np.ndarray,
    color: str,
) -> None:
    """A unit square: a shard's queries down, the visiting keys across, the pairs that are seen in colour."""
    (x, y), (begin, end), n = at, mask, len(keys)
    ax.add_patch(Rectangle((x, y), 1, 1, fc=PAPER, ec=FAINT, lw=0.8))
    local = [(int(np.searchsorted(keys, begin[q])), int(np.searchsorted(keys, end[q]))) for q in queries]
    t = 0
    for (low, high), rows in groupby(local):
        height = len(list(rows))
        if high > low:
            ax.add_patch(Rectangle((x + low / n, y + t / n), (high - low) / n, height / n, fc=color, lw=0))
        t += height


def speed() -> Figure:
    """TFLOP/s a GPU beside other libraries, ours in the one colour; narrow enough to be read on a phone."""
    rows = [r for r in read(BENCHMARKS / "speed-h200.jsonl") if r["mode"] == "forward+backward"]
    figure, ((ax,),) = panels(1, 1, 4.8, 4.6)
    y = 0.0
    for case, group in groupby(rows, lambda r: r["case"]):
        values = {r["who"]: r["tflops"] for r in group}
        top, alone = y, values.pop("one GPU alone")
        ax.text(0, y, case, va="center", weight="bold")
        for name, value in values.items():
            y += 1
            ours = name == "ringattn"
            ax.barh(y, value, height=0.86, color=RANKS[0] if ours else OTHER)
            ax.text(12, y, name, va="center", fontsize=8, color="white" if ours else INK)
            ax.text(value - 12, y, str(value), va="center", ha="right", color="white" if ours else INK)
        ax.plot([alone, alone], [top + 0.5, y + 0.5], color=INK, lw=1.5)
        if not top:
            ax.text(alone, top, f"one GPU alone: {alone}", va="center", ha="center")
        y += 1.4
    ax.set(ylim=(y - 0.8, -0.6), xlim=(0, 660), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("TFLOP/s a GPU, forward and backward, causal, H200")
    return figure


def prefill() -> Figure:
    """The memory of a rank for a prompt: as a ring call, and in chunks."""
    return bars(read(BENCHMARKS / "prefill-cpu.jsonl"), "peak_mib")


def blank(ax: Axes, width: float, height: float) -> None:
    """An empty canvas whose y goes down, as rows of a matrix do."""
    ax.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def grid(ax: Axes, rows: int, columns: int, title: str) -> None:
    blank(ax, columns, rows)
    ax.set_aspect("equal")
    ax.set_title(title)
    ax.add_patch(Rectangle((0, 0), columns, rows, fc=PAPER, ec=FAINT, lw=0.8))


def main(folder: Path = Path(__file__).parent) -> None:
    """Draw every picture into the folder."""
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        for draw in (masks, mask_kinds, tiling, layouts, ring, speed, prefill):
            save(draw(), folder / f"{draw.__name__}.svg")
        for draw in (layouts, speed):  # in the README, of which PyPI shows no SVG
            save(draw(), folder / f"{draw.__name__}.png")
    sys.argv[1:] = [str(folder)]
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "who_holds_what.py"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
