"""Cases and random calls on JAX arrays, over the devices of this process: what `ringattn verify backend=jax` runs.

Results are whole, in the order of the sequence; padding goes in as NaN. A random call in float32 runs twice: with its
own numbers, where each element is held to what rounding allows it, and with numbers and scores around 1, where `norm`
is the worst error of a whole result over 5e-6.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import ringattn.jax as rj
from ringattn.launch.verify import drawn, oracle
from ringattn.launch.verify.cases import Case, Truth

MOST = 5e-6  # that a result in float32 may be off, by its norm

Given = dict[str, Any]
Program = Callable[[Given], dict[str, Any]]


def runs_here(case: Any) -> bool:
    """Whether JAX has the layout, and as many devices as it needs."""
    layout = case.case.layout if isinstance(case, drawn.Call) else case.layout
    return layout != "balanced" and case.ring * case.ulysses <= len(jax.devices())


def errors(case: Any, truth: Truth) -> dict[str, float]:
    """The errors of each result, as ranks have them."""
    call = case if isinstance(case, drawn.Call) else None
    mine = call.mine if call is not None and call.steps else oracle.whole
    with jax.enable_x64(truth.given["q"].dtype == torch.float64):
        program = program_of(case)
        off = oracle.compared(by_name(program, truth), truth, mine)
        if call is None or call.dtype != torch.float32:
            return off
        plain = drawn.truth_of(ordinary(call))
        norms = [size_of_error(x, mine(n, plain.exact[n], 0.0)) for n, x in by_name(program, plain).items()]
        return {**off, "norm": max(norms) / MOST}


def size_of_error(result: Tensor, exact: Tensor) -> float:
    """The relative error of a result of numbers around 1; some vanish, as dq of queries that see one key."""
    return oracle.error(result, exact, max(oracle.size(exact), 0.1 * exact.numel() ** 0.5))


def by_name(program: Program, truth: Truth) -> dict[str, Tensor]:
    """The program's results for what a case is given, as torch's tensors in float64."""
    names = {torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    given = {n: x for n, x in truth.given.items() if x is not None}
    results = program({n: jnp.asarray(x.double().numpy(), names.get(x.dtype, "float32")) for n, x in given.items()})
    return {n: torch.from_numpy(np.array(x).astype("float64")) for n, x in results.items()}


def ordinary(call: drawn.Call) -> drawn.Call:
    """The same call of numbers around 1, and scores too."""
    powers = {name: call.powers[name] if name == "g" else 0.0 for name in call.powers}
    if isinstance(call.case, Case):
        powers["k"] = -math.log10((call.case.spec.scale or call.case.head_dim**-0.5) * call.case.head_dim**0.5)
    return replace(call, powers=powers, wild=())


def program_of(case: Any) -> Program:
    """What computes this case's results on the devices."""
    call, case = (case, case.case) if isinstance(case, drawn.Call) else (None, case)
    mesh = rj.init_mesh(ring=case.ring, ulysses=case.ulysses, devices=jax.devices()[: case.ring * case.ulysses])
    plan = case.plan_on(mesh)
    return jax.jit(once(case, plan)) if call is None or not call.steps else piece_by_piece(call, plan)


def once(case: Any, plan: Any) -> Program:
    """Both results and every gradient. Gradients come back for each that one is given for; not for an lse of -inf."""

    def forward(leaves: Given) -> Given:
        tokens = {n: poisoned(n, x, plan) for n, x in leaves.items()}
        results = dict(zip(case.outputs, case.call(plan, tokens), strict=True))
        return {n: x if n in oracle.WHOLE else plan.unshard(x) for n, x in results.items()}

    def results(given: Given) -> Given:
        outputs, backward = jax.vjp(forward, {n: given[n] for n in case.leaves if n in given})
        back = {n: given.get(f"d{n}", jnp.zeros_like(x)) for n, x in outputs.items()}
        (grads,) = backward({n: jnp.where(jnp.isfinite(x), back[n], 0).astype(x.dtype) for n, x in outputs.items()})
        return {**outputs, **{f"d{n}": x for n, x in grads.items()}}

    return results


def poisoned(name: str, x: jax.Array, plan: Any) -> jax.Array:
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    if name in oracle.WHOLE:
        return x
    plan = plan.keys if name in ("k", "v") else plan
    real = plan.real_tokens().reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(real, plan.shard(x), jnp.nan)


@partial(jax.jit, static_argnums=0)
def sharded(plan: Any, *whole: jax.Array) -> tuple[jax.Array, ...]:
    """One program, where a call of each operation would compile it alone."""
    return tuple(map(plan.shard, whole))


@partial(jax.jit, static_argnums=0)
def unsharded(plan: Any, x: jax.Array) -> Any:
    return plan.unshard(x)


def piece_by_piece(call: drawn.Call, plan: Any) -> Program:
    """A cache filled and read; pieces of numpy's arrays need no program to be cut."""

    def results(given: Given) -> Given:
        numpy = {n: np.array(x) for n, x in given.items()}
        pieces = drawn.pieces_of(call, plan, numpy, jnp.asarray, sharded, unsharded)
        return {"out": np.concatenate([np.array(x, np.float64) for x in pieces], 1)}

    return results
