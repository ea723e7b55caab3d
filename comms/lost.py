"""Who is lost: errors of the transport name the ranks that died or hang.

A transfer knows its peers. A collective does not: whoever it fails for answers a roll call in the store, and the ranks
that do not answer are named.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

ROLL_CALL = 5.0  # seconds in which ranks must answer; less where the time-out is less than twice that

BROKEN: Any = WeakSet()  # the groups of all ranks, of which some rank is lost
MET: Any = WeakKeyDictionary()  # how often the ranks of such a group have met


class Lost(NamedTuple):
    """What to say when a rank is lost: whom each work of a list needs, and what they were for."""

    axis: Any
    needs: Sequence[Collection[int]]
    what: str

    @contextmanager
    def named(self, work: int = 0) -> Iterator[None]:
        """An error of the transport says whom it lost; another one goes by as it is."""
        try:
            yield
        except RuntimeError as error:
            if not of_transport(error):
                raise
            raise self.error(work, str(error)) from error

    def error(self, work: int, said: str) -> ConnectionError:
        """Names the rank, or those that it may be; and the one that was lost first, if another rank has said so.

        The first loss brings others, so it is what a rank that knows whom it lost tells all.
        """
        note()
        axis, needs = self.axis, sorted({r % self.axis.size for r in self.needs[min(work, len(self.needs) - 1)]})
        whom, all_ranks = " or ".join(map(str, needs)), dist.get_world_size()
        if axis.size < all_ranks:
            whom += f", which is rank {' or '.join(str(axis.peer(r)) for r in needs)} of {all_ranks}"
        what = self.what and f" ({self.what})"
        mine = f"{axis.name} rank {axis.rank} lost {axis.name} rank {whom}{what}: {reason(said)}"
        return ConnectionError(with_first_loss(mine, certain=len(needs) == 1))


def note() -> None:
    """From now on nobody waits for transfers that were given up: a rank is lost."""
    if dist.group.WORLD is not None:
        BROKEN.add(dist.group.WORLD)


def broken() -> bool:
    return dist.group.WORLD in BROKEN


def of_transport(error: BaseException | str) -> bool:
    """Whether a connection or a time-out is what failed: as gloo says it, also under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "monitoredBarrier"))


def reason(said: str) -> str:
    """The line that tells, of what gloo says."""
    return said.splitlines()[0].split("] ")[-1].split(". This is")[0]


@contextmanager
def missing_named(what: str) -> Iterator[None]:
    """An error of the transport in a collective of all ranks names those that do not answer a roll call."""
    try:
        yield
    except RuntimeError as error:
        if not of_transport(error):
            raise
        raise ConnectionError(f"{what}: {who_is_missing(str(error))}") from error


def who_is_missing(said: str) -> str:
    """The ranks that do not answer, where a collective of all ranks failed and says this."""
    if not dist.is_initialized():
        return reason(said)
    note()
    absent, ranks = roll_call(), dist.get_world_size()
    if not absent:
        return with_first_loss(f"rank {dist.get_rank()} of {ranks} lost its connection: {reason(said)}", certain=False)
    s = "s" * (len(absent) > 1)
    mine = f"rank{s} {', '.join(map(str, absent))} of {ranks} did not answer (dead, hung, or in another call)"
    return f"{with_first_loss(mine)}: {reason(said)}"


def roll_call() -> list[int]:
    """The ranks that do not answer. Every rank whose collective failed answers, and waits a while for the others."""
    limit = patience(dist.group.WORLD)
    end = time.monotonic() + min(ROLL_CALL, limit.total_seconds() / 2 if limit else ROLL_CALL)
    absent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    try:
        store = store_of("roll call")
        store.set(str(dist.get_rank()), "here")
        while absent and time.monotonic() < end:
            time.sleep(0.02)
            absent = [rank for rank in absent if not store.check([str(rank)])]
    except (RuntimeError, ValueError):  # the store went with the rank that kept it
        return []
    return absent


def meet(what: str, mine: str) -> None:
    """All ranks come here, in time and with the same words; an error names those that do not."""
    world, limit = dist.group.WORLD, patience(dist.group.WORLD)
    if limit is None:  # a group whose ranks do not exist
        return
    met = MET.setdefault(world, Counter())
    met[what] += 1
    store, rank, ranks = store_of(f"{what} {met[what]}"), dist.get_rank(), dist.get_world_size()
    names = [str(r) for r in range(ranks)]
    store.set(names[rank], mine)
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        store.set("given up", mine)
        absent = ", ".join(name for name in names if not store.check([name]))
        raise ConnectionError(
            f"rank {rank} of {ranks} waits with {what} {mine}: rank {absent} did not come within "
            f"{limit.total_seconds():g} s; it died, hangs, or makes another call"
        ) from error
    if store.check(["given up"]):
        raise ConnectionError(f"rank {rank} of {ranks} comes too late with {what} {mine}: others have given up waiting")
    found = store.multi_get(names) if store.has_extended_api() else [store.get(name) for name in names]
    by: dict[str, list[str]] = {}
    for name, one in zip(names, found, strict=True):
        by.setdefault(one.decode(), []).append(name)
    if len(by) > 1:
        who = "; ".join(f"rank {', '.join(them)} has {one}" for one, them in by.items())
        raise ValueError(f"the ranks do not make the same {what}: {who}")


def with_first_loss(mine: str, certain: bool = True) -> str:
    """What this rank says of a loss, and what the first of all ranks said; to be that one, it must be certain."""
    first = first_word(mine if certain else "")
    return mine if first in ("", mine) else f"{mine}; the first loss: {first}"


def first_word(mine: str = "") -> str:
    """What the first rank of all said that lost another: `mine` if that is this one, or no store is left to ask."""
    try:
        store = dist.PrefixStore("ringattn", dist.distributed_c10d._get_default_store())
        if not mine and not store.check(["lost"]):
            return ""
        return str(store.compare_set("lost", "", mine).decode())
    except (RuntimeError, ValueError):
        return mine


def store_of(what: str) -> Any:
    return dist.PrefixStore(f"ringattn {what}", dist.distributed_c10d._get_default_store())


def patience(group: Any, device_type: str = "") -> timedelta | None:
    """How long a group waits for a rank, if it has a time-out: a fake one does not."""
    devices = [torch.device(device_type)] if device_type else group._device_types
    for backend in (backend_of(group, device) for device in devices):
        limit: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            return limit
    return None


def set_patience(limit: timedelta, group: Any = None) -> None:
    """Of one group, or of that of all ranks: over each of its backends."""
    group = group or dist.group.WORLD
    for device in group._device_types:
        backend = backend_of(group, device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(limit)


def backend_of(group: Any, device: torch.device) -> Any:
    """A group's transport for a device, if it has one: itself, not what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it in."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)
