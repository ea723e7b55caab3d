"""Set up before anything imports triton: without a GPU its kernels run in the interpreter."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import forkserver
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

flags = "--xla_force_host_platform_device_count=8"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a TPU's compiler may be installed where no TPU is
    flags += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # programs run once
    if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):  # later ones have no such flag, and end
        flags += " --xla_cpu_use_fusion_emitters=false"  # with them it compiles for twice as long
os.environ.setdefault("XLA_FLAGS", flags)

SHARED = ["ringattn.launch.processes"]  # what many tests' ranks import
if not torch.cuda.is_available():  # transformers asks CUDA for its devices, which no rank that is forked then can use
    SHARED.append("transformers.models.llama.modeling_llama")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script starts with it ignored
settings.register_profile("ringattn", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("ringattn")
torch.set_num_threads(1)
if not torch.cuda.is_available():  # in torch 2.11 the guard of fake CUDA tensors dies with the thread that made it
    torch._C._ensureCUDADeviceGuardSet()


@pytest.fixture
def fresh_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`change(module, attend=...)`: a kernel with other functions, which calls look up once."""
    from ringattn.torch.attention.steps import score_with

    def change(module: Any, **functions: Any) -> None:
        monkeypatch.setattr(module, "KERNEL", replace(module.KERNEL, **functions))

    score_with.cache_clear()
    yield change
    score_with.cache_clear()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Several workers: each starts the server that forks ranks, which imports what they share."""
    if hasattr(session.config, "workerinput"):
        from ringattn.launch.train.torchrun import PRELOAD

        multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *SHARED])
        kept = os.dup(1), os.dup(2)
        with open(os.devnull, "w") as nowhere:  # what ranks print is nobody's: they are forked from here on
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        forkserver.ensure_running()
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with its share of the slow tests, so that none of them waits for one at the end."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    kinds = [[item for item in items if ("slow" in item.keywords) == slow] for slow in (True, False)]
    items[:] = [
        item
        for i in range(workers)
        for kind in kinds
        for item in kind[i * len(kind) // workers : (i + 1) * len(kind) // workers]
    ]
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
