"""Benchmarks, side by side: `ringattn bench SUITE [key=value ...]`.

`ringattn bench SUITE --help` lists the keys of a suite. Each row is printed as soon as it is measured, and all of them
as a table at the end. With out=FILE each is also appended to the file, as a JSON line: commit, device, versions, case,
milliseconds, ratios.
"""
# A suite is a module of launch/bench/ with its own Options and `run(options)`, which yields rows as they are measured;
# one over ranks gets its rows from `over_ranks`.

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringattn.conf.keys import nearest
from ringattn.launch.processes import each
from ringattn.launch.processes import run as run_ranks
from ringattn.launch.rows import Row, cell, table
from ringattn.launch.words import answer, option, usage, values, writable

SUITES = {
    "inference": "a token over a cache that is spread over ranks, and a prompt whole and in chunks",
    "jax": "attention on JAX arrays over this machine's GPUs, next to its kernel alone",
    "kernels": 'one GPU: kernel="auto" and each kernel, next to FlashAttention-4 itself, in turns',
    "plans": "the candidates of plans over ranks: predicted, and measured here",
    "ring": "attention and linear attention over ranks, next to the same work without communication",
}
OUT = option(None, "a file that the rows are appended to, one JSON line each")
NOT_IN_ROWS = ("timeout", "device")  # options that change no figure, or that `stamp` has


def main(argv: list[str]) -> int:
    """`ringattn bench SUITE ...`: the suite's own options, and out=FILE for every suite."""
    if not argv or argv[0] in ("-h", "--help"):
        suites = "\n".join(f"  {name:<10} {what}" for name, what in SUITES.items())
        print(f"usage: ringattn bench SUITE [out=FILE] [key=value ...]\n\n{__doc__}\n{suites}")
        return 0
    name, *words = argv
    if name not in SUITES:
        print(f"ringattn bench: no suite {name!r}{nearest(name, SUITES)} ({', '.join(SUITES)})", file=sys.stderr)
        return 2
    return answer(f"bench {name}", lambda: measure(name, import_module(f"{__name__}.{name}"), words))


def measure(name: str, suite: Any, words: list[str]) -> None:
    """Run a suite, print each row and append it to out=FILE if given, and print all of them."""
    keys = dataclasses.make_dataclass("Keys", [("out", str | None, OUT)], bases=(suite.Options,))
    if any(w in ("-h", "--help") for w in words):
        print(usage(f"bench {name}", suite.__doc__, keys))
        return
    chosen = values(words, keys)
    out = chosen.pop("out", None)
    options = suite.Options(**chosen)
    check(options)
    file = writable(Path(out)) if out else Path(os.devnull)
    about = run_ranks(stamp, 1)[0] if out else {}  # in a process that ends: to ask for a GPU's name takes its memory
    rows = []
    with file.open("a") as lines:
        for row in suite.run(options):
            print("  ".join(f"{n}={cell(row.get(n))}" for n in suite.COLUMNS), file=sys.stderr, flush=True)
            rows.append({"suite": name, **about, **row})
            print(json.dumps(rows[-1]), file=lines, flush=True)
    more = [name for row in rows for name in row if name.startswith("over_")]
    print(table(rows, [*suite.COLUMNS, *dict.fromkeys(more)]))


def check(options: Any) -> None:
    """A ValueError for unknown masks, missing GPUs, and the lengths for GPUs on a CPU."""
    import torch

    from ringattn.launch.bench.masks import asked_by

    default, gpus, ranks = type(options)(), torch.cuda.device_count(), getattr(options, "ranks", 1)
    short = "on a CPU use device=cpu and tokens=1024 or the like"
    for mask in getattr(options, "mask", ()):
        asked_by(mask, max(options.tokens))
    if options.device == "cuda" and ranks > gpus:
        raise ValueError(f"ranks={ranks} need a GPU each, and torch sees {gpus}; {short}")
    for name in ("tokens", "settings"):
        if options.device == "cpu" and hasattr(options, name) and getattr(options, name) == getattr(default, name):
            raise ValueError(f"without {name}= the lengths are a GPU's; {short}")


def over_ranks(rows: Callable[[Any], Iterator[Row]], options: Any, *worst: str) -> Iterator[Row]:
    """The rows that `rows(options)` yields on every rank of a group of processes, with the options that they ran by.

    `worst` are figures of which the slowest rank's counts; the rest is rank 0's.
    """
    same = {n: x for n, x in dataclasses.asdict(options).items() if n not in NOT_IN_ROWS and not isinstance(x, list)}
    ranks, backend = options.ranks, "nccl" if options.device == "cuda" else "gloo"
    print(f"measuring {ranks} rank{'s' * (ranks > 1)} on {options.device} ...", file=sys.stderr, flush=True)
    for measured in each(rows, ranks, options, backend=backend, timeout=options.timeout):
        row = {**same, **measured[0]}
        yield row | {n: max(m[n] for m in measured) for n in worst if row[n] is not None}


def stamp() -> dict[str, str]:
    """The commit of the checkout, with a + when it has changes ('unknown' outside a checkout), device and versions."""
    import torch

    describe = ["git", "describe", "--always", "--dirty=+"]
    try:
        folder = Path(__file__).resolve().parent
        commit = subprocess.run(describe, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = {name: metadata.version(name) for name in ("torch", "triton", "jax") if find_spec(name)}
    return {"commit": commit, "device": device, **versions}
