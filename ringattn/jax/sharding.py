"""A sequence in the plan's order, spread over the mesh, and back. All of it is reshapes: no indices are stored.

And the programs of calls: what runs on every device, on arrays that lie so.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringattn.check.arguments import of_arguments
from ringattn.check.attention import of_dim, of_part, of_roll, of_shapes, of_whole
from ringattn.comms.axis import Solo
from ringattn.comms.jax import MeshAxis, automatic_axes, platform
from ringattn.jax.attention.steps import local_positions
from ringattn.jax.lookup import padded, reordered, spoiled, uncut, up_to
from ringattn.masks.spec import Docs, raise_if
from ringattn.plans.plan import Plan
from ringattn.plans.ranks import Ranks


def shard(x: Array, plan: Plan, dim: int = 1, compare: bool = True) -> Array:
    """The global array `x`, whose dim `dim` is the sequence: padded with zeros, in the plan's order, over the mesh.

    `compare` is for torch, where ranks have arrays of their own: a global array is the same for all.
    """
    dim = dim_of(x, dim)
    if is_local(plan):
        raise ValueError("inside a shard_map arrays are this device's tokens already: shard before it")
    raise_if(of_whole(x, dim, plan, plan.tokens.padded_length))
    x = uncut(x, dim)  # no permutation along a dim that the type says is cut
    pad = plan.tokens.padded_length - plan.seq_len
    if pad:
        x = padded(x, pad, dim)
        if isinstance(x, jax.core.Tracer):  # else XLA may shard other dims first, and then has to replicate x
            x = placed(x, plan, dim, ())
    return placed(reordered(x, plan.tokens, dim), plan, dim, sequence_axes(plan))


def unshard(x: Array, plan: Plan, dim: int = 1) -> Array:
    """The sequence in its own order, padding removed: the inverse of `shard`; differentiable.

    In a shard_map it gathers the tokens of all devices.
    """
    dim = dim_of(x, dim)
    if is_local(plan):
        for axis in (plan.ulysses_axis, plan.ring_axis):
            x = axis.all_gather(x, dim).wait()
        return jax.lax.slice_in_dim(reordered(x, plan.tokens, dim, back=True), 0, plan.seq_len, axis=dim)
    raise_if(of_part(x, dim, plan, plan.tokens.padded_length, "a sharded array of this plan has"))
    everything = reordered(placed(x, plan, dim, ()), plan.tokens, dim, back=True)
    return jax.lax.slice_in_dim(everything, 0, plan.seq_len, axis=dim)


def roll(x: Array, plan: Plan, shift: int = -1, dim: int = 1, docs: Docs | None = None, fill: Any = None) -> Array:
    """Position p of the sequence gets position p - shift, or `fill` if that is outside of it or of p's document."""
    dim, T = dim_of(x, dim), plan.seq_len
    if is_local(plan):
        raise ValueError("inside a shard_map arrays are this device's tokens only: roll before it or after it")
    raise_if(of_roll(x, dim, plan, shift, docs))
    count = int(shift)
    at, ends = jnp.arange(T), jnp.array([[T]]) if docs is None else jnp.asarray(docs.starts)[:, 1:]
    document, source = up_to(ends, at), up_to(ends, at - count)
    inside = (document == source) & (document < ends.shape[1]) & (at >= count)  # tokens after the documents are in none
    shape = [T if i == dim else len(inside) if i == 0 else 1 for i in range(x.ndim)]
    moved = jnp.take(unshard(x, plan, dim), jnp.clip(at - count, 0, T - 1), dim)
    if fill is None and jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        moved = moved.astype(int)  # bytes have no -100
    empty = (-100 if jnp.issubdtype(x.dtype, jnp.integer) else 0) if fill is None else fill
    moved = jnp.where(inside.reshape(shape), moved, jnp.asarray(empty, moved.dtype))
    return shard(spoiled(moved, docs and docs.starts), plan, dim)


