"""Builds the mesh and its axes: data outermost, then ring, and ulysses innermost, where the links are fastest."""

from collections.abc import Mapping
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from ringattn.comms.axis import Axis, Solo, mesh_sizes, split_sizes
from ringattn.comms.local import LocalMesh
from ringattn.comms.lost import meet, set_timeout, timeout_of
from ringattn.comms.process_group import CollectiveAxis, ProcessGroupAxis, hosts_of
from ringattn.comms.symmetric import over_nccl, shared_axis

SPLIT: Any = WeakIdKeyDictionary()  # by mesh: the meshes that it was split into
KEPT: Any = WeakIdKeyDictionary()  # by mesh: what others keep as long as it lives


def init_mesh(
    *, data: int = 1, ring: int = 1, ulysses: int = 1, sequence: int | None = None, device_type: str | None = None
) -> DeviceMesh:
    """A DeviceMesh with axes data, ring and ulysses over all ranks; or data and sequence, which `plan` will factor.

    Start the ranks first, with torchrun or init_process_group, whose time-out then holds along all axes. The default
    device is cuda if the ranks have NCCL, else cpu.
    """
    started = dist.is_initialized()
    sizes = mesh_sizes(data, ring, ulysses, sequence, dist.get_world_size() if started else None, "ranks")
    if device_type is None:
        nccl = not started or "nccl" in dist.get_backend()
        device_type = "cuda" if torch.cuda.is_available() and nccl else "cpu"
    if started:
        if device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_initialized():
            own = dist.get_node_local_rank(fallback_rank=dist.get_rank())  # ranks share GPUs if there are too few
            torch.cuda.set_device(own % torch.cuda.device_count())
        meet("mesh", described(sizes, device_type))
    try:
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    except ValueError as error:
        if started:
            raise
        raise ValueError(
            f"no ranks were started: run this under torchrun --nproc-per-node={prod(sizes.values())}, or call "
            "torch.distributed.init_process_group first; ringattn.comms.local.run runs ranks as threads of one process"
        ) from error
    set_timeouts(timeout_of(dist.group.WORLD, device_type), mesh)
    return mesh


def described(sizes: dict[str, int], device_type: str) -> str:
    return f"{' x '.join(f'{n}={s}' for n, s in sizes.items() if s > 1) or 'of one rank'} on {device_type}"


def set_timeouts(limit: timedelta | None, *meshes: DeviceMesh) -> None:
    """Set the time-out of all axes of these meshes.

    By default torch gives the groups of a mesh a time-out of their own, of half an hour over gloo.
    """
    if limit is not None:
        for group in (mesh.get_group(name) for mesh in meshes for name in axis_names(mesh)):
            set_timeout(limit, group)


def kept(mesh: Any) -> dict[Any, Any]:
    """What is kept as long as the mesh lives. It must not refer to the mesh."""
    return mesh.kept if isinstance(mesh, LocalMesh) else KEPT.setdefault(mesh, {})


def axis_names(mesh: Any) -> tuple[str, ...]:
    return mesh.axis_names if isinstance(mesh, LocalMesh) else tuple(mesh.mesh_dim_names or ())


def axis_size(mesh: Any, name: str) -> int:
    """The number of ranks along an axis; 1 if the mesh does not have it."""
    names = axis_names(mesh)
    if name not in names:
        return 1
    return mesh.sizes[name] if isinstance(mesh, LocalMesh) else mesh.size(names.index(name))


def hosts_along(mesh: Any, name: str) -> int:
    """On how many hosts an axis lies, each with equally many consecutive ranks; 0: unknown. All ranks must call it."""
    if isinstance(mesh, LocalMesh) or axis_size(mesh, name) == 1:
        return mesh.hosts if isinstance(mesh, LocalMesh) else 1
    hosts = hosts_of(mesh.get_group(name))
    return 0 if hosts == 1 and mesh.device_type == "cpu" else hosts  # as gloo's axes say: there any route is as fast


def axis(mesh: Any, name: str, transport: str = "auto") -> Axis:
    """The axis of that name, for transfers; a Solo if the mesh lacks it, or if it has one rank.

    `transport` is "symmetric" (GPUs that see each other's memory) or "group" (NCCL, gloo). "auto" takes "symmetric" if
    it is available, with "group" for transfers that are faster there. All ranks must pass the same arguments.
    """
    if axis_size(mesh, name) == 1:
        return Solo(name)
    if isinstance(mesh, LocalMesh):
        return mesh.axis(name)
    group = mesh.get_group(name)
    on_gpus, nccl = mesh.device_type == "cuda", over_nccl(group)
    by_gloo = "gloo" in dist.get_backend_config(group) and not on_gpus
    grouped = (ProcessGroupAxis if by_gloo else CollectiveAxis)(group, name)
    if on_gpus and transport != "group":
        shared = shared_axis(group, name, grouped if nccl and transport == "auto" else None)
        if shared:
            return shared
    if transport == "symmetric":
        raise ValueError(
            f"by='symmetric' needs GPUs of one host that see each other's memory, which those of the {name} axis "
            f"({dist.get_backend(group)}) do not; leave out by="
        )
    if on_gpus and dist.get_backend(group) == "gloo":
        raise ValueError(
            f"gloo cannot move GPU memory between the ranks of the {name} axis; start each rank with its own GPU and "
            "init_process_group('nccl'), or share GPUs with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 and without "
            "by='group'"
        )
    return grouped


def axes(mesh: Any, names: Mapping[str, tuple[str, ...]] | None = None, transport: str = "auto") -> tuple[Axis, Axis]:
    """The ring axis and the Ulysses axis; `names` are the mesh's axes by their role, if these have other names."""
    names = {} if names is None else names
    ring, ulysses = (axis(mesh, names.get(role, (role,))[0], transport) for role in ("ring", "ulysses"))
    return ring, ulysses


def split(mesh: Any, name: str, sizes: dict[str, int]) -> Any:
    """The mesh with one axis cut into several, the last one innermost; cached. All ranks must call it."""
    if isinstance(mesh, LocalMesh):
        return mesh.split(name, sizes)
    made, how = SPLIT.setdefault(mesh, {}), (name, *sizes.items())
    if how not in made:  # its groups live as long as the process
        shape = split_sizes({old: axis_size(mesh, old) for old in axis_names(mesh)}, name, sizes)
        meet("mesh", described(shape, mesh.device_type))
        made[how] = DeviceMesh(mesh.device_type, mesh.mesh.reshape(*shape.values()), mesh_dim_names=tuple(shape))
        set_timeouts(timeout_of(mesh.get_group(name), mesh.device_type), made[how])
    return made[how]
