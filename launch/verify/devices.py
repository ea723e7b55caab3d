"""Random calls on JAX arrays, over the devices of this process: what `ringattn verify backend=jax` runs.

Results are whole, in the order of the sequence; padding goes in as NaN.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, Mesh
from torch import Tensor

import ringattn.jax as rj
from ringattn.launch.verify import oracle
from ringattn.launch.verify.cases import Case

Given = dict[str, Any]


def results(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results for what a case is given, as torch's tensors in float64, over the first devices.

    The types of arrays on explicit axes, as `jax.make_mesh` makes them, say how they are cut.
    """
    mesh = rj.init_mesh(**case.sizes, devices=jax.devices()[: case.ring * case.ulysses])
    kinds = (AxisType.Explicit if case.explicit else AxisType.Auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    with jax.enable_x64(case.dtype == "float64"), jax.set_mesh(mesh) if case.explicit else nullcontext():
        names = {n: str(x.dtype).removeprefix("torch.") for n, x in given.items()}
        arrays = {n: jnp.asarray(x.double().numpy(), names[n]) for n, x in given.items()}
        plan = case.plan_on(mesh)
        if case.steps:  # pieces of numpy's arrays need no program to be cut
            pieces = case.pieces(plan, {n: np.array(x) for n, x in arrays.items()}, jnp.asarray, jax.jit)
            found = {"out": np.concatenate([np.array(x, np.float64) for x in pieces], 1)}
        else:
            found = jax.jit(partial(passes, case, plan))(arrays)
        return {n: torch.from_numpy(np.array(x).astype("float64")) for n, x in found.items()}


def passes(case: Case, plan: Any, given: Given) -> Given:
    """Both results and every gradient. Gradients come back for each that one is given for; not for an lse of -inf."""

    def forward(x: Given) -> Given:
        found = dict(zip(case.outputs, case.call(plan, {n: poisoned(n, t, plan) for n, t in x.items()}), strict=True))
        return {n: t if n in oracle.WHOLE else plan.unshard(t) for n, t in found.items()}

    outputs, backward = jax.vjp(forward, {n: given[n] for n in case.arguments})
    back = {n: given.get(f"d{n}", jnp.zeros_like(x)) for n, x in outputs.items()}
    (grads,) = backward({n: jnp.where(jnp.isfinite(x), back[n], 0).astype(x.dtype) for n, x in outputs.items()})
    return {**outputs, **{f"d{n}": x for n, x in grads.items()}}


def poisoned(name: str, x: jax.Array, plan: Any) -> jax.Array:
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    if name in oracle.WHOLE:
        return x
    plan = plan.keys if name in ("k", "v") else plan
    real = plan.real_tokens().reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(real, plan.shard(x), jnp.nan)
