"""The ranks of a run as Ray's workers: placed on its nodes, started again when one fails.

Ray only starts things. Weights and the place in the data come back from the run's own checkpoints, which lie on storage
that all nodes see. The driver serves the store where the ranks of each attempt meet; by it the ranks tell a problem and
the summary of rank 0, and the driver the request to stop.
"""

import contextlib
import dataclasses
import json
import logging
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

from ringattn.conf.schema import Cluster, Train
from ringattn.launch import processes
from ringattn.launch.train import torchrun
from ringattn.launch.train.configured import new_folder, resolved

# What of the driver's environment is passed on to every rank, by how its name begins.
PASSED_ON = ("GLOO_", "JAX_", "NCCL_", "OMP_", "PYTHONPATH", "TORCH_", "XLA_")


def fit(config: Train, work: Callable[..., Any]) -> tuple[dict[str, Any], Path]:
    """Run `work` on Ray's workers until it ends; returns the summary of rank 0, and the run's folder."""
    ray = connect(config)
    try:
        config = sized(config, ray.cluster_resources())
        folder, host = new_folder(config).absolute(), ray.util.get_node_ip_address()
        listening = listener(host)
        meeting = host, listening.getsockname()[1]
        store = store_at(*meeting, timedelta(seconds=config.cluster.timeout), listening)
        task = {"config": config, "work": work, "folder": str(folder), "started": time.time(), "meeting": meeting}
        with stopping(lambda: store.set("stopping", "")):
            failure = attempts(task)
        if store.check(["problem"]):
            raise ValueError(store.get("problem").decode())
        if not store.check(["summary"]):
            raise failure or processes.RankError(0, "ended without a word")
        return json.loads(store.get("summary")), folder
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

        host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        ray.init(**where, runtime_env={"env_vars": passed}, logging_level=logging.WARNING)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cluster.address={address}: {described(error)}; is the cluster up (ray start --head), and is the token "
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


def sized(config: Train, cluster: dict[str, float]) -> Train:
    """How many ranks, on what, from what the cluster has; with paths that hold on every node."""
    gpus = int(cluster.get("GPU", 0))
    device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    ranks = config.nproc or (gpus if device == "cuda" else 2)
    have, kind = (gpus, "GPU") if device == "cuda" else (int(cluster.get("CPU", 0)), "CPU")
    if have < ranks:
        raise ValueError(f"nproc={ranks} ranks need a {kind} each, and Ray has {have}; use nproc={have}, or add nodes")
    data, resume = config.data, config.resume
    if data.path != "stdlib":
        data = dataclasses.replace(data, path=str(Path(data.path).expanduser().absolute()))
    if resume not in (None, "auto"):
        resume = str(Path(resume).absolute())
    return dataclasses.replace(config, nproc=ranks, device=device, data=data, resume=resume)


def attempts(task: dict[str, Any]) -> processes.RankError | None:
    """Train with as many attempts as failures are allowed; why the last one failed."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            """Ctrl-C stays with `stopping`: Ray's own handler would end the ranks before they save."""

    class Backend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            """The variables of torchrun, and no process group: a rank joins its own at the driver's store."""
            worker_group.execute(_set_torch_distributed_env_vars)

    class Joining(TorchConfig):
        backend_cls = Backend

    config, folder = task["config"], Path(task["folder"])
    workers = ScalingConfig(
        num_workers=config.nproc, use_gpu=config.device == "cuda", placement_strategy=config.cluster.placement
    )
    failures = FailureConfig(max_failures=config.cluster.failures)
    run = RunConfig(name=folder.name, storage_path=str(folder.parent / ".ray"), failure_config=failures)
    try:
        Trainer(one_rank, train_loop_config=task, torch_config=Joining(), scaling_config=workers, run_config=run).fit()
    except TrainingFailedError as error:
        of_rank = getattr(error, "worker_failures", {})
        named = {rank: processes.RankError(rank, described(e)) for rank, e in of_rank.items()}
        return processes.root_cause(named) if named else processes.RankError(0, described(error))
    return None