def dim_of(x: Array, dim: int) -> int:
    """The dim, counted from the first one, of an array that has it."""
    if not isinstance(x, (Array, np.ndarray)):
        raise ValueError(f"x is of type {type(x).__name__}; expected a jax array, as the plan is for a jax mesh")
    raise_if(of_dim(x, dim))
    return dim % x.ndim


def positions(plan: Plan, docs: Docs | None = None) -> Array:
    """The global positions of all tokens in the plan's order, over the mesh; padding repeats the last one.

    Inside a shard_map those of this device's tokens. In trees, depths along their branches.
    """
    raise_if(of_arguments(docs=docs))
    at = with_number(jnp.minimum, padded_positions(plan), plan.seq_len - 1)
    return at if docs is None or docs.depths is None else jnp.asarray(docs.depths, jnp.int32)[..., at]


def real_positions(plan: Plan) -> Array:
    """Whether each token in the plan's order is real; False for padding. Spread as `positions`."""
    return with_number(jnp.less, padded_positions(plan), plan.seq_len)


@partial(jax.jit, static_argnums=(0, 2), inline=True)  # or the number is sent to a device in each call
def with_number(function: Any, x: Array, number: int) -> Array:
    return function(x, number)


def padded_positions(plan: Plan) -> Array:
    """The positions of all tokens in the plan's order; those from `seq_len` on are padding."""
    if is_local(plan):
        return local_positions(plan)
    at = jnp.arange(plan.tokens.padded_length, dtype=jnp.int32)
    return placed(reordered(at, plan.tokens, 0), plan, 0, sequence_axes(plan))


