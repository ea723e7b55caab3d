"""Makes errors of the transport name the ranks that died or hang.

A transfer knows its peer, but a peer that is late may itself wait for another rank, and a collective knows nobody. So
the ranks that wait in vain answer a roll call in the store, and the error names those that do not answer.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

ROLL_CALL = 5.0  # seconds in which ranks must answer, but at most half the time-out

BROKEN: Any = WeakSet()  # world groups that have lost a rank
MET: Any = WeakKeyDictionary()  # by world group: how often its ranks have met, for each purpose


@contextmanager
def renamed(error_of: Callable[[str], str], prefix: str = "") -> Iterator[None]:
    """Turn an error of the transport into a ConnectionError with the text that `error_of` makes of its message."""
    try:
        yield
    except RuntimeError as error:
        if not of_transport(error):
            raise
        raise ConnectionError(prefix + error_of(str(error))) from error


def unless_ended(report: Callable[..., str]) -> Callable[..., str]:
    """The report of a message, or the message's useful part if another thread has ended the group, as Ray does."""

    @wraps(report)
    def unless(*given: Any) -> str:
        try:
            return report(*given)
        except ValueError:
            return reason(given[-1])

    return unless


class Lost(NamedTuple):
    """What the error of a lost rank needs: the ranks that each work of a list depends on, and the works' purpose."""

    axis: Any
    needs: Sequence[Collection[int]]
    what: str

    def named(self, work: int = 0) -> AbstractContextManager[None]:
        """Turn an error of the transport into one that names the lost rank; other errors pass unchanged."""
        return renamed(lambda message: self.error(work, message))

    @unless_ended
    def error(self, work: int, message: str) -> str:
        """The error that names the lost rank, or the candidates, and the first loss that any rank has reported.

        One loss causes others, so the first rank that is certain of its loss reports it to all.
        """
        note()
        axis, needs = self.axis, sorted({r % self.axis.size for r in self.needs[min(work, len(self.needs) - 1)]})
        absent = roll_call() if "imed out" in message or "monitoredBarrier" in message else []
        if absent:
            needs = [r for r in needs if axis.peer(r) in absent] or needs
        whom, all_ranks = " or ".join(map(str, needs)), dist.get_world_size()
        if axis.size < all_ranks:
            whom += f", which is rank {' or '.join(str(axis.peer(r)) for r in needs)} of {all_ranks}"
        what = self.what and f" ({self.what})"
        if absent and not {axis.peer(r) for r in needs} & {*absent}:  # they answer: they wait for another rank, too
            mine = f"{axis.name} rank {axis.rank} waited in vain for {axis.name} rank {whom}{what}; {silent(absent)}"
            return f"{with_first_loss(mine, certain=False)}: {reason(message)}"
        mine = f"{axis.name} rank {axis.rank} lost {axis.name} rank {whom}{what}: {reason(message)}"
        return with_first_loss(mine, certain=len(needs) == 1)


def note() -> None:
    """Note that a rank is lost: abandoned transfers are not waited for any more."""
    if dist.group.WORLD is not None:
        BROKEN.add(dist.group.WORLD)


def broken() -> bool:
    return dist.group.WORLD in BROKEN


def of_transport(error: BaseException | str) -> bool:
    """Whether a connection failed or timed out, by torch's error type or gloo's texts."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "monitoredBarrier"))


def reason(message: str) -> str:
    """The useful part of gloo's message."""
    return message.splitlines()[0].split("] ")[-1].split(". This is")[0]


def missing_named(what: str) -> AbstractContextManager[None]:
    """Make an error of the transport in a collective of all ranks name those that do not answer a roll call."""
    return renamed(who_is_missing, f"{what}: ")


@unless_ended
def who_is_missing(message: str) -> str:
    """A sentence that names the ranks that do not answer, after a collective of all ranks failed with this message."""
    note()
    mine = f"rank {dist.get_rank()} of {dist.get_world_size()} lost its connection: {reason(message)}"
    absent = roll_call()
    if not absent:
        return with_first_loss(mine, certain=False)
    return f"{with_first_loss(silent(absent))}: {reason(message)}"


def silent(absent: list[int]) -> str:
    """Names the ranks that did not answer a roll call."""
    who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {dist.get_world_size()}"
    return f"{who} did not answer (dead, hung, or in another call)"


def roll_call() -> list[int]:
    """The ranks that do not answer in time. Every rank that waited in vain calls it, which is its answer."""
    limit = timeout_of(dist.group.WORLD)
    end = time.monotonic() + min(ROLL_CALL, limit.total_seconds() / 2 if limit else ROLL_CALL)
    absent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    try:
        store = store_of("roll call")
        store.set(str(dist.get_rank()), "present")
        while absent and time.monotonic() < end:
            time.sleep(0.02)
            absent = [rank for rank in absent if not store.check([str(rank)])]
    except (RuntimeError, ValueError):  # the store was lost with the rank that kept it
        return []
    return absent


def meet(what: str, mine: str) -> None:
    """Check that all ranks call this in time with equal arguments; the error names those that do not."""
    world, limit = dist.group.WORLD, timeout_of(dist.group.WORLD)
    if limit is None:  # a group whose ranks do not exist
        return
    met = MET.setdefault(world, Counter())
    met[what] += 1
    store, rank, names = store_of(f"{what} {met[what]}"), dist.get_rank(), list(map(str, range(dist.get_world_size())))
    me = f"rank {rank} of {len(names)}"
    store.set(names[rank], mine)
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        store.set("given up", mine)
        absent = ", ".join(name for name in names if not store.check([name]))
        raise ConnectionError(
            f"{me} waits to make the {what} {mine}: rank {absent} did not join within {limit.total_seconds():g} s; it "
            "died, hangs, or makes another call"
        ) from error
    if store.check(["given up"]):
        raise ConnectionError(f"{me} is too late to make the {what} {mine}: other ranks timed out")
    stored = store.multi_get(names) if store.has_extended_api() else map(store.get, names)
    values = [value.decode() for value in stored]
    if len({*values}) > 1:
        who = {value: ", ".join(n for n, x in zip(names, values, strict=True) if x == value) for value in values}
        has = "; ".join(f"rank {them} has {value}" for value, them in who.items())
        raise ValueError(f"all ranks must make the same {what}, but {has}")


def with_first_loss(mine: str, certain: bool = True) -> str:
    """This rank's report of a loss, with the first report of any rank, which it may be itself if it is certain."""
    try:
        store = dist.PrefixStore("ringattn", dist.distributed_c10d._get_default_store())
        first = mine
        if certain or store.check(["lost"]):
            first = store.compare_set("lost", "", mine if certain else "").decode()
    except (RuntimeError, ValueError):  # the store was lost with the rank that kept it
        return mine
    return mine if first in ("", mine) else f"{mine}; the first loss: {first}"


def store_of(what: str) -> Any:
    return dist.PrefixStore(f"ringattn {what}", dist.distributed_c10d._get_default_store())


def timeout_of(group: Any, device_type: str = "") -> timedelta | None:
    """The time-out of a group, or None if it has none, as a fake group."""
    devices = [torch.device(device_type)] if device_type else group._device_types
    for backend in (backend_of(group, device) for device in devices):
        limit: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        if limit is not None:
            return limit
    return None


def set_timeout(limit: timedelta, group: Any = None) -> None:
    """Set the time-out of all backends of a group, by default of the world group."""
    group = group or dist.group.WORLD
    for device in group._device_types:
        backend = backend_of(group, device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(limit)


def backend_of(group: Any, device: torch.device) -> Any:
    """A group's backend for a device or None, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)
