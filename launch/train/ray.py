"""The ranks of a run as Ray's workers: placed on its nodes, started again when one fails, fewer of them if need be.

Ray only starts things. Weights and the place in the data come back from the run's own checkpoints, which lie on storage
that all nodes see. The driver and the ranks talk by a `Board`, which lives with the driver.
"""

import contextlib
import dataclasses
import logging
import math
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.conf.schema import Cluster, Strategy, Train
from ringattn.launch import processes
from ringattn.launch.train import torchrun

# What of the driver's environment is passed on to every rank, by how its name begins.
PASSED_ON = ("GLOO_", "JAX_", "NCCL_", "OMP_", "PYTHONPATH", "TORCH_", "XLA_")


class Board:
    """What the driver and the ranks exchange, by name: a problem, the summary of rank 0, and the request to stop."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def write(self, name: str, value: Any) -> None:
        """Only the first value of a name counts."""
        self.values.setdefault(name, value)

    def read(self, name: str) -> Any:
        return self.values.get(name)


def fit(config: Train, work: Callable[..., Any], choose_folder: Callable[[Train], Path]) -> tuple[dict[str, Any], Path]:
    """Run `work` on Ray's workers until it ends; returns the summary of rank 0, and the run's folder."""
    ray = connect(config)
    try:
        config, gpus = sized(config, ray.cluster_resources())
        folder = choose_folder(config).absolute()
        board = on_this_node(ray, Board)
        task = {"config": config, "work": work, "folder": str(folder), "started": time.time(), "board": board}
        with stopping(lambda: board.write.remote("stopping", True)):
            failure = attempt(task, gpus)
        problem, summary = (ray.get(board.read.remote(name)) for name in ("problem", "summary"))
        if problem:
            raise ValueError(problem)
        if summary is None:
            raise failure or processes.RankError(0, "ended without a word")
        return summary, folder
    finally:
        ray.shutdown()


def connect(config: Train) -> Any:
    """Ray, connected: to the cluster that was named, to that of the job this is, or to one started for this run."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    if address is None:  # read when ray is imported: no server of this cluster listens beyond this machine
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no statistics
        passed.setdefault("GLOO_SOCKET_IFNAME", torchrun.LOOPBACK)
        keep_token_private()
    where = {"num_cpus": max(config.nproc or 2, os.cpu_count() or 1)} if address is None else {"address": address}
    try:
        import ray

        reach(address)
        ray.init(**where, runtime_env={"env_vars": passed}, logging_level=logging.WARNING)
    except ImportError:
        raise ValueError("Ray is not installed; pip install 'ringattn[ray]', or use cluster=local") from None
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cluster.address={address}: {first_line(error)}; is the cluster up (ray start --head), and is the token "
            "in RAY_AUTH_TOKEN or ~/.ray/auth_token the cluster's?"
        ) from None
    return ray


def keep_token_private() -> None:
    """Make ~/.ray/auth_token before Ray does, which would let every user of the machine read it."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(path.parent.stat().st_mode & 0o755)
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # readable by its owner alone
            file.write(secrets.token_hex(32))
            file.flush()
            with contextlib.suppress(FileExistsError):  # another run was first
                os.link(file.name, path)
    path.chmod(0o600)


def reach(address: str | None) -> None:
    """An OSError where nothing answers at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def sized(config: Train, cluster: dict[str, float]) -> tuple[Train, bool]:
    """How many ranks, on what, from what the cluster has; with paths that hold on every node."""
    gpus = int(cluster.get("GPU", 0))
    device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    ranks = config.nproc or (gpus if device == "cuda" else 2)
    have, kind = (gpus, "GPU") if device == "cuda" else (int(cluster.get("CPU", 0)), "CPU")
    if have < (config.cluster.at_least or ranks):
        raise ValueError(f"nproc={ranks} ranks need a {kind} each, and Ray has {have}; use nproc={have}, or add nodes")
    if config.cluster.at_least is not None:
        check_elastic(config.strategy)
    path, resume = config.data.path, config.resume
    data = dataclasses.replace(config.data, path=str(Path(path).expanduser().absolute())) if path != "stdlib" else None
    resume = resume if resume in (None, "auto") else str(Path(resume).absolute())
    config = dataclasses.replace(config, nproc=ranks, device=device, data=data or config.data, resume=resume)
    return config, device == "cuda"


