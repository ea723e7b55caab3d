"""`make test-hosts`: every route between two hosts with slow links, on one machine.

Two network namespaces, each with a host name of its own, are joined by a link of 100 Mbit/s; torchrun starts four ranks
in each. Every route must equal dense float64 attention on every rank. The two-level route must be the fastest ring, and
plans must choose it by themselves. Needs Linux, root and iproute2; takes two minutes.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOSTS = (("ringattn-a", "10.213.77.1"), ("ringattn-b", "10.213.77.2"))
RANKS, PORT = 4, 29571  # of a host
LINK = ["tbf", "rate", "100mbit", "burst", "256kb", "latency", "200ms"]
TOKENS = 4096
WAYS: dict[str, dict[str, Any]] = {
    "relay": {"ring": 8, "route": "relay"},
    "direct": {"ring": 8, "route": "direct"},
    "levels": {"ring": 8, "route": "levels", "hosts": 2},
    "gather": {"ring": 8, "strategy": "gather"},
    "hybrid": {"ring": 2, "ulysses": 4},
}
MOST = 1e-5  # relative error in float32


def main() -> int:
    if len(sys.argv) > 1:
        return worker()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        print(
            "make test-hosts makes network namespaces: it needs Linux, root, iproute2 and util-linux", file=sys.stderr
        )
        return 2
    try:
        join()
        started = [start(number) for number in range(len(HOSTS))]
        return max(abs(process.wait(300)) for process in started)
    finally:
        for name, _ in HOSTS:
            subprocess.run(f"ip netns pids {name} | xargs -r kill -9; ip netns del {name}", shell=True, check=False)


def join() -> None:
    """Both hosts, and the link between them."""
    for name, _ in HOSTS:
        call("ip", "netns", "add", name)
    (a, _), (b, _) = HOSTS
    call("ip", "link", "add", "veth0", "netns", a, "type", "veth", "peer", "name", "veth0", "netns", b)
    for name, address in HOSTS:
        inside = ("ip", "-n", name)
        call(*inside, "addr", "add", f"{address}/24", "dev", "veth0")
        call(*inside, "link", "set", "lo", "up")
        call(*inside, "link", "set", "veth0", "up")
        call("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", *LINK)


def call(*words: str) -> None:
    subprocess.run(words, check=True)


def start(number: int) -> "subprocess.Popen[bytes]":
    """torchrun on one of the hosts."""
    name, _ = HOSTS[number]
    words = (
        "-m", "torch.distributed.run", "--nnodes", str(len(HOSTS)), "--node-rank", str(number),
        "--nproc-per-node", str(RANKS), "--master-addr", HOSTS[0][1], "--master-port", str(PORT),
        str(Path(__file__)), "worker",
    )  # fmt: skip
    inside = f'hostname {name} && exec "$0" "$@"'
    where = {**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "TP_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": str(ROOT)}  # fmt: skip
    return subprocess.Popen(
        ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside, sys.executable, *words), env=where
    )


def worker() -> int:
    """One rank: every way is compared with dense float64, then timed."""
    import torch
    import torch.distributed as dist

    import ringattn as ra
    from ringattn.launch.verify import oracle
    from ringattn.launch.verify.cases import FEATURES

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    meshes = {sizes: ra.init_mesh(ring=sizes[0], ulysses=sizes[1]) for sizes in ((8, 1), (2, 4))}
    if rank == 0:
        print("way      error     forward s  backward s", flush=True)
    seconds: dict[str, tuple[float, float]] = {}
    problems: list[str] = []
    for way, how in WAYS.items():
        sizes = how["ring"], how.get("ulysses", 1)
        choices = {name: value for name, value in how.items() if name in ("route", "hosts")}
        worst = 0.0
        for case in FEATURES:
            if case.name not in ("causal", "window", "docs_rows", "cross", "all_at_once"):
                continue
            case = replace(case, ring=sizes[0], ulysses=sizes[1], strategy=how.get("strategy", "ring"))
            given = oracle.inputs(case, torch.float32)
            found = oracle.run(case, meshes[sizes], given, **choices)
            truth = oracle.dense(case, given)
            worst = max([worst, *oracle.errors(case, meshes[sizes], found, truth).values()])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, worst)
        seconds[way] = timed(ra.plan(
            meshes[sizes], seq_len=TOKENS, strategy=how.get("strategy", "ring"), layout="zigzag",
            transport=ra.Transport(**choices),
        ))  # fmt: skip
        if rank == 0:
            print(f"{way:<8} {max(every):.1e} {seconds[way][0]:11.2f} {seconds[way][1]:11.2f}", flush=True)
        if max(every) > MOST:
            problems.append(f"{way}: off by {max(every):.1e} from dense float64, at most {MOST:.0e} is right")
    taken = ra.plan(meshes[8, 1], seq_len=TOKENS, strategy="ring").transport
    if (taken.route, taken.hosts) != ("levels", 2):
        problems.append(f"a plan took {taken} by itself; between two hosts it is route='levels', hosts=2")
    for i, mode in enumerate(("forward", "backward")):
        best = min(seconds[way][i] for way in ("relay", "direct"))
        if seconds["levels"][i] > best:
            problems.append(f"levels took {seconds['levels'][i]:.2f} s {mode}, the fastest of the others {best:.2f} s")
    if rank == 0 and problems:
        print("\n".join(problems), file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(problems))


def timed(plan: Any) -> tuple[float, float]:
    """Seconds forward and backward of the slowest rank, the mean of two."""
    import torch
    import torch.distributed as dist

    import ringattn as ra

    q, k, v = (torch.randn(1, plan.local_len, 8, 64, requires_grad=True) for _ in range(3))
    found = []
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        out = ra.attention(q, k, v, plan)
        dist.barrier()
        half = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        dist.barrier()
        found.append((half - begun, time.perf_counter() - half))
    forward, backward = zip(*found[1:], strict=True)
    times = torch.tensor([statistics.median(forward), statistics.median(backward)])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times[0]), float(times[1])


if __name__ == "__main__":
    sys.exit(main())
