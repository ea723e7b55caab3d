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

import ringattn as ra
import ringattn.jax as rj
from ringattn.launch.verify import drawn, linear_oracle, oracle, rounding
from ringattn.launch.verify.cases import Case, Truth

MOST = 5e-6  # that a result in float32 may be off, by its norm

Given = dict[str, Any]
Program = Callable[[Given], dict[str, Any]]


def runs_here(case: Any) -> bool:
    """Whether JAX has the layout, and as many devices as it needs."""
    layout = case.case.layout if isinstance(case, drawn.Call) else case.layout
    return layout != "balanced" and case.ring * case.ulysses <= len(jax.devices())


def errors(case: Any, truth: Truth, kernel: str) -> dict[str, float]:
    """The errors of each result, as the module of its kind of case reports them for ranks."""
    call = case if isinstance(case, drawn.Call) else None
    with jax.enable_x64(truth.given["q"].dtype == torch.float64):
        program = program_of(case if call is None else call.case, call, truth, kernel)
        results = by_name(program, truth)
        exact, allowed = truth.exact, truth.allowed
        element = {n: rounding.over(x, exact[n], allowed[n]) for n, x in results.items() if n in allowed}
        if call is None:
            off = {n: oracle.off(x, exact[n]) for n, x in results.items()}
            return {**off, **({"element": max(element.values())} if element else {})}
        if call.dtype != torch.float32:
            return element
        plain = drawn.truth_of(ordinary(call))
        norms = [size_of_error(x, plain.exact[n]) for n, x in by_name(program, plain).items()]
        return {**element, "norm": max(norms) / MOST}


def size_of_error(result: Tensor, exact: Tensor) -> float:
    """The relative error of a result of numbers around 1; some vanish, as dq of queries that see one key."""
    norm = float(torch.nan_to_num(exact, neginf=0).norm())
    return oracle.error(result, exact, max(norm, 0.1 * exact.numel() ** 0.5))


def by_name(program: Program, truth: Truth) -> dict[str, Tensor]:
    """The program's results for what a case is given, as torch's tensors in float64."""
    names = {torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    given = {n: x for n, x in truth.given.items() if x is not None}
    results = program({n: jnp.asarray(x.double().numpy(), names.get(x.dtype, "float32")) for n, x in given.items()})
    read = {n: torch.from_numpy(np.array(x).astype("float64")) for n, x in results.items() if n != "asked"}
    if "asked" in results:  # of a cache's tokens, some may never have been a query
        read["out"] = torch.where(torch.from_numpy(results["asked"])[..., None, None], read["out"], truth.exact["out"])
    return read


def ordinary(call: drawn.Call) -> drawn.Call:
    """The same call of numbers around 1, and scores too."""
    powers = {name: call.powers[name] if name == "g" else 0.0 for name in call.powers}
    if isinstance(call.case, Case):
        powers["k"] = -math.log10((call.case.spec.scale or call.case.head_dim**-0.5) * call.case.head_dim**0.5)
    return replace(call, powers=powers, wild=())


def program_of(case: Any, call: drawn.Call | None, truth: Truth, kernel: str) -> Program:
    """What computes this case's results on the devices."""
    mesh = rj.init_mesh(ring=case.ring, ulysses=case.ulysses, devices=jax.devices()[: case.ring * case.ulysses])
    if call is not None and call.steps:
        return pieces(call, mesh)
    if isinstance(case, linear_oracle.Case):
        plan = ra.plan(mesh, seq_len=case.seq_len, layout=case.layout)
        return jax.jit(linear(case, plan, kernel))
    plan = ra.plan(mesh, seq_len=case.seq_len, key_len=case.key_len, spec=case.spec, strategy=case.strategy,
                   layout=case.layout, kernel=kernel)  # fmt: skip
    return jax.jit(attention(case, plan, truth.given.keys()))


def poisoned(x: jax.Array, plan: Any) -> jax.Array:
    """The whole sequence in the plan's order, with NaN where the plan pads."""
    real = plan.real_tokens().reshape(1, -1, *[1] * (x.ndim - 2))
    return jnp.where(real, plan.shard(x), jnp.nan)


def attention(case: Case, plan: Any, names: Any) -> Program:
    """out, lse and every gradient. Gradients come back for out, lse or both; not for an lse of -inf."""

    def results(given: Given) -> Given:
        def forward(leaves: Given) -> Any:
            out, lse = ra.attention(
                poisoned(leaves["q"], plan), poisoned(leaves["k"], plan.keys), poisoned(leaves["v"], plan.keys), plan,
                spec=case.spec, docs=case.docs, key_docs=case.key_docs, align=case.align, mask=case.mask,
                sinks=leaves.get("sinks"), return_lse=True,
            )  # fmt: skip
            return plan.unshard(out), plan.unshard(lse)

        leaves = {n: given[n] for n in ("q", "k", "v", *["sinks"] * case.sinks)}
        (out, lse), back = jax.vjp(forward, leaves)
        dout, dlse = (given[n] if n in given else jnp.zeros_like(x) for n, x in (("dout", out), ("dlse", lse)))
        (grads,) = back((dout, jnp.where(jnp.isfinite(lse), dlse, 0).astype(lse.dtype)))
        return {"out": out, "lse": lse, **{f"d{n}": x for n, x in grads.items()}}

    return results


def linear(case: linear_oracle.Case, plan: Any, kernel: str) -> Program:
    """out, the end states and every gradient."""
    docs = linear_oracle.docs_of(case.lengths, case.seq_len)

    def results(given: Given) -> Given:
        def forward(leaves: Given) -> Any:
            tokens = {n: poisoned(x, plan) for n, x in leaves.items() if n != "state"}
            out, end = ra.linear_attention(
                tokens["q"], tokens["k"], tokens["v"], tokens.get("g"), plan, beta=tokens.get("beta"), docs=docs,
                initial_state=leaves["state"], return_state=True, scan=case.strategy, kernel=kernel,
            )  # fmt: skip
            return plan.unshard(out), end

        leaves = {n: x for n, x in given.items() if n not in ("dout", "dend")}
        (out, end), back = jax.vjp(forward, leaves)
        (grads,) = back((given["dout"], given["dend"]))
        return {"out": out, "end": end, **{f"d{n}": x for n, x in grads.items()}}

    return results


@partial(jax.jit, static_argnums=0)
def sharded(plan: Any, *whole: jax.Array) -> tuple[jax.Array, ...]:
    """One program, where a call of each operation would compile it alone."""
    return tuple(map(plan.shard, whole))


@partial(jax.jit, static_argnums=0)
def unsharded(plan: Any, x: jax.Array) -> Any:
    return plan.unshard(x)


def pieces(call: drawn.Call, mesh: Any) -> Program:
    """A cache filled and read piece by piece: the out of each token that was asked for, the last one where twice."""
    case, steps = call.case, call.steps
    assert isinstance(case, Case)
    plan = ra.plan(mesh, seq_len=case.seq_len, kernel=call.kernel)
    longest = max((n for do, n, _ in steps if do != "back"), default=1)

    def results(given: Given) -> Given:
        cache: Any = ra.KVCache.allocate(
            plan, batch=case.batch, max_len=case.seq_len, kv_heads=case.kv_heads, head_dim=case.head_dim,
            value_dim=case.value_dim, dtype=given["q"].dtype, window=case.spec.behind, room=longest, block=call.block,
        )  # fmt: skip
        also: Given = {"spec": case.spec, "sinks": given["sinks"].astype(given["q"].dtype) if case.sinks else None}
        rows, whole = np.arange(case.batch)[:, None], np.zeros(given["q"].shape[:3] + given["v"].shape[3:])
        tokens = [np.array(given[name]) for name in "qkv"]  # whose pieces need no program to be cut
        asked = np.zeros(whole.shape[:2], bool)
        for do, n, how in steps:
            if do == "back":
                cache = cache.truncate(list(n))
                continue
            at = np.array(cache.lengths)[:, None] + np.arange(n)
            q, k, v = (jnp.asarray(x[rows, at]) for x in tokens)
            if do == "decode":
                out, cache = ra.decode(q, k, v, cache, **also, **how)
            else:
                chunk = plan.for_length(n)
                q, k, v = sharded(chunk, q, k, v)
                out, cache = ra.prefill(q, k, v, chunk, cache, **also, **how)
                out = unsharded(chunk, out)
            whole[rows, at], asked[rows, at] = np.array(out, np.float64), True
        return {"out": whole, "asked": asked}

    return results
