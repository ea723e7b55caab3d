"""Compiles the flash kernels for GPUs that are not here, and reads what the compilers say: `compile_triton.py ARCH...`.

One JSON line a kernel: its entry, registers, bytes of stack (spills) and of shared memory, and how often its tightest
loop of matrix products, the one over tiles without a mask, touches a spilled register. It runs in a process of its own,
because Triton's interpreter and its compiler cannot share one. A stand-in driver names the target, and a launch becomes
a compilation, so what is compiled is exactly what `attend` would launch.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ringattn.kernels.attention.triton import KERNEL, blocks
from ringattn.kernels.attention.triton.append import append
from ringattn.kernels.attention.triton.decode import decode_splits
from ringattn.kernels.attention.triton.forward import attend
from ringattn.kernels.attention.triton.merge import merge_stack
from ringattn.kernels.attention.triton.table import TABLE
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.triton import delta, gated
from ringattn.kernels.partial import Partial

# The compiler's target, and the bytes of shared memory a program may have there.
TARGETS = {
    "sm80": (GPUTarget("cuda", 80, 32), 101376),  # what the smaller GPUs of the family have; an A100 has 166912
    "sm90": (GPUTarget("cuda", 90, 32), 232448),
    "sm100": (GPUTarget("cuda", 100, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}


def stand_in(target: GPUTarget) -> Any:
    """A driver without a device: it knows the target, and nothing can be launched on it."""
    number = [name for name, _ in TARGETS.values()].index(target)  # compiled kernels are kept by device
    return SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: number, get_current_stream=lambda _device: 0
    )


def compiled(target: GPUTarget, work: Any) -> list[Any]:
    """The kernels that `work()` would launch on the target."""
    triton.runtime.driver.set_active(stand_in(target))
    kernels, run = [], JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = run
    return kernels


KNOWN: dict[str, dict[str, Any]] = {}  # by the compiler's hash: entries share their small kernels


def resources(kernel: Any) -> dict[str, Any]:
    """Registers, stack bytes and shared memory of a compiled kernel, from the binary itself."""
    if kernel.hash not in KNOWN:
        KNOWN[kernel.hash] = read_binary(kernel)
    return KNOWN[kernel.hash]


def read_binary(kernel: Any) -> dict[str, Any]:
    if "amdgcn" in kernel.asm:
        read = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"]))
        registers, stack, spills = int(read["vgpr_count"]), int(read["private_segment_fixed_size"]), 0
    else:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            read = dict(re.findall(r"(REG|STACK):(\d+)", shown(tool, "--dump-resource-usage", file.name)))
            registers, stack = int(read["REG"]), int(read["STACK"])
            spills = loop_spills(shown(tool, "--dump-sass", file.name)) if stack else 0  # nowhere to spill to
    results = {"registers": registers, "stack": stack, "loop_spills": spills, "shared": kernel.metadata.shared}
    return {"kernel": kernel.metadata.name, **results}


def shown(*command: Any) -> str:
    return subprocess.check_output(command, text=True)


def loop_spills(code: str) -> int:
    """The fewest accesses to local memory among the loops of a program that hold matrix products."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (address, text) in enumerate(lines):
        to = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if to and int(to[1], 16) < int(address, 16):
            body = [text for _, text in lines[at[int(to[1], 16)] : i]]
            if any("MMA" in text for text in body):
                loops.append(sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in body))
    return min(loops, default=0)


def run_entry(key: str, table: Any, softcap: float | None = None, dims: tuple[int, int] | None = None) -> None:
    """Forward and backward with this entry, at its full width unless `dims` says (head, value)."""
    bits, width = (int(x) for x in key.split("/")[1:])
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    D, V = dims or (width, width)
    q, k, v, dout = (torch.empty(1, 512, h, d, dtype=dtype) for h, d in ((8, D), (2, D), (2, V), (8, V)))
    stats = torch.empty(1, 8, 512).transpose(1, 2)
    where = Intervals(*torch.zeros(2, 1, 512, dtype=torch.int32))
    options = {"scale": 0.1, "softcap": softcap, "table": table}
    attend(q, k, v, where, **options)
    KERNEL.backward((q, k, v), where, KERNEL.prepare(dout, stats, stats, None), **options)


def run_linear(bits: int, dims: tuple[int, int], gate: str) -> None:
    """The four passes of gated linear attention, with documents where gates are per channel and dims not the widest."""
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    q, k, v, dout = (torch.empty(1, 512, 8, d, dtype=dtype) for d in (dims[0], *dims, dims[1]))
    g = {"channel": q, "head": q[..., 0], "none": None}[gate]
    begin = torch.zeros(1, 512, dtype=torch.int32) if gate == "channel" and dims[0] <= 128 else None
    x = Inputs(q, k, v, g, None, begin, 0.1)
    scan, rscan = gated.scan_states(x), gated.scan_gradients(x, dout)
    state = scan.map.kv
    gated.read_out(x, scan, state)
    gated.gradients(x, scan, state, rscan, dout, state)


