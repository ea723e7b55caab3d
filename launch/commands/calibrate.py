"""Measure this machine in under a minute and write its description, which plans then find: `ringattn calibrate`.

Measured are attention forward and backward (on CPUs also by the kernel of windows), a matrix product, a copy in memory
and, under torchrun, the links: within a host between neighbours, between hosts between ranks of the same place; and how
long the host takes for each step and each exchange of a call over ranks. Without torchrun these are those of the
shipped description of the device. Rank 0 measures what one rank computes while the others wait; where they share the
cores of a CPU, how many compute at once is measured too. out=FILE writes elsewhere; give that file as machine=FILE.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.comms import messages
from ringattn.comms.process_group import hosts_of
from ringattn.launch.bench.timing import Heads, Passes, alone_ms, copy_rate, dtype_on, median_ms, passes_of
from ringattn.launch.processes import join
from ringattn.launch.words import option, writable
from ringattn.plans.machine import OWN, Link, Machine, chip_here, of_device, of_text, write
from ringattn.plans.predict import BACKWARD

SIZES = {"cpu": (1024, 256, 512), "cuda": (16384, 4096, 8192)}  # tokens of a call, of a window, rows of a product
HEADS, DIM = {"cpu": 4, "cuda": 32}, {"cpu": 64, "cuda": 128}
MIN_SHARE_OF_SOLO_SPEED = 0.9  # of one rank alone: with more each of those that compute at once has a core to itself
BYTES = {"cpu": 2**20, "cuda": 2**26}  # of a transfer
SHORT = 8  # tokens a rank of a call that takes as long as its launches
REPEATS = 5
BURSTS = 10  # of a short call's repeats, the quietest of which counts: others may use the cores meanwhile


@dataclass(frozen=True)
class Options:
    out: str | None = option(None, f"the file to write; by default {OWN.name} in ~/.cache/ringattn, which plans find")
    head_dim: int = option(0, f"of your heads; 0: {DIM['cpu']} on a CPU, {DIM['cuda']} on a GPU", least=0)


def run(options: Options) -> int:
    began = time.perf_counter()
    path = Path(options.out) if options.out else OWN
    path.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if many := int(os.environ.get("WORLD_SIZE", 1)) > 1:
        join(device)
    speaks = not many or dist.get_rank() == 0
    if speaks:
        writable(path)
    machine = (among_ranks if many else measured)(device, options.head_dim or DIM[device])
    if speaks:
        write(machine, path)
        print(f"{machine.name}: {machine.source}\nwrote {path} in {time.perf_counter() - began:.0f} s")
    if many:
        dist.destroy_process_group()
    return 0


def among_ranks(device: str, head_dim: int) -> Machine:
    """What rank 0 measures while the others wait, then what all measure together: the same on every rank."""
    alone = messages.gather(measured(device, head_dim).text if dist.get_rank() == 0 else None)[0]
    machine = hosted(linked(of_text(alone), device), device, head_dim)
    return machine.replace(cores=cores(machine.gpus, head_dim)) if device == "cpu" else machine


def attention(device: str, head_dim: int, tokens: int, window: int | None = None) -> Passes:
    heads = Heads(HEADS[device], HEADS[device], head_dim, device)
    return passes_of(heads, ra.plan(seq_len=tokens), {"spec": ra.AttentionSpec(window=window)})


def measured(device: str, head_dim: int) -> Machine:
    """This rank alone."""
    base, (long, window, rows), native = of_device(device), SIZES[device], dtype_on(device)

    def passes(tokens: int, sees: int | None = None) -> tuple[float, float]:
        """Seconds of a call, forward and backward."""
        forward, both = (alone_ms(x, REPEATS, device) / 1e3 for x in attention(device, head_dim, tokens, sees).values())
        return forward, max(1e-9, both - forward)

    def rate(seconds: tuple[float, float], pairs: float) -> tuple[float, float]:
        flops = 4 * HEADS[device] * head_dim * pairs / 1e12
        return flops / max(1e-9, seconds[0] - start[0]), BACKWARD * flops / max(1e-9, seconds[1] - start[1])

    start = passes(SHORT)
    rates = {str(native).removeprefix("torch."): rate(passes(long), long * (long + 1) / 2)}
    if device == "cpu":  # another kernel serves what is no few rectangles; those of GPUs have rates of their own
        rates["tiled/float32"] = rate(passes(long, window), (long - window / 2) * window)
    x = torch.randn(rows, rows, dtype=native, device=device)
    product = 2 * rows**3 / alone_ms(lambda: x @ x, REPEATS, device) / 1e9
    chip, arch = chip_here(device) or "", tuple[int, ...]()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        memory, arch = torch.cuda.get_device_properties().total_memory, torch.cuda.get_device_capability()
    return base.replace(
        name=f"{chip or 'CPU'} of {platform.node()}", chip=chip, rates={**base.rates, **rates},
        products=product, bandwidth=copy_rate(device), start=start, memory=float(memory), arch=arch, cores=0.0,
        source=f"measured by ringattn calibrate: memory, products, {', '.join(rates)}; the rest: {base.name}",
    )  # fmt: skip


def linked(machine: Machine, device: str) -> Machine:
    """The same with the links that were measured among all ranks."""
    ranks = dist.get_world_size()
    assert dist.group.WORLD is not None
    hosts = hosts_of(dist.group.WORLD) or 1
    gpus = ranks // hosts
    links: dict[str, Any] = {"source": f"{machine.source}; links measured on {ranks} ranks of {hosts} hosts"}
    if gpus > 1:
        links["inside"] = link(1, gpus, gpus, device, machine.inside.sharing)
    if hosts > 1:
        links["between"] = link(gpus, ranks, gpus, device, machine.between.sharing)
    return machine.replace(gpus=gpus, **links)


def link(shift: int, among: int, gpus: int, device: str, sharing: int) -> Link:
    """The link to the rank `shift` further in groups of `among` ranks, while all `gpus` of every host send."""
    first, index = divmod(dist.get_rank(), among)
    after, before = (first * among + (index + by) % among for by in (shift, -shift))

    def seconds(nbytes: int) -> float:
        out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def move() -> None:
            moves = [dist.P2POp(dist.irecv, into, before), dist.P2POp(dist.isend, out, after)]  # as our rings do
            for work in dist.batch_isend_irecv(moves):
                work.wait()

        return slowest(move)

    latency = seconds(64)
    bandwidth = BYTES[device] / max(1e-6, seconds(BYTES[device]) - latency)
    return Link(bandwidth * min(sharing, gpus), latency, sharing)  # what one sender alone would get


def hosted(machine: Machine, device: str, head_dim: int) -> Machine:
    """The same with what the host takes for a step and for an exchange, beyond the latency of the link."""
    ranks = dist.get_world_size()
    heads = Heads(ranks, ranks, head_dim, device)
    late = (machine.between if ranks > machine.gpus else machine.inside).latency

    def more(beside: Sequence[float], count: int, **sizes: int) -> list[float]:
        """How much longer each pass of a short call over ranks takes, for each of so many steps or exchanges."""
        mesh = ra.init_mesh(**sizes, device_type=device)
        plan = ra.plan(mesh, seq_len=SHORT * ranks, transport=ra.Transport(together=1))
        calls = passes_of(heads, plan, {}).values()
        forward, both = (min(slowest(call) for _ in range(BURSTS)) for call in calls)
        return [max(0.0, (x - y) / count - late) for x, y in zip((forward, both - forward), beside, strict=True)]

    step = more(machine.start, ranks, ring=ranks)
    exchange = more([sum(each) for each in zip(machine.start, step, strict=True)], 2, ulysses=ranks)
    library = machine.library * sum(step) / (sum(machine.step) or 1.0)
    source = f"{machine.source}, launches too"
    return machine.replace(step=tuple(step), exchange=sum(exchange) / 2, library=library, source=source)


def cores(gpus: int, head_dim: int) -> float:
    """How many ranks of a host compute at once as fast as one alone; 0 if all do."""
    call = attention("cpu", head_dim, SIZES["cpu"][0])["forward+backward"]
    alone = messages.gather(alone_ms(call, REPEATS, "cpu") if dist.get_rank() == 0 else None)[0]
    share = float(alone / 1e3 / slowest(call))
    return gpus * share if share < MIN_SHARE_OF_SOLO_SPEED else 0.0


def slowest(call: Callable[[], Any]) -> float:
    """The median in seconds of the slowest rank, if all start together."""
    return max(messages.gather(median_ms(call, REPEATS))) / 1e3
