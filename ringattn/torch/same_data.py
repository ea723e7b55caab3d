"""Whether all ranks of a plan shard the same sequences: the ranks compare checksums of the tensors that they shard.

A sampler that deals examples out over all ranks gives the ranks of a plan different sequences, whose parts would be
joined into one. The words that ranks exchange anyway (`agree`) contain the checksums. Where words are not cheap,
checksums are also gathered now and then (`compare_data`) and compared one call later, to avoid waiting for the device.
"""

import threading
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringattn.plans.plan import Plan

FIRST, EVERY = 4, 64  # the steps whose data are compared: the first 4, and then one in 64
MOST = 16  # checksums kept between two comparisons; with more than that, the comparison is skipped
SAMPLED = 2**22  # numbers of a tensor that a checksum reads at most

Place = tuple[int, int]  # ring rank, ulysses rank


@dataclass
class Seen:
    """What this rank sharded since the last comparison, and the comparison in flight."""

    steps: int = 0
    checked: list[tuple[int, Tensor]] = field(default_factory=list)  # with the thread: one that loads ahead has no step
    flying: tuple[Tensor, Any] | None = None  # [ring, ulysses, (count, checksum)] on the host, valid after the event

    @property
    def due(self) -> bool:
        return self.steps < FIRST or self.steps % EVERY == 0


def seen_of(plan: Plan) -> Seen:
    return plan.kept.setdefault("seen", Seen())


def note(x: Tensor, plan: Plan) -> None:
    """Keep a checksum of a whole tensor of integers, and of documents that are laid out, if this step is compared."""
    if torch.compiler.is_compiling() or plan.ring * plan.ulysses == 1 or not plain(x):
        return
    seen = seen_of(plan)
    if seen.due and len(seen.checked) <= MOST:
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
    flat = flat[:: flat.numel() // SAMPLED + 1].long()
    mixed = (flat + torch.arange(1, len(flat) + 1, device=x.device) * 0x1E3779B97F4A7C15) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    return (mixed ^ (mixed >> 32)).sum() + x.numel()


def taken(plan: Plan) -> list[Tensor]:
    """The checksums of this thread since the last call, which are then dropped; empty if there were too many."""
    seen, me = seen_of(plan), threading.get_ident()
    mine = [x for thread, x in seen.checked if thread == me]
    full = len(seen.checked) > MOST
    seen.checked = [] if full else [(thread, x) for thread, x in seen.checked if thread != me]
    return [] if full else mine


def compare_data(plan: Plan, cheap_words: bool) -> None:
    """Count a step. Where `agree` does not compare every call, compare now and then, and raise one call later.

    All ranks call this at the same calls and read the same comparison, so they raise together.
    """
    if torch.compiler.is_compiling() or plan.ring * plan.ulysses == 1:
        return
    seen = seen_of(plan)
    landed(seen)
    due, first = seen.due, seen.steps == 0
    seen.steps += 1
    if cheap_words or not due:
        return
    mine = [each.to(plan.device, non_blocking=True) for each in taken(plan)]
    row = torch.full((1, 2), len(mine), dtype=torch.int64, device=plan.device)
    if mine:
        row[0, 1] = checksum(torch.stack(mine))
    block = plan.ulysses_axis.all_gather(row).wait().reshape(1, -1)
    rows = plan.ring_axis.all_gather(block).wait().unflatten(1, (plan.ulysses, 2))
    seen.flying = to_host(rows)
    if first:
        landed(seen)


def to_host(x: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host, and the event after which it is valid."""
    if not x.is_cuda:
        return x.clone(), None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done


def landed(seen: Seen) -> None:
    """Read the comparison in flight, if there is one."""
    if seen.flying is None:
        return
    (rows, done), seen.flying = seen.flying, None
    if done is not None:
        done.synchronize()
    judge({(r, u): tuple(pair) for r, line in enumerate(rows.tolist()) for u, pair in enumerate(line)}, count=True)


def judge(checksums: dict[Place, tuple[int, ...]], count: bool = False) -> None:
    """Raise if ranks sharded different tensors. Ranks with different numbers of tensors are not compared.

    With `count` a rank's numbers are the number of its tensors, and one checksum of all.
    """
    (first, expected), *others = checksums.items()
    same = (lambda a, b: a[0] == b[0]) if count else (lambda a, b: len(a) == len(b))
    unlike = [place for place, mine in others if same(mine, expected) and mine != expected]
    if unlike:
        raise ValueError(
            "the ranks of one plan were given different sequences: integers (ids, labels), or the documents that the "
            f"plan lays out, of {named(unlike)} are not those of {named([first])}; give all of them the same whole "
            "sequences, with DistributedSampler(dataset, num_replicas=DATA_RANKS, rank=DATA_RANK) (1 and 0 without a "
            "data axis), or, if they differ on purpose, pass compare=False to plan.shard or hf.prepare"
        )


def named(places: list[Place]) -> str:
    return ", ".join(f"ring rank {r}" + (f" ulysses rank {u}" if u else "") for r, u in places)
