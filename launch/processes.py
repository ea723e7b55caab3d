"""Run a function on N ranks, one process each, on this machine: `run(function, ranks, *args)`; `each` if it yields.

Processes are forked from a server that has torch loaded, so a group starts in a fraction of a second. The first rank
that fails ends the others, and its error is raised here with its rank and traceback.
"""

import builtins
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # lets ranks share a GPU, which gloo supports
GRACE = 1.5  # seconds that the other ranks have to end after the first error
RANKS_LIMIT = max(64, 4 * (os.cpu_count() or 1))  # on one machine
EXTRAS = {
    "matplotlib": "plot", "hydra": "train", "safetensors": "train", "omegaconf": "train", "transformers": "hf",
    **{name: name for name in ("torch", "jax", "ray")},
}  # fmt: skip
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # words and checkpoints, which lie on the host, go by gloo
TERMINALS = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to all of its processes
CLOSED = (  # errors about a lost rank; the last one under TORCH_DISTRIBUTED_DEBUG=DETAIL
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
    "failed to pass monitoredBarrier",
)  # fmt: skip
BAD = (ValueError, NotImplementedError, OSError)  # printed as one sentence, without a traceback
WRONG_INPUT, FAILED = 2, 1  # exit statuses: after FAILED the same command may succeed later
WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class RankError(RuntimeError):
    """A rank failed; `details` is its traceback."""

    def __init__(self, rank: int, summary: str, details: str = ""):
        super().__init__(f"rank {rank}: {summary}" + (f"\n{details}" if details else ""))
        self.rank, self.summary = rank, summary


def kind_of(error: BaseException) -> tuple[type, str]:
    """An error's type and text; for a RankError those of the rank's error, if it is a builtin one."""
    if not isinstance(error, RankError):
        return type(error), str(error)
    name, _, text = error.summary.partition(": ")
    kind = getattr(builtins, name, None)
    return (kind, text) if isinstance(kind, type) else (RankError, text)


def sentence(error: BaseException) -> str | None:
    """The sentence for a usage error, raised here or on a rank; None for errors that need a traceback.

    A broken connection needs one.
    """
    kind, text = kind_of(error)
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and package not in ("", "ringattn"):
        found = f"{package} is not installed, or cannot be imported ({text})"
        return f"{found}; pip install 'ringattn[{EXTRAS.get(package, 'dev')}]' ('.[...]' in a checkout)"
    return text if issubclass(kind, BAD) and not issubclass(kind, ConnectionError) else None


def status(error: BaseException) -> int:
    """The exit status: 2 if the input must change, 1 if another attempt may succeed, as with a full disk."""
    kind, _ = kind_of(error)
    may_pass = sentence(error) is None or (issubclass(kind, OSError) and not issubclass(kind, WRONG_PATH))
    return FAILED if may_pass else WRONG_INPUT


