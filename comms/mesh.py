"""Names and builds the mesh: data outermost, ring, and ulysses innermost, where the links are fastest."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.comms.axis import Axis, Solo
from ringattn.comms.local import LocalMesh
from ringattn.comms.process_group import ProcessGroupAxis
from ringattn.comms.symmetric import shared_axis

SPLIT: Any = WeakIdKeyDictionary()  # what each mesh was cut into


def init_mesh(
    data: int = 1, ring: int = 1, ulysses: int = 1, sequence: int | None = None, device_type: str | None = None
) -> DeviceMesh:
    """A DeviceMesh with axes data, ring and ulysses over all ranks; or data and sequence, which `plan` will factor.

    Ranks must have been started (torchrun, or init_process_group). The default device is cuda where the ranks have
    NCCL, else cpu.
    """
    sizes = {"data": data, "ring": ring, "ulysses": ulysses}
    if sequence is not None:
        if (ring, ulysses) != (1, 1):
            raise ValueError(
                f"sequence={sequence} leaves ring and ulysses to the plan; leave out ring={ring}, ulysses={ulysses}"
            )
        sizes = {"data": data, "sequence": sequence}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r}: the number of ranks along {name}, a whole number of at least 1")
    need = prod(sizes.values())
    if dist.is_initialized():
        have = dist.get_world_size()
        if need != have:
            said = " x ".join(f"{n}={s}" for n, s in sizes.items())
            raise ValueError(f"{said} needs {need} ranks, and {have} were started; make the product {have}")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() and _has_nccl() else "cpu"
    try:
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    except ValueError as error:
        if dist.is_initialized():
            raise
        raise ValueError(
            f"no ranks were started: run this under torchrun --nproc-per-node={need}, or call "
            "torch.distributed.init_process_group first; ringattn.comms.local.run has threads of one process for ranks"
        ) from error


def _has_nccl() -> bool:
    return not dist.is_initialized() or "nccl" in dist.get_backend()


def axis_names(mesh: Any) -> tuple[str, ...]:
    return mesh.axis_names if isinstance(mesh, LocalMesh) else tuple(mesh.mesh_dim_names or ())


def axis_size(mesh: Any, name: str) -> int:
    """How many ranks lie along an axis; 1 for an axis the mesh does not have."""
    names = axis_names(mesh)
    if name not in names:
        return 1
    return mesh.sizes[name] if isinstance(mesh, LocalMesh) else mesh.size(names.index(name))


def axis(mesh: Any, name: str, transport: str = "auto") -> Axis:
    """The axis of that name as something to send along; a Solo where the mesh has none, or one of a single rank.

    `transport` is "symmetric" (GPUs that see each other's memory) or "group" (NCCL, gloo); auto takes the first that
    is there, and leaves to the other what goes sooner by it. Every rank must ask alike.
    """
    if axis_size(mesh, name) == 1:
        return Solo(name)
    if isinstance(mesh, LocalMesh):
        return mesh.axis(name)
    group = mesh.get_group(name)
    grouped = ProcessGroupAxis(group, name)
    if transport == "group":
        return grouped
    shared = shared_axis(group, name, grouped if transport == "auto" else None)
    if shared is None and transport == "symmetric":
        raise ValueError(
            f"transport='symmetric' needs GPUs of one host that see each other's memory, and NCCL; the {name} axis "
            f"({dist.get_backend(group)}) has not; use transport='group'"
        )
    return shared or grouped


def axes(mesh: Any, transport: str = "auto") -> tuple[Axis, Axis]:
    return axis(mesh, "ring", transport), axis(mesh, "ulysses", transport)


def split(mesh: Any, name: str, sizes: dict[str, int]) -> Any:
    """The mesh with one axis cut into several, the last one innermost: the same one each time. Every rank must ask."""
    if isinstance(mesh, LocalMesh):
        return mesh.split(name, sizes)
    made, how = SPLIT.setdefault(mesh, {}), (name, *sizes.items())
    if how not in made:
        made[how] = cut(mesh, name, sizes)
    return made[how]


def cut(mesh: DeviceMesh, name: str, sizes: dict[str, int]) -> DeviceMesh:
    """A mesh like this one with groups of its own, which live as long as the process."""
    parts = [sizes if old == name else {old: axis_size(mesh, old)} for old in axis_names(mesh)]
    shape = {n: s for part in parts for n, s in part.items()}
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(*shape.values()), mesh_dim_names=tuple(shape))
