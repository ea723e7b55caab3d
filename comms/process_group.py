"""An axis over a torch process group: gloo on CPUs, NCCL on GPUs."""

import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms import messages
from ringattn.comms.axis import Afterwards, All, ByRank, Pending, Sharing, Then
from ringattn.comms.lost import Lost, broken, timeout_of
from ringattn.comms.memory import copy, packed, whole
from ringattn.comms.moves import Moves, as_stored

# torch 2.13 renamed both; 2.11 knows only the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ENDED = "destroy_process_group() has ended the ranks of this plan; make the mesh and the plan again"

# Caches by group. Nothing here may keep a group alive, since it has threads and connections.
HOSTS: Any = WeakKeyDictionary()
TWINS: Any = WeakKeyDictionary()


class Works:
    """torch's works in flight, and the tensors they read and write, which must live until then."""

    def __init__(self, works: Sequence[Any], result: Any, tensors: Sequence[Any], lost: Lost):
        self.works, self.result, self.tensors, self.lost = works, result, tensors, lost

    def wait(self) -> Any:
        works, self.works = self.works, ()
        limit = self.lost.axis.limit() if works else ()
        for i, work in enumerate(works):
            with self.lost.named(i):
                work.wait(*limit)
        self.tensors = ()
        return self.result

    def __del__(self) -> None:
        """Without a wait, since an error came first: wait now, or the next call would receive what this one sends.

        If a rank is lost there is no next call, and a wait could last for ever.
        """
        if self.works and not broken() and not sys.is_finalizing():
            with suppress(RuntimeError, ConnectionError):
                self.wait()


class ProcessGroupAxis(Moves):
    """The ranks of one process group, in group order. `sent` counts the bytes that this rank has sent.

    All transfers are moves, so that an error names the lost rank.
    """

    cheap_words = True
    one_by_one = True  # one work for each tensor

    def __init__(self, group: dist.ProcessGroup, name: str = "ring"):
        self.name, self.group_ref = name, ref(group)
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.by: str = dist.get_backend(group)
        self.on_gpus = torch.cuda.is_available() and not self.cheap_words  # a group may have a backend for each device
        with self.losing_any("making a plan").named():
            hosts = hosts_of(group)
        self.hosts = 0 if self.cheap_words and hosts == 1 else hosts  # on one host gloo's relay is as fast as any route
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and self.by == "gloo":
            add_twin(group, "near", "cpu", backend="gloo")
        if hosts > 1 and not self.cheap_words:  # gloo's transfers do not wait for each other
            add_twin(group, "far", "cuda")
        self.sent = 0

    @property
    def group(self) -> dist.ProcessGroup:
        return alive(self.group_ref)

    def losing_any(self, what: str) -> Lost:
        """The error for a transfer that needs all other ranks."""
        return Lost(self, [[rank for rank in range(self.size) if rank != self.rank]], what)

    def limit(self) -> tuple[Any, ...]:
        """The time-out of one transfer, as an argument of `work.wait`.

        A gloo group keeps the time-out it was made with, for a mesh torch's default, even if another one is set later.
        """
        limit = timeout_of(group, "cpu") if (group := self.group_ref()) is not None else None
        return () if limit is None else (limit,)

    def move(self, out: ByRank, into: ByRank, what: str = "", persistent: bool | None = True) -> Pending:
        return self.post("near", out, into, None, what)

    def sharing(self, out: ByRank, into: ByRank, what: str = "", persistent: bool = True) -> Sharing:
        """On GPUs the body is launched first, since launching a move takes the host a while."""
        if not self.on_gpus or not (out or into):
            return super().sharing(out, into, what, persistent)
        since = torch.cuda.current_stream().record_event()
        return Afterwards(partial(self.post, "near", out, into, since, what))

    def post(self, way: str, out: ByRank, into: ByRank, since: Any, what: str) -> Pending:
        """Start a move "near" (within a host) or "far" (between hosts), after the event `since`."""
        twins = TWINS.get(self.group, {})
        group = twins.get(way, twins.get("near", self.group))
        with beside(since):
            leaving = [(rank, x) for rank, tensors in out.items() for x in tensors if rank != self.rank]
            copies = {id(x): packed(x) for _, x in leaving}  # once for all receivers
            outgoing = [(rank, copies[id(x)]) for rank, x in leaving]
            arriving = [(rank, x, whole(x)) for rank, tensors in into.items() for x in tensors if rank != self.rank]
            # Receives first: gloo has one connection for both directions, on which it says that it is ready to receive.
            # Behind what it sends, that would come so late that the two directions would follow each other.
            ops = [dist.P2POp(dist.irecv, room, self.peer(rank), group) for rank, _, room in arriving]
            ops += [dist.P2POp(dist.isend, x, self.peer(rank), group) for rank, x in outgoing]
            peers = [rank for rank, _, _ in arriving] + [rank for rank, _ in outgoing]
            lost = Lost(self, [[rank] for rank in peers] if self.one_by_one else [peers], what)
            works = self.started(ops, lost)
        self.sent += sum(x.nbytes for _, x in outgoing)
        to_unpack = [(x, room) for _, x, room in arriving if room is not x]
        to_unpack += zip(into.get(self.rank, ()), out.get(self.rank, ()), strict=True)
        return Then(Works(works, to_unpack, (out, outgoing), lost), unpack)

    def started(self, ops: list[dist.P2POp], lost: Lost) -> list[Any]:
        """Start transfers and return their works. It fails here if a connection is already known to be closed."""
        works: list[Any] = []
        batches = [[op] for op in ops] if self.one_by_one else [ops]
        for together in filter(None, batches):  # torch refuses an empty one
            with lost.named(len(works)):
                works += dist.batch_isend_irecv(together)
        return works

    def hop(self, out: ByRank, into: ByRank, what: str) -> Pending:
        return self.post("far", out, into, None, what)

    def exchange_words(self, words: Any) -> list[Any]:
        """If all are equal, only digests travel."""
        sent, data = self.sent, messages.encode(words)
        mine, digest = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (data, sha256(data).digest()))
        digests = self.all_gather(digest, what="words").wait().unflatten(0, (self.size, -1))
        everyone = [mine] * self.size
        if not (digests == digest).all():
            lengths = self.all_gather(torch.tensor([len(data)]), what="words").wait().tolist()
            everyone = [mine if r == self.rank else mine.new_empty(length) for r, length in enumerate(lengths)]
            self.move(self.others([[mine] * self.size]), self.others([everyone]), what="words").wait()
        self.sent = sent  # words do not count
        return [messages.decode(x.numpy().tobytes(), self.peer(rank)) for rank, x in enumerate(everyone)]

    def peer(self, rank: int) -> int:
        try:
            return dist.get_global_rank(self.group, rank % self.size)
        except ValueError:
            raise ValueError(ENDED) from None