def run(function: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> list[Any]:
    """`function(*args)` on every rank of a new process group; the ranks' results in order. Options are `each`'s."""
    (results,) = each(called, ranks, function, *args, **options)
    return results


def called(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    yield function(*args)


def each(
    function: Callable[..., Iterator[Any]], ranks: int, *args: Any, backend: str = "gloo",
    timeout: float | None = 600.0, collective_timeout: float = 120.0, preload: Sequence[str] = (), grace: float = GRACE,
) -> Iterator[list[Any]]:  # fmt: skip
    """What `function(*args)` yields on the ranks of a new process group: all ranks' first items, their second, ...

    The function must be importable (no lambda). `timeout` seconds (None: no limit) are for everything; a collective
    that waits for `collective_timeout` seconds is an error of its rank. The first call of a process may name modules to
    `preload` for all ranks. After the first error the others have `grace` seconds to end by themselves.
    """
    if not 1 <= ranks <= RANKS_LIMIT:
        raise ValueError(f"{ranks} ranks, each a process here: on this machine there can be 1 to {RANKS_LIMIT}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "ringattn.launch.processes", *preload])
    pipes, started = [], []
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        try:
            for rank in range(ranks):
                pipe, child = context.Pipe(duplex=False)
                given = (child, function, args, rank, ranks, f"{folder}/store", backend, collective_timeout)
                process = context.Process(target=work, args=given, daemon=True)
                with blocked(*TERMINALS):
                    process.start()
                child.close()
                pipes.append(pipe)
                started.append(process)
            yield from collect(pipes, started, time.monotonic() + (timeout or math.inf), grace)
        finally:
            for process in started:
                process.kill()
                process.join()


def heard(*signals: signal.Signals) -> list[signal.Signals]:
    """Those that this process was not started to ignore: a script's background job ignores Ctrl-C, nohup a hangup."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handling(handler: Callable[..., Any], *signals: signal.Signals) -> Iterator[None]:
    """Meanwhile this handles those of the signals that are `heard`."""
    before = {number: signal.signal(number, handler) for number in heard(*signals)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals for processes started meanwhile and their children; this process receives them afterwards.

    A terminal sends its signals to all of its processes, and the first one handles them.
    """
    resource_tracker.ensure_running()  # it starts with the first process, and would reset the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def collect(pipes: list[Connection], started: list[Any], deadline: float, grace: float) -> Iterator[list[Any]]:
    """Every rank's items, or the first error, after the others had a moment to report theirs."""
    items: list[deque[Any]] = [deque() for _ in pipes]
    errors: dict[int, RankError] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting.values()), left)
        if not ready:
            break
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                kind, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                kind, value = "error", (f"ended without a word: {end_of(started[rank])}", "")
            if kind == "item":
                items[rank].append(value)
            else:
                del waiting[rank]
            if kind == "error":
                errors[rank] = RankError(rank, *value)
                deadline = min(deadline, time.monotonic() + grace)
        while all(items):  # even if a rank has failed since
            yield [queue.popleft() for queue in items]
    if errors:
        raise root_cause(errors)
    if waiting:
        raise RankError(min(waiting), f"no result in time; waiting for ranks {sorted(waiting)}")
    assert not any(items), "the ranks yield as many items each"


def end_of(process: Any) -> str:
    """How a process that just closed its pipe ended."""
    process.join(GRACE)
    code = process.exitcode
    return f"killed by signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"exit status {code}"


def root_cause(errors: dict[int, RankError]) -> RankError:
    """The original error: one that a rank reports about itself rather than another rank's death; else a death."""

    def order(error: RankError) -> int:
        if any(word in error.summary for word in ("ConnectionError", *CLOSED)):
            return 2
        return "ended without a word" in error.summary

    return min(errors.values(), key=order)


def work(
    pipe: Connection, function: Callable[..., Any], args: Any, rank: int, ranks: int, store: str, backend: str,
    timeout: float,
) -> None:  # fmt: skip
    """One rank: join the group, run, send the items or the error."""
    import torch
    import torch.distributed as dist

    for number in TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():
        end_without(parent.is_alive)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(SHARING, "1")
    torch.set_num_threads(1)
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        gpu = torch.device("cuda", rank) if "nccl" in backend else None
        files, patience = dist.FileStore(store, ranks), timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=patience, store=files, rank=rank, world_size=ranks, device_id=gpu)
        for item in function(*args):
            send(pipe, "item", item)
        send(pipe, "end")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        with suppress(BrokenPipeError):  # the parent is gone
            send(pipe, "error", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)


def join(device: str, timeout: float = 600.0) -> None:
    """Join the ranks that another program started: each has a GPU, through NCCL, or all share those here, by gloo.

    Each attempt of torchrun has its own words in its store, which has those of the attempts before.
    """
    import torch
    import torch.distributed as dist

    backend, gpu, patience = "gloo", None, timedelta(seconds=timeout)
    if device == "cuda":
        gpus, neighbours = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
        os.environ.setdefault(SHARING, "1")
        if neighbours <= gpus:
            backend, gpu = BACKENDS["cuda"], torch.device("cuda", torch.cuda.current_device())
    store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=patience)))
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience, device_id=gpu)


def end_without(alive: Callable[[], bool]) -> None:
    """Send this rank a SIGTERM when what started it is gone: training saves, all else ends."""

    def watch() -> None:
        while alive():
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def send(pipe: Connection, kind: str, value: Any = None) -> None:
    """Plain bytes, in which tensors are copied; handles would end with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))
