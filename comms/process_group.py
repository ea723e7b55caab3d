"""An axis over a torch process group: gloo on CPUs, NCCL on GPUs."""

import pickle
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comms.axis import Parcels, Pending, Then
from ringattn.comms.moves import Moves, as_stored, rotated

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 knows only the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Works:
    """Work in flight, and the tensors it reads and writes, which must live until it is done."""

    def __init__(self, works: Sequence[Any], result: Any, held: Sequence[Any], lost: "Lost"):
        self.works, self.result, self.held, self.lost = works, result, held, lost

    def wait(self) -> Any:
        works, self.works = self.works, ()
        for i, work in enumerate(works):
            with self.lost.named(i):
                work.wait()
        self.held = ()
        return self.result

    def __del__(self) -> None:
        """Nobody waited, for an error came first: it is waited for now, or the next call would meet what it sends.

        Not where a rank is lost: then there is no next call, and nobody may answer.
        """
        if self.works and not ProcessGroupAxis.broken and not sys.is_finalizing():
            with suppress(RuntimeError, ConnectionError):
                self.wait()


class Lost(NamedTuple):
    """What to say when a rank is lost: whom each work of a list needs, and what they were for."""

    axis: "ProcessGroupAxis"
    needs: Sequence[Collection[int]]
    what: str

    @contextmanager
    def named(self, work: int = 0) -> Iterator[None]:
        """An error of the transport says whom it lost; another one goes by as it is."""
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error) and not isinstance(error, dist.DistError):
                raise
            raise self.error(work, str(error)) from error

    def error(self, work: int, said: str) -> ConnectionError:
        """Names the rank, or those that it may be; and the one that was lost first, if another rank has said so.

        The first loss brings others, so it is what a rank that knows whom it lost tells all.
        """
        ProcessGroupAxis.broken = True
        axis, needs = self.axis, sorted({r % self.axis.size for r in self.needs[min(work, len(self.needs) - 1)]})
        why = said.splitlines()[0].split("] ")[-1].split(". This is")[0]
        whom, all_ranks = " or ".join(map(str, needs)), dist.get_world_size()
        if axis.size < all_ranks:
            whom += f", which is rank {' or '.join(str(axis.peer(r)) for r in needs)} of {all_ranks}"
        mine = f"{axis.name} rank {axis.rank} lost {axis.name} rank {whom}{self.what and f' ({self.what})'}: {why}"
        return ConnectionError(with_first_loss(mine, certain=len(needs) == 1))


class ProcessGroupAxis(Moves):
    """The ranks of one process group, in group order. `sent` counts the bytes this rank has handed to others.

    Made of moves, so that an error names the rank that was lost.
    """

    cheap_words = True
    one_by_one = True  # each transfer is a work of its own
    broken = False  # whether some axis of this process has lost a rank

    def __init__(self, group: dist.ProcessGroup, name: str = "ring"):
        self.group, self.name = group, name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.by: str = dist.get_backend(group)
        self.on_gpus = torch.cuda.is_available() and not self.cheap_words  # a group may have a backend for each device
        self.hosts = 0 if self.cheap_words else hosts_of(group)
        self.hops = hop_group(group)
        self.far = far_group(group) if self.hosts > 1 else self.hops
        self.sent = 0

    def move(self, out: Parcels, into: Parcels, what: str = "") -> Pending:
        return self.post(self.hops, out, into, None, what)

    def share(
        self, tensors: Sequence[Tensor], readers: Sequence[int], into: Parcels, work: Callable[[], T], what: str = ""
    ) -> tuple[T, Pending]:
        """A GPU gets the work first: launching a move takes a while too."""
        if not self.on_gpus or not (readers or into):
            return super().share(tensors, readers, into, work, what)
        since = torch.cuda.current_stream().record_event()
        result = work()
        return result, self.post(self.hops, dict.fromkeys(readers, tensors), into, since, what)

    def post(self, group: dist.ProcessGroup, out: Parcels, into: Parcels, since: Any, what: str) -> Pending:
        with beside(since):
            leaving = [(rank, x) for rank, tensors in out.items() for x in tensors]
            packed = {id(x): x.contiguous() for _, x in leaving}  # once for all who get it
            outgoing = [(rank, packed[id(x)]) for rank, x in leaving]
            arriving = [(rank, x, whole(x)) for rank, tensors in into.items() for x in tensors]
            ops = [dist.P2POp(dist.isend, x, self.peer(rank), group) for rank, x in outgoing]
            ops += [dist.P2POp(dist.irecv, place, self.peer(rank), group) for rank, _, place in arriving]
            peers = [rank for rank, _ in outgoing] + [rank for rank, _, _ in arriving]
            lost = Lost(self, [[rank] for rank in peers] if self.one_by_one else [peers], what)
            works = self.started(ops, lost)
        self.sent += sum(x.nbytes for _, x in outgoing)
        parted = [(x, place) for _, x, place in arriving if place is not x]
        return Then(Works(works, parted, (out, outgoing), lost), unpack)

    def started(self, ops: list[dist.P2POp], lost: Lost) -> list[Any]:
        """The works of some transfers; where a connection is known to be gone already, they fail here."""
        works: list[Any] = []
        batches = [[op] for op in ops] if self.one_by_one else [ops]
        for together in filter(None, batches):  # torch refuses an empty one
            with lost.named(len(works)):
                works += dist.batch_isend_irecv(together)
        return works

    def rotate(
        self, tensors: Sequence[Tensor], shift: int = 1, send: bool = True, recv: bool = True, what: str = ""
    ) -> Pending:
        return rotated(self, partial(self.post, self.far, since=None), tensors, shift, send, recv, what)

    def exchange_words(self, words: Any) -> list[Any]:
        sent = self.sent
        everyone = self.told(pickle.dumps(words))
        self.sent = sent  # what carries words is not counted
        return [words] * self.size if everyone is None else [pickle.loads(said) for said in everyone]

    def told(self, said: bytes) -> list[bytes] | None:
        """What each rank says; None where all say the same. Their digests go first, and mostly alone."""
        mine, digest = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (said, sha256(said).digest()))
        digests = self.all_gather(digest, what="words").wait().unflatten(0, (self.size, -1))
        if (digests == digest).all():
            return None
        lengths = self.all_gather(torch.tensor([len(said)], device=mine.device), what="words").wait().tolist()
        everyone = [mine if r == self.rank else mine.new_empty(length) for r, length in enumerate(lengths)]
        self.move(self.others([mine] * self.size), self.others(everyone), what="words").wait()
        return [x.numpy().tobytes() for x in everyone]

    def over(self, transport: str) -> "ProcessGroupAxis":
        return self

    def peer(self, rank: int) -> int:
        try:
            return dist.get_global_rank(self.group, rank % self.size)
        except ValueError:
            gone = "destroy_process_group() has ended the ranks of this plan; make the mesh and the plan again"
            raise ValueError(gone) from None


