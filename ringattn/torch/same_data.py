"""Checksums of the sequences that a rank shards, by which the ranks of a plan notice that theirs differ.

A sampler that deals examples out over all ranks gives the ranks of a plan different sequences, whose parts would be
joined into one. Ranks compare checksums whenever they compare their calls (`agree`); where that is not cheap, also in
some steps of training (`agree.compare_data`).
"""

import threading
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.plans.plan import Plan

FIRST_STEPS, INTERVAL = 4, 256  # the steps whose data are compared: the first 4, and then one in 256
MAX_CHECKSUMS = 16  # kept between two comparisons; with more than that, the comparison is skipped
MAX_NUMBERS = 2**22  # of a tensor that a checksum reads

Place = tuple[int, int]  # ring rank, ulysses rank


@dataclass
class Seen:
    """The steps of this rank, and what it sharded since the last comparison."""

    steps: int = 0
    checked: list[tuple[int, Tensor]] = field(default_factory=list)  # with the thread: one that loads ahead has no step

    @property
    def due(self) -> bool:
        return self.steps < FIRST_STEPS or self.steps % INTERVAL == 0


def seen_of(plan: Plan) -> Seen:
    return plan.kept.setdefault("seen", Seen())


def note(x: Tensor, plan: Plan) -> None:
    """Keep a checksum of a whole tensor of integers, and of documents that are laid out, if this step is compared."""
    if torch.compiler.is_compiling() or plan.ring * plan.ulysses == 1 or not plain(x):
        return
    seen = seen_of(plan)
    if seen.due and len(seen.checked) <= MAX_CHECKSUMS:
        docs = 0 if plan.docs is None else zlib.crc32(plan.docs.encoded.tobytes())
        seen.checked.append((threading.get_ident(), checksum(x) + docs))


def plain(x: Tensor) -> bool:
    """Integers with values: not traced, fake or captured."""
    return (
        type(x) is Tensor
        and not (x.is_floating_point() or x.is_complex() or x.is_meta)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def checksum(x: Tensor) -> Tensor:
    """An int64 that depends on the numbers and their places, on their device."""
    flat = x.detach().reshape(-1)
    flat = flat[:: flat.numel() // MAX_NUMBERS + 1].long()
    mixed = (flat + torch.arange(1, len(flat) + 1, device=x.device) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 32)).sum() + x.numel()


def taken(plan: Plan) -> list[int]:
    """The checksums of this thread since the last call, which are then dropped; empty if there were too many.

    Waits for the device.
    """
    seen, thread = seen_of(plan), threading.get_ident()
    mine = [int(x) for by, x in seen.checked if by == thread]
    full = len(seen.checked) > MAX_CHECKSUMS
    seen.checked = [] if full else [(by, x) for by, x in seen.checked if by != thread]
    return [] if full else mine


def judge(checksums: dict[Place, list[int]]) -> None:
    """Raise if ranks sharded different tensors. Ranks with different numbers of tensors are not compared."""
    (first, expected), *others = checksums.items()
    unlike = [place for place, mine in others if len(mine) == len(expected) and mine != expected]
    if unlike:
        raise ValueError(
            "the ranks of one plan were given different sequences: integers (ids, labels), or the documents that the "
            f"plan lays out, of {named(unlike)} are not those of {named([first])}; give all of them the same whole "
            "sequences, with DistributedSampler(dataset, num_replicas=DATA_RANKS, rank=DATA_RANK) (1 and 0 without a "
            "data axis), or, if they differ on purpose, pass compare=False to plan.shard or hf.prepare"
        )


def named(places: list[Place]) -> str:
    return ", ".join(f"ring rank {r}" + (f" ulysses rank {u}" if u else "") for r, u in places)