FEW = "16/128"  # the entry of most models
SHAPES = [(16, (128, 128), "channel"), (16, (96, 80), "head"), (16, (256, 512), "channel"), (32, (64, 64), "none"),
          (16, (64, 64), "none"), (32, (128, 128), "channel"), (32, (96, 80), "head"),
          (32, (256, 512), "channel")]  # fmt: skip
HALF = [("half", (128, 128), "channel"), ("half", (128, 128), "head")]  # float16, for the delta rule


def run_delta(bits: int | str, dims: tuple[int, int], gate: str) -> None:
    """The passes of the delta rule with fewer key heads, and documents where gates are per channel."""
    dtype = {16: torch.bfloat16, 32: torch.float32, "half": torch.float16}[bits]
    q, k = (torch.empty(1, 4096, 4, dims[0], dtype=dtype) for _ in range(2))
    v, dout = (torch.empty(1, 4096, 8, dims[1], dtype=dtype) for _ in range(2))
    g = {"channel": torch.empty(1, 4096, 8, dims[0], dtype=dtype), "head": v[..., 0], "none": None}[gate]
    begin = torch.zeros(1, 4096, dtype=torch.int32) if gate == "channel" else None
    x = Inputs(q, k, v, g, v[..., 0], begin, 0.1)
    scan, rscan = delta.scan_states(x), delta.scan_gradients(x, dout)
    state = scan.map.kv
    delta.read_out(x, scan, state)
    delta.gradients(x, delta.scan_states(x, maps=False), state, rscan, dout, state)


def linear_rows(rule: str, arch: str, few: bool) -> None:
    target, limit = TARGETS[arch]
    gated.architecture = lambda _device: arch
    for bits, dims, gate in SHAPES[:1] if few else [*SHAPES, *(HALF if rule == "delta" else [])]:
        for kernel in compiled(target, partial({"linear": run_linear, "delta": run_delta}[rule], bits, dims, gate)):
            row = {"entry": f"{rule}/{arch}/{bits}/{dims}/{gate}", "target": arch, "limit": limit, "capped": False}
            print(json.dumps({**row, **resources(kernel)}), flush=True)


DIMS = [(128, 128), (64, 64), (80, 80), (192, 128), (256, 256)]  # of decode


def decode_rows(arch: str, few: bool) -> None:
    """The steps of caches and the merges."""
    target, limit = TARGETS[arch]

    def compile_all(work: Any) -> None:
        for kernel in compiled(target, work):
            row = {"entry": f"decode/{arch}", "target": arch, "limit": limit, "capped": False}
            print(json.dumps({**row, **resources(kernel)}), flush=True)

    where, lengths = Intervals(*torch.zeros(2, 1, 16, dtype=torch.int32)), torch.zeros(1, dtype=torch.int64)
    for D, V in DIMS[: 1 if few else None]:
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = (torch.empty(s, dtype=dtype) for s in ((1, 16, 4, D), (1, 8192, 1, D), (1, 8192, 1, V)))

            def work(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
                for rows in (1, 8, 16) if q.dtype == torch.bfloat16 else (1,):  # a tile of 16, 32 and 64 rows
                    few = where._replace(begin=where.begin[:, :rows], end=where.end[:, :rows])
                    decode_splits(q[:, :rows], k, v, few, 0.1, 5.0 if rows == 8 else None, 4)

            compile_all(work)
        k, v = (torch.empty(1, 8192, 8, n, dtype=torch.bfloat16) for n in (D, V))
        compile_all(lambda k=k, v=v: append(k[:, :3], v[:, :3], k, v, lengths, (0, 64, 256, 64), window=9))
    stack, part = (Partial(torch.empty(*n, 1, 1, 4, 256), torch.empty(*n, 1, 1, 4)) for n in ((128,), ()))
    for merge in (
        lambda: merge_stack(Partial(*(x[:1] for x in stack)), part, torch.empty(4), part),
        lambda: merge_stack(stack),
        lambda: merge_stack(stack._replace(lse=stack.lse.double())),
    ):
        compile_all(merge)


def main(entries: str, *names: str) -> None:
    """Compile a `few` kernels, those of one entry, or `all`, for each target."""
    few = entries == "few"
    for name in names:
        arch, _, source = name.partition(":")  # sm90:sm80 compiles the entries of sm80 for sm90
        if arch in ("linear", "delta"):
            linear_rows(arch, source, few)
            continue
        if arch == "decode":
            decode_rows(source, few)
            continue
        target, limit = TARGETS[arch]
        blocks.architecture = lambda _device, arch=arch: arch  # the tensors of this process lie on the CPU
        for key, tiles in TABLE.items():
            if key.startswith((source or arch) + "/") and (not few or key.endswith(FEW)):
                here = f"{arch}/{key.split('/', 1)[1]}"
                for kernel in compiled(target, partial(run_entry, here, {here: tiles})):
                    tile = getattr(tiles, kernel.metadata.name.removesuffix("_kernel"), None)
                    row = {"entry": key, "target": arch, "limit": limit, "capped": bool(tile and tile.registers)}
                    print(json.dumps({**row, **resources(kernel)}), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(*sys.argv[1:])
