"""How a plan is chosen: the candidate with the least predicted time, out of all that the mesh allows."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.check.arguments import of_arguments, of_unknown
from ringattn.check.attention import of_mask
from ringattn.comms.axis import roles
from ringattn.kernels.rates import RATES
from ringattn.masks.slices import Mask
from ringattn.masks.spec import AttentionSpec, Docs, raise_if
from ringattn.plans.candidates import Asked, compared, factored, first
from ringattn.plans.explain import Option, data_of, kernel_report, sentence, table, ways_report
from ringattn.plans.graphs import in_words
from ringattn.plans.machine import Machine, chip_here, load, of_device
from ringattn.plans.plan import GRAPHS, Plan
from ringattn.plans.ranks import Ranks, one_rank
from ringattn.plans.sizes import Transport, dtype_name


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
    mask: Mask | None = None,
    strategy: str = "auto",
    layout: str = "auto",
    kernel: str = "auto",
    deterministic: bool = False,
    transport: Transport | None = None,
    axes: Mapping[str, Any] | None = None,
    graphs: str = GRAPHS,
    saved_as: str | None = None,
    machine: str | Path | Machine | None = None,
    **unknown: Any,
) -> Plan:
    """A plan for `seq_len` tokens over the mesh. Any choice can be given; the others are made by predicted time.

    The mesh has axes "ring" and/or "ulysses", whose sizes are then fixed, or "sequence", which is factored here;
    `axes` says which ones they are if they have other names: {"sequence": "cp"}. In JAX it also names the axes that cut
    the batch and the heads: {"ring": "context", "batch": ("data", "fsdp"), "heads": "tensor"}. No
    mesh means one device; a `choosing.Target` stands for ranks that need not exist. `heads` is (query heads, key
    heads). Every rank must make the same plan; `explain()` shows the candidates and why this one was chosen. With
    `docs`, or the `mask` in their place, the layout is chosen for them. With `deterministic` only kernels run whose
    gradients have the same bits in every run, as also under torch.use_deterministic_algorithms. `transport` is how
    blocks travel over a torch mesh. With `graphs="auto"` short calls that repeat run as CUDA graphs. `saved_as` is the
    name of attention's results for policies of jax.checkpoint. `machine` is a description by which times are predicted,
    a name or a file; by default that of this machine. The same on every rank.
    """
    raise_if(of_unknown("plan", unknown) or of_mask(mask, docs))
    raise_if(of_arguments(spec=spec, docs=docs, transport=transport))
    spec, docs, transport = spec or AttentionSpec(), docs if mask is None else mask, transport or Transport()
    target = target_of(mesh, transport.by, axes)
    alone = Plan(
        seq_len,
        key_len=key_len,
        heads=heads,  # type: ignore[arg-type]  # one number for both becomes a pair there
        head_dim=head_dim,
        value_dim=value_dim,
        kernel=kernel,
        deterministic=deterministic,
        graphs=graphs,
        saved_as=saved_as,
        machine=of_device(target.device, target.chip) if machine is None else load(machine),
        axes=Ranks(None, None, target.framework, target.device, here=False),
    )
    raise_if(of_given(alone, target, docs, transport))
    dtype = ("float32" if target.device == "cpu" else "bfloat16") if dtype is None else dtype_name(dtype)
    gpus = target.gpus or (None if target.here else alone.machine.gpus)
    sizes, rates = tuple(target.sizes), hash(frozenset(RATES.items()))
    return picked(Asked(alone, sizes, gpus, strategy, layout, spec, docs, dtype, transport, rates), target)


def of_given(alone: Plan, target: "Target", docs: Docs | None, transport: Transport) -> str | None:
    if target.framework == "jax" and transport != Transport():
        return f"transport={transport}: in JAX the compiler moves the blocks; leave transport out"
    if docs is not None and docs.length != alone.seq_len:
        return f"docs: document lengths add up to {docs.length}, and seq_len={alone.seq_len}; make them the same"
    if docs is not None and alone.keys.seq_len != alone.seq_len:
        return f"docs with key_len={alone.key_len}: pass docs and key_docs to attention, and leave them out of the plan"
    return None


def picked(asked: Asked, target: "Target") -> Plan:
    """The best candidate, on the ranks of the target, with every choice made and the reasons for it."""
    options = () if asked.shape is None else compared(asked)
    best = options[0].plan if options else first(asked)
    best = best.replace(axes=target.bind(best.ring, best.ulysses))
    chip = target.chip or (chip_here(best.machine.device) if target.here else None)
    notes = [note + ": the times are not of this one"] if (note := chip and best.machine.differs(chip)) else []
    problem = None if asked.shape is None else asked.problem(best, asked.shape)
    notes += kernel_report(best, problem)  # refuses a kernel that there is not
    # without the target, whose mesh has the process groups: a plan may outlive them
    return best.replace(report=partial(report_of, best, options, asked, notes))


class Target(NamedTuple):
    """The device of a plan, the (ring, ulysses) sizes that it can have, and how they become axes."""

    device: str
    sizes: Sequence[tuple[int, int]]
    bind: Callable[[int, int], Ranks]
    framework: str = "torch"
    gpus: int | None = None  # ranks of a host, if known
    here: bool = True
    chip: str | None = None  # the name of the device, if the mesh knows it


def elsewhere(
    device: str, sizes: Sequence[tuple[int, int]], ring: Any = None, framework: str = "torch", gpus: int | None = None
) -> Target:
    """A target of ranks that do not exist here, so many a host; `ring` stands in for their axis."""
    return Target(device, sizes, lambda r, u: Ranks(ring, None, framework, device, here=False), framework, gpus, False)


def target_of(mesh: Any, by: str, named: Mapping[str, Any] | None = None) -> Target:
    """The target for a mesh: its device, the sizes it allows, and its axes once sizes are chosen."""
    if named is not None and (mesh is None or isinstance(mesh, Target)):
        raise ValueError(f"axes={named!r} name those of a mesh; give plan() the mesh, or leave out axes")
    if isinstance(mesh, Target):
        return mesh
    if mesh is None:
        device = "cuda" if "torch" in sys.modules and sys.modules["torch"].cuda.is_available() else "cpu"
        return Target(device, [(1, 1)], lambda ring, ulysses: one_rank(device))
    meshes: Any
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        from ringattn.comms import jax as meshes

        device, framework, axes, chip = meshes.platform(mesh), "jax", meshes.axes, meshes.device_of(mesh).device_kind
    elif hasattr(mesh, "device_type"):
        from ringattn.comms import mesh as meshes

        device, framework, axes, chip = mesh.device_type, "torch", partial(meshes.axes, transport=by), None
    else:
        raise ValueError(f"mesh={mesh!r} is of type {type(mesh).__name__}; make one with ringattn.init_mesh(ring=...)")
    names = tuple(meshes.axis_names(mesh))
    given = roles(named, names, framework)
    cuts = (given.get("batch", ()), given.get("heads", ())) if {"batch", "heads"} & set(given) else None

    def ranks(of: Any, names: Mapping[str, tuple[str, ...]]) -> Ranks:
        """All plans of a mesh share their ranks, so that the limits of the caches hold for all of them together."""
        kept: dict[Any, Ranks] = {} if framework == "jax" else meshes.kept(of)
        how = by, *[names.get(role, (role,)) for role in ("ring", "ulysses")], cuts
        if how not in kept:
            ring, ulysses = axes(of, names)
            kept[how] = Ranks(ring, ulysses, framework, device, cuts=cuts)
        return kept[how]

    if "sequence" in given:
        (line,) = given["sequence"]

        def bind(ring: int, ulysses: int) -> Ranks:
            split = meshes.split(mesh, line, {"ring": ring, "ulysses": ulysses})
            return ranks(split, {**given, "ring": ("ring",), "ulysses": ("ulysses",)})

        size = meshes.axis_size(mesh, line)
        hosts = meshes.hosts_along(mesh, line) if framework == "torch" else 0
        return Target(device, factored(size), bind, framework, size // hosts if hosts else None, chip=chip)
    if not {"ring", "ulysses"} & set(given):
        raise ValueError(
            f"the mesh has axes {names or '()'}; a plan needs 'ring' and/or 'ulysses', or 'sequence' to be factored "
            f"(ringattn{'.jax' if framework == 'jax' else ''}.init_mesh names them, or axes={{'ring': ...}} here)"
        )
    ring, ulysses = (prod(meshes.axis_size(mesh, name) for name in given.get(r, ())) for r in ("ring", "ulysses"))
    bound = ranks(mesh, given)
    hosts = getattr(bound.ring, "hosts", 0)
    gpus = ring * ulysses // hosts if hosts else None
    return Target(device, [(ring, ulysses)], lambda *sizes: bound, framework, gpus, chip=chip)


def report_of(best: Plan, options: Sequence[Option], asked: Asked, notes: Sequence[str]) -> tuple[Any, ...]:
    """What `explain` shows of this choice: lines, and plain values."""
    machine, gpus = asked.machine, asked.gpus or asked.machine.gpus
    lines = [*ways_report(best, asked.shape), *in_words(best, asked.shape, asked.spec, asked.docs), *notes]
    if not options:
        missing = "no prediction: give heads=(query, key) and head_dim to compare candidates"
        return (str(best), missing, *lines), {}
    return (sentence(options), str(best), *table(options, machine, gpus), *lines), data_of(options, machine, gpus)
