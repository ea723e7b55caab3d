"""Benchmarks, side by side: `ringattn bench SUITE [key=value ...]`.

`ringattn bench SUITE --help` lists the keys of a suite. The results are printed as a table. With out=FILE each row is
also appended to the file, as soon as it is measured, as a JSON line: commit, device, versions, case, milliseconds,
ratios. compare=FILE says what got faster or slower than in such a file.
"""
# A suite is a module of launch/bench/ with its own Options and `run(options)`, which yields rows as they are measured;
# one over ranks gets its rows from `over_ranks`. A suite without COLUMNS prints its own table.

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ringattn.conf.keys import nearest
from ringattn.launch.bench import compare
from ringattn.launch.processes import each
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.rows import Row, read
from ringattn.launch.words import answer, default_of, option, usage, values, writable

SUITES = {
    "decode": "a token over a cache that is spread over ranks, next to a copy of the cache",
    "jax": "attention on JAX arrays over this machine's GPUs, next to its kernel alone",
    "kernels": 'one GPU: kernel="auto" and our kernel next to cuDNN, FlashAttention and FlexAttention',
    "linear": "one GPU: our gated linear attention next to flash-linear-attention",
    "memory": "the peak memory of a rank, with 1, 2, 4, 8 ranks",
    "plans": "the candidates of plans over ranks: predicted, simulated, measured here",
    "prefill": "a prompt whole and in chunks: time and peak memory",
    "ring": "attention over many ranks, next to the same work of one rank without communication",
    "scaling": "one layer over more and more ranks: predicted, simulated, measured here",
    "scan": "linear attention over many ranks, next to each rank alone",
    "step": "a step of a training run, next to its attention and matrix products alone",
    "traffic": "the bytes that a rank sends, counted, next to those of the schedule",
}
OUT = option(None, "a file that the rows are appended to, one JSON line each")
OLD = option(None, "a file of an earlier run: says what got faster or slower, and what is noise")
NOT_IN_ROWS = ("timeout", "device", "trace")  # options that change no figure, or that `stamp` has


def main(argv: list[str]) -> int:
    """`ringattn bench SUITE ...`: the suite's own options, and out=FILE for every suite."""
    if not argv or argv[0] in ("-h", "--help"):
        head, _, about = (__doc__ or "").strip().partition("\n")
        suites = "\n".join(f"    {name:<9} {what}" for name, what in SUITES.items())
        print(f"usage: ringattn bench SUITE [out=FILE] [compare=OLD] [key=value ...]\n\n{head}\n\n{suites}\n{about}")
        return 0
    if argv[0] not in SUITES:
        print(f"ringattn bench: no suite {argv[0]!r}{nearest(argv[0], SUITES)} ({', '.join(SUITES)})", file=sys.stderr)
        return 2
    return answer(f"bench {argv[0]}", lambda: measure(argv[0], argv[1:]))


def measure(name: str, words: list[str]) -> None:
    """Run a suite, append each row to out=FILE if given, and print all of them."""
    suite = import_module(f"ringattn.launch.bench.{name}")
    keys = dataclasses.make_dataclass(
        "Keys", [("out", str | None, OUT), ("compare", str | None, OLD)], bases=(suite.Options,)
    )
    if any(w in ("-h", "--help") for w in words):
        print(usage(f"bench {name}", suite.__doc__ or "", keys))
        return
    chosen = values(words, keys)
    out, old = chosen.pop("out", None), chosen.pop("compare", None)
    options = suite.Options(**chosen)
    check(options, sized=bool({"tokens", "settings"} & set(chosen)))
    file, before = writable(Path(out)) if out else None, read(Path(old)) if old else None
    # in a process that ends: to ask for a GPU's name takes some of its memory
    about = run_ranks(stamp, 1)[0] if file or before is not None else {}
    rows = []
    with ExitStack() as stack:
        lines = stack.enter_context(file.open("a")) if file else None
        for row in suite.run(options):
            rows.append({**about, **row})
            if lines:
                lines.write(json.dumps(rows[-1]) + "\n")
                lines.flush()
    if hasattr(suite, "COLUMNS"):
        print(table(rows, suite.COLUMNS))
    if before is not None:
        print(f"\nbeside {old}:\n{table(compare.compared(rows, before), compare.COLUMNS)}")


