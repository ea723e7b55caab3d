"""For JAX neither torch nor triton is needed: what `pip install 'ringattn[jax]'` installs is enough."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("jax")

ROOT = Path(__file__).parents[1]
SCRIPT = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import jax, jax.numpy as jnp, numpy as np
import ringattn as ra, ringattn.jax as rj
from ringattn.launch.words import main

mesh = rj.init_mesh(ring=2, ulysses=2)
q = jax.random.normal(jax.random.key(0), (1, 30, 4, 8))
plan = ra.plan(mesh, seq_len=30, heads=4, head_dim=8)
assert "reference" in plan.explain()
docs = ra.Docs.from_lengths([10, 20])

def attention(q, plan=None):
    given = [q if plan is None else plan.shard(q)] * 3
    out = ra.attention(*given, plan, docs=docs)
    return out if plan is None else plan.unshard(out)

def loss(plan):
    return jax.jit(jax.value_and_grad(lambda q: (attention(q, plan) ** 2).sum()))(q)

for found, expected in zip(loss(plan), loss(None)):
    assert np.allclose(found, expected, atol=1e-5)

chunk = ra.plan(mesh, seq_len=30, layout="contiguous", strategy="ring")
x = chunk.shard(q)
out = jax.jit(lambda x: ra.linear_attention(x, x, x, -x * x, chunk, beta=jax.nn.sigmoid(x[..., 0])))(x)
assert np.allclose(chunk.unshard(out), ra.linear_attention(q, q, q, -q * q, beta=jax.nn.sigmoid(q[..., 0])), atol=1e-5)

cache = ra.KVCache.allocate(chunk, batch=1, max_len=31, kv_heads=4, head_dim=8, dtype=q.dtype)
_, cache = ra.prefill(x, x, x, chunk, cache)
out, cache = ra.decode(q[:, :1], q[:, :1], q[:, :1], cache)
whole = jnp.concatenate([q, q[:, :1]], 1)
assert np.allclose(out, ra.attention(whole, whole, whole)[:, -1:], atol=1e-5)

assert main(["plan", "ring=4"]) == main(["plan", "device=tpu", "ring=4"]) == main(["doctor"]) == 0
assert main(["verify"]) == 2
for use in (lambda: ra.nn, lambda: ra.init_mesh(ring=2)):
    try:
        use()
    except ModuleNotFoundError as error:
        assert "pip install 'ringattn[torch]'" in str(error), error
    else:
        raise AssertionError("torch was found")
"""


def required(names):
    """The names of these distributions and of all that they require; of ours, what pyproject.toml says."""
    result, left = set(), list(names)
    while left:
        name = re.split(r"[^\w.-]", left.pop())[0].lower().replace("_", "-")
        if name not in result:
            result.add(name)
            left += [x for x in metadata.requires(name) or () if "extra ==" not in x]
    return result


@pytest.mark.slow
def test_what_the_extra_for_jax_installs_is_enough(tmp_path):
    """A folder with those packages alone, and none of the environment's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = required([*project["dependencies"], *project["optional-dependencies"]["jax"]])
    assert "torch" not in names
    for name in names:
        for file in metadata.files(name) or ():
            top = tmp_path / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(file.locate().parents[len(file.parts) - 2] if len(file.parts) > 1 else file.locate())
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    flags += "--xla_llvm_disable_expensive_passes=true"
    given = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-S", "-c", SCRIPT], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for words in ("kernel auto -> splash (tpu", "kernel auto -> cudnn (cuda", "none  torch", "reference serves cpu"):
        assert words in done.stdout, done.stdout
    assert "torch is not installed" in done.stderr
