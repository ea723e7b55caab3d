"""The ranks of a run as Ray's workers: placed on its nodes, started again when one fails.

Ray only starts things. Weights and the place in the data come back from the run's own checkpoints, which lie on storage
that all nodes see. By a store that the driver serves the ranks tell a problem and the summary of rank 0, and the driver
the request to stop.
"""

import dataclasses
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.conf.schema import Train
from ringattn.launch import processes
from ringattn.launch.train.configured import new_folder, resolved

# What of the driver's environment is passed on to every rank, by how its name begins.
PASSED_ON = ("GLOO_", "JAX_", "NCCL_", "OMP_", "PYTHONPATH", "TORCH_", "XLA_")


def fit(config: Train, work: Callable[..., Any]) -> tuple[dict[str, Any], Path]:
    """Run `work` on Ray's workers until it ends; returns the summary of rank 0, and the run's folder."""
    ray = connect(config.cluster.address)
    try:
        config = sized(config, ray.cluster_resources())
        folder, host = new_folder(config).absolute(), ray.util.get_node_ip_address()
        store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
        task = {"config": config, "work": work, "folder": str(folder), "started": time.time()}
        with processes.handling(lambda *_: store.set("stopping", ""), signal.SIGTERM, signal.SIGINT):
            failure = attempts({**task, "store": (host, store.port)})
        if store.check(["problem"]):
            raise ValueError(store.get("problem").decode())
        if failure:
            raise failure
        return json.loads(store.get("summary")), folder
    finally:
        ray.shutdown()


def connect(address: str | None) -> Any:
    """Ray, connected: to the cluster that is named, or that of the job this is, or the one that runs here."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    try:
        import ray

        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        ray.init(address, runtime_env={"env_vars": passed}, logging_level=logging.WARNING)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cluster.address={address}: {described(error)}; is the cluster up (ray start --head), and is the token "
            "in RAY_AUTH_TOKEN or ~/.ray/auth_token the cluster's?"
        ) from None
    return ray


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
    from ray.train.torch import TorchConfig, TorchTrainer

    class Trainer(TorchTrainer):
        def _register_sigint_handler(self, controller: Any) -> None:
            """Ctrl-C asks the ranks to save and end: Ray's own handler would end them before that."""

    config, folder = task["config"], Path(task["folder"])
    group = TorchConfig(processes.BACKENDS[config.device], timeout_s=config.cluster.timeout)
    workers = ScalingConfig(
        num_workers=config.nproc, use_gpu=config.device == "cuda", placement_strategy=config.cluster.placement
    )
    failures = FailureConfig(max_failures=config.cluster.failures)
    run = RunConfig(name=folder.name, storage_path=str(folder.parent / ".ray"), failure_config=failures)
    try:
        Trainer(one_rank, train_loop_config=task, torch_config=group, scaling_config=workers, run_config=run).fit()
    except TrainingFailedError as error:
        of_rank = getattr(error, "worker_failures", {0: error})
        return processes.root_cause({rank: processes.RankError(rank, described(e)) for rank, e in of_rank.items()})
    return None


def one_rank(task: dict[str, Any]) -> None:
    """One worker's whole run. A problem that only the user can fix goes to the driver, and no attempt follows."""
    config, (host, port), rank0 = task["config"], task["store"], dist.get_rank() == 0
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=config.cluster.timeout), wait_for_workers=False)
    if store.check(["problem"]):
        return
    try:
        stop = partial(store.check, ["stopping"]) if rank0 else None
        summary = task["work"](config, task["folder"], task["started"], should_stop=stop)
    except Exception as error:
        ended = not dist.is_initialized()  # by Ray, in another thread: a peer died, and this error only follows from it
        if ended or processes.status(error) == processes.FAILED:
            raise
        store.set("problem", str(error))
        if config.device == "cuda":
            raise  # NCCL's peers would wait for this rank until their time is up
        dist.destroy_process_group()  # gloo's peers notice
        return
    if rank0:
        store.set("summary", json.dumps(summary))


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
    ray = connect(address)
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

        with socket.create_server(("", 0)) as free:
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, meeting: str, rank: int, ranks: int, patience: float, function: Callable[..., Any], args: Any) -> Any:
        import jax

        jax.distributed.initialize(meeting, ranks, rank, initialization_timeout=int(patience))
        return function(*args)