def check_elastic(s: Strategy) -> None:
    """Refuse what fits some numbers of ranks only, before a node is lost."""
    if s.keys == "ulysses":
        raise ValueError("strategy.keys=ulysses fits one number of ranks; use strategy=ring to be elastic")
    if s.ring is not None:
        raise ValueError(f"strategy.ring={s.ring} fits one number of ranks; leave it out to be elastic")
    if s.data > 1:
        instead = f"use accumulate={s.data} strategy.data=1 to be elastic"
        raise ValueError(f"strategy.data={s.data} fits its multiples only; {instead}")


def fitted(config: Train, ranks: int) -> Train:
    """An elastic run on as many ranks as there are now: the largest part of its Ulysses size that divides them."""
    if config.cluster.at_least is None:
        return config
    s = config.strategy
    return dataclasses.replace(config, strategy=dataclasses.replace(s, ulysses=math.gcd(s.ulysses or ranks, ranks)))


def on_this_node(ray: Any, kind: type) -> Any:
    """An actor that lives where the driver does."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(kind).remote()


def attempt(task: dict[str, Any], gpus: bool) -> processes.RankError | None:
    """Train with as many attempts as failures are allowed; why the last one failed."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            """Ctrl-C stays with `stopping`: Ray's own handler would end the ranks before they save."""

    config, folder = task["config"], Path(task["folder"])
    c = config.cluster
    workers = ScalingConfig(
        num_workers=config.nproc if c.at_least is None else (c.at_least, config.nproc), use_gpu=gpus,
        placement_strategy=c.placement, elastic_resize_monitor_interval_s=c.resize_every,
    )  # fmt: skip
    failures = FailureConfig(max_failures=c.failures)
    run = RunConfig(name=folder.name, storage_path=str(folder.parent / ".ray"), failure_config=failures)
    meeting = joining(torchrun.backend(config.device), c.timeout)
    try:
        Trainer(one_rank, train_loop_config=task, torch_config=meeting, scaling_config=workers, run_config=run).fit()
    except TrainingFailedError as error:
        of_rank = getattr(error, "worker_failures", {})
        named = {rank: processes.RankError(rank, described(e)) for rank, e in of_rank.items()}
        return processes.root_cause(named) if named else processes.RankError(0, first_line(error))
    return None


