"""Decode and the merges compile for every GPU without one: no spills, shared memory within the limit.

The compiler and the interpreter cannot share a process, so the test runs this file as a script.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DIMS = [(128, 128), (64, 64), (80, 80), (192, 128), (256, 256)]
ALL = [pytest.param(arch, len(DIMS), marks=pytest.mark.compile) for arch in ("sm80", "sm90", "sm100", "gfx942")]


@pytest.mark.parametrize(("arch", "dims"), [pytest.param("sm90", 1, marks=pytest.mark.slow), *ALL])
def test_decode_and_merge_fit(arch: str, dims: int) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{HERE.parent}{os.pathsep}{HERE}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, arch, str(dims)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5 * dims + 4
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= row["limit"], f"{arch}: {row}"


def main(arch: str, dims: str) -> None:
    """One JSON line a kernel, compiled as `decode` and the merges would launch it on `arch`; for the first DIMS."""
    import torch
    from compile_triton import TARGETS, compiled, resources

    from ringattn.kernels.attention.triton.append import append
    from ringattn.kernels.attention.triton.decode import decode_splits
    from ringattn.kernels.attention.triton.merge import merge_into, merge_stack
    from ringattn.kernels.intervals import Intervals
    from ringattn.kernels.partial import Partial, Streams

    target, limit = TARGETS[arch]
    where, lengths = Intervals(*torch.zeros(2, 1, 16, dtype=torch.int32)), torch.zeros(1, dtype=torch.int64)
    for D, V in DIMS[: int(dims)]:
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = (torch.empty(s, dtype=dtype) for s in ((1, 16, 4, D), (1, 8192, 1, D), (1, 8192, 1, V)))

            def work(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
                for rows in (1, 8, 16) if q.dtype == torch.bfloat16 else (1,):  # a tile of 16, 32 and 64 rows
                    few = where._replace(begin=where.begin[:, :rows], end=where.end[:, :rows])
                    decode_splits(q[:, :rows], k, v, few, 0.1, 5.0 if rows == 8 else None, 4)

            for kernel in compiled(target, work):
                print(json.dumps({"dims": [D, V], "dtype": str(dtype), "limit": limit, **resources(kernel)}))
        k, v = (torch.empty(1, 8192, 8, n, dtype=torch.bfloat16) for n in (D, V))
        for kernel in compiled(
            target, lambda k=k, v=v: append(k[:, :3], v[:, :3], k, v, lengths, (0, 64, 256, 64), window=9)
        ):
            print(json.dumps({"dims": [D, V], "limit": limit, **resources(kernel)}))
    stack = torch.empty(128, 1, 1, 4, 256), torch.empty(128, 1, 1, 4)
    for merge in (
        lambda: merge_into(Partial(stack[0][0], stack[1][0]), Partial(stack[0][1], stack[1][1]), torch.empty(4)),
        lambda: merge_stack(Partial(*stack)),
        lambda: merge_stack(Streams(*stack, stack[1])),
        lambda: merge_stack(Streams(*(x[:33, ..., :128] if x.dim() == 5 else x[:33] for x in (*stack, stack[1])))),
    ):
        for kernel in compiled(target, merge):
            print(json.dumps({"limit": limit, **resources(kernel)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
