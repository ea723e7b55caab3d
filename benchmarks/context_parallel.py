"""torch's own context_parallel with cuDNN, causal, in milliseconds: what `ringattn bench ring kernel=cudnn` is beside.

torchrun --nproc-per-node 4 benchmarks/context_parallel.py 16384 32768 131072
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringattn.launch.bench.ring import Options
from ringattn.launch.bench.timing import draws, median_ms, passes


def main(lengths: list[int]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (ranks,))
    for tokens in lengths:
        for method in ("allgather", "alltoall"):
            _attention.set_rotate_method(method)
            none = torch.zeros(1, 1, 2 * ranks, 1, device="cuda")
            with context_parallel(mesh, buffers=[none], buffer_seq_dims=[2]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                drawn = draws(Options(ranks=ranks), tokens // ranks, "qkvo")
                q, k, v, dout = (x.transpose(1, 2).contiguous().requires_grad_() for x in drawn)

                def attend(q: Any = q, k: Any = k, v: Any = v) -> Any:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                for mode, call in passes(attend, (q, k, v), dout.detach()).items():
                    slowest = torch.tensor(median_ms(call, 10), device="cuda")
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    if dist.get_rank() == 0:
                        print(f"{tokens} tokens, {method}, {mode}: {float(slowest):.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [32768])
