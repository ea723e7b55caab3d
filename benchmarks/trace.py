"""What runs when on every rank of a ring: a Chrome trace a rank, and how much communication shows.

    torchrun --nproc-per-node 4 benchmarks/trace.py OUT [TOKENS] [NCCL or symmetric memory: group, symmetric]

`exposed` is the part of a call, forward and backward, in which something moves and no kernel computes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ringattn as ra
from ringattn.launch.bench.ring import Options
from ringattn.launch.bench.timing import attention_passes, finish, meet

MOVES = ("ncclDevKernel", "Memcpy", "SendRecv", "memcpy", "gloo:")


def covered(spans: list[tuple[int, int]]) -> int:
    """How long one of these (start, end) lasts, at least."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main(out: str, tokens: str = "32768", by: str = "auto") -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = ra.init_mesh(ring=int(os.environ["WORLD_SIZE"]), device_type=device)
    options = Options(ranks=mesh.size(), device=device)
    plan = ra.plan(mesh, seq_len=int(tokens), strategy="ring", transport=ra.Transport(by=by))
    call = attention_passes(options, plan)["forward+backward"]
    call()
    meet()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]) as profiler:
        call()
        finish()
    profiler.export_chrome_trace(f"{out}-{dist.get_rank()}.json")
    events = [e for e in profiler.profiler.kineto_results.events() if e.duration_ns() and "Memset" not in e.name()]
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    here = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_type() == kind]
    moving = [(start, end) for name, start, end in here if any(word in name for word in MOVES)]
    computing = [(start, end) for name, start, end in here if not any(word in name for word in MOVES)]
    whole = max(end for *_, end in here) - min(start for _, start, _ in here)
    exposed = (covered(moving + computing) - covered(computing)) / whole
    print(f"rank {dist.get_rank()}: {whole / 1e6:.3f} ms, exposed communication {exposed:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
