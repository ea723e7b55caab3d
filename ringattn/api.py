"""The public functions: each finds the framework from its arguments and calls the function of the same name there."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from ringattn import kernels
from ringattn.check import kind, of_arrays, of_choice, of_partials, of_unknown, of_words
from ringattn.comms.axis import TRANSPORTS, Solo
from ringattn.cost import Shape, kv_heads_of_a_rank
from ringattn.kernels.partial import Partial
from ringattn.kernels.partial import merge as merged
from ringattn.planning import (
    Plan,
    Target,
    candidates,
    candidates_report,
    dtype_name,
    factored,
    groups_report,
    hardware_of,
    priced,
    route_over,
    route_report,
)
from ringattn.serving import KVCache
from ringattn.spec import AttentionSpec, Docs


def attention(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan | None = None,
    *,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    key_docs: Docs | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, exact, whichever rank holds which part of it.

    q [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] are this rank's tokens under `plan` (see `Plan.shard`); G divides
    H. Without a plan they are everything: on one device, or, jax arrays, on the mesh that their sharding names. Returns
    out [B, T, H, V] in q's dtype, and with `return_lse` also lse [B, T, H], the natural log-sum-exp in float32,
    differentiable.

    spec      causal, window, softcap, scale; causal by default
    docs      packed documents, the same on every rank; `key_docs` those of the keys where they are another sequence
    sinks     [H], a logit a head that takes part in the softmax with a value of zero
    """
    problem = (
        of_unknown("attention", unknown, "spec", "docs")
        or of_words(plan=plan, spec=spec, docs=docs, key_docs=key_docs, return_lse=return_lse)
        or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    )
    if problem:
        refuse(problem, plan)
    return framework(q).attention(
        q, k, v, plan, spec=spec, docs=docs, key_docs=key_docs, sinks=sinks, return_lse=return_lse
    )


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any = None,
    plan: Plan | None = None,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    docs: Docs | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    scan: str = "auto",
    check: bool | None = None,
    **unknown: Any,
) -> Any:
    """S_t = exp(log_decay_t) S_{t-1} + k_t^T v_t and o_t = scale * q_t S_t, over the whole sequence, exact.

    q, k [B, T, H, K] and v [B, T, H, V] are this rank's tokens under `plan`, whose layout is contiguous or zigzag;
    without a plan they are everything. Returns out [B, T, H, V] in q's dtype, and with `return_state` also the state
    behind the last token [B, H, K, V], the same on every rank, in float32 (float64 for float64 inputs).

    log_decay       [B, T, H, K] a gate a key channel, [B, T, H] one a head, None for none; natural logarithm, at most 0
    initial_state   the state before the first token, the same on every rank; its gradient is this rank's share (of
                    global JAX arrays: all of it)
    docs            packed documents: where one begins the state is zero, except at the first token
    scale           of q; 1 / sqrt(K) by default
    kernel          auto, triton or chunkwise; in JAX auto or chunkwise
    scan            how states go from rank to rank: auto, gather, ring or pipeline
    check           look at every gate, which waits for the device; by default on CPUs only
    """
    optional = {"log_decay": log_decay, "initial_state": initial_state}
    problem = (
        of_unknown("linear_attention", unknown, "docs")
        or of_words(plan=plan, docs=docs, return_state=return_state, check=check)
        or of_arrays({"q": q, "k": k, "v": v}, optional, plan)
    )
    if problem:
        refuse(problem, plan)
    found: Any  # by statements: torch.compile traces no import_module
    if kind(q) == "jax":
        import ringattn.jax.linear as found
    else:
        import ringattn.torch.linear as found
    return found.linear_attention(
        q, k, v, log_decay, plan, initial_state=initial_state, return_state=return_state, docs=docs, scale=scale,
        kernel=kernel, scan=scan, check=check,
    )  # fmt: skip


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys, exact, from what queries found in each; differentiable.

    out [B, T, H, V] and lse [B, T, H] are those that `attend` gives, or `attention` with return_lse=True. A row whose
    lse is -inf has seen no key.
    """
    problem = of_partials(a, b)
    if problem:
        raise ValueError(problem)
    return merged(a, b)


def prefill(
    q: Any,
    k: Any,
    v: Any,
    plan: Plan,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Any = None,
    start: int | Sequence[int] | None = None,
    move: str = "auto",
    keys: int | None = None,
    **unknown: Any,
) -> Any:
    """Append a chunk of the prompt to the cache and attend to everything so far: out, with JAX (out, the cache).

    q, k and v are this rank's part of the chunk under `plan`, which is the cache's plan `for_length(chunk)`. Nothing is
    differentiable.

    start     where the chunk begins, one number or one a row: checked against the cache
    move      what travels: "queries", "keys", or what leaves less time exposed (`cache.explain` says which)
    keys      at most so many of a rank's keys are attended to, or sent, at once
    """
    problem = (
        of_unknown("prefill", unknown, "spec")
        or of_cached(plan, cache)
        or of_words(spec=spec)
        or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    )
    if problem:
        refuse(problem, getattr(cache, "plan", plan))
    return part("inference", q).prefill(q, k, v, plan, cache, spec=spec, sinks=sinks, start=start, move=move, keys=keys)


def decode(
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache,
    *,
    spec: AttentionSpec | None = None,
    sinks: Any = None,
    form: str = "lse",
    parents: Sequence[int] | None = None,
    **unknown: Any,
) -> Any:
    """The next token or tokens, the same on every rank or device: out, with JAX (out, the cache). Not differentiable.

    form      how partials are merged: "lse" as (out, lse), "streams" as (out, max, sum)
    parents   the token that each new one follows; a chain, as they see each other causally
    """
    plan = getattr(cache, "plan", None)
    problem = (
        of_cached(plan, cache) or of_words(spec=spec) or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    )
    if problem:
        refuse(problem, plan)
    return part("inference", q).decode(q, k, v, cache, spec=spec, sinks=sinks, form=form, parents=parents, **unknown)


def part(name: str, array: Any) -> Any:
    """The module of this name for this tensor's framework."""
    where = f"ringattn.{kind(array)}.{name}"
    return import_module(where)  # and not from sys.modules, where another thread may have it half imported


