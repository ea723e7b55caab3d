"""A command whose words make a configuration, as `ringattn train` is: it runs, or one sentence says why not."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable

from ringattn.conf import compose, schema
from ringattn.conf.schema import Train
from ringattn.launch.processes import WRONG_INPUT, sentence

USAGE = """usage: ringattn train [group=choice ...] [key=value ...]    (or torchrun ... -m ringattn.launch.train ...)

Groups choose files of conf/, keys change single values; --cfg job prints the result, --multirun with a=1,2 sweeps,
--config-dir DIR adds your own files; eval "$(ringattn train --completion)" has bash complete them.
"""

PATIENCE = 20.0  # seconds that a rank leaves the word to rank 0


def run(words: list[str], task: Callable[[Train, str], int | None], rank: int = 0, started: bool = False) -> int | None:
    """`task(config, what a sweep says of it alone)` for each configuration that the words make; its exit status.

    What cannot be is one sentence from rank 0 and status 2. A task's None, a signal stopped it, ends a sweep too, whose
    status is then that of the runs before it, None if all were good.
    `started` means that many ranks run this at once.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{compose.choices()}\n\n{schema.explain()}")
        return 0
    if "--completion" in words:
        from ringattn.launch import complete

        print(complete.SCRIPT.format(python=shlex.quote(sys.executable)))
        return 0
    try:
        asked = compose.options(words)
        if asked.multirun and started:
            raise ValueError(
                "a sweep starts many runs, and the ranks of one run are already started; sweep outside torchrun"
            )
        configs = compose.composed(asked)
    except (ImportError, ValueError) as error:
        said = sentence(error)
        if said is None:
            raise
        return complain(said, rank)
    if asked.cfg:
        for _, config in configs if rank == 0 else ():
            print(compose.as_yaml(config), end="")
        return 0
    statuses: list[int] = []
    for done, (swept, config) in enumerate(configs, 1):
        if swept:
            print(f"{swept}:", file=sys.stderr, flush=True)
        status = task(config, swept)
        if status is None:
            if configs[done:]:
                print(f"the sweep was stopped; not begun: {'; '.join(left for left, _ in configs[done:])}")
            return max(statuses, default=0) or None
        statuses.append(status)
    return max(statuses)


def complain(problem: str, rank: int, status: int = WRONG_INPUT) -> int:
    """Say what is wrong, once: on rank 0, or where rank 0 has no complaint; the status to end with."""
    if rank:
        leave_to_first(status)
        problem = f"rank {rank}: {problem}"
    print(f"ringattn train: {problem}", file=sys.stderr, flush=True)
    return status


def leave_to_first(status: int) -> None:
    """Wait until rank 0 has reported the problem, which all ranks have as a rule, and the launcher ends this one.

    A rank that is ended so has the status of its own problem: Slurm reports the highest one, and a signal is higher.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
    time.sleep(PATIENCE)
