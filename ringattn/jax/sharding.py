"""A sequence in the plan's order, spread over the mesh, and back. All of it is reshapes: no indices are stored.

And the other way round: the plan of arrays that are spread over a mesh already, or lie on one device.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringattn.check import of_shapes
from ringattn.comms.axis import Solo
from ringattn.comms.jax import MeshAxis, platform
from ringattn.jax.steps import local_positions
from ringattn.layout import Layout
from ringattn.planning import Plan
from ringattn.spec import whole


def shard(x: Array, plan: Plan, dim: int = 1) -> Array:
    """The global array `x`, whose dim `dim` is the sequence: padded with zeros, in the plan's order, over the mesh."""
    dim = dim_of(x, dim)
    if is_local(plan):
        raise ValueError("inside a shard_map arrays are this device's tokens already: shard before it")
    if x.shape[dim] != plan.seq_len:
        already = plan.tokens.padded_length != plan.seq_len and x.shape[dim] == plan.tokens.padded_length
        hint = "it is already sharded" if already else f"use plan.for_length({x.shape[dim]})"
        raise ValueError(f"dim {dim} of x has {x.shape[dim]} tokens, the plan is for {plan.seq_len}; {hint}")
    pad = plan.tokens.padded_length - plan.seq_len
    x = jnp.pad(x, [(0, pad if i == dim else 0) for i in range(x.ndim)]) if pad else x
    return placed(permuted(x, plan.tokens, dim), plan, dim)


def unshard(x: Array, plan: Plan, dim: int = 1) -> Array:
    """The sequence in its own order, padding removed: the inverse of `shard`; differentiable."""
    dim = dim_of(x, dim)
    if is_local(plan):
        raise ValueError("inside a shard_map arrays are this device's tokens only: unshard after it")
    if x.shape[dim] != plan.tokens.padded_length:
        raise ValueError(
            f"dim {dim} of x has {x.shape[dim]} tokens, a sharded array of this plan has "
            f"{plan.tokens.padded_length} ({plan})"
        )
    there = NamedSharding(mesh_here(plan), spec_of(x, plan, dim, ()))
    everything = restored(moved(x, there), plan.tokens, dim)
    return jax.lax.slice_in_dim(everything, 0, plan.seq_len, axis=dim)


def dim_of(x: Array, dim: int) -> int:
    """The dim, counted from the first one, of an array that has it."""
    if not isinstance(x, (Array, np.ndarray)):
        raise ValueError(f"x is of type {type(x).__name__}; expected a jax array, as the plan is for a jax mesh")
    found = whole(dim)
    if found is None or not -x.ndim <= found < x.ndim:
        raise ValueError(f"dim={dim!r}: x has shape {x.shape}; say which of its {x.ndim} dims is the sequence")
    return found % x.ndim


def positions(plan: Plan) -> Array:
    """The global positions of all tokens in the plan's order, over the mesh; those from `seq_len` on are padding.

    Inside a shard_map those of this device's tokens.
    """
    if is_local(plan):
        return local_positions(plan)
    at = jnp.arange(plan.tokens.padded_length, dtype=jnp.int32)
    return placed(permuted(at, plan.tokens, 0), plan, 0)


