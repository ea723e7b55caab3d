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


def results(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results for what a case is given, as torch's tensors in float64, over the first devices."""
    mesh = rj.init_mesh(ring=case.ring, ulysses=case.ulysses, devices=jax.devices()[: case.ring * case.ulysses])
    if case.explicit:  # as `jax.make_mesh` makes them
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    with jax.enable_x64(case.dtype == "float64"), jax.set_mesh(mesh) if case.explicit else nullcontext():
        arrays = {n: jnp.asarray(x.double().numpy(), str(x.dtype).removeprefix("torch.")) for n, x in given.items()}
        plan = case.plan_on(mesh)
        if case.steps:  # whose results are not cut alike
            found = {"out": np.concatenate([np.array(x) for x in case.pieces(plan, arrays)], 1)}
        else:
            found = jax.jit(partial(passes, case, plan))(arrays)
        return {n: torch.from_numpy(np.array(x).astype("float64")) for n, x in found.items()}


def passes(case: Case, plan: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Both results and every gradient. Gradients come back for each that one is given for; not for an lse of -inf."""

    def forward(x: dict[str, Any]) -> dict[str, Any]:
        mine = {n: oracle.local(plan, n, t, where=jnp.where) for n, t in x.items()}
        found = zip(case.outputs, case.call(plan, mine), strict=True)
        return {n: t if n in oracle.WHOLE else plan.unshard(t) for n, t in found}

    outputs, backward = jax.vjp(forward, {n: given[n] for n in case.arguments})
    back = {n: given.get(f"d{n}", jnp.zeros_like(x)) for n, x in outputs.items()}
    (grads,) = backward({n: jnp.where(jnp.isfinite(x), back[n], 0).astype(x.dtype) for n, x in outputs.items()})
    return {**outputs, **{f"d{n}": x for n, x in grads.items()}}
