"""A script for torchrun on ranks that are forked here, with the environment of torchrun, in a fraction of its time."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE = 600.0  # seconds


def launched(script: Path, words: list[str], ranks: int, folder: Path, debug: bool = True, **more: Any) -> str:
    """What all ranks print, with errors; an AssertionError if one of them fails. In `folder`; no GPU is seen.

    `more` are further variables of the environment, or other values.
    """
    # as torchrun's agent does, this process serves the store
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    context, output = multiprocessing.get_context("forkserver"), folder / "output.txt"
    processes = []
    for rank in range(ranks):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
                       "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1, **more}  # fmt: skip
        given = (str(script), words, {name: str(value) for name, value in environment.items()}, str(output), debug)
        processes.append(context.Process(target=as_rank, args=given, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    text = output.read_bytes().decode(errors="surrogateescape")
    assert [process.exitcode for process in processes] == [0] * ranks, text[-4000:]
    return text


def as_rank(script: str, words: list[str], environment: dict[str, str], output: str, debug: bool) -> None:
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    if not debug:
        dist.set_debug_level(dist.DebugLevel.OFF)
    os.chdir(Path(output).parent)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))  # as Python does
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def as_users_have_it(function: Callable[..., Any], *args: Any) -> Any:
    """On a rank: `function(*args)` over groups without CI's TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Under DETAIL hops take a twin of each.
    """
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"joined {rank}", "")  # a rank that leaves while another one still connects ends that one
    store.wait([f"joined {other}" for other in range(ranks)])
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)
    return function(*args)
