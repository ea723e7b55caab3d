"""Plans over a process group, for callers that have no mesh."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ringattn import choosing
from ringattn.comms.local import LocalMesh
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan

PLANS_KEPT = 64  # by length and documents, for each group and layout
PLANS: Any = WeakIdKeyDictionary()  # by group, as long as it lives


def plan_over(
    group: Any, device: str, local_len: int, layout: str, strategy: str = "ring", local_keys: int | None = None,
    axis: str = "ring", docs: Docs | None = None,
) -> Plan:  # fmt: skip
    """The plan of sequences of which every rank of the group holds `local_len` tokens: the same one each time.

    With `docs` that of a sequence of these documents, each of which is cut over all ranks.

    The group is a process group (or None for all ranks), which becomes this axis, or a mesh with axes "ring" and/or
    "ulysses".
    """
    if group is None:
        group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise ValueError("no ranks were started: call torch.distributed.init_process_group first, or give group=")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: make the call on the ranks of the group only")
    if not isinstance(group, (dist.ProcessGroup, DeviceMesh, LocalMesh)):
        raise ValueError(f"group={group!r}: pass a process group, a mesh with an axis {axis!r}, or None for all ranks")
    plans = PLANS.setdefault(group, {}).setdefault((device, layout, strategy, axis), {})
    if not plans:
        mesh = group
        if isinstance(group, dist.ProcessGroup):
            mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(axis,))
        plans[0] = choosing.plan(mesh, seq_len=1, layout=layout, strategy=strategy)  # keeps the axes
    lengths = local_len, local_len if local_keys is None else local_keys
    kind = (*lengths, docs)
    if kind not in plans:
        if len(plans) > PLANS_KEPT:
            del plans[list(plans)[1]]
        ranks = plans[0].ring * plans[0].ulysses
        whole = plans[0].for_length(lengths[0] * ranks, key_len=lengths[1] * ranks)
        plans[kind] = whole if docs is None else whole.for_docs(docs)
    plan: Plan = plans[kind]
    if (plan.local_len, plan.keys.local_len) != lengths:
        raise ValueError(f"{local_len} tokens a rank: {layout} needs an even number, two parts of the same length")
    return plan
