"""Your own model, your own loop: one attention layer over a sequence that no rank holds whole.

torchrun --nproc-per-node 2 examples/long_layer.py 4096
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import ringattn as ra
from ringattn import nn


def main(tokens: str = "4096") -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    plan = ra.plan(ra.init_mesh(ring=dist.get_world_size(), device_type=device), seq_len=int(tokens))
    layer = nn.Attention(d_model=64, heads=4, kv_heads=2, head_dim=16).to(device)
    x = plan.shard(torch.randn(1, plan.seq_len, 64), dim=1).to(device)
    for step in range(5):
        losses = F.mse_loss(layer(x, plan), x, reduction="none").mean(-1)
        loss = ra.token_mean(losses, plan)
        loss.backward()
        with torch.no_grad():
            for weight in layer.parameters():
                dist.all_reduce(weight.grad)  # the sum of the ranks' shares
                weight -= weight.grad
                weight.grad = None
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}, {plan.local_len} of {plan.seq_len} tokens a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(f"ranks are started by torchrun, as here:\n\n{__doc__}")
    main(*sys.argv[1:])