def refuse(problem: str, plan: Any) -> None:
    """Raise what is wrong with a call; on all ranks of a torch plan alike, where only some of them may know."""
    if isinstance(plan, Plan) and plan.framework == "torch" and plan.axes is not None:
        from ringattn.torch import agree

        agree.agree(plan, {}, problem)
    raise ValueError(problem)


def of_cached(plan: Any, cache: Any) -> str | None:
    """A plan and a cache are what their names say."""
    if not isinstance(cache, KVCache):
        swapped = "; plan comes before cache" * isinstance(cache, Plan)
        return f"cache is of type {type(cache).__name__}; make one with KVCache.allocate(plan, ...){swapped}"
    if not isinstance(plan, Plan):
        return f"plan is of type {type(plan).__name__}; use the cache's plan.for_length(n)"
    return None


def framework(array: Any) -> Any:
    """The module of functions for this tensor's framework."""
    if kind(array) == "torch":
        import ringattn.torch.attention

        return ringattn.torch.attention
    import ringattn.jax

    return ringattn.jax


def init_mesh(
    data: int = 1, ring: int = 1, ulysses: int = 1, sequence: int | None = None, device_type: str | None = None
) -> Any:
    """A torch DeviceMesh over all ranks: axes data, ring and ulysses, or data and sequence, which `plan` factors."""
    from ringattn.comms import mesh

    return mesh.init_mesh(data, ring, ulysses, sequence, device_type)


def plan(
    mesh: Any = None,
    *,
    seq_len: int,
    key_len: int | None = None,
    heads: tuple[int, int] | int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    spec: AttentionSpec | None = None,
    strategy: str = "auto",
    layout: str = "auto",
    kernel: str = "auto",
    route: str = "auto",
    hosts: int | None = None,
    together: int | None = None,
    transport: str = "auto",
    backward: str = "auto",
    groups: int | None = None,
    docs: Docs | None = None,
    dtype: str | None = None,
) -> Plan:
    """How `seq_len` tokens are spread over the mesh: every choice can be given, the rest is picked by predicted time.

    The mesh has axes "ring" and/or "ulysses", whose sizes are then fixed, or "sequence", which is factored here; no
    mesh means one device, and a `planning.Target` ranks that need not be there. `heads` is (query heads, key heads).
    Every rank must make the same plan; `explain()` shows the candidates and why this one. `docs`, if they are known,
    let it pick the layout that suits them.

    route      how blocks of keys reach the ranks of a ring: "direct", from their owner to each that sees them, "relay",
               from rank to rank, or "levels", from host to host and there direct; auto goes by `hosts`
    hosts      how many the ring lies on, one after the other with as many ranks on each; by default as found
    together   how many blocks a step may bring on the direct route; by default as many as are small
    transport  "symmetric" (GPUs that see each other's memory: copy engines move everything) or "group" (NCCL, gloo)
    backward   what travels in backward on the direct route, "keys" or "queries"; auto takes what is fewer bytes
    groups     in how many groups of heads Ulysses and gather exchange, one while another is attended to; by default as
               many as save time
    """
    problem = of_words(spec=spec, docs=docs) or of_choice("transport", transport, TRANSPORTS)
    if problem:
        raise ValueError(problem)
    spec = AttentionSpec() if spec is None else spec
    target = target_of(mesh, transport)
    device = target.device
    alone = Plan(
        seq_len,
        key_len=key_len,
        heads=heads,  # type: ignore[arg-type]  # one number for both becomes a pair there
        head_dim=head_dim,
        value_dim=value_dim,
        kernel=kernel,
        framework=target.framework,
        device=device,
    )
    if docs is not None and docs.length != alone.seq_len:
        raise ValueError(f"docs: document lengths add up to {docs.length}, and seq_len={seq_len}; make them the same")
    dtype = ("float32" if device == "cpu" else "bfloat16") if dtype is None else dtype_name(dtype)
    shape = alone.shape({"float64": 8, "float32": 4}.get(dtype, 2))
    options = candidates(alone, target.sizes, strategy, layout, spec, docs)
    if shape is None:
        best, report = options[0], ["no prediction: say heads=(query, key) and head_dim to compare candidates"]
    else:
        costs = priced(options, shape, spec, hardware_of(device), docs)
        best, report = costs[0][0], candidates_report(costs, hardware_of(device))
    axes = target.bind(best.ring, best.ulysses)
    if hosts is None and axes:
        hosts = getattr(axes[0], "hosts", 0) or None  # None: nobody knows
    best = replace(best, axes=axes, hosts=1 if hosts is None else hosts, together=together, groups=groups)
    if route == "auto":
        route = "relay" if hosts is None else route_over(best.hosts, best.ring)
    narrow = target.framework == "torch" and kernels.is_narrow(kernel)
    sizes = shape.backward_bytes(best.ring, shape.itemsize if narrow else 4) if shape else None
    if backward == "auto":
        free = sizes if route == "direct" and best.strategy != "gather" else None
        backward = min(free, key=lambda name: free[name]) if free else "keys"
    best = replace(best, route=route, backward=backward)
    report += [*route_report(best, sizes), *groups_report(best, shape), *kernel_report(best, shape, spec, dtype)]
    return replace(best, report=tuple(report))


