"""How a plan is chosen: the candidate with the least predicted time, out of all that the mesh allows."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ringattn import kernels
from ringattn.check import of_arguments, of_choice, of_unknown
from ringattn.comms.axis import roles
from ringattn.cost import Cost, Hardware, Shape, kv_heads_of_a_rank, predict, seen_pairs
from ringattn.kernels.rates import mask_of
from ringattn.mask import Mask, schedule_of
from ringattn.planning import Plan, Transport, dtype_name, hardware_of
from ringattn.ranks import Ranks, one_rank
from ringattn.spec import AttentionSpec, Docs, raise_if

ALIKE, EVEN = 1.01, 1.02  # the time over that of the fastest, and the busiest rank's work over the mean: no difference


def plan(
    mesh: Any = None,
    *,
    seq_len: int,
    key_len: int | None = None,
    heads: tuple[int, int] | int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    dtype: str | None = None,
    spec: AttentionSpec | None = None,
    docs: Docs | None = None,
    strategy: str = "auto",
    layout: str = "auto",
    kernel: str = "auto",
    deterministic: bool = False,
    transport: Transport | None = None,
    axes: Mapping[str, Any] | None = None,
    saved_as: str | None = None,
    **unknown: Any,
) -> Plan:
    """A plan for `seq_len` tokens over the mesh. Any choice can be given; the others are made by predicted time.

    The mesh has axes "ring" and/or "ulysses", whose sizes are then fixed, or "sequence", which is factored here;
    `axes` says which ones they are if they have other names: {"sequence": "cp"}. In JAX it also names the axes that cut
    the batch and the heads: {"ring": "context", "batch": ("data", "fsdp"), "heads": "tensor"}. No
    mesh means one device; a `choosing.Target` stands for ranks that need not exist. `heads` is (query heads, key
    heads). Every rank must make the same plan; `explain()` shows the candidates and why this one was chosen. With
    `docs` the layout is chosen for these documents. With `deterministic` only kernels run whose gradients have the same
    bits in every run, as also under torch.use_deterministic_algorithms. `transport` is how blocks travel over a torch
    mesh. `saved_as` is the name of attention's results for policies of jax.checkpoint.
    """
    words = of_arguments(spec=spec, docs=docs, transport=transport)
    raise_if(of_unknown("plan", unknown, "spec", "docs", "transport") or words)
    spec = AttentionSpec() if spec is None else spec
    transport = Transport() if transport is None else transport
    target = target_of(mesh, transport.by, axes)
    if target.framework == "jax" and transport.chosen:
        raise ValueError(
            f"transport={transport.chosen}: in JAX the compiler moves the blocks, so it is not supported; leave "
            "transport out"
        )
    alone = Plan(
        seq_len,
        key_len=key_len,
        heads=heads,  # type: ignore[arg-type]  # one number for both becomes a pair there
        head_dim=head_dim,
        value_dim=value_dim,
        kernel=kernel,
        deterministic=deterministic,
        saved_as=saved_as,
        axes=Ranks(None, None, target.framework, target.device, here=False),
    )
    if docs is not None and docs.length != alone.seq_len:
        raise ValueError(f"docs: document lengths add up to {docs.length}, and seq_len={seq_len}; make them the same")
    if docs is not None and alone.keys.seq_len != alone.seq_len:
        raise ValueError(
            f"docs with key_len={key_len}: work is counted for one sequence only; leave docs out of the plan, "
            "and pass docs and key_docs to attention"
        )
    dtype = ("float32" if target.device == "cpu" else "bfloat16") if dtype is None else dtype_name(dtype)
    shape = alone.shape({"float64": 8, "float32": 4}.get(dtype, 2))
    options = candidates(alone, target.sizes, strategy, layout, spec, docs)
    if shape is None:
        best, report = options[0], ["no prediction: give heads=(query, key) and head_dim to compare candidates"]
    else:
        hardware = hardware_of(target.device)
        costs = priced(options, shape, spec, hardware, docs, transport.together)
        best, report = costs[0][0], candidates_report(costs, hardware)
    best = best.replace(axes=target.bind(best.ring, best.ulysses))
    if transport.grads == "auto":
        transport = transport.replace(grads=dtype_of_gradients(best, shape, spec, dtype, docs))
    narrow = transport.grads == "input"
    nbytes = shape.backward_bytes(best.ring, shape.itemsize if narrow else 4) if shape else None
    best = best.replace(transport=settled(transport, best))
    report += [*route_report(best, nbytes), *groups_report(best, shape), *kernel_report(best, shape, spec, dtype, docs)]
    return best.replace(report=tuple(report))


def settled(transport: Transport, plan: Plan) -> Transport:
    """The transport with every choice made that all ranks must share."""
    found = getattr(plan.axes.ring, "hosts", 0) or None  # None: unknown
    hosts = found if transport.hosts is None else transport.hosts
    if plan.ring == 1 and hosts is not None:
        hosts = 1  # a ring of one rank lies on one host
    route = transport.route
    if route == "auto":
        route = "relay" if hosts is None else route_over(hosts, plan.ring)
    return transport.replace(route=route, hosts=hosts or 1)


def dtype_of_gradients(plan: Plan, shape: Shape | None, spec: AttentionSpec, dtype: str, docs: Docs | None) -> str:
    """The dtype in which gradients travel by default: that of the inputs if the expected kernel rounds them to it."""
    if plan.framework == "jax" or plan.ring == 1:
        return "float32"
    named = kernels.BY_NAME.get(plan.kernel)
    if named is None and plan.device == "cuda":
        typical = Shape(plan.seq_len, plan.keys.seq_len, 32, 8, 128, 128)
        problem = problem_of(plan, shape or typical, spec, dtype, docs)
        try:
            named = kernels.select(problem, backward=True)
        except NotImplementedError:  # the call says so
            return "float32"
    return "input" if named is not None and named.narrow else "float32"


class Target(NamedTuple):
    """The device of a plan, the (ring, ulysses) sizes that it can have, and how they become axes."""

    device: str
    sizes: Sequence[tuple[int, int]]
    bind: Callable[[int, int], Ranks]
    framework: str = "torch"


def elsewhere(
    device: str, sizes: Sequence[tuple[int, int]], ring: Any = None, framework: str = "torch"
) -> Target:  # fmt: skip
    """A target of ranks that do not exist here; `ring` stands in for their axis."""
    return Target(device, sizes, lambda r, u: Ranks(ring, None, framework, device, here=False), framework)


def target_of(mesh: Any, by: str, named: Mapping[str, Any] | None = None) -> Target:
    """The target for a mesh: its device, the sizes it allows, and its axes once sizes are chosen."""
    if named is not None and (mesh is None or isinstance(mesh, Target)):
        raise ValueError(f"axes={named!r} name those of a mesh; give plan() the mesh, or leave out axes")
    if isinstance(mesh, Target):
        return mesh
    if mesh is None:
        device = "cuda" if torch_on_gpu() else "cpu"
        return Target(device, [(1, 1)], lambda ring, ulysses: one_rank(device))
    meshes: Any
    if is_jax_mesh(mesh):
        from ringattn.comms import jax as meshes

        device, framework, axes = meshes.platform(mesh), "jax", meshes.axes
    elif hasattr(mesh, "device_type"):
        from ringattn.comms import mesh as meshes

        device, framework, axes = mesh.device_type, "torch", partial(meshes.axes, transport=by)
    else:
        raise ValueError(f"mesh={mesh!r} is of type {type(mesh).__name__}; make one with ringattn.init_mesh(ring=...)")
    names = tuple(meshes.axis_names(mesh))
    found = roles(named, names, framework)
    cuts = (found.get("batch", ()), found.get("heads", ())) if {"batch", "heads"} & set(found) else None

    def ranks(of: Any, names: Mapping[str, tuple[str, ...]]) -> Ranks:
        ring, ulysses = axes(of, names)
        return Ranks(ring, ulysses, framework, device, cuts=cuts)

    if "sequence" in found:
        (line,) = found["sequence"]

        def bind(ring: int, ulysses: int) -> Ranks:
            split = meshes.split(mesh, line, {"ring": ring, "ulysses": ulysses})
            return ranks(split, {**found, "ring": ("ring",), "ulysses": ("ulysses",)})

        return Target(device, factored(meshes.axis_size(mesh, line)), bind, framework)
    if not {"ring", "ulysses"} & set(found):
        raise ValueError(
            f"the mesh has axes {names or '()'}; a plan needs 'ring' and/or 'ulysses', or 'sequence' to be factored "
            f"(ringattn{'.jax' if framework == 'jax' else ''}.init_mesh names them, or axes={{'ring': ...}} here)"
        )
    ring, ulysses = (prod(meshes.axis_size(mesh, name) for name in found.get(r, ())) for r in ("ring", "ulysses"))
    return Target(device, [(ring, ulysses)], lambda *sizes: ranks(mesh, found), framework)


def is_jax_mesh(mesh: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh))


def torch_on_gpu() -> Any:
    """torch, if it is imported and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def factored(size: int) -> list[tuple[int, int]]:
    """Every (ring, ulysses) whose product is `size`."""
    return [(size // u, u) for u in range(1, size + 1) if size % u == 0]


def candidates(
    alone: Plan, sizes: Sequence[tuple[int, int]], strategy: str, layout: str, spec: AttentionSpec, docs: Docs | None
) -> list[Plan]:
    """Every plan that spreads `alone` over one of these sizes; strategy and layout vary if they are "auto"."""
    found = []
    for ring, ulysses in sizes:
        if len(sizes) > 1 and (
            (alone.heads is not None and alone.heads[0] % ulysses) or (strategy == "ulysses" and ring > 1)
        ):
            continue
        names = ("ulysses",) if ring == 1 else ("ring", "gather")
        layouts = ("contiguous",) if ring == 1 or not spec.causal else ("zigzag", "contiguous")
        if ring > 1 and docs is not None:
            layouts = (*layouts, "striped")  # equal work for any documents
            if alone.framework == "torch" and docs.first is not None:
                layouts = (*layouts, "balanced")
        found += [
            alone.replace(ring=ring, ulysses=ulysses, strategy=s, layout=one, **dealt(one, docs, spec))
            for s in (names if strategy == "auto" else (strategy,))
            for one in (layouts if layout == "auto" else (layout,))
        ]
    if not found:
        size = sizes[0][0] * sizes[0][1]
        raise ValueError(
            f"strategy={strategy!r} over {size} ranks needs query heads that {size} divides, and there are "
            f"{alone.heads and alone.heads[0]}; use strategy='ring', 'gather' or 'auto'"
        )
    return found


def dealt(layout: str, docs: Docs | None, spec: AttentionSpec) -> dict[str, Any]:
    """What a layout that is made for documents and their work needs."""
    return {"docs": docs, "work": AttentionSpec(spec.causal, spec.window)} if layout == "balanced" else {}


def priced(
    options: list[Plan], shape: Shape, spec: AttentionSpec, hardware: Hardware, docs: Docs | None, together: int | None
) -> list[tuple[Plan, Cost]]:
    """The candidates with their predicted costs, fastest first; of equals the one that receives least."""
    counts: dict[Any, np.ndarray] = {}  # by layout, which several strategies share
    found = []
    for plan in options:
        layouts = plan.tokens, plan.keys.tokens
        if layouts not in counts:
            counts[layouts] = seen_pairs(*layouts, spec, docs)
        schedule = schedule_of(Mask(plan.replace(strategy="ring"), spec, docs))
        found.append((plan, predict(shape, *layouts, counts[layouts], schedule, plan.strategy, hardware, together)))
    least = min(cost.seconds for _, cost in found)

    def order(one: tuple[Plan, Cost]) -> tuple[Any, ...]:
        cost = one[1]
        alike = cost.seconds <= ALIKE * least and cost.imbalance <= EVEN
        return (0, cost.received) if alike else (1, cost.seconds)

    return sorted(found, key=order)


def candidates_report(options: list[tuple[Plan, Cost]], hardware: Hardware) -> list[str]:
    """The candidates as the lines of a table: times, and of the busiest rank its work and what it receives."""
    return [
        f"predicted forward on {hardware.name}:",
        "  ring ulysses strategy layout      ms      exposed ms  work / mean  MB received (mean)",
        *(
            f"  {plan.ring:>4} {plan.ulysses:>7} {plan.strategy:<8} {plan.layout:<10} {cost.seconds * 1e3:>8.3f} "
            f"{max(0.0, cost.exposed) * 1e3:>11.3f} {cost.imbalance:>12.2f}  "
            f"{cost.received[0] / 1e6:>8.1f} ({cost.received[1] / 1e6:.1f})"
            for plan, cost in options
        ),
    ]


def route_over(hosts: int, ring: int) -> str:
    """The default route for a ring on this many hosts."""
    if hosts == 1:
        return "direct"
    return "levels" if ring > hosts else "relay"


def route_report(plan: Plan, nbytes: int | None) -> list[str]:
    """How blocks reach the ranks of a torch ring; `nbytes` is what one moves in backward."""
    how = plan.transport
    if plan.ring == 1 or plan.framework != "torch":
        return []
    over = f", over {plan.axes.ring.by}" if plan.axes.ring else ""
    slower = ["the predicted times do not know that links between hosts are slower"] * (
        how.hosts != 1 and nbytes is not None
    )
    if plan.strategy == "gather":
        return [
            f"gather: every rank's keys come at once{over}; in backward their gradients are scattered home",
            *slower,
        ]
    come = {"direct": "straight from their owners", "relay": "from rank to rank"}.get(how.route, "host by host")
    back = "" if nbytes is None else f"; in backward {nbytes / 1e6:.1f} MB a block, gradients in {how.grads}"
    return [f"route {how.route}: blocks come {come}{over}{back}", *slower]


def groups_report(plan: Plan, shape: Shape | None) -> list[str]:
    """The number of groups of heads in which Ulysses and gather exchange, if torch exchanges any."""
    if plan.framework != "torch" or not plan.swaps:
        return []
    if plan.transport.groups is not None:
        groups, why = plan.transport.groups, "as given"
    elif shape is not None:
        groups, why = plan.groups_for(shape), f"{plan.exchanged(shape) / 1e6:.1f} MB a rank"
    else:
        return ["heads exchanged in groups: pass heads and head_dim to see how many"]
    if groups == 1:
        return [f"heads exchanged all at once ({why})"]
    return [f"heads exchanged in {groups} groups ({why}): one travels while another is computed"]


def kernel_report(plan: Plan, shape: Shape | None, spec: AttentionSpec, dtype: str, docs: Docs | None) -> list[str]:
    """Which kernel will run, and why the others will not; raises for an unknown name."""
    from ringattn.kernels import pallas as for_jax

    known: Any = for_jax if plan.framework == "jax" else kernels
    device, kernel = plan.device, plan.kernel
    if shape is None:
        raise_if(of_choice("kernel", kernel, ("auto", *(k.name for k in known.TABLE))))
        return [f"kernel {kernel}: give heads and head_dim to see which one that is"]
    problem = problem_of(plan, shape, spec, dtype, docs)
    chosen = known.select(problem, kernel).name
    lines = [f"kernel {kernel} -> {chosen} ({device}, {dtype}, head dim {problem.head_dim})"]
    for other in known.TABLE:
        serves = "would serve, slowly, if named" if device in other.named else "would serve"
        if other.name != chosen:
            more = None if plan.framework == "jax" else kernels.gain(other, problem, chosen)
            lines.append(f"  {other.name}: {more or other.refuses(problem) or serves}")
    return lines


def problem_of(plan: Plan, shape: Shape, spec: AttentionSpec, dtype: str, docs: Docs | None) -> kernels.Problem:
    """The problem of one rank, as far as a plan knows it."""
    torch = torch_on_gpu() if plan.device == "cuda" else None
    lengths = np.array([[shape.key_len]]) if docs is None else np.diff(docs.starts)
    return kernels.Problem(
        device=plan.device,
        dtype=dtype,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        heads=shape.heads // plan.ulysses,
        kv_heads=kv_heads_of_a_rank(shape.kv_heads, plan.ulysses),
        softcap=spec.softcap is not None,
        rectangles=spec.window is None and docs is None,  # stripes may still cut a step into too many rectangles
        mask=mask_of(lengths, spec.causal, spec.window, alone=plan.ring == 1),
        arch=torch.cuda.get_device_capability() if torch else None,
        deterministic=plan.deterministic,
        rows=plan.tokens.shard_len * (shape.heads // plan.ulysses),
    )
