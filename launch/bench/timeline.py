"""What ran when on every rank: recorded by torch's profiler, saved as a Chrome trace and as a picture.

A span is a kernel or a copy, on a CPU an operation of torch or a message of gloo: its name, its lane, when it started
and how long it took, in microseconds. Lanes are `attention` (kernels of the call) and `hops` (what moves between ranks;
on a CPU from when it is asked for to when it is waited for).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ringattn.launch.bench.timing import finish, meet

HOPS = ("ncclDevKernel", "Memcpy", "SendRecv", "memcpy")
BACKWARD = ("backward", "bwd", "dkdv_kernel", "dq_kernel")  # in the names of what runs in backward only
SPECK = 1e-3  # of the picture's width: what is shorter is not drawn, what is nearer is drawn as one
MEETING = ("AllReduce", "gloo:barrier")  # a barrier, over NCCL and over gloo
COLORS = {"attention": "#4477aa", "hops": "#ee6677"}


class Span(NamedTuple):
    name: str
    lane: str
    start: float
    length: float


def record(call: Callable[[], Any]) -> list[Span]:
    """One call under the profiler, after all ranks have met in an all-reduce."""
    gpu = torch.cuda.is_initialized()
    with silence(), profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]) as profiler:
        for _ in range(2):  # the first one under a profiler is slow
            meet()
            call()
        finish()
    device = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    spans: list[Span] = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == device and event.duration_ns() > 0:
            name = event.name()
            lane = lane_of(name) if gpu else lane_on_cpu(name)
            if lane:
                spans.append(Span(name, lane, event.start_ns() / 1e3, event.duration_ns() / 1e3))
    met = max(span.start for span in spans if any(word in span.name for word in MEETING))
    return [span for span in spans if span.start > met]


@contextmanager
def silence() -> Iterator[None]:
    """Discard stderr, also C++'s: the profiler logs when it starts and ends, between the rows."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def lane_of(name: str) -> str | None:
    """The lane of what ran on a GPU; None for what is in neither."""
    if "Memset" in name or name.startswith("nccl:"):
        return None
    return "hops" if any(word in name for word in HOPS) else "attention"


def lane_on_cpu(name: str) -> str | None:
    """The same on a CPU, where gloo sends and torch's operations compute."""
    return {"gloo": "hops", "aten": "attention"}.get(name.partition(":")[0])


def covered(spans: Sequence[Span], apart: float = 0.0) -> list[tuple[float, float]]:
    """The times at which some span runs, as intervals that are further apart than so much."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        end = span.start + span.length
        if merged and span.start <= merged[-1][1] + apart:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((span.start, end))
    return merged


def exposed(spans: Sequence[Span]) -> float:
    """The part of the time from the first span to the last end in which something moves and nothing computes."""
    start, end = min(s.start for s in spans), max(s.start + s.length for s in spans)
    return idle(spans) - 1 + sum(b - a for a, b in covered(spans)) / (end - start)


def idle(spans: Sequence[Span]) -> float:
    """The part of the time in which nothing computes, for any reason."""
    start, end = min(s.start for s in spans), max(s.start + s.length for s in spans)
    return 1 - sum(b - a for a, b in covered([s for s in spans if s.lane == "attention"])) / (end - start)


def save(ranks: Sequence[Sequence[Span]], path: Path, name: str) -> str:
    """Write the trace and the picture beside `path`; returns what they show."""
    slug = "-".join(name.replace("+", " ").split())
    target = path.with_name(f"{path.stem}-{slug}")
    target.with_suffix(".json").write_text(json.dumps(trace(ranks)))
    worst = max(exposed(spans) for spans in ranks), max(idle(spans) for spans in ranks)
    title = f"{name}: exposed communication {worst[0]:.1%}, no attention kernel running {worst[1]:.1%}"
    draw(ranks, target.with_suffix(".svg"), title)
    return f"{target}.svg: {title}"


def trace(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Chrome's format: a process a rank, a thread a lane."""
    zero = min(s.start for spans in ranks for s in spans)
    lanes = list(COLORS)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": r, "name": "process_name", "args": {"name": f"rank {r}"}} for r in range(len(ranks))
    ]
    for r in range(len(ranks)):
        for i, lane in enumerate(lanes):
            events.append({"ph": "M", "pid": r, "tid": i, "name": "thread_name", "args": {"name": lane}})
    for r, spans in enumerate(ranks):
        for s in spans:
            when = {"pid": r, "tid": lanes.index(s.lane), "ts": s.start - zero, "dur": s.length}
            events.append({"ph": "X", "name": s.name, "cat": s.lane, **when})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(ranks: Sequence[Sequence[Span]], path: Path, title: str) -> None:
    """Two lanes a rank over the same time: kernels above, hops below."""
    import matplotlib

    from ringattn.launch.commands.plot import STYLE, panels, write

    every = [s for spans in ranks for s in spans]
    zero, last = min(s.start for s in every), max(s.start + s.length for s in every)
    speck, turn = SPECK * (last - zero), [s.start for s in every if any(word in s.name for word in BACKWARD)]
    with matplotlib.rc_context(STYLE):
        figure, ((axes,),) = panels(1, 1, 10, 0.9 + 0.75 * len(ranks))
    ticks = []
    for r, spans in enumerate(ranks):
        for i, (lane, color) in enumerate(COLORS.items()):
            y = -(3 * r + i)
            times = covered([s for s in spans if s.lane == lane], apart=speck)
            mine = [((start - zero) / 1e3, (end - start) / 1e3) for start, end in times if end - start >= speck]
            axes.broken_barh(mine, (y - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3)
            ticks.append((y, f"rank {r}: {lane}" if i == 0 else lane))
    axes.set_yticks([y for y, _ in ticks], [text for _, text in ticks])
    if turn:
        x = (min(turn) - zero) / 1e3
        axes.axvline(x, color="grey", linestyle=":", zorder=0)
        axes.text(x, 1.0, "backward", transform=axes.get_xaxis_transform(), fontsize=8, color="grey")
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10, pad=14)
    axes.spines["left"].set_visible(False)
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": path.stem}):
        write(figure, path)