def sequence_axes(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that cut the sequence, ring outside."""
    return (*plan.ring_axis.names, *plan.ulysses_axis.names)


def placed(x: Array, plan: Plan, dim: int, along: tuple[str, ...]) -> Array:
    """`x` with its sequence over these axes; its other dims stay cut as they are."""
    return moved(x, NamedSharding(current_mesh(plan), spec_of(x, plan, dim, along)))


def current_mesh(plan: Plan) -> Mesh | AbstractMesh:
    """The plan's mesh; inside a shard_map over some of its axes, the mesh of the shard_map."""
    mesh, current = plan.ring_axis.mesh, jax.sharding.get_abstract_mesh()
    if not current.manual_axes:
        return on_devices(mesh) if isinstance(mesh, AbstractMesh) else mesh
    if any(current.shape.get(name) != mesh.shape[name] for name in sequence_axes(plan)):
        raise ValueError(
            f"this is inside a shard_map over a mesh of axes {dict(current.shape)}, and the plan's are "
            f"{dict(mesh.shape)}; give shard_map the plan's mesh, plan.ring_axis.mesh"
        )
    return current


def on_devices(mesh: AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh of jax.set_mesh, for a plan of the same axes without devices; the abstract one while JAX traces."""
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # tracing
        return mesh
    return mesh if context.empty else context


def is_local(plan: Plan) -> bool:
    """Whether this is inside a shard_map over the axes that cut the sequence: over all of them, or over none."""
    names, current = sequence_axes(plan), current_mesh(plan)
    manual = set(names) & set(current.manual_axes)
    free = [name for name in names if current.shape[name] > 1 and name not in manual]
    if manual and free:
        raise ValueError(
            f"this is inside a shard_map over {current.manual_axes}, and {free} cut the plan's sequence too; name all "
            f"of {names} in its axis_names"
        )
    return bool(manual)


def check_context(plan: Plan) -> None:
    """Check that the mesh of jax.set_mesh, if there is one, is the plan's."""
    mesh, current = plan.ring_axis.mesh, jax.sharding.get_abstract_mesh()
    if not (current.empty or current.manual_axes or current.shape_tuple == mesh.shape_tuple):
        raise ValueError(
            f"jax.set_mesh holds axes {dict(current.shape)}, the plan's are {dict(mesh.shape)}; use "
            "`with jax.set_mesh(plan.ring_axis.mesh)`"
        )


def batch_axes(plan: Plan, mesh: Mesh | AbstractMesh, rows: int) -> tuple[str, ...]:
    """The axes that cut the batch of global arrays, if they divide it: those that the plan names, or data."""
    named = ("data",) if plan.axes.cuts is None else plan.axes.cuts[0]
    names = tuple(name for name in named if name in mesh.axis_names and name not in mesh.manual_axes)
    return names if rows % MeshAxis(names, mesh).size == 0 else ()


def spec_of(x: Array, plan: Plan, dim: int, along: tuple[str, ...]) -> P:
    """The sequence over these axes, the other dims as they are cut; a batch that is not cut goes over the data axis.

    A dim is open (P.UNCONSTRAINED) where nothing is known to cut it: the compiler decides about a traced array. The
    batch is open too where other automatic axes may cut it.
    """
    mesh = current_mesh(plan)
    cuts = cuts_of(x, mesh, along)
    unnamed = P.UNCONSTRAINED if AxisType.Auto in mesh.axis_types else None  # explicit axes cut only what types say
    parts: list[Any] = [cut or unnamed for cut in cuts]
    parts[dim] = along or None
    batch = batch_axes(plan, mesh, x.shape[0])
    others = plan.axes.cuts is None and automatic_axes(mesh).keys() - {*along, "data"}
    unknown = isinstance(x, jax.core.Tracer) and others
    if dim and batch and not (cuts[0] or unknown or any({*batch} & {*cut} for cut in cuts)):
        parts[0] = batch
    return P(*parts)


def cuts_of(x: Array, mesh: Mesh | AbstractMesh, taken: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes of the mesh, other than those taken, that are known to cut each dim: by its type, or as data lies."""
    there = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    named = there if isinstance(there, NamedSharding) and there.mesh.shape_tuple == mesh.shape_tuple else None
    cuts = [names_of(cut) for cut in named.spec] if named is not None else []
    return [tuple(name for name in cut if name not in taken) for cut in [*cuts, *[()] * (x.ndim - len(cuts))]]


def moved(x: Array, there: NamedSharding) -> Array:
    """`x` with this sharding: a concrete array is moved, a traced one constrained; the compiler decides open dims."""
    mesh = there.mesh
    if isinstance(mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        closed = P(*(None if cut is P.UNCONSTRAINED else cut for cut in there.spec))  # open dims are not cut
        return jax.device_put(x, NamedSharding(mesh, closed))
    x = resharded(x, mesh, there.spec)
    if AxisType.Auto not in mesh.axis_types:
        return x
    cuts = (of_kind(AxisType.Auto, mesh, cut) or (P.UNCONSTRAINED if cut else None) for cut in there.spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*cuts)))


def resharded(x: Array, mesh: Mesh | AbstractMesh, spec: P) -> Array:
    """A traced value, cut in this way by the explicit axes of the mesh, if there are any."""
    if AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.reshard(x, NamedSharding(mesh, P(*(of_kind(AxisType.Explicit, mesh, cut) for cut in spec))))


def of_kind(kind: AxisType, mesh: Mesh | AbstractMesh, cut: Any) -> tuple[str, ...]:
    """Those axes of one dim's cut that are of this kind."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in names_of(cut) if kinds[name] == kind)


def names_of(cut: Any) -> tuple[str, ...]:
    return (cut,) if isinstance(cut, str) else () if cut is P.UNCONSTRAINED else tuple(cut or ())


@lru_cache(maxsize=256)
def over_mesh(
    function: Any, call: Any, mesh: Mesh | AbstractMesh | None = None, given: Any = (), results: Any = (),
    free: bool = True, check_vma: bool = True,
) -> Any:  # fmt: skip
    """A program: `function(call, *arrays)` on every device of the mesh; without a mesh, on arrays as they are.

    Arguments are moved to the specs `given`, results have the specs `results`. If `free`, automatic axes that no spec
    names, except the data axis, stay the compiler's: what they cut stays cut.
    """
    work = partial(function, call)
    if mesh is None:
        return jax.jit(work)
    specs = jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, P))
    left = automatic_axes(mesh).keys() - {"data", *(name for spec in specs for cut in spec for name in names_of(cut))}
    left = left if free else set()
    some = left or mesh.manual_axes
    named = set(mesh.axis_names) - set(mesh.manual_axes) - left if some else set()  # empty: all but those of a vmap
    inner = jax.shard_map(work, mesh=mesh, in_specs=given, out_specs=results, check_vma=check_vma, axis_names=named)

    def there(x: Array | None, spec: P) -> Array | None:
        return None if x is None else resharded(x, mesh, spec)

    def program(*arrays: Any) -> Any:
        return inner(*jax.tree.map(there, arrays, given, is_leaf=lambda x: x is None))

    return jax.jit(program)


def located(q: Array, k: Array, v: Array, plan: Plan | None, linear: bool = False) -> tuple[Plan, bool]:
    """The plan of a call, without one that of its arrays' sharding, and whether they are one device's part."""
    raise_if(of_shapes(q, k, v, linear))
    given, plan = plan, plan or plan_where(placed_alike(q, k, v), q.shape[1], k.shape[1])
    if plan.framework != "jax":
        raise ValueError("the plan was made for a torch mesh, and q is a jax array; give plan() a mesh of jax devices")
    inside = not isinstance(plan.ring_axis, MeshAxis) or is_local(plan)
    if given and not inside:
        check_context(plan)
    return plan, inside


class Placed(NamedTuple):
    """The axes of a mesh that cut the batch, the tokens and the heads of an array [B, T, H, D]; none are ()."""

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    tokens: tuple[str, ...]
    heads: tuple[str, ...]

    def __str__(self) -> str:
        mesh = self.mesh
        where = "" if isinstance(mesh, AbstractMesh) else f" of {mesh.size} devices from {mesh.devices.flat[0]} on"
        return f"batch {self.batch}, tokens {self.tokens}, heads {self.heads}{where}"


def placed_alike(q: Array, k: Array, v: Array) -> Placed | None:
    """The sharding of q, k and v, if they are on a mesh; None on one device, and for local arrays inside shard_map."""
    placements = {name: placement(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    if any(at is not None and isinstance(at.mesh, AbstractMesh) for at in placements.values()):  # some are traced
        placements = {name: at and at._replace(mesh=at.mesh.abstract_mesh) for name, at in placements.items()}
    if len(set(placements.values())) > 1:
        cuts = "; ".join(f"{name}: {'one device' if at is None else at}" for name, at in placements.items())
        raise ValueError(f"without a plan, q, k and v need equal shardings, but are cut by {cuts}; use jax.reshard")
    return placements["q"]


def placement(name: str, x: Array) -> Placed | None:
    """The sharding of `x`, from its type or from a concrete array; one that only the compiler knows is refused."""
    traced = isinstance(x, jax.core.Tracer)
    there: Any = jax.typeof(x).sharding if traced else x.sharding
    if not isinstance(there, NamedSharding):
        if there.is_fully_replicated:
            return None
        raise ValueError(
            f"{name} is on {len(there.device_set)} devices, and its sharding names no axes ({there}); put it on a "
            "mesh with jax.device_put and a NamedSharding, or give a plan"
        )
    mesh = there.mesh
    alone = mesh.size <= 1 and AxisType.Explicit not in mesh.axis_types  # the types of explicit axes must agree
    if alone or (AxisType.Manual in mesh.axis_types and not any(there.spec)):
        return None
    if traced and AxisType.Auto in mesh.axis_types:
        raise ValueError(
            f"what cuts {name} is not known while it is traced (jit, grad, vmap): axes of its mesh {mesh.axis_names} "
            "are automatic; give a plan (ringattn.plan(mesh, ...)), or make the mesh with AxisType.Explicit"
        )
    batch, tokens, heads, dim = [*map(names_of, there.spec), (), (), (), ()][:4]
    if dim:
        raise ValueError(f"the head dim of {name} is cut by {dim}; attention needs whole heads: use jax.reshard")
    return Placed(mesh, batch, tokens, heads)


@lru_cache(maxsize=256)
def plan_where(placed: Placed | None, seq_len: int, key_len: int) -> Plan:
    """The plan of tokens in their own order: a contiguous ring over the axes that cut them, if any do."""
    if placed is None:
        return Plan(seq_len, key_len=key_len, axes=Ranks(Solo("ring"), Solo("ulysses"), "jax", platform(None)))
    ring, cuts = MeshAxis(placed.tokens, placed.mesh), (placed.batch, placed.heads)
    axes = Ranks(ring, MeshAxis((), placed.mesh), "jax", platform(placed.mesh), cuts=cuts)
    return Plan(seq_len, ring.size, key_len=key_len, axes=axes)


def on_every_device(
    function: Any, call: Any, plan: Plan, inside: bool, arrays: Any, numbers: Any, cuts: Any, eager: bool
) -> Any:
    """`function(call, arrays, numbers)` on every device, or `inside` a shard_map on this one.

    `cuts(tokens)` are the specs of the arrays, of which q and k come first, and of the results. The numbers are starts
    of documents and the like, with one row or one for each of the batch.
    """
    if inside:
        return over_mesh(function, call)(arrays, tuple(map(whole_numbers, numbers)))
    mesh, tokens = current_mesh(plan), cut_of_tokens(arrays[0], arrays[1], plan)
    rows = tuple(P(tokens[0]) if x is not None and x.shape[0] > 1 else P() for x in numbers)
    given, results = cuts(tokens)
    program = over_mesh(function, call, mesh, (given, rows), results, plan.axes.cuts is None)
    of_call = (whole_numbers(x, mesh if eager else None, cut) for x, cut in zip(numbers, rows, strict=True))
    return program(arrays, tuple(of_call))


def whole_numbers(x: Any, mesh: Any = None, cut: P | None = None) -> Array | None:
    """Numbers as an array; with a mesh of devices, those that are known are put on it."""
    if not isinstance(x, np.ndarray):
        return None if x is None else jnp.asarray(x, jnp.int32)
    there = NamedSharding(mesh, cut) if isinstance(mesh, Mesh) and cut is not None else None
    return jax.device_put(x.astype(np.int32), there)


def cut_of_tokens(q: Array, k: Array, plan: Plan) -> P:
    """The axes of the mesh that cut q, [B, T, H], and also k and v.

    Those that the plan names cut the batch and the heads; otherwise explicit ones by q's type, and an automatic data
    axis cuts the batch.
    """
    mesh, tokens = current_mesh(plan), sequence_axes(plan)
    batch = heads = tuple[str, ...]()
    if plan.axes.cuts is not None:
        heads = tuple(name for name in plan.axes.cuts[1] if name not in mesh.manual_axes)
    elif AxisType.Explicit in mesh.axis_types:
        batch, _, heads, _ = map(names_of, jax.typeof(q).sharding.spec)
    named = batch_axes(plan, mesh, q.shape[0])
    batch = batch or (of_kind(AxisType.Auto, mesh, named) if plan.axes.cuts is None else named)
    if twice := set(tokens) & {*batch, *heads}:
        raise ValueError(f"{sorted(twice)} cut the batch or the heads of q, and the plan's sequence; use jax.reshard")
    axes = ", ".join(f"{name}={mesh.shape[name]}" for name in heads)
    if heads and q.shape[2] % (MeshAxis(heads, mesh).size * plan.ulysses):
        raise ValueError(f"{axes} and ulysses={plan.ulysses} both cut heads, and do not divide {q.shape[2]} of q")
    if k.shape[2] % MeshAxis(heads, mesh).size:
        raise ValueError(
            f"{axes}, which cuts the heads of q, does not divide {k.shape[2]} key heads; repeat k and v, or leave q's "
            "heads uncut"
        )
    return P(batch or None, tokens or None, heads or None)
