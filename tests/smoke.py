"""What must work where only the package is installed with torch, and nothing else: `make packages` runs it."""

import importlib.metadata
import subprocess
import sys

import torch

import ringattn as ra
from ringattn.comms.local import run

assert "site-packages" in ra.__file__, f"this tries {ra.__file__}, not the installed package"
assert importlib.metadata.version("ringattn") == ra.__version__
q, k = torch.randn(1, 100, 4, 8), torch.randn(1, 100, 2, 8)


def one_rank(mesh):
    plan = ra.plan(mesh, seq_len=100, heads=(4, 2), head_dim=8)
    x, y = plan.shard(q).requires_grad_(), plan.shard(k)
    out = ra.attention(x, y, y, plan)
    out.sum().backward()
    assert x.grad is not None
    return plan.unshard(out.detach())


for out in run(one_rank, ring=2, ulysses=2):
    assert torch.allclose(out, ra.attention(q, k, k), atol=1e-5)


def ringattn(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ringattn", *words], capture_output=True, text=True, timeout=300)


assert ringattn("--version").stdout == f"ringattn {ra.__version__}\n"
planned = ringattn("plan", "seq_len=131072", "heads=32,8", "head_dim=128", "sequence=8", "device=cuda")
assert planned.returncode == 0 and "strategy" in planned.stdout, planned.stderr
for name in ("train", "verify", "bench", "plot"):
    helped = ringattn(name, "--help")
    if helped.returncode:  # an extra is missing: the error says which
        assert "pip install 'ringattn[" in helped.stderr, helped.stderr
print(f"ringattn {ra.__version__} works alone")
