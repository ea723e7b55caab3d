"""The pictures of docs/, each computed by the code that it explains.

Layouts come from ringattn.layouts, tiles from kernels/attention/tiled.py, steps from ringattn.steps: a picture cannot
show what the code does not do. Figures come from benchmarks/. `make pictures`, or `python docs/pictures/draw.py
[FOLDER]`, draws them all.
"""

import json
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
from ringattn.kernels.linear import chunkwise
from ringattn.launch.commands.plot import INK, RANKS, STYLE, bars, panels, read, save
from ringattn.layouts.layout import LAYOUTS, Layout
from ringattn.masks.bands import all_bands, bounds_at, families
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import seen_pairs
from ringattn.plans.plan import Plan
from ringattn.plans.segments import order
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


def merging() -> Figure:
    """Left: what two blocks of keys weigh. Right: the weight of b over the gap of their lse, and the swapped form."""
    figure, ((left, right),) = panels(1, 2, 9.5, 2.9, wspace=0.15)
    s = np.array([0.2, 1.1, -0.6, 0.5, 1.6, 0.9, 2.0, 1.2])
    weights = np.exp(s)
    a, b = weights[:4].sum(), weights[4:].sum()
    for first, total, name, color in ((0, a, "a", RANKS[0]), (4, b, "b", RANKS[1])):
        left.bar(range(first, first + 4), weights[first : first + 4], color=color, width=0.8)
        text = f"lse$_{name}$ = log {total:.1f} = {np.log(total):.2f}\n{total / (a + b):.0%} of the whole"
        left.text(first + 1.5, 9, text, ha="center", va="center", color=color)
    left.set(title="exp(score) of the keys in block a and block b", ylim=(0, 10.5), xticks=[], yticks=[0, 4, 8])
    gap = np.linspace(-6, 6, 200)
    weight = 1 / (1 + np.exp(-gap))
    right.plot(gap, weight, color=RANKS[2], lw=2)
    right.plot(gap, 1 - weight, color=INK, lw=1, ls="--")
    here = np.log(b) - np.log(a)
    right.plot([here], [b / (a + b)], "o", color=RANKS[1], ms=7)
    right.text(here + 0.4, b / (a + b) - 0.05, "the blocks to the left", va="center", color=RANKS[1])
    right.text(-6.1, 0.3, "sigmoid(lse$_b$ - lse$_a$)", color=RANKS[2])
    right.text(-6.1, 0.82, "swapped: wrong")
    right.set(title="the weight of b in the merged output", xlabel="lse$_b$ - lse$_a$", yticks=[0, 0.5, 1])
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
            digit = DIGIT.get(color, "white")
            mask.text(t + 0.5, -1.02, str(owner[t]), ha="center", va="center", color=digit, fontsize=8)
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


