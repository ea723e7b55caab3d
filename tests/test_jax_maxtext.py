"""The recipe for MaxText in docs/how-to/jax-models.md: its own cases, and those that it refuses, against float64."""

import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

B, T, H, G = 2, 64, 4, 2
NAMES = ("data", "fsdp", "context", "context_usp_ulysses", "tensor")
SIZES = {"ring": (1, 2, 4, 1, 1), "usp": (1, 1, 2, 2, 2), "ulysses": (1, 1, 2, 1, 2), "all_gather": (2, 1, 4, 1, 1)}
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "jax-models.md"
(RECIPE,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def packed(rng):
    """Ids of a few documents a row; 0 is padding at its end."""
    rows = [np.sort(rng.choice(np.arange(1, T), 3, replace=False)) for _ in range(B)]
    return np.stack([np.repeat([1, 2, 3, 0], np.diff([0, *cuts, T])) for cuts in rows]).astype(np.int32)


def dense(q, k, v, ids, sinks, softcap=None, window=None, chunk=None):
    """In float64, from the definition."""
    i, j = np.mgrid[:T, :T]
    seen = (j <= i) & (window is None or j > i - window) & (chunk is None or i // chunk == j // chunk)
    seen = seen & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
    k, v = (np.repeat(x, H // G, 2) for x in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    p = np.exp(s) * seen[:, None]
    more = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None]
    return np.einsum("bhts,bshd->bthd", p / np.maximum(p.sum(-1) + more, 1e-300)[..., None], v)


CASES = [
    ("ring", {}, {"window": 20}, True, 8),
    ("ring", {}, {"chunk": 3}, False, 8),
    ("ring", {"D": 12}, {}, False, 8),
    ("usp", {}, {"softcap": 5.0}, True, 8),
    ("ulysses", {}, {"window": 20}, True, 8),
    ("all_gather", {}, {}, False, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("strategy", "size", "given", "with_sinks", "V"), CASES, ids=str)
def test_maxtexts_cases(strategy, size, given, with_sinks, V, kind):
    scope = {}
    exec(RECIPE, scope)
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh(SIZES[strategy], NAMES, axis_types=(AxisType[kind],) * 5)
    q, k, v = (rng.normal(size=(B, T, h, d)) for h, d in ((H, size.get("D", 8)), (G, size.get("D", 8)), (G, V)))
    ids, sinks = packed(rng), jnp.asarray(rng.normal(size=H), jnp.float32) if with_sinks else None
    ring = mesh.shape["context"]
    blocks = np.arange(T).reshape(2 * ring, -1)  # its load-balanced order: blocks r and 2 ring - 1 - r
    order = blocks[[b for r in range(ring) for b in (r, 2 * ring - 1 - r)]].ravel()
    order = np.arange(T) if strategy == "ulysses" else order
    there = NamedSharding(mesh, P(("data", "fsdp"), ("context", "context_usp_ulysses"), "tensor"))
    placed = [jax.device_put(jnp.asarray(x[:, order], jnp.float32), there) for x in (q, k, v)]

    @jax.jit
    def gradients(ids, *x):
        def loss(*x):
            out = scope["context_parallel"](*x, mesh, ids, strategy=strategy, sinks=sinks, most=4, **given)
            return (out**2).sum(), out

        return jax.grad(loss, argnums=(0, 2), has_aux=True)(*x)

    with jax.set_mesh(mesh):
        (dq, dv), out = gradients(jnp.asarray(ids[:, order]), *placed)
    expected = dense(q, k, v, ids, sinks, **given)
    assert np.abs(np.asarray(out) - expected[:, order]).max() < 1e-5
    step = [rng.normal(size=x.shape) for x in (q, v)]  # the derivative along one direction

    def moved(e):
        return (dense(q + e * step[0], k, v + e * step[1], ids, sinks, **given) ** 2).sum()

    found = sum(float((np.asarray(g) * s[:, order]).sum()) for g, s in zip((dq, dv), step, strict=True))
    assert abs(found - (moved(1e-5) - moved(-1e-5)) / 2e-5) <= 1e-4 * max(1, abs(found))