class CollectiveAxis(ProcessGroupAxis):
    """The same by the collectives of torch, where those are faster than moves: over NCCL."""

    cheap_words = one_by_one = False

    def all_to_all(self, x: Tensor, split: int, join: int) -> Pending:
        pieces = torch.stack(as_stored(x).chunk(self.size, split))
        arrived = torch.empty_like(pieces)
        self.sent += pieces.nbytes // self.size * (self.size - 1)
        together = self.collective("all_to_all", dist.all_to_all_single, arrived, pieces)
        return Then(together, lambda pieces: torch.cat(pieces.unbind(0), join))

    def all_gather(self, x: Tensor, dim: int = 0, what: str = "all_gather") -> Pending:
        x = as_stored(x).contiguous()
        arrived = x.new_empty((self.size, *x.shape))
        self.sent += x.nbytes * (self.size - 1)
        together = self.collective(what, all_gather_single, arrived.flatten(0, 1), x)
        return Then(together, lambda _: arrived.flatten(0, 1) if dim == 0 else torch.cat(arrived.unbind(0), dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Pending:
        pieces = torch.stack(as_stored(x).chunk(self.size, dim))
        mine = torch.empty_like(pieces[0])
        self.sent += pieces.nbytes // self.size * (self.size - 1)
        return self.collective("reduce_scatter", reduce_scatter_single, mine, pieces.flatten(0, 1))

    def collective(self, what: str, call: Callable[..., Any], result: Tensor, x: Tensor) -> Pending:
        """One of torch's collectives, under way; it brings `result`."""
        lost = self.losing_any(what)
        with lost.named():
            return Works([call(result, x, group=self.group, async_op=True)], result, [x], lost)

    def exchange_words(self, words: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        with self.losing_any("words").named():
            dist.all_gather_object(gathered, words, group=self.group)
        return gathered

    def losing_any(self, what: str) -> Lost:
        """What to say when any other rank is lost."""
        return Lost(self, [[rank for rank in range(self.size) if rank != self.rank]], what)


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


def whole(x: Tensor) -> Tensor:
    """`x` if it lies in one piece, else memory of its shape that does."""
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def unpack(parted: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, arrived in parted:
        x.copy_(arrived)


def beside(since: Any) -> AbstractContextManager[Any]:
    """Where work that may start at that moment is launched: on a stream of its own, which waits for nothing later."""
    if since is None:
        return nullcontext()
    stream = side_stream(torch.cuda.current_device())
    stream.wait_event(since)
    return torch.cuda.stream(stream)


@lru_cache
def side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@cache  # never forgotten: asking is a collective, and ranks of other groups would forget at other times
def hosts_of(group: dist.ProcessGroup) -> int:
    """On how many machines a group's ranks lie, if as many on each and in order; else 0. Every rank must ask."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname(), boot.read_text() if boot.exists() else ""
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, name, group=group)
    places = [names.index(name) for name in names]
    hosts = len(set(places))
    size = len(names) // hosts
    return hosts if places == [i // size * size for i in range(len(names))] else 0


@cache  # never forgotten, as above
def far_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A twin of a group for what goes between hosts: NCCL would have what comes later on the same group wait for it."""
    return twin(group, torch.device("cuda"))


@cache  # never forgotten, as above
def hop_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that hops use: `group`, or a twin of it under TORCH_DISTRIBUTED_DEBUG=DETAIL.

    There torch compares the ranks' counts of calls at every collective, and counts hops too, of which ranks make
    different numbers: who has nothing to send does not.
    """
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or dist.get_backend(group) != "gloo":
        return group
    return twin(group, torch.device("cpu"), backend="gloo")


def twin(group: dist.ProcessGroup, device: torch.device, **options: Any) -> dist.ProcessGroup:
    """Another group of the same ranks, as patient as this one."""
    patience = group._get_backend(device).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=patience, use_local_synchronization=True, **options)
