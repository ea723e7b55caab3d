"""Say what this machine has, which kernels serve on it, whether ranks can talk, and what to do about what is missing.

Ends with status 1 if something that ringattn needs is broken. It starts two real processes that send each other
tensors (gloo, and NCCL where there are two GPUs), ended after timeout=SECONDS if they hang.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Literal, NamedTuple

import ringattn
from ringattn import kernels
from ringattn.launch import processes
from ringattn.launch.words import option

# What is tried: the oldest version that serves, the extra that installs it, and what it is for.
PACKAGES = {
    "torch": ((2, 11), "torch", "if you use PyTorch"),
    "triton": ((3, 6), "gpu", "GPU kernels (Linux)"),
    "jax": ((0, 10), "jax", "if you use JAX"),
}
HEAD_DIM = 128
ABSENT = "not installed"


@dataclass(frozen=True)
class Options:
    timeout: float = option(60.0, "seconds after which ranks that do not answer count as broken")


class Finding(NamedTuple):
    """One line of the report; `bad` is needed and broken, `none` is optional and absent."""

    state: Literal["ok", "none", "bad"]
    what: str
    detail: str
    remedy: str = ""


def run(options: Options) -> int:
    """Print every finding with its remedy as it is made; 1 if one of them is bad."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"ringattn {ringattn.__version__}, {machine}, Python {platform.python_version()} ({sys.executable})\n")
    bad = []
    for state, what, detail, remedy in examine(options):
        print(f"  {state:<5} {what:<12} {detail}" + (f"\n        -> {remedy}" if remedy else ""), flush=True)
        bad += [what] if state == "bad" else []
    print(f"\nbroken: {', '.join(bad)}" if bad else "\neverything that is needed works")
    return 1 if bad else 0


def examine(options: Options) -> Iterator[Finding]:
    """The checks in order; what the first ones find missing, the later ones leave out. One that breaks is a finding."""
    packages = {name: package(name, *about) for name, about in PACKAGES.items()}
    torch, jax = packages["torch"], packages["jax"]
    if torch.state != "ok" and (torch.detail != ABSENT or jax.state != "ok"):
        packages["torch"] = torch._replace(state="bad")  # only where jax works it may be absent
    yield from packages.values()
    checks: dict[str, Callable[[], list[Finding]]] = {}
    if torch.state == "ok":
        checks = {"gpu": gpus, "kernels": in_torch, "gloo": partial(talking, "gloo", options.timeout)}
        if import_module("torch").cuda.is_available():
            checks["nccl"] = partial(talking, "nccl", options.timeout)
    elif packages["torch"].state == "none":
        checks = {"devices": in_jax}
    for what, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding("bad", what, f"{type(error).__name__}: {error}", "this should not happen; please report it")


def package(name: str, oldest: tuple[int, ...], extra: str, use: str) -> Finding:
    """Whether a package can be imported, and is new enough; it is really imported, since broken ones exist."""
    try:
        version = metadata.version(name)
        import_module(name)
    except metadata.PackageNotFoundError:
        return Finding("none", name, ABSENT, f"pip install 'ringattn[{extra}]' ('.[{extra}]' in a checkout): {use}")
    except Exception as error:
        return Finding("bad", name, f"cannot be imported: {type(error).__name__}: {error}", f"reinstall {name}")
    if tuple(int(number) for number in version.split(".")[:2]) < oldest:
        return Finding("none", name, f"{version} is too old", f"pip install '{name}>={'.'.join(map(str, oldest))}'")
    return Finding("ok", name, version)


def gpus() -> list[Finding]:
    """Every kind of GPU."""
    import torch

    if torch.cuda.is_available():
        every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        kinds = [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in every]
        return [Finding("ok", "gpu", f"{kinds.count(kind)} x {kind}") for kind in dict.fromkeys(kinds)]
    if shutil.which("nvidia-smi") is None:
        return [Finding("none", "gpu", "not here; attention runs on the CPU")]
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    problem = f"nvidia-smi is here, and torch sees no GPU; torch {torch.__version__} is built for {built}"
    remedy = "install the torch build for this driver (nvidia-smi shows its CUDA version)"
    return [Finding("bad", "gpu", problem, remedy)]


def in_jax() -> list[Finding]:
    """JAX's devices, and which kernel serves there."""
    import jax

    from ringattn.comms.jax import generation
    from ringattn.kernels.attention import pallas

    device = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    devices = Finding("ok", "devices", f"{jax.device_count()} x {jax.devices()[0].device_kind}")
    return [devices, *served(device, generation() if device == "tpu" else None, pallas.TABLE)]


def in_torch() -> list[Finding]:
    """On each kind of device, which kernel serves."""
    import torch

    findings = served("cpu", None, kernels.TABLE)
    if torch.cuda.is_available():
        findings += served("cuda", torch.cuda.get_device_capability(), kernels.TABLE)
    return findings


def served(device: str, arch: tuple[int, int] | None, table: tuple[kernels.Kernel, ...]) -> list[Finding]:
    """Which kernel of the table serves a usual problem; why each other one does not, and what installing it gains."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    problem = kernels.Problem(device, dtype, HEAD_DIM, HEAD_DIM, heads=32, kv_heads=8, rectangles=True, arch=arch)
    asked = f"{device}, {dtype}, head dim {HEAD_DIM}"
    try:
        first = kernels.select(problem, table=table).name
        lines = [Finding("ok", "kernels", f"{first} serves {asked}")]
    except NotImplementedError:
        first = ""
        lines = [Finding("bad", "kernels", f"none serves {asked}", "the lines below show what each one lacks")]
    for kernel in table:
        why = kernels.gain(kernel, problem, first) or kernel.refuses(problem)
        slow = "would serve if named; slow here" if device in kernel.skipped_on else "would serve too"
        if kernel.name != first:
            lines.append(Finding("none" if why else "ok", f"  {kernel.name}", why or slow))
    return lines


def attended(ranks: int, device: str) -> float:
    """How far one attention over the ranks is off what float64 gives on one."""
    import torch

    from ringattn.comms.mesh import init_mesh

    plan = ringattn.plan(init_mesh(ring=ranks, device_type=device), seq_len=61)
    torch.manual_seed(0)  # the same on every rank
    whole = [torch.randn(1, 61, heads, 16) for heads in (4, 2, 2)]
    q, k, v = (plan.shard(x.to(device)) for x in whole)
    out = plan.unshard(ringattn.attention(q, k, v, plan))
    q, k, v = (x.double() for x in whole)
    return float((out.cpu() - ringattn.attention(q, k, v)).abs().max())


def talking(backend: str, timeout: float, ranks: int = 2) -> list[Finding]:
    """Real processes compute one attention together and must get what float64 gives."""
    import torch

    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda" and torch.cuda.device_count() < ranks:
        return [Finding("ok", backend, f"not tried, {ranks} ranks need as many GPUs")]
    try:
        worst = max(processes.run(attended, ranks, ranks, device, backend=backend, timeout=timeout))
    except processes.RankError as error:
        remedy = {
            "gloo": "ranks find each other by the host's name: try GLOO_SOCKET_IFNAME=lo, and check /etc/hosts",
            "nccl": "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 shows whether the links are at fault",
        }[backend]
        problem = f"{ranks} ranks do not work together: rank {error.rank}: {error.summary}"
        return [Finding("bad", backend, problem, remedy)]
    detail = f"{ranks} processes compute one attention together, off by {worst:.0e}"
    if worst > 1e-5:
        return [Finding("bad", backend, detail, "run ringattn verify to see which results are off")]
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "GLOO_"))]
    return [Finding("ok", backend, "; ".join([detail, *settings]))]
