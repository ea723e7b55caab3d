"""The ranks of a training run: started here, or found started by torchrun (or anything that sets its variables).

Only this file reads those variables.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist

from ringattn.comms import lost
from ringattn.launch import processes

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# imported once, not by every rank; torch._dynamo, which FSDP and models without memory import, takes as long as torch
PRELOAD = ["torch", "torch._dynamo", "ringattn.launch.train.trainer"]


def started() -> bool:
    """Whether this process is a rank of a group that another program started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def neighbours() -> int:
    """How many ranks there are on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()


def end_on_signals() -> None:
    """Until training listens a launcher's signal ends this rank without a traceback; so does the death of torchrun.

    Afterwards both have training save and end. torchrun alone is watched: a shell may end before what it started.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    for number in processes.TERMINALS:
        if launched or signal.getsignal(number) is not signal.SIG_IGN:  # nohup cannot keep torchrun from passing it on
            signal.signal(number, signal.SIG_DFL)
    if launched:
        threading.Thread(target=processes.end_with_launcher, args=(os.getppid(),), daemon=True).start()


def attempt() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def run_name() -> str | None:
    """A name that all ranks and all attempts of one torchrun share."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun-{os.getppid()}" if name == "none" else name


def join(device: str, timeout: float) -> None:
    """Join the process group that the environment describes, with this rank's device as the current one.

    Each attempt has its own words in torchrun's store, which has those of the attempts before.
    """
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    patience = timedelta(seconds=timeout)
    store, number, ranks = next(iter(dist.rendezvous("env://", timeout=patience)))
    store = dist.PrefixStore(f"attempt_{attempt()}", store)
    dist.init_process_group(
        backend(device), store=store, rank=number, world_size=ranks, timeout=patience, device_id=gpu
    )


def backend(device: str) -> str:
    """Tensors on GPUs travel by NCCL; words and checkpoints, which lie on the host, by gloo."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def local(function: Callable[..., Any], ranks: int, device: str, *args: Any, patience: float = 600.0) -> list[Any]:
    """`function(*args)` on ranks that are started here. SIGTERM, and what a terminal sends, are passed on to them.

    There is no limit for the whole; one exchange that takes longer than `patience` seconds is an error.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve the other ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # no other machine may connect
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with passed_on(signal.SIGTERM, *processes.TERMINALS) as ranks_exist:
        serve(context)
        ranks_exist.set()
        return processes.run(function, ranks, *args, backend=backend(device), timeout=None, collective_timeout=patience)


def serve(context: Any) -> None:
    """Wait for the fork server, whose imports take seconds. Its ranks keep a SIGTERM until Stop handles it."""
    with processes.blocked(signal.SIGTERM, *processes.TERMINALS):
        forkserver.ensure_running()
    first = context.Process(target=os.getpid)
    first.start()
    first.join()


class Stopped(Exception):
    """A signal came before there was a rank to stop."""


@contextlib.contextmanager
def passed_on(*signals: signal.Signals) -> Iterator[threading.Event]:
    """Give these signals to the child processes as SIGTERM: they save, and end by themselves.

    Until the event that this gives is set there are none, and a signal is `Stopped`.
    """
    ranks = threading.Event()

    def forward(number: int, frame: Any) -> None:
        if not ranks.is_set():
            raise Stopped
        for child in multiprocessing.active_children():
            child.terminate()
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # and again: a rank may have been starting just then

    with processes.handling(forward, *signals, signal.SIGALRM):
        try:
            yield ranks
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


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