class CollectiveAxis(ProcessGroupAxis):
    """The same with torch's collectives, which are faster than moves over NCCL."""

    cheap_words = one_by_one = False

    def limit(self) -> tuple[Any, ...]:
        """None: with a time-out the host would wait, not just its stream; these groups have their own."""
        return ()

    def all_to_all(self, tensors: Sequence[Tensor], split: int, join: int, persistent: bool | None = True) -> Pending:
        return All(*[self.one_to_all(x, split, join) for x in tensors])

    def one_to_all(self, x: Tensor, split: int, join: int) -> Pending:
        chunks = torch.stack(as_stored(x).chunk(self.size, split))
        arrived = torch.empty_like(chunks)
        self.sent += chunks.nbytes // self.size * (self.size - 1)
        together = self.collective("all_to_all", dist.all_to_all_single, arrived, chunks)
        return Then(together, lambda chunks: torch.cat(chunks.unbind(0), join))

    def all_gather(self, x: Tensor, dim: int = 0, what: str = "all_gather") -> Pending:
        x = as_stored(x).contiguous()
        arrived = x.new_empty((self.size, *x.shape))
        self.sent += x.nbytes * (self.size - 1)
        together = self.collective(what, all_gather_single, arrived.flatten(0, 1), x)
        return Then(together, lambda _: arrived.flatten(0, 1) if dim == 0 else torch.cat(arrived.unbind(0), dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Pending:
        chunks = torch.stack(as_stored(x).chunk(self.size, dim))
        mine = torch.empty_like(chunks[0])
        self.sent += chunks.nbytes // self.size * (self.size - 1)
        return self.collective("reduce_scatter", reduce_scatter_single, mine, chunks.flatten(0, 1))

    def collective(self, what: str, call: Callable[..., Any], result: Tensor, x: Tensor) -> Pending:
        """Start one of torch's collectives, which writes `result`."""
        lost = self.losing_any(what)
        with lost.named():
            return Works([call(result, x, group=self.group, async_op=True)], result, [x], lost)

    def exchange_words(self, words: Any) -> list[Any]:
        with self.losing_any("words").named():
            return messages.gather(words, self.group)


def unpack(to_unpack: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, arrived in to_unpack:
        copy(x, arrived)


def beside(since: Any) -> AbstractContextManager[Any]:
    """A context that launches work on a side stream, which waits for the event `since` but for nothing later."""
    if since is None:
        return nullcontext()
    stream = side_stream(torch.cuda.current_device())
    stream.wait_event(since)
    return torch.cuda.stream(stream)


@lru_cache
def side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def hosts_of(group: dist.ProcessGroup) -> int:
    """The number of hosts of a group, if each holds equally many consecutive ranks, else 0. All ranks must call it."""
    if group not in HOSTS:
        boot = Path("/proc/sys/kernel/random/boot_id")
        names = messages.gather([socket.gethostname(), boot.read_text() if boot.exists() else ""], group)
        numbers = [names.index(name) for name in names]
        hosts = len({*numbers})
        size = len(names) // hosts
        HOSTS[group] = hosts if numbers == [i // size * size for i in range(len(names))] else 0
    count: int = HOSTS[group]
    return count


def add_twin(group: dist.ProcessGroup, way: str, device: str, **options: Any) -> None:
    """Make another group of the same ranks with the same time-out, if there is none yet for this way.

    "far", between hosts: on one NCCL group, later transfers would wait for these. "near", within a host, with gloo and
    TORCH_DISTRIBUTED_DEBUG=DETAIL: there torch compares at every collective how many calls each rank has made, moves
    included. Ranks make different numbers of moves, since a rank with nothing to send makes none.
    """
    twins = TWINS.setdefault(group, {})
    if way not in twins:
        limit, ranks = timeout_of(group, device), dist.get_process_group_ranks(group)
        twins[way] = dist.new_group(ranks, timeout=limit, use_local_synchronization=True, **options)


def alive(group_ref: Any) -> dist.ProcessGroup:
    """The group of a weak reference; torch keeps it alive until it is destroyed."""
    group: dist.ProcessGroup | None = group_ref()
    if group is None:
        raise ValueError(ENDED)
    return group
