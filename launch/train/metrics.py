"""The metrics of a run: a progress line, JSON lines in a file, optionally TensorBoard and W&B, and a picture."""

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ringattn.conf.schema import Train

# Dense bf16 tensor-core peaks of one GPU, flops a second, by a part of the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
MIB = 2**20


def peak_flops(device: torch.device) -> float:
    """The peak flops of one rank: of a GPU from its data sheet, else measured with a large matrix product."""
    if device.type == "cuda":
        peaks = [peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name(device)]
        if peaks:
            return peaks[0]
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    a, best = torch.randn(n, n, device=device, dtype=dtype), float("inf")
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


class Memory:
    """The most memory this rank has held since `reset`, in bytes: the GPU's allocator, or the process's own pages."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before = self.now()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(
                OSError, AttributeError
            ):  # return freed memory to the system, if the C library can
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


def process_began() -> float:
    """When this process started, as `time.time`; now, if that is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        lived = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, lived)
    except (OSError, ValueError, IndexError):
        return time.time()


def mfu(share: float, device: str = "cuda") -> list[str]:
    """The model flops utilization in words; left out if it is below 0.5%, as for small models.

    A CPU has no data sheet: its peak is what a matrix product reaches here.
    """
    words = f"MFU {share:.0%}" if device == "cuda" else f"{share:.0%} of a matrix product's flops"
    return [words] if share >= 0.005 else []


def echo(text: str, stream: Any = None, end: str = "\n") -> None:
    """Write to stderr, or another stream; if it is closed, drop the text without an error."""
    stream = stream or sys.stderr
    try:
        stream.write(text + end)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Bar:
    """A progress line on the terminal that is overwritten; without a terminal, one line every few steps."""

    def __init__(self, steps: int, every: int | None = None, stream: Any = None, device: str = "cuda"):
        self.steps, self.stream, self.device = steps, stream or sys.stderr, device
        self.live = self.stream.isatty()
        self.every = every or (1 if self.live else -(-steps // 50))
        self.started = time.monotonic()
        self.first: int | None = None

    def show(self, step: int, row: dict[str, Any]) -> None:
        if self.first is None:
            self.first = step - 1
        elif step % self.every and step < self.steps:
            return
        left = (time.monotonic() - self.started) / max(1, step - self.first) * (self.steps - step)
        text = "  ".join([
            f"{step:>{len(str(self.steps))}}/{self.steps}", f"loss {row['loss']:.4f}",
            f"{row['tokens_per_second']:,.0f} tokens/s", *mfu(row["mfu"], self.device), f"{row['memory_mib']:,.0f} MiB",
            f"{left:.0f} s left",
        ])  # fmt: skip
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            cells = max(0, min(20, width - len(text) - 3))  # the bar fills the rest of the line
            done = round(cells * step / self.steps)
            text = f"[{'#' * done}{'.' * (cells - done)}] {text}"[:width]
            text = f"\r{text:<{width}}"
        echo(text, self.stream, end="" if self.live else "\n")

    def close(self) -> None:
        if self.live:
            echo("", self.stream)


class Log:
    """metrics.jsonl in the run's folder, and TensorBoard or W&B beside it: `step/loss`, `eval/loss`, `save/seconds`.

    Only rank 0 makes one.
    """

    def __init__(self, folder: Path, config: Train):
        self.writer: Any = None
        self.wandb: Any = None
        modules, path = loggers(config), folder / "metrics.jsonl"
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
            self.file = path.open("a")
            self.file.write("\n" * bool(torn))
            self.file.flush()
            if config.tensorboard:
                self.writer = modules["tensorboard"].SummaryWriter(str(folder))
        if config.wandb:
            self.wandb = wandb_run(modules["wandb"], folder, config)

    def write(self, row: dict[str, Any]) -> None:
        with writing(self.file.name):
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        if not self.there():
            raise FileNotFoundError(
                f"{self.file.name} was deleted or moved while the run wrote to it; nothing is logged"
            )
        if row["step"] < 0:  # a measurement of memory, which has no place on a curve
            return
        kind = row["kind"]
        numbers = {f"{kind}/{k}": v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        if self.writer:
            with writing(Path(self.file.name).parent):
                for name, value in numbers.items():
                    self.writer.add_scalar(name, value, row["step"])
        if self.wandb:
            self.wandb.log(numbers, step=row["step"])

    def there(self) -> bool:
        """Whether the file is still the one of its name: one that was deleted can be written to and is lost."""
        try:
            return os.path.samestat(os.stat(self.file.name), os.fstat(self.file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every row is already written
            self.file.close()
        if self.writer:
            self.writer.close()
        if self.wandb:
            self.wandb.finish()


def wandb_run(wandb: Any, folder: Path, config: Train) -> Any:
    """A run of W&B, the same one after a resume; if it cannot be made, usually because of a missing login, an error."""
    kept = folder / "wandb-id"
    with writing(kept):
        if not kept.exists():
            kept.write_text(secrets.token_hex(8))
        run_id = kept.read_text().strip()
    about = dataclasses.asdict(config)
    try:
        return wandb.init(
            project=config.wandb, dir=str(folder), name=folder.name, id=run_id, resume="allow", config=about
        )
    except wandb.Error as error:
        kind = OSError if isinstance(error, wandb.errors.CommError) else ValueError  # the network may come back
        why = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise kind(
            f"wandb={config.wandb}: W&B answers: {why}; run `wandb login` or set WANDB_API_KEY where rank 0 runs, "
            "set WANDB_MODE=offline, or leave wandb out"
        ) from None


def loggers(config: Train) -> dict[str, Any]:
    """The modules of the requested loggers, by package; a ValueError for one that is not installed."""
    wanted, modules = {"torch.utils.tensorboard": config.tensorboard, "wandb": config.wandb}, {}
    for module in (name for name, enabled in wanted.items() if enabled):
        package = module.rpartition(".")[2]
        try:
            modules[package] = import_module(module)
        except ImportError:
            raise ValueError(f"{package} is not installed; pip install {package}, or leave it out") from None
    return modules


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """A disk error, raised with the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise OSError(f"could not write {path} ({error.strerror}); free space, or use folder=PATH") from None


def forget_after(path: Path, step: int) -> None:
    """Remove the rows that will be written again after `step`: later steps, and measurements made at the end.

    If that is all rows, because there is no checkpoint, the file is renamed instead.
    """
    rows = lines(path)
    if rows and step == 0:
        aside = path.replace(path.with_name(f"{path.name}.aside"))
        echo(f"{path.parent} has no checkpoint to go on from, so this begins anew; the log of before is {aside}")
    unfinished = path.with_name(f"{path.name}.part")
    with writing(path):
        unfinished.write_text("".join(f"{json.dumps(row)}\n" for row in rows if 0 <= row["step"] <= step))
        unfinished.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl in the order of steps; of several with the same step and kind, the last."""
    rows = {(row["step"], row["kind"]): row for row in lines(path)}
    return [rows[k] for k in sorted(rows)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, if it exists, without incomplete or foreign lines."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    ours = {"step": int, "kind": str}
    return [r for r in rows if isinstance(r, dict) and all(isinstance(r.get(k), kind) for k, kind in ours.items())]


def columns(rows: Sequence[dict[str, Any]], *names: str) -> list[list[Any]]:
    return [[r[n] for r in rows] for n in names]