def check(options: Any, sized: bool) -> None:
    """A ValueError for heads that do not divide, missing GPUs, and a GPU's sizes on a CPU if none are given."""
    import torch

    fields = {f.name: f for f in dataclasses.fields(options)}
    if "kv_heads" in fields and options.heads % options.kv_heads:
        raise ValueError(f"{options.kv_heads} key heads do not divide {options.heads} query heads")
    if "device" not in fields:
        return
    size = "settings=auto/1024/4/2/causal" if "settings" in fields else "tokens=1024"
    small = " ".join([f"device=cpu {size}", *(f"{name}=2" for name in ("ranks", "repeats") if name in fields)])
    gpus, most = torch.cuda.device_count(), max(groups_of(options), default=0)
    if options.device == "cuda" and most and not gpus:
        raise ValueError(f"device=cuda, and torch sees no GPU here; on a CPU use {small}")
    if options.device == "cuda" and most > gpus:
        raise ValueError(f"ranks={most} need a GPU each, and torch sees {gpus} here; use ranks={gpus}")
    if options.device == "cpu" and default_of(fields["device"]) != "cpu" and not sized:
        raise ValueError(f"without {size.split('=')[0]}= the lengths are a GPU's; on a CPU use {small}")


def over_ranks(rows: Callable[[Any], Iterator[Row]], options: Any, *worst: str) -> Iterator[Row]:
    """The rows that `rows(options)` yields on every rank of a group of processes, with the options that they ran by.

    `worst` are figures of which the slowest rank's counts, and lists are those of all ranks; the rest is rank 0's.
    Where `options.ranks` lists several numbers there is a group of processes for each.
    """
    same = {n: x for n, x in dataclasses.asdict(options).items() if n not in NOT_IN_ROWS and not isinstance(x, list)}
    for ranks in groups_of(options):
        backend = "nccl" if options.device == "cuda" else "gloo"
        print(f"measuring {ranks} rank{'s' * (ranks > 1)} on {options.device} ...", file=sys.stderr, flush=True)
        for measured in each(one_rank, ranks, rows, options, backend=backend, timeout=options.timeout):
            row = {"suite": rows.__module__.rpartition(".")[2], **same, **measured[0]}
            row |= {n: max(m[n] for m in measured) for n in worst if row[n] is not None}
            yield row | {n: [m[n] for m in measured] for n, x in measured[0].items() if isinstance(x, list)}


def groups_of(options: Any) -> list[int]:
    """How many processes there are in each group that a suite starts; one where it starts none."""
    ranks: Any = getattr(options, "measured", None)
    ranks = getattr(options, "processes", 0) or getattr(options, "ranks", 1) if ranks is None else ranks
    return ranks if isinstance(ranks, list) else [ranks]


def one_rank(rows: Callable[[Any], Iterator[Row]], options: Any) -> Iterator[Row]:
    """The rows of one rank. Rank 0 prints each to stderr right away; the table comes after all rows."""
    import torch.distributed as dist

    for row in rows(options):
        if dist.get_rank() == 0:
            text = "  ".join(f"{name}={cell(value)}" for name, value in row.items() if not isinstance(value, list))
            print(f"rank 0:  {text}", file=sys.stderr, flush=True)
        yield row


def beside(rows: list[Row], row: Row, *same: str, **like: Any) -> Row | None:
    """The first row that has `like`, and what `row` has of `same`: what a figure is held against."""
    like |= {name: row[name] for name in same}
    return next((r for r in rows if all(r[name] == value for name, value in like.items())), None)


def table(rows: list[Row], columns: Sequence[str]) -> str:
    """The rows as aligned text; numbers to four significant places."""
    cells = [[*columns], *([cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in cells)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def stamp() -> dict[str, str]:
    """The commit of the checkout, with a + when it has changes ('unknown' outside a checkout), device and versions."""
    import torch

    describe = ["git", "describe", "--always", "--dirty=+"]
    try:
        here = Path(__file__).resolve().parent
        commit = subprocess.run(describe, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"commit": commit, "device": device, "torch": torch.__version__, "triton": version("triton")}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