def target_of(mesh: Any, transport: str = "auto") -> Target:
    """Where a mesh is: its device, the sizes it allows, and its axes once they are chosen."""
    if isinstance(mesh, Target):
        return mesh
    if mesh is None:
        return Target(default_device(), [(1, 1)], lambda ring, ulysses: (Solo("ring"), Solo("ulysses")))
    meshes: Any
    if is_jax_mesh(mesh):
        from ringattn.comms import jax as meshes

        device, framework, axes = meshes.platform(mesh), "jax", meshes.axes
    elif hasattr(mesh, "device_type"):
        from ringattn.comms import mesh as meshes

        device, framework, axes = mesh.device_type, "torch", partial(meshes.axes, transport=transport)
    else:
        raise ValueError(f"mesh={mesh!r} is of type {type(mesh).__name__}; make one with ringattn.init_mesh(ring=...)")
    names = tuple(meshes.axis_names(mesh))
    if "sequence" in names:
        sizes = factored(meshes.axis_size(mesh, "sequence"))

        def bind(ring: int, ulysses: int) -> tuple[Any, Any]:
            return axes(meshes.split(mesh, "sequence", {"ring": ring, "ulysses": ulysses}))

        return Target(device, sizes, bind, framework)
    if not {"ring", "ulysses"} & set(names):
        raise ValueError(
            f"the mesh has axes {names or '()'}; a plan needs 'ring' and/or 'ulysses', or 'sequence' to be factored "
            f"(ringattn{'.jax' if framework == 'jax' else ''}.init_mesh names them)"
        )
    fixed = meshes.axis_size(mesh, "ring"), meshes.axis_size(mesh, "ulysses")
    return Target(device, [fixed], lambda ring, ulysses: axes(mesh), framework)


def is_jax_mesh(mesh: Any) -> bool:
    return "jax" in sys.modules and isinstance(mesh, sys.modules["jax"].sharding.Mesh)


def default_device() -> str:
    """Where tensors of a plan without a mesh are made: the GPU if torch sees one."""
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_available() else "cpu"


def kernel_report(plan: Plan, shape: Shape | None, spec: AttentionSpec, dtype: str) -> list[str]:
    """Which kernel will run and why each other one will not; an unknown name is refused here."""
    from ringattn.kernels import pallas as for_jax

    known: Any = for_jax if plan.framework == "jax" else kernels
    device, kernel = plan.device, plan.kernel
    if shape is None:
        if kernel not in ("auto", *(k.name for k in known.TABLE)):
            known.select(kernels.Problem(device, "float32", 64, 64, 1, 1), kernel)
        return [f"kernel {kernel}: say heads and head_dim to see which one that is"]
    problem = kernels.Problem(
        device=device,
        dtype=dtype,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        heads=shape.heads // plan.ulysses,
        kv_heads=kv_heads_of_a_rank(shape.kv_heads, plan.ulysses),
        softcap=spec.softcap is not None,
        tiles=spec.window is None,  # documents and stripes may cut a step into more pieces than rectangles
    )
    chosen = known.select(problem, kernel).name
    lines = [f"kernel {kernel} -> {chosen} ({device}, {dtype}, head dim {problem.head_dim})"]
    for other in known.TABLE:
        serves = "would serve, slowly: say its name" if device in other.told else "would serve"
        if other.name != chosen:
            lines.append(f"  {other.name}: {other.refuses(problem) or serves}")
    return lines