def one_rank(task: dict[str, Any]) -> None:
    """One worker's whole run. A problem that only the user can fix goes to the driver, and no attempt follows."""
    from ray.train.collective import broadcast_from_rank_zero

    patience, ranks = timedelta(seconds=task["config"].cluster.timeout), int(os.environ["WORLD_SIZE"])
    host, port = task["meeting"]
    store = store_at(host, port, patience)
    if store.check(["problem"]):
        return
    attempt = dist.PrefixStore(broadcast_from_rank_zero(secrets.token_hex(8)), store)
    kind = torchrun.backend(task["config"].device)
    dist.init_process_group(kind, store=attempt, rank=torchrun.rank(), world_size=ranks, timeout=patience)

    def should_stop() -> bool:
        return dist.get_rank() == 0 and store.check(["stopping"])

    try:
        config = resolved(task["config"], ranks)
        summary = task["work"](config, task["folder"], task["started"], should_stop=should_stop)
    except Exception as error:
        ended = not dist.is_initialized()  # by Ray, in another thread: a peer died, and this error only follows from it
        if ended or processes.status(error) == processes.FAILED:
            raise
        store.set("problem", str(error))
        if "nccl" in kind:
            raise  # NCCL's peers would wait for this rank until their time is up
        dist.destroy_process_group()  # gloo's peers notice
        return
    if dist.get_rank() == 0:
        store.set("summary", json.dumps(summary))


@contextlib.contextmanager
def stopping(ask: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile a SIGTERM or Ctrl-C asks the ranks to save and end; a second Ctrl-C interrupts at once."""

    def handle(number: int, frame: Any) -> None:
        ask()
        signal.signal(signal.SIGINT, before.get(signal.SIGINT, signal.SIG_IGN))

    with processes.handling(handle, signal.SIGTERM, signal.SIGINT) as before:
        yield


def on_loopback(host: str) -> bool:
    """Whether this address is reachable only from this machine."""
    return host == "localhost" or host.strip("[]") == "::1" or host.startswith("127.")


def listener(host: str) -> socket.socket:
    """A socket that listens at a free port: on the loopback where that is the host, else on all interfaces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host if on_loopback(host) else "", 0), family=family)


def store_at(host: str, port: int, timeout: timedelta, served: socket.socket | None = None) -> Any:
    """The meeting place's store. Who is given a socket serves it there; torch alone takes all interfaces."""
    descriptor = None if served is None else served.detach()
    return dist.TCPStore(
        host, port, None, descriptor is not None, timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def described(error: BaseException) -> str:
    """An error of a rank in one line; Ray wraps some, and adds a traceback."""
    error = getattr(error, "_base_exc", error)
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"


def jax_run(
    function: Callable[..., Any], ranks: int, *args: Any, address: str | None = None,
    resources: dict[str, float] | None = None, patience: float = 300.0,
) -> list[Any]:  # fmt: skip
    """`function(*args)` on every process of one JAX program, which Ray's nodes run; their results in order.

    Each process has the devices that jax finds with its resources ({"CPU": 1} by default; {"GPU": 8}, {"TPU": 4}).
    The first one that fails ends the others; so does `patience` seconds without all of them having met.
    """
    ray = connect(Train(nproc=ranks, cluster=Cluster(kind="ray", address=address)))
    wanted = {"CPU": 1.0, **(resources or {})}
    cpus, gpus = wanted.pop("CPU"), wanted.pop("GPU", 0)
    kind = ray.remote(num_cpus=cpus, num_gpus=gpus, resources=wanted)(JaxProcess)
    actors = [kind.remote() for _ in range(ranks)]
    try:
        meeting = ray.get(actors[0].address.remote(), timeout=patience)
        running = {a.run.remote(meeting, rank, ranks, patience, function, args): rank for rank, a in enumerate(actors)}
        results: dict[int, Any] = {}
        while len(results) < ranks:
            for done in ray.wait([ref for ref, rank in running.items() if rank not in results])[0]:
                try:
                    results[running[done]] = ray.get(done)
                except Exception as error:
                    cause = getattr(error, "cause", None) or error
                    raise processes.RankError(running[done], described(cause), str(error)) from None
        return [results[rank] for rank in range(ranks)]
    except ray.exceptions.GetTimeoutError:
        raise processes.RankError(0, f"{ranks} processes did not start in time; has Ray room for them?") from None
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


class JaxProcess:
    """One process of a JAX program, as an actor."""

    def address(self) -> str:
        """Where the others meet it."""
        import ray

        host = ray.util.get_node_ip_address()
        with listener(host) as s:
            return f"{host}:{s.getsockname()[1]}"

    def run(self, meeting: str, rank: int, ranks: int, patience: float, function: Callable[..., Any], args: Any) -> Any:
        import jax

        bound = meeting if on_loopback(meeting.rpartition(":")[0]) else None
        jax.distributed.initialize(
            meeting, ranks, rank, initialization_timeout=int(patience), coordinator_bind_address=bound
        )
        return function(*args)