def documents() -> Figure:
    """Which tokens of seven packed documents each of 4 ranks holds, its work, and the keys that it receives."""
    size, docs = 4, Docs.from_lengths([26000, 3000, 9000, 1200, 16000, 2336, 8000])
    T, spec = docs.length, AttentionSpec()
    kinds = {
        "zigzag": Layout("zigzag", T, size),
        "zigzag, each document cut": Layout("zigzag", T, size, docs=docs),
        "balanced": Layout("balanced", T, size, docs=docs, spec=spec),
    }
    figure, axes = panels(len(kinds), 1, 10, 4.6, hspace=0.55)
    for ax, (title, layout) in zip(axes[:, 0], kinds.items(), strict=True):
        shards = [layout.shard(rank) for rank in range(size)]
        pairs = seen_pairs(layout, layout, spec, docs).sum(1)
        read = seen(all_bands(spec, T, T, docs), shards, shards).tokens
        received = (read.sum(1) - read.diagonal()) / layout.shard_len
        blank(ax, T, size)
        ax.set_title(title, loc="left")
        for rank, shard in enumerate(shards):
            ax.add_patch(Rectangle((0, rank + 0.1), T, 0.8, fc=PAPER, lw=0))
            for tokens in shard:
                ax.add_patch(Rectangle((tokens.start, rank + 0.1), len(tokens), 0.8, color=RANKS[rank], lw=0))
            ax.text(-0.01 * T, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=8)
            figures = f"work {pairs[rank] / pairs.mean():.2f}, receives {received[rank]:.2f}"
            ax.text(1.01 * T, rank + 0.5, figures, ha="left", va="center", fontsize=8)
        for start in docs.starts[0].tolist():
            ax.plot([start, start], [0, size], color=INK, lw=0.8)
    text = "65,536 tokens; a line begins a document. Work over the mean; keys received, in shards"
    axes[-1][0].set_xlabel(text, labelpad=8)
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
    ax.set(xlim=(0, 1.8), ylim=(ring, 0), yticks=np.arange(ring) + 0.5, yticklabels=range(ring), xticks=[0, 1])
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
        mask = bounds_at(*families(spec, T), np.arange(T))
        shards = [layout.shard(r) for r in range(size)]
        table = build(seen(all_bands(spec, T, T), shards, shards), size)
        blank(ax, size * dx, size * dy)
        ax.set_title(title, pad=30)
        for i, d in enumerate(table.distances):
            if ax is axes[0][0]:
                ax.text(-0.15, d * dy + 0.5, f"step {d}", ha="right", va="center")
            for rank in range(size):
                phase, at = steps_of(table, shards, rank)[i].phase, (rank * dx, d * dy)
                color = RANKS[phase.block] if phase.held else "#888888"
                text = f"keys {phase.block}" if phase.held else "not sent"
                sides = [np.searchsorted(layout.positions(phase.block), x[0, layout.positions(rank)]) for x in mask]
                meet(ax, at, list(zip(*(x.tolist() for x in sides), strict=True)), color)
                ax.text(at[0] + 0.5, at[1] - 0.04, text, ha="center", va="bottom", fontsize=7, color=color)
        for d in set(range(size)) - set(table.distances):
            ax.text(size * dx / 2 - 0.1, d * dy + 0.5, "no step: nobody sees anything", ha="center", va="center")
        for rank in range(size):
            ax.text(rank * dx + 0.5, -0.38, f"rank {rank}", ha="center", va="bottom", fontsize=8)
    return figure


def meet(ax: Axes, at: tuple[float, float], intervals: list[tuple[int, int]], color: str) -> None:
    """A unit square: a shard's queries down, as many visiting keys across; in colour the keys that each query sees."""
    (x, y), n, t = at, len(intervals), 0
    ax.add_patch(Rectangle((x, y), 1, 1, fc=PAPER, ec=FAINT, lw=0.8))
    for (low, high), rows in groupby(intervals):
        height = len(list(rows))
        if high > low:
            ax.add_patch(Rectangle((x + low / n, y + t / n), (high - low) / n, height / n, fc=color, lw=0))
        t += height


