"""Run a command whose words make a configuration, such as `ringattn train`, or print one sentence on why not."""

import os
import signal
import sys
import time
from collections.abc import Callable

from ringattn.conf import schema
from ringattn.conf.schema import Train
from ringattn.launch.processes import WRONG_INPUT, sentence
from ringattn.launch.train import torchrun

USAGE = """usage: ringattn train [group=choice ...] [key=value ...]    (or torchrun ... -m ringattn.launch.train ...)

Groups choose files of conf/, keys change single values; --cfg job prints the result, --multirun with a=1,2 sweeps,
--config-dir DIR adds your own files.
"""

PATIENCE = 20.0  # seconds that a rank waits for rank 0 to report a problem


def run(words: list[str], task: Callable[[Train], int | None]) -> int | None:
    """`task(config)` for each configuration that the words make; the exit status.

    A wrong configuration is one sentence from rank 0 and status 2. If a task returns None, a signal stopped it: the
    sweep ends too, with the status of the runs before it, None if all were good.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{schema.choices()}\n\n{schema.explain()}")
        return 0
    try:
        from ringattn.conf import compose  # which needs Hydra

        given = compose.options(words)
        if given.multirun and torchrun.started():
            raise ValueError("a sweep starts many runs, and torchrun started the ranks of one; sweep outside torchrun")
        configs = compose.composed(given)
    except (ImportError, ValueError) as error:
        text = sentence(error)
        if text is None:
            raise
        return complain(text)
    if given.cfg:
        for _, config in configs if torchrun.rank() == 0 else ():
            print(compose.as_yaml(config), end="")
        return 0
    statuses: list[int] = []
    for done, (swept, config) in enumerate(configs, 1):
        if swept:
            print(f"{swept}:", file=sys.stderr, flush=True)
        status = task(config)
        if status is None:
            if configs[done:]:
                print(f"the sweep was stopped; not begun: {'; '.join(left for left, _ in configs[done:])}")
            return max(statuses, default=0) or None
        statuses.append(status)
    return max(statuses)


def complain(problem: str, status: int = WRONG_INPUT) -> int:
    """Print the problem once: on rank 0, or on the rank that has it if rank 0 does not; return the exit status.

    A rank that its launcher ends meanwhile has this status: Slurm reports the highest one, and a signal's is higher.
    """
    if rank := torchrun.rank():
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(status))
        time.sleep(PATIENCE)
        problem = f"rank {rank}: {problem}"
    print(f"ringattn train: {problem}", file=sys.stderr, flush=True)
    return status