def joining(backend: str, timeout: float) -> Any:
    """How Ray's workers become a process group: as Ray has them do it, but for where the store listens."""
    from ray.train.torch import config

    class Backend(config._TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            meeting = worker_group.execute_single(0, listen)
            worker_group.execute(config._set_torch_distributed_env_vars)
            worker_group.execute(join, meeting, backend, timeout)

    class Joining(config.TorchConfig):
        @property
        def backend_cls(self) -> type:
            return Backend

    return Joining(backend=backend, timeout_s=int(timeout))


listening: list[socket.socket] = []  # of rank 0, between `listen` and `join`


def listen() -> tuple[str, int]:
    """Where the ranks meet: at an address of this node, and on the loopback where that is what Ray uses."""
    import ray

    host = ray.util.get_node_ip_address()
    listening[:] = [torchrun.listener(host)]
    return host, listening[0].getsockname()[1]


def join(meeting: tuple[str, int], backend: str, timeout: float) -> None:
    """Join the process group of a run as the rank that Ray has given this worker."""
    rank, ranks, patience = torchrun.rank(), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting[0], str(meeting[1])
    store = torchrun.store(*meeting, ranks, patience, listening.pop() if rank == 0 else None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=patience)


def one_rank(task: dict[str, Any]) -> None:
    """One worker's whole run. A problem that only the user can fix goes to the board, and no attempt follows."""
    import ray

    from ringattn.launch.train.start import resolved

    board = task["board"]
    if ray.get(board.read.remote("problem")):
        return
    try:
        ranks = dist.get_world_size()
        config = resolved(fitted(task["config"], ranks), ranks)

        def should_stop() -> bool:
            return dist.get_rank() == 0 and bool(ray.get(board.read.remote("stopping"), timeout=60.0))

        summary = task["work"](config, task["folder"], task["started"], should_stop=should_stop)
    except Exception as error:
        ended = not dist.is_initialized()  # by Ray, in another thread: a peer died, and this error only follows from it
        if ended or processes.status(error) == processes.FAILED:
            raise
        ray.get(board.write.remote("problem", str(error)))
        if "nccl" in dist.get_backend_config():
            raise  # NCCL's peers would wait for this rank until their time is up
        dist.destroy_process_group()  # gloo's peers notice
        return
    if dist.get_rank() == 0:
        ray.get(board.write.remote("summary", summary))


@contextlib.contextmanager
def stopping(ask: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile a SIGTERM or Ctrl-C asks the ranks to save and end; a second Ctrl-C interrupts at once."""

    def handle(number: int, frame: Any) -> None:
        ask()
        signal.signal(signal.SIGINT, before.get(signal.SIGINT, signal.SIG_IGN))

    before = {s: signal.signal(s, handle) for s in processes.heard(signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def described(error: BaseException) -> str:
    """An error of a rank in one line; Ray wraps some, and adds a traceback."""
    error = getattr(error, "_base_exc", error)
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def jax_run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    address: str | None = None,
    resources: dict[str, float] | None = None,
    patience: float = 300.0,
) -> list[Any]:
    """`function(*args)` on every process of one JAX program, which Ray's nodes run; their results in order.

    Each process has the devices that jax finds with its resources ({"CPU": 1} by default; {"GPU": 8}, {"TPU": 4}).
    The first one that fails ends the others; so does `patience` seconds without all of them having met.
    """
    ray = connect(Train(nproc=ranks, cluster=Cluster(kind="ray", address=address)))
    wanted = {"CPU": 1.0, **(resources or {})}
    each = ", ".join(f"{name}={count:g}" for name, count in wanted.items())
    cpus, gpus = wanted.pop("CPU"), wanted.pop("GPU", 0)
    kind = ray.remote(num_cpus=cpus, num_gpus=gpus, resources=wanted)(JaxProcess)
    processes_ = [kind.remote() for _ in range(ranks)]
    try:
        meeting = ray.get(processes_[0].address.remote(), timeout=patience)
        waiting = {p.run.remote(meeting, r, ranks, patience, function, args): r for r, p in enumerate(processes_)}
        results: dict[int, Any] = {}
        while len(results) < ranks:
            for done in ray.wait([ref for ref, rank in waiting.items() if rank not in results])[0]:
                try:
                    results[waiting[done]] = ray.get(done)
                except Exception as error:
                    cause = getattr(error, "cause", None) or error
                    raise processes.RankError(waiting[done], described(cause), str(error)) from None
        return [results[rank] for rank in range(ranks)]
    except ray.exceptions.GetTimeoutError:
        raise processes.RankError(0, f"{ranks} processes with {each} each did not start in time") from None
    finally:
        for process in processes_:
            ray.kill(process)
        ray.shutdown()


class JaxProcess:
    """One process of a JAX program, as an actor."""

    def address(self) -> str:
        """Where the others meet it."""
        import ray

        host = ray.util.get_node_ip_address()
        with torchrun.listener(host) as s:
            return f"{host}:{s.getsockname()[1]}"

    def run(self, meeting: str, rank: int, ranks: int, patience: float, function: Callable[..., Any], args: Any) -> Any:
        import jax

        bound = meeting if torchrun.on_loopback(meeting.rpartition(":")[0]) else None
        jax.distributed.initialize(
            meeting, ranks, rank, initialization_timeout=int(patience), coordinator_bind_address=bound
        )
        return function(*args)
