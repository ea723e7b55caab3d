"""`make test-hosts`: two and four hosts with slow links, on one machine.

Hosts are network namespaces, each with a host name of its own, that a bridge joins; what leaves a host passes a link
of so many Mbit/s. torchrun starts two ranks in each. There `ringattn verify` must pass, which draws every strategy and
route. Then this machine is calibrated, and of a few settings every candidate is measured beside what was
predicted of it: nine of ten plans must be within 10% of the fastest. The links are so slow that they
decide: eight ranks compute on whatever cores there are. Needs Linux, root and iproute2; takes half an hour.

Words choose a part, and a file to which rows are appended: `tests/hosts.py hosts=4 speeds=25,50 out=FILE`. With
`make`: `make test-hosts ARGS='hosts=2 speeds=50'`. `tests/hosts.py --help` lists them. A row has what was calibrated,
so that its candidate can be predicted and simulated again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.comms import messages
from ringattn.launch import words
from ringattn.launch.bench import plans
from ringattn.launch.commands import calibrate
from ringattn.launch.rows import Row, read, table
from ringattn.launch.words import option
from ringattn.plans.machine import Machine

ROOT = Path(__file__).parent.parent
BRIDGE, PREFIX = "ringattn-switch", "ringattn-host"
RANKS, PORT = 2, 29571  # of a host
HEAD_DIM = 32


@dataclass
class Options:
    hosts: list[int] = option([2, 4], "how many hosts there are, one count after the other", least=2)
    speeds: list[int] = option([12, 25, 50], "Mbit/s that leave a host")
    settings: list[str] = option(["auto/2048/8/8/causal", "auto/4096/8/8/512"], "those of ringattn bench plans")
    out: str | None = option(None, "a file to which rows are appended")


def run(options: Options) -> int:
    plans_options(2, options.settings)  # refuses wrong words
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        raise ValueError("this makes network namespaces: it needs Linux, root, iproute2 and util-linux")
    with tempfile.TemporaryDirectory() as folder:
        rows = words.writable(Path(options.out or f"{folder}/rows.jsonl").absolute())
        earlier = len(read(rows)) if rows.is_file() else 0
        for hosts in options.hosts:
            try:
                join(hosts)
                measure = (str(Path(__file__)), "worker", f"speeds={words.show(options.speeds)}",
                           f"settings={words.show(options.settings)}", f"out={rows}")  # fmt: skip
                for command in (("-m", "ringattn", "verify", "random=60"), measure):
                    started = [start(number, hosts, command) for number in range(hosts)]
                    seconds = 600 + 200 * len(options.speeds) * len(options.settings)
                    if worst := max(abs(process.wait(seconds)) for process in started):
                        return worst
            finally:
                for name in (*(f"{PREFIX}{n}" for n in range(hosts)), BRIDGE):
                    ending = f"ip netns pids {name} | xargs -r kill -9; ip netns del {name}"
                    subprocess.run(ending, shell=True, check=False)
        return judged(read(rows)[earlier:])


def judged(rows: list[Row]) -> int:
    """Show all rows; nine of ten plans must be within 10% of the fastest candidate."""
    print(table(rows, ["hosts", "mbit", *plans.COLUMNS]))
    print(plans.summary(rows))
    chosen = [row["of_best"] for row in rows if row["pick"] and row["mode"] == plans.MODES[-1]]
    return int(sum(x > 1.1 for x in chosen) > len(chosen) // 10)


def join(hosts: int) -> None:
    """The hosts, the bridge between them, and a link from each to it."""
    call("ip", "netns", "add", BRIDGE)
    call("ip", "-n", BRIDGE, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", BRIDGE, "link", "set", "bridge", "up")
    for n in range(hosts):
        name = f"{PREFIX}{n}"
        call("ip", "netns", "add", name)
        call("ip", "link", "add", "veth0", "netns", name, "type", "veth", "peer", "name", f"port{n}", "netns", BRIDGE)
        call("ip", "-n", BRIDGE, "link", "set", f"port{n}", "master", "bridge", "up")
        call("ip", "-n", name, "addr", "add", f"10.213.77.{n + 1}/24", "dev", "veth0")
        for link in ("lo", "veth0"):
            call("ip", "-n", name, "link", "set", link, "up")


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def limit(speed: int) -> None:
    """Let so many Mbit/s leave the host that this process runs in."""
    link = ("tbf", "rate", f"{speed}mbit", "burst", "32kb", "latency", "4s")  # a queue that drops next to nothing
    call("tc", "qdisc", "replace", "dev", "veth0", "root", *link)


def start(number: int, hosts: int, what: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    """torchrun on one of the hosts."""
    name = f"{PREFIX}{number}"
    command = (
        "-m", "torch.distributed.run", "--nnodes", str(hosts), "--node-rank", str(number),
        "--nproc-per-node", str(RANKS), "--master-addr", "10.213.77.1", "--master-port", str(PORT),
        *what,
    )  # fmt: skip
    inside = f'hostname {name} && exec "$0" "$@"'
    where = {**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "TP_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": str(ROOT)}  # fmt: skip
    return subprocess.Popen(
        ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside, sys.executable, *command), env=where
    )


def worker(options: Options) -> int:
    """One rank: every way is exact; then all candidates at every speed."""
    dist.init_process_group("gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    rows: list[Row] = []
    for speed in options.speeds:
        if int(os.environ["LOCAL_RANK"]) == 0:
            limit(speed)
        dist.barrier()
        about = {"hosts": ranks // RANKS, "mbit": speed}
        for row in candidates(ranks, options.settings):
            rows.append(plans.finished(about | row, [r for r in rows if r["mbit"] == speed]))
            if first:
                with open(str(options.out), "a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def candidates(ranks: int, settings: list[str]) -> Iterator[Row]:
    """The rows of all settings, with the time of the slowest rank, on the machine as calibrated just now."""
    machine = calibrate.among_ranks("cpu", HEAD_DIM)
    for row in plans.measured(plans_options(ranks, settings), machine):
        every = messages.gather(row["ms"])
        yield row | {"ms": max(every), "calibrated": calibrated(machine)}


def plans_options(ranks: int, settings: list[str]) -> plans.Options:
    return plans.Options(ranks=ranks, settings=settings, head_dim=HEAD_DIM, within=2.5, seconds=1.5, device="cpu")


def calibrated(machine: Machine) -> dict[str, Any]:
    """What of the description was measured here."""
    about = {
        name: getattr(machine, name) for name in ("gpus", "cores", "start", "step", "exchange", "products", "bandwidth")
    }
    links = {name: vars(getattr(machine, name)) for name in ("inside", "between")}
    return about | links | {"rates": {name: machine.rates[name] for name in ("float32", "tiled/float32")}}


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(Options(**words.values(sys.argv[2:], Options))))
    sys.exit(words.answer("test-hosts", lambda: words.call("test-hosts", sys.modules[__name__], sys.argv[1:])))
