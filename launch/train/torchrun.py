"""The ranks of a training run: started here, or found started by torchrun (or anything that sets its variables)."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist

from ringattn.comms import lost, messages
from ringattn.launch import processes

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# imported once, not by every rank; torch._dynamo, which FSDP and models without memory import, takes as long as torch
PRELOAD = ["torch", "torch._dynamo", "ringattn.launch.train.trainer"]


def started() -> bool:
    """Whether this process is a rank of a group that another program started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def follow_launcher() -> None:
    """torchrun's signals and its death end this rank, or have its training save and end.

    Other launchers are not watched: a shell may end before what it started.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for number in processes.TERMINALS:  # torchrun passes them on even where nohup has ranks ignore them
            signal.signal(number, signal.SIG_DFL)
        launcher = os.getppid()
        processes.end_without(lambda: os.getppid() == launcher)


def run_name() -> str | None:
    """A name that all ranks and all attempts of one torchrun share."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun-{os.getppid()}" if name == "none" else name


def local(function: Callable[..., Any], ranks: int, device: str, *args: Any, patience: float = 600.0) -> list[Any]:
    """`function(*args)` on ranks that are started here, to which SIGTERM and what a terminal sends come as SIGTERM.

    There is no limit for the whole; one exchange that takes longer than `patience` seconds is an error.
    """

    def forward(number: int, frame: Any) -> None:
        for child in multiprocessing.active_children():
            child.terminate()
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # and again: a rank may have been starting just then

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve the other ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # no other machine may connect
    limits: Any = {"timeout": None, "collective_timeout": patience}
    serve()
    with processes.handling(forward, signal.SIGTERM, *processes.TERMINALS, signal.SIGALRM):
        try:
            return processes.run(function, ranks, *args, backend=processes.BACKENDS[device], **limits)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def serve() -> None:
    """Wait for the fork server, whose imports take seconds. Its ranks keep a SIGTERM until Stop handles it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with processes.blocked(signal.SIGTERM, *processes.TERMINALS):
        forkserver.ensure_running()
    first = context.Process(target=os.getpid)
    first.start()
    first.join()


def together(action: Callable[[], Any], group: Any = None) -> list[Any]:
    """What `action()` gives on each rank; where it fails on one, that error on all."""
    result = problem = None
    try:
        result = action()
    except Exception as error:
        problem = f"{error}" or type(error).__name__
    everyone = messages.gather([result, problem], group) if dist.is_initialized() else [[result, problem]]
    if problem := next((problem for _, problem in everyone if problem is not None), None):
        raise ValueError(problem)
    return [result for result, _ in everyone]


class Stop:
    """A SIGTERM to any rank, or `other` returning True, ends the run after the current step, on all ranks alike.

    So do the signals of a terminal, unless they are ignored: torchrun and Slurm pass them on. `group` is for small
    things on the host, apart from the training's own exchanges.
    """

    def __init__(self, group: Any, other: Callable[[], bool] | None = None) -> None:
        self.signalled, self.group, self.other = False, group, other
        if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
            for number in (signal.SIGTERM, *processes.heard(*processes.TERMINALS)):
                signal.signal(number, self.on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # one that came before is handled now

    def on_signal(self, number: int, frame: Any) -> None:
        self.signalled = True

    def agreed(self) -> bool:
        stop = torch.tensor(int(self.signalled or (self.other is not None and self.other())))
        with lost.missing_named("agreeing whether to stop"):
            dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=self.group)
        return bool(stop)
