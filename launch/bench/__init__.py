"""Benchmarks, side by side: `ringattn bench SUITE [key=value ...]`.

    decode    a token over a cache that is spread over ranks: time over that of copying it
    jax       attention on JAX arrays over this machine's GPUs, beside its kernel alone
    kernels   one GPU: our kernels beside cuDNN, FlashAttention and FlexAttention
    linear    one GPU: our gated linear attention beside flash-linear-attention
    memory    the peak memory of a rank at 1, 2, 4, 8 ranks
    prefill   a prompt whole and in chunks: time and peak memory
    ring      many ranks: time over the floor of one without communication
    scan      linear attention over many ranks: time over the floor of each rank alone
    step      a training run's step over the floor of its attention and matrix products
    traffic   the bytes a rank sends, counted, beside what the schedule says

A suite is a module of launch/bench/ with its own Options and `run(options) -> list of rows`. Every row is printed in
a table and, with out=FILE, appended to it as one JSON line: commit, device, versions, case, milliseconds, ratios.
"""

import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ringattn.conf.schema import nearest
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.words import answer, default_of, usage, values, writable

SUITES = ("decode", "jax", "kernels", "linear", "memory", "prefill", "ring", "scan", "step", "traffic")


def main(argv: list[str]) -> int:
    """`ringattn bench SUITE ...`: the suite's own options, and out=FILE for every suite."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: ringattn bench SUITE [out=FILE] [key=value ...]\n\n{(__doc__ or '').strip()}")
        return 0
    if argv[0] not in SUITES:
        print(f"ringattn bench: no suite {argv[0]!r}{nearest(argv[0], SUITES)} ({', '.join(SUITES)})", file=sys.stderr)
        return 2
    return answer(f"bench {argv[0]}", lambda: measure(argv[0], argv[1:]))


def measure(name: str, words: list[str]) -> None:
    """Run a suite, and append its rows to out=FILE if given."""
    suite = import_module(f"ringattn.launch.bench.{name}")
    if any(w in ("-h", "--help") for w in words):
        print(usage(f"bench {name}", suite))
        print("  out=FILE".ljust(34) + "  a file that the rows are appended to, one JSON line each")
        return
    outs = [w.removeprefix("out=") for w in words if w.startswith("out=")]
    if len(outs) > 1:
        raise ValueError("out is given twice; give it once")
    chosen = values([w for w in words if not w.startswith("out=")], suite.Options)
    options = suite.Options(**chosen)
    fits(options, sized="tokens" in chosen)
    file = writable(Path(outs[0])) if outs else None
    rows = suite.run(options)
    if file:
        write(rows, file)


def fits(options: Any, sized: bool) -> None:
    """A ValueError for heads that do not divide, missing GPUs, and a GPU's sizes on a CPU if none are given."""
    import torch

    fields = {f.name: f for f in dataclasses.fields(options)}
    if "kv_heads" in fields and options.heads % options.kv_heads:
        raise ValueError(f"{options.kv_heads} key heads do not divide {options.heads} query heads")
    if "device" not in fields:
        return
    small = " ".join(["device=cpu tokens=1024", *(f"{name}=2" for name in ("ranks", "repeats") if name in fields)])
    gpus, ranks = torch.cuda.device_count(), getattr(options, "processes", 0) or getattr(options, "ranks", 1)
    most = max(ranks, default=1) if isinstance(ranks, list) else ranks
    if options.device == "cuda" and not gpus:
        raise ValueError(f"device=cuda, and torch sees no GPU here; on a CPU say {small}")
    if options.device == "cuda" and most > gpus:
        raise ValueError(f"ranks={most} need a GPU each, and torch sees {gpus} here; say ranks={gpus}")
    if options.device == "cpu" and default_of(fields["device"]) != "cpu" and not sized:
        raise ValueError(f"without tokens= the lengths are a GPU's; on a CPU say {small}")


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Append the rows to `path`, each with the machine and versions of its measurement."""
    stamp = {"commit": commit(), **machine()}
    with path.open("a") as file:
        file.writelines(json.dumps({**stamp, **row}) + "\n" for row in rows)


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The rows as aligned text; numbers to three significant places."""
    cells = [[*columns], *([cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def on_ranks(measure: Callable[..., Any], ranks: int, device: str, timeout: float, *args: Any) -> list[Any]:
    """The results of `measure(*args)` on all ranks, processes of this machine, in order."""
    return run_ranks(measure, ranks, *args, backend="nccl" if device == "cuda" else "gloo", timeout=timeout)


def reported(row: dict[str, Any]) -> dict[str, Any]:
    """The row, which rank 0 prints to stderr right away; the table comes after all rows."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        text = "  ".join(f"{name}={cell(value)}" for name, value in row.items())
        print(f"rank 0:  {text}", file=sys.stderr, flush=True)
    return row


def slowest(ranks: list[list[dict[str, Any]]], *names: str) -> Iterator[dict[str, Any]]:
    """The rows that all ranks measured, as rank 0 has them, with the largest of these figures if there are any."""
    for measured in zip(*ranks, strict=True):
        yield measured[0] | {n: max(m[n] for m in measured) for n in names if measured[0][n] is not None}


def given(options: Any, *without: str) -> dict[str, Any]:
    """The options that a row shows; each row has figures of its own for the others, or the machine's."""
    return {n: x for n, x in dataclasses.asdict(options).items() if n not in (*without, "timeout", "device")}


def draws(options: Any, tokens: int, heads: str = "qkv", batch: int = 1, grads: bool = False) -> list[Any]:
    """Random [batch, tokens, heads, head_dim] for each letter: q (or o) of the query heads, k and v of the key heads.

    In bfloat16 on a GPU, else in float32. With `grads` all but o require a gradient.
    """
    import torch

    counts = {"q": options.heads, "k": options.kv_heads, "v": options.kv_heads, "o": options.heads}
    how = {"device": options.device, "dtype": torch.bfloat16 if options.device == "cuda" else torch.float32}
    shapes = [(name, (batch, tokens, counts[name], options.head_dim)) for name in heads]
    return [torch.randn(*shape, **how, requires_grad=grads and name != "o") for name, shape in shapes]


def passes(attend: Callable[[], Any], leaves: Sequence[Any], dout: Any) -> dict[str, Callable[[], Any]]:
    """What is timed: one forward pass, and one with its backward."""
    import torch

    return {
        "forward": torch.no_grad()(attend),
        "forward+backward": lambda: torch.autograd.grad(attend(), leaves, dout),
    }


def meet() -> None:
    """A barrier of all ranks, after their devices have finished."""
    import torch.distributed as dist

    finish()
    dist.barrier()
    finish()


def finish() -> None:
    """Wait for the GPU, if this process uses one."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def together(call: Callable[[], Any]) -> float:
    """Seconds from when all ranks start until this one is done."""
    meet()
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as one CUDA graph."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    meet()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def commit() -> str:
    """The commit of the checkout, with a + when it has changes; 'unknown' outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "torch": torch.__version__, "triton": version("triton")}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
