"""The figures of a run: a progress line, and JSON lines in a file."""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Dense bf16 tensor-core peaks of one GPU, flops a second, by a part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}


def peak_flops(device: torch.device) -> float | None:
    """The peak flops of one rank by its GPU's data sheet, None where it has none here."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


class Memory:
    """The most memory this rank has held since `reset`, in bytes: the GPU's allocator, or the process's own pages."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before = self.now()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError, AttributeError):  # freed memory goes back, if the C library can
                ctypes.CDLL(None).malloc_trim(0)
            with contextlib.suppress(OSError):  # not Linux: the mark stays that of the whole process
                Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        self.before = self.now()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else status("VmRSS")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else status("VmHWM")

    def grown(self) -> int:
        """The peak above the memory held at `reset`."""
        return max(0, self.peak() - self.before)


def status(name: str) -> int:
    """A size from /proc/self/status in bytes; without that file, the largest size of the process so far."""
    try:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def echo(text: str, stream: Any = None, end: str = "\n") -> None:
    """Write to stderr, or another stream; if nobody reads it any more, drop the text without an error."""
    stream = stream or sys.stderr
    try:
        stream.write(text + end)  # Ray Train's `print` would show it twice
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress:
    """A line on the terminal that is overwritten; without a terminal, at most 50 lines."""

    def __init__(self, begun: int, steps: int, stream: Any = None):
        self.begun, self.steps, self.stream = begun, steps, stream or sys.stderr
        self.live = self.stream.isatty()
        self.started = time.monotonic()

    def show(self, row: dict[str, Any]) -> None:
        step, done = row["step"], row["step"] - self.begun
        if not self.live and done > 1 and step % -(-self.steps // 50) and step < self.steps:
            return
        left = (time.monotonic() - self.started) / done * (self.steps - step)
        text = (
            f"{step:>{len(str(self.steps))}}/{self.steps}  loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} "
            f"tokens/s{mfu(row['mfu'])}  {row['memory_mib']:,.0f} MiB  {left:.0f} s left"
        )
        width = shutil.get_terminal_size().columns - 1
        echo(f"\r{text[:width]:<{width}}" if self.live else text, self.stream, end="" if self.live else "\n")

    def close(self) -> None:
        if self.live:
            echo("", self.stream)


def mfu(share: Any) -> str:
    """The model flops utilization in words, to follow others; nothing where it is not known, as on a CPU."""
    return f", MFU {share:.0%}" if share else ""


def append(path: Path, row: dict[str, Any]) -> None:
    """One more row of metrics.jsonl."""
    with writing(path), path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """A disk error, raised with the file and the remedy."""
    try:
        yield
    except OSError as error:
        why = f"could not write {path} ({error.strerror}); free space, or use folder=PATH"
        raise type(error)(why) from None  # its type decides whether another attempt may succeed


def forget_after(path: Path, step: int) -> None:
    """Remove the rows that will be written again after `step`: later steps, and measurements made at the end.

    If that is all rows, because there is no checkpoint, the file is kept under another name.
    """
    rows = read(path)
    with writing(path):
        if rows and step == 0:
            path.replace(f"{path}.before")
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text("".join(f"{json.dumps(row)}\n" for row in rows if 0 <= row["step"] <= step))
        unfinished.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A line that was torn, as by a full disk, is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows
