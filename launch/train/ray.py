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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.conf.schema import Train
from ringattn.launch import processes
from ringattn.launch.train import torchrun
from ringattn.launch.train.configured import new_folder, resolved

# What of the driver's environment is passed on to every rank, by how its name begins.
PASSED_ON = ("GLOO_", "JAX_", "NCCL_", "OMP_", "PYTHONPATH", "TORCH_", "XLA_")


def fit(config: Train, work: Callable[..., Any]) -> tuple[dict[str, Any], Path]:
    """Run `work` on Ray's workers until it ends; returns the summary of rank 0, and the run's folder."""
    ray = connect(config.cluster.address, config.nproc or 2)
    try:
        config = sized(config, ray.cluster_resources())
        folder, host = new_folder(config).absolute(), ray.util.get_node_ip_address()
        listening = listener(host)  # torch alone would listen on all interfaces
        meeting, descriptor = (host, listening.getsockname()[1]), listening.detach()
        store = dist.TCPStore(*meeting, None, True, wait_for_workers=False, master_listen_fd=descriptor)
        task = {"config": config, "work": work, "folder": str(folder), "started": time.time()}
        with processes.handling(lambda *_: store.set("stopping", ""), signal.SIGTERM, signal.SIGINT):
            failure = attempts({**task, "store": meeting})
        if store.check(["problem"]):
            raise ValueError(store.get("problem").decode())
        if failure:
            raise failure
        return json.loads(store.get("summary")), folder
    finally:
        ray.shutdown()


def connect(address: str | None, ranks: int) -> Any:
    """Ray, connected: to the cluster that is named, to that of the job this is, or to one started for these ranks."""
    address = address or os.environ.get("RAY_ADDRESS")
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    where: dict[str, Any] = {"address": address}
    if address is None:  # read when ray is imported: no server of this cluster listens beyond this machine
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends no statistics
        passed.setdefault("GLOO_SOCKET_IFNAME", torchrun.LOOPBACK)
        keep_token_private()
        where = {"num_cpus": max(ranks, os.cpu_count() or 1)}
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
    config, cpus = resolved(config, None, int(cluster.get("GPU", 0))), int(cluster.get("CPU", 0))
    if config.device == "cpu" and cpus < (config.nproc or 1):
        raise ValueError(f"nproc={config.nproc} ranks need a CPU each, and Ray has {cpus}; use nproc={cpus}")
    data, resume = config.data, config.resume
    if data.path != "stdlib":
        data = dataclasses.replace(data, path=str(Path(data.path).expanduser().absolute()))
    if resume not in (None, "auto"):
        resume = str(Path(resume).absolute())
    return dataclasses.replace(config, data=data, resume=resume)


def attempts(task: dict[str, Any]) -> processes.RankError | None:
    """Train with as many attempts as failures are allowed; why the last one failed."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            """Ctrl-C asks the ranks to save and end: Ray's own handler would end them before that."""

    class NoGroup(Backend):
        """The ranks make their group at the driver's store: Ray's own store would listen on all interfaces."""

        share_cuda_visible_devices = True

    class Meeting(TorchConfig):
        backend_cls = NoGroup

    config, folder = task["config"], Path(task["folder"])
    workers = ScalingConfig(
        num_workers=config.nproc, use_gpu=config.device == "cuda", placement_strategy=config.cluster.placement
    )
    failures = FailureConfig(max_failures=config.cluster.failures)
    run = RunConfig(name=folder.name, storage_path=str(folder.parent / ".ray"), failure_config=failures)
    try:
        Trainer(one_rank, train_loop_config=task, torch_config=Meeting(), scaling_config=workers, run_config=run).fit()
    except TrainingFailedError as error:
        of_rank = getattr(error, "worker_failures", {0: error})
        return processes.root_cause({rank: processes.RankError(rank, described(e)) for rank, e in of_rank.items()})
    return None


def one_rank(task: dict[str, Any]) -> None:
    """One worker's whole run. A problem that only the user can fix goes to the driver, and no attempt follows."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    config, (host, port), ray = task["config"], task["store"], get_context()
    patience, rank0 = timedelta(seconds=config.cluster.timeout), ray.get_world_rank() == 0
    store = dist.TCPStore(host, port, timeout=patience, wait_for_workers=False)
    if store.check(["problem"]):
        return
    attempt = dist.PrefixStore(broadcast_from_rank_zero(secrets.token_hex(8)), store)
    dist.init_process_group(
        processes.BACKENDS[config.device], store=attempt, rank=ray.get_world_rank(), world_size=ray.get_world_size(),
        timeout=patience,
    )  # fmt: skip
    os.environ["LOCAL_WORLD_SIZE"] = str(ray.get_local_world_size())
    try:
        stop = partial(store.check, ["stopping"]) if rank0 else None
        summary = task["work"](config, task["folder"], task["started"], should_stop=stop)
    except Exception as error:
        if processes.status(error) == processes.FAILED:
            raise
        store.set("problem", str(error))
        if config.device == "cuda":
            raise  # NCCL's peers would wait for this rank until their time is up
        dist.destroy_process_group()  # gloo's peers notice
        return
    if rank0:
        store.set("summary", json.dumps(summary))


def on_loopback(host: str) -> bool:
    """Whether this address is reachable only from this machine."""
    return host == "localhost" or host.strip("[]") == "::1" or host.startswith("127.")


def listener(host: str) -> socket.socket:
    """A socket that listens at a free port: on the loopback where that is the host, else on all interfaces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host if on_loopback(host) else "", 0), family=family)


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
    ray = connect(address, ranks)
    wanted = {"CPU": 1.0, **(resources or {})}
    cpus, gpus = wanted.pop("CPU"), wanted.pop("GPU", 0)
    kind = ray.remote(num_cpus=cpus, num_gpus=gpus, resources=wanted)(JaxProcess)
    actors = [kind.remote() for _ in range(ranks)]
    try:
        meeting = ray.get(actors[0].address.remote(), timeout=patience)
        running = {a.run.remote(meeting, rank, ranks, patience, function, args): rank for rank, a in enumerate(actors)}
        results: dict[int, Any] = {}
        while running:
            (done,), _ = ray.wait([*running])
            rank = running.pop(done)
            try:
                results[rank] = ray.get(done)
            except Exception as error:
                cause = getattr(error, "cause", None) or error
                raise processes.RankError(rank, described(cause), str(error)) from None
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
        with listener(host) as free:
            return f"{host}:{free.getsockname()[1]}"

    def run(self, meeting: str, rank: int, ranks: int, patience: float, function: Callable[..., Any], args: Any) -> Any:
        import jax

        bound = meeting if on_loopback(meeting.rpartition(":")[0]) else None
        jax.distributed.initialize(
            meeting, ranks, rank, initialization_timeout=int(patience), coordinator_bind_address=bound
        )
        return function(*args)
