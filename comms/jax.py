"""Axes of a JAX mesh, for the single program that all devices run inside shard_map.

XLA itself starts transfers early and finishes them late, so handles have nothing to wait for. The loops restrict its
order with `jax.lax.optimization_barrier`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ringattn.comms.axis import All, Done, mesh_sizes, split_sizes
from ringattn.comms.tpu_slice import ring_order


class Rotated:
    """A transfer made of rotations, whose blocks may pass through a barrier; `wait` puts them together.

    It belongs behind the barrier: before it, it would end the rotations there.
    """

    def __init__(self, blocks: Sequence[Any], finish: Callable[[Sequence[Any]], Any]):
        self.blocks, self.finish = blocks, finish

    def wait(self) -> Any:
        return self.finish(self.blocks)


jax.tree_util.register_pytree_node(Rotated, lambda x: ((x.blocks,), x.finish), lambda finish, x: Rotated(*x, finish))
jax.tree_util.register_pytree_node(All, lambda x: (x.pending, None), lambda _, pending: All(*pending))


@dataclass(frozen=True)
class MeshAxis:
    """`size` devices along the axis `name` of `mesh`; an axis that the mesh lacks has size 1.

    Several names form one axis, the last one innermost. A mesh without devices is enough to trace a program.
    """

    name: str | tuple[str, ...]
    mesh: Mesh | AbstractMesh
    by_rotations: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The axes of the mesh that form this one."""
        names = (self.name,) if isinstance(self.name, str) else self.name
        return tuple(name for name in names if name in self.mesh.axis_names)

    @property
    def size(self) -> int:
        return math.prod(axis_size(self.mesh, name) for name in self.names)

    @property
    def rank(self) -> Any:
        """The device's place on the axis: traced, since all devices run one program."""
        return lax.axis_index(self.name) if self.size > 1 else 0

    def rotate(self, tensors: Sequence[Any], shift: int = 1, senders: Sequence[int] | None = None) -> Done:
        """Send to rank + shift and receive from rank - shift; zeros arrive from ranks that are not senders."""
        ranks = range(self.size) if senders is None else senders
        names = tuple(name for name in self.mesh.axis_names if name in self.names)  # by which ppermute counts
        shape, order = [axis_size(self.mesh, name) for name in names], [names.index(name) for name in self.names]
        places = np.arange(self.size).reshape(shape).transpose(order).ravel().tolist()
        pairs = [(places[r], places[(r + shift) % self.size]) for r in ranks]
        return Done(tuple(lax.ppermute(x, names, pairs) for x in tensors))

    def all_to_all(self, tensors: Sequence[Any], split: int, join: int) -> All:
        """Cut each into `size` pieces along dim `split`, send piece i to rank i, join what arrives along dim `join`."""
        return All(*[self.one_to_all(x, split, join) for x in tensors])

    def one_to_all(self, x: Any, split: int, join: int) -> Done | Rotated:
        if self.rotates:
            return self.swapped(self.rows(x, split), lambda blocks: joined(self.by_sender(blocks), join))
        return Done(x if self.size == 1 else lax.all_to_all(x, self.name, split, join, tiled=True))

    def all_gather(self, x: Any, dim: int = 0) -> Done | Rotated:
        """The `x` of all ranks, joined along `dim` in rank order."""
        if self.rotates:
            return self.swapped([x] * self.size, lambda blocks: joined(self.by_sender(blocks), dim))
        return Done(x if self.size == 1 else lax.all_gather(x, self.name, axis=dim, tiled=True))

    def reduce_scatter(self, x: Any, dim: int = 0) -> Done | Rotated:
        """The sum of the `x` of all ranks, of which rank i gets piece i along `dim`."""
        if self.rotates:
            return self.swapped(self.rows(x, dim), lambda blocks: reduce(add, blocks))
        return Done(x if self.size == 1 else lax.psum_scatter(x, self.name, scatter_dimension=dim, tiled=True))

    @property
    def rotates(self) -> bool:
        """Whether collectives are made of rotations.

        Where the compiler shards other axes of the mesh, it would gather whole arrays for its own collectives.
        """
        return self.size > 1 and (self.by_rotations or bool(automatic_axes()))

    @property
    def rotating(self) -> "MeshAxis":
        """The same axis, whose collectives are made of rotations: XLA hides those behind kernels, but not its own."""
        return replace(self, by_rotations=True)

    def rows(self, x: Any, dim: int) -> list[Any]:
        """`x` cut along `dim` into a piece for each rank, by how many ranks ahead it is."""
        blocks = pieces(x, self.size, dim)
        return [
            lax.dynamic_index_in_dim(blocks, (self.rank + i) % self.size, 0, keepdims=False) for i in range(self.size)
        ]

    def swapped(self, rows: Sequence[Any], finish: Callable[[Sequence[Any]], Any]) -> Rotated:
        """Row i goes to the rank i ahead."""
        return Rotated([self.rotate([row], i).wait()[0] if i else row for i, row in enumerate(rows)], finish)

    def by_sender(self, blocks: Sequence[Any]) -> Any:
        """Blocks by how far they came, stacked in the order of the ranks they come from."""
        stack = jnp.zeros_like(blocks[0], shape=(self.size, *blocks[0].shape))
        for i, block in enumerate(blocks):
            stack = lax.dynamic_update_index_in_dim(stack, block, (self.rank - i) % self.size, 0)
        return stack