def sequence_axes(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that cut the sequence, ring outside."""
    return (*plan.ring_axis.names, *plan.ulysses_axis.names)


def placed(x: Array, plan: Plan, dim: int) -> Array:
    """`x` with its sequence over ring and ulysses, and its first dim over the mesh's data axis where that divides."""
    return moved(x, NamedSharding(mesh_here(plan), spec_of(x, plan, dim, sequence_axes(plan))))


def mesh_here(plan: Plan) -> Mesh | AbstractMesh:
    """The plan's mesh; inside a shard_map over some of its axes that mesh as seen there."""
    mesh, here = plan.ring_axis.mesh, jax.sharding.get_abstract_mesh()
    if not here.manual_axes:
        return mesh
    if any(here.shape.get(name) != mesh.shape[name] for name in sequence_axes(plan)):
        raise ValueError(
            f"this is inside a shard_map over a mesh of axes {dict(here.shape)}, and the plan's are "
            f"{dict(mesh.shape)}; give shard_map the plan's mesh, plan.ring_axis.mesh"
        )
    return here


def is_local(plan: Plan) -> bool:
    """Whether this is inside a shard_map over the axes that cut the sequence: over all of them, or over none."""
    names, here = sequence_axes(plan), mesh_here(plan)
    manual = set(names) & set(here.manual_axes)
    free = [name for name in names if here.shape[name] > 1 and name not in manual]
    if manual and free:
        raise ValueError(
            f"this is inside a shard_map over {here.manual_axes}, and {free} cut the plan's sequence too; name all of "
            f"{names} in its axis_names"
        )
    return bool(manual)


def check_context(plan: Plan) -> None:
    """The mesh that jax.set_mesh holds, if it holds one, is the plan's."""
    mesh, here = plan.ring_axis.mesh, jax.sharding.get_abstract_mesh()
    if not (here.empty or here.manual_axes or here.shape_tuple == mesh.shape_tuple):
        raise ValueError(
            f"jax.set_mesh holds axes {dict(here.shape)}, the plan's are {dict(mesh.shape)}; use "
            "`with jax.set_mesh(plan.ring_axis.mesh)`"
        )


def data_axis(mesh: Mesh | AbstractMesh) -> tuple[str | None, int]:
    """The axis that cuts the batch of global arrays, if there is one, and its size."""
    found = "data" in mesh.axis_names and "data" not in mesh.manual_axes
    return ("data", mesh.shape["data"]) if found else (None, 1)


def spec_of(x: Array, plan: Plan, dim: int, along: tuple[str, ...]) -> P:
    data, size = data_axis(mesh_here(plan))
    parts: list[Any] = [None] * x.ndim
    parts[dim] = along or None
    if dim and x.shape[0] % size == 0:
        parts[0] = data
    return P(*parts)


def moved(x: Array, there: NamedSharding) -> Array:
    """`x` with this sharding: data that is at hand is moved, a traced value is told where it will be."""
    if isinstance(there.mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, there)
    if AxisType.Explicit in there.mesh.axis_types:
        return jax.reshard(x, there)
    return jax.lax.with_sharding_constraint(x, there)


def permuted(x: Array, layout: Layout, dim: int) -> Array:
    """`x[layout.order()]` along `dim`."""
    return rearranged(x, layout, dim, back=False)


def restored(x: Array, layout: Layout, dim: int) -> Array:
    """The inverse of `permuted`."""
    return rearranged(x, layout, dim, back=True)


def rearranged(x: Array, layout: Layout, dim: int, back: bool) -> Array:
    """Striped is a transpose, zigzag a permutation of 2 x ring blocks."""
    ring, before, after = layout.ring, x.shape[:dim], x.shape[dim + 1 :]
    if ring == 1 or layout.name == "contiguous":
        return x
    if layout.name == "striped":
        grid = (ring, layout.shard_len) if back else (layout.shard_len, ring)
        return x.reshape(*before, *grid, *after).swapaxes(dim, dim + 1).reshape(x.shape)
    order = np.array([block for r in range(ring) for block in (r, 2 * ring - 1 - r)])
    order = np.argsort(order) if back else order
    return jnp.take(x.reshape(*before, 2 * ring, -1, *after), order, axis=dim).reshape(x.shape)


class Placed(NamedTuple):
    """The axes of a mesh that cut the batch, the tokens and the heads of an array [B, T, H, D]; none are ()."""

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    tokens: tuple[str, ...]
    heads: tuple[str, ...]

    def __str__(self) -> str:
        of = self.mesh
        where = "" if isinstance(of, AbstractMesh) else f" of {of.size} devices from {of.devices.flat[0]} on"
        return f"batch {self.batch}, tokens {self.tokens}, heads {self.heads}{where}"


def placed_alike(q: Array, k: Array, v: Array) -> Placed | None:
    """Where q, k and v all lie, if that is on a mesh; None where they are on one device, or local inside shard_map."""
    found = {name: placement(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    if any(at is not None and isinstance(at.mesh, AbstractMesh) for at in found.values()):  # beside traced ones, data
        found = {name: at and at._replace(mesh=at.mesh.abstract_mesh) for name, at in found.items()}
    if len(set(found.values())) > 1:
        said = "; ".join(f"{name}: {'one device' if at is None else at}" for name, at in found.items())
        raise ValueError(f"without a plan, q, k and v must lie alike, and they are cut by {said}; use jax.reshard")
    return found["q"]


def placement(name: str, x: Array) -> Placed | None:
    """Read from the type of `x` where that says it, and from data at hand; what only the compiler knows is refused."""
    traced = isinstance(x, jax.core.Tracer)
    there = jax.typeof(x).sharding if traced else x.sharding
    if not isinstance(there, NamedSharding):
        if there.is_fully_replicated:
            return None
        raise ValueError(
            f"{name} lies on {len(there.device_set)} devices, and its sharding names no axes ({there}); put it on a "
            "mesh with jax.device_put and a NamedSharding, or give a plan"
        )
    mesh = there.mesh
    if mesh.size <= 1 or AxisType.Manual in mesh.axis_types:
        return None
    if traced and AxisType.Auto in mesh.axis_types:
        raise ValueError(
            f"what cuts {name} is not known while it is traced (jit, grad, vmap): axes of its mesh {mesh.axis_names} "
            "are automatic; give a plan (ringattn.plan(mesh, ...)), or make the mesh with AxisType.Explicit"
        )
    cuts = [() if cut is None else (cut,) if isinstance(cut, str) else tuple(cut) for cut in there.spec]
    batch, tokens, heads, dim = [*cuts, (), (), (), ()][:4]
    if dim:
        raise ValueError(f"the head dim of {name} is cut by {dim}; attention needs whole heads: use jax.reshard")
    return Placed(mesh, batch, tokens, heads)


def located(q: Array, k: Array, v: Array, plan: Plan | None) -> tuple[Plan, Placed | None, bool]:
    """The plan of a call; where its arrays lie, if nobody gave one; whether they are one device's part."""
    shapes = of_shapes(q, k, v)
    if shapes:
        raise ValueError(shapes)
    lying = placed_alike(q, k, v) if plan is None else None
    if plan is None:
        lengths = q.shape[1], k.shape[1]
        plan = plan_where(lying, *lengths) if lying else single_device(*lengths, jax.default_backend())
    if plan.framework != "jax":
        raise ValueError("the plan was made for a torch mesh, and q is a jax array; give plan() a mesh of jax devices")
    inside = not isinstance(plan.ring_axis, MeshAxis) or is_local(plan)
    if not (inside or lying):
        check_context(plan)
    return plan, lying, inside


def cut_of_tokens(q: Array, plan: Plan, lying: Placed | None) -> P:
    """By which axes of the mesh q is cut, [B, T, H], and so k and v."""
    batch, heads = (lying.batch or None, lying.heads or None) if lying else other_axes(q, mesh_here(plan))
    return P(batch, sequence_axes(plan) or None, heads)


def other_axes(q: Array, mesh: Mesh | AbstractMesh) -> tuple[Any, Any]:
    """What cuts the batch and the heads: as q's type says where the mesh is explicit, else the data axis the batch."""
    if AxisType.Explicit in mesh.axis_types:
        spec = jax.typeof(q).sharding.spec
        return spec[0], spec[2]
    data, size = data_axis(mesh)
    if q.shape[0] % size:
        raise ValueError(f"data={size} does not divide a batch of {q.shape[0]}; pad the batch, or make the mesh data=1")
    return data, None


@lru_cache(maxsize=256)
def single_device(seq_len: int, key_len: int, backend: str) -> Plan:
    """The plan of one device: the same function, no communication."""
    device = {"gpu": "cuda"}.get(backend, backend)
    return Plan(seq_len, key_len=key_len, framework="jax", axes=(Solo("ring"), Solo("ulysses")), device=device)


@lru_cache(maxsize=256)
def plan_where(placed: Placed, seq_len: int, key_len: int) -> Plan:
    """The plan of tokens that lie in their own order: a contiguous ring over the axes that cut them."""
    ring = MeshAxis(placed.tokens, placed.mesh)
    return Plan(
        seq_len,
        ring.size,
        key_len=key_len,
        framework="jax",
        axes=(ring, MeshAxis((), placed.mesh)),
        device=platform(placed.mesh),
    )