def ulysses() -> Figure:
    """Who holds which tokens of which heads: before `enter`, after it, and in a hybrid."""
    chunks = heads = 4
    kinds = (
        ("before and after:\na slice of the tokens, all heads", lambda t, h: t),
        ("during attention, ulysses=4:\nall tokens, a slice of the heads", lambda t, h: h),
        ("during attention, ring=2 x ulysses=2:\na ring shard, half the heads", lambda t, h: t // 2 * 2 + h // 2),
    )
    figure, axes = panels(1, len(kinds), 9, 2.7)
    for ax, (title, owner) in zip(axes[0], kinds, strict=True):
        blank(ax, heads, chunks)
        ax.set_aspect("equal")
        ax.set_title(title)
        for t in range(chunks):
            for h in range(heads):
                color = RANKS[owner(t, h)]
                ax.add_patch(Rectangle((h, t), 1, 1, fc=color, ec="white", lw=2))
                digit = DIGIT.get(color, "white")
                ax.text(h + 0.5, t + 0.5, str(owner(t, h)), ha="center", va="center", color=digit)
        ax.set_xlabel("heads")
    axes[0][0].set_ylabel("tokens")
    figure.text(0.5, -0.04, "digit and colour: the rank", ha="center")
    return figure


def linear() -> Figure:
    """Left: the product each pair of 32 tokens is in, chunks of 16. Right: a state's way past 4 zigzag ranks."""
    T, chunk = 32, 16
    figure, ((left, right),) = panels(1, 2, 9.5, 3.1, width_ratios=[1, 1.7], wspace=0.08)
    grid(left, T, T, "which product a pair of tokens is in")
    gates = torch.zeros(1, T, 1, 1)
    halves = [h for after, _ in chunkwise.decays(gates, gates, None).cuts if (h := after.shape[-2]) < chunk]
    for h in halves:
        for start in range(h, T, 2 * h):
            left.add_patch(Rectangle((start - h, start), h, h, fc=RANKS[halves.index(h)], ec="white", lw=0.5))
    for t in range(T):
        left.add_patch(Rectangle((t, t), 1, 1, fc=INK, ec="white", lw=0.3))
    left.add_patch(Rectangle((0, chunk), chunk, T - chunk, fc=FAINT, lw=0))
    left.text(chunk / 2, T * 0.75, "by way of\nthe state", ha="center", va="center")
    left.set(xlabel="keys", ylabel="queries")
    cuts = [Patch(color=RANKS[i], label=f"{h} tokens on either side of a cut") for i, h in enumerate(halves)]
    left.legend(
        handles=[*cuts, Patch(color=INK, label="itself")], loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=7
    )
    plan = Plan(T, ring=4, layout="zigzag")
    walk = order(plan)
    blank(right, len(walk), 5)
    right.set_title("a state's way past the segments of 4 ranks, zigzag")
    for i, (r, _, _) in enumerate(walk):
        right.add_patch(Rectangle((i + 0.06, r + 0.15), 0.88, 0.7, fc=RANKS[r], lw=0))
        digit = DIGIT.get(RANKS[r], "white")
        right.text(i + 0.5, r + 0.5, f"rank {r}", ha="center", va="center", color=digit, fontsize=8)
        if i:
            arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 1, "shrinkB": 1}
            right.annotate("", (i + 0.06, r + 0.5), (i - 0.06, walk[i - 1][0] + 0.5), arrowprops=arrow)
    along = {"arrowstyle": "->", "color": INK}
    right.annotate("", (len(walk), 4.35), (0, 4.35), arrowprops=along, annotation_clip=False)
    right.text(len(walk) / 2, 4.7, "tokens, in the order of the sequence", ha="center", va="center")
    right.set_xlim(-0.1, len(walk) + 0.1)
    return figure


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


def timelines() -> Figure:
    """The first rank of two traced calls, one below the other on one axis: over NCCL, and by the copy engines."""
    kinds = {"NCCL": "timeline-nccl.json", "copy engines": "timeline-symmetric.json"}
    figure, axes = panels(len(kinds), 1, 10, 3.2, hspace=0.5)
    for ax, (title, name) in zip(axes[:, 0], kinds.items(), strict=True):
        events = json.loads((BENCHMARKS / name).read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
        began = min(e["ts"] for e in spans)
        for e in spans:
            span = (e["ts"] - began) / 1e3, e["dur"] / 1e3
            ax.broken_barh([span], (1 - e["tid"] + 0.1, 0.8), color=RANKS[e["tid"]])
        ended = max(e["ts"] + e["dur"] for e in spans) - began
        ax.set_title(f"{title}: {ended / 1e3:.1f} ms", loc="left")
        ax.set(xlim=(0, 20.5), ylim=(0, 2), yticks=[0.5, 1.5], yticklabels=["hops", "attention"])
    axes[-1][0].set_xlabel("milliseconds of one call, forward and backward, rank 0 of 4 H200s, 32,768 tokens")
    return figure


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
        for draw in (masks, mask_kinds, tiling, merging, layouts, documents, ring, ulysses, linear, speed, prefill,
                     timelines):  # fmt: skip
            save(draw(), folder / f"{draw.__name__}.svg")
        for draw in (layouts, speed):  # in the README, of which PyPI shows no SVG
            save(draw(), folder / f"{draw.__name__}.png")
    sys.argv[1:] = [str(folder)]
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "who_holds_what.py"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