def automatic_axes(mesh: Mesh | AbstractMesh | None = None) -> dict[str, int]:
    """The sizes of a mesh's automatic axes of more than one device.

    Without a mesh those that the shard_map around this leaves to the compiler, if there is one.
    """
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.manual_axes:
            return {}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1}


def pieces(x: Any, count: int, dim: int) -> Any:
    """`x` cut into `count` equal pieces along `dim`, stacked."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :]), dim, 0)


def joined(x: Any, dim: int) -> Any:
    """The inverse of `pieces`."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def relay(
    axis: MeshAxis, start: Any, onward: Callable[[Any, Any], Any], reverse: bool,
    work: Callable[[Any], Any], given: Any, made: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """An exclusive scan of `start` [pieces, ...] over the ranks, and work(given) written into `made` meanwhile.

    As `ringattn.comms.scan.Relay`: `onward(i, x)` turns piece i into what the next rank gets, while piece i + 1
    arrives; only the first rank's `start` counts; `reverse` begins at the last rank. All ranks rotate in every step,
    and ignore what arrives outside their turn. Beside each rotation a share of the chunks is computed; the first dims
    of `given` and `made` count the chunks.
    """
    n, chunks = len(start), len(jax.tree.leaves(given)[0])
    place = axis.size - 1 - axis.rank if reverse else axis.rank
    senders = range(1, axis.size) if reverse else range(axis.size - 1)
    hops = axis.size - 1 + n - 1
    share = max(1, -(-chunks // hops))  # chunks beside a hop
    busy = -(-chunks // share)

    def stored(last: Any, x: Any, t: Any) -> tuple[Any, Any]:
        i = t - place
        at = jnp.clip(i, 0, n - 1)
        return at, last.at[at].set(jnp.where(i == at, x, last[at]))

    def hop(carry: Any, t: Any, beside: bool) -> tuple[Any, None]:
        x, last, made = carry
        at, last = stored(last, x, t)
        (arriving,) = axis.rotate((onward(at, x),), -1 if reverse else 1, senders).wait()
        if beside:  # the last share may overlap with the one before
            done = work(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, t * share, share), given))
            arriving, done = lax.optimization_barrier((arriving, done))  # see ringattn.jax.attention.ring
            made = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, t * share, 0), made, done)
        return (jnp.where(place == 0, start[jnp.minimum(t + 1, n - 1)], arriving), last, made), None

    carry = start[0], start, made
    for ticks, beside in ((jnp.arange(busy), True), (jnp.arange(busy, hops), False)):
        carry = lax.scan(partial(hop, beside=beside), carry, ticks)[0] if len(ticks) else carry
    x, last, made = carry
    return stored(last, x, hops)[1], made


def axis_names(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    return mesh.axis_names


def axis_size(mesh: Mesh | AbstractMesh, name: str) -> int:
    return mesh.shape.get(name, 1)


def device_of(mesh: Mesh | AbstractMesh | None) -> Any:
    """One device of a mesh, or the abstract device of a mesh without devices; without a mesh the default device."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    return getattr(mesh, "abstract_device", None) or jax.devices()[0]


def platform(mesh: Mesh | AbstractMesh | None) -> str:
    """The kind of device of a mesh, or by default, with the names of `kernels.Problem`: cpu, cuda or tpu."""
    kind = device_of(mesh).platform
    return {"gpu": "cuda"}.get(kind, kind)


def generation(mesh: Mesh | AbstractMesh | None = None) -> tuple[int, int] | None:
    """A TPU's (generation, 1 for the larger of two chips): v5e is (5, 0), v5p (5, 1). None for other devices."""
    kind = device_of(mesh).device_kind
    number = re.match(r"TPU\s?v?(\d+)", kind)
    if number is None:
        return None
    return int(number.group(1)), int(number.group(1) == "5" and not re.search(r"lite|v5e", kind))


def init_mesh(
    *, data: int = 1, ring: int = 1, ulysses: int = 1, sequence: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:  # fmt: skip
    """A Mesh with axes data, ring and ulysses over the devices; or data and sequence, which `plan` will factor.

    Ulysses is innermost, where the links are fastest. By default `devices` are all devices. On a flat TPU slice each
    hop of a ring goes to a neighbour (see `tpu_slice`).
    """
    have = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(data, ring, ulysses, sequence, len(have), "devices", ", or pass devices=")
    kinds = (AxisType.Auto,) * len(sizes)
    ordered = ring_order(have, sizes.get("sequence") or ring, ulysses)
    if ordered is not None:
        return Mesh(ordered.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=have)


def split(mesh: Mesh | AbstractMesh, name: str, sizes: dict[str, int]) -> Mesh | AbstractMesh:
    """The mesh with one axis cut into several, the last one innermost; devices keep their order."""
    split_axes = split_sizes(mesh.shape, name, sizes)
    kinds = [
        kind
        for old, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        for _ in (sizes if old == name else (old,))
    ]
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(split_axes.values()), tuple(split_axes), axis_types=tuple(kinds))
    return Mesh(mesh.devices.reshape(tuple(split_axes.values())), tuple(split_axes), axis_types=tuple(kinds))


def axes(mesh: Mesh | AbstractMesh, names: Mapping[str, tuple[str, ...]] | None = None) -> tuple[MeshAxis, MeshAxis]:
    """The ring axis and the Ulysses axis; `names` are the mesh's axes by their role, if these have other names."""
    of = {"ring": ("ring",), "ulysses": ("ulysses",), **({} if names is None else names)}
    ring, ulysses = (MeshAxis(x[0] if len(x) == 1 else x, mesh) for x in (of["ring"], of["ulysses"]))
    return ring, ulysses
