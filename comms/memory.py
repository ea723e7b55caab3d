"""The memory of tensors as runs of bytes, joined where they touch, and cut into batches that fill a slot.

Sender and receiver cut the same bytes at the same places. Within a batch each side makes as few copies as its memory
allows: runs of the same size at the same distance become the rows of one piece.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.comms.axis import ByRank, Slices

SLOT = 16 * 2**20  # bytes
LARGEST_PITCH = 2**31 - 1  # bytes: the driver's limit for the distance between rows of one copy
MAX_RUNS = 8  # a tensor of more runs is packed first, which takes the host less time than so many copies

STRIDE = 2**56  # bytes from tensor to tensor where tensors have numbers, not addresses: more than any address

Run = tuple[int, int, int]  # address, bytes, and the allocation it lies in


class Piece(NamedTuple):
    """What one copy moves: rows of memory, which are contiguous in a slot."""

    address: int
    size: int  # bytes of a row
    rows: int = 1
    pitch: int = 0  # bytes from the start of a row to that of the next


def copy(to: Tensor, source: Tensor) -> None:
    """to.copy_(source), in elements of 16 bytes where both allow it: torch finds the place of each one by itself."""
    if not (to.is_contiguous() and source.is_contiguous()) and in_sixteens(to) and in_sixteens(source):
        to, source = to.view(torch.complex128), source.view(torch.complex128)
    to.copy_(source)


def packed(x: Tensor) -> Tensor:
    """`x` if it is contiguous, else a contiguous copy."""
    room = whole(x)
    if room is not x:
        copy(room, x)
    return room


def whole(x: Tensor) -> Tensor:
    """`x` if it is contiguous, else new contiguous memory of its shape."""
    return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def in_sixteens(x: Tensor) -> bool:
    """Whether a tensor is also one of elements of 16 bytes."""
    n = 16 // x.itemsize
    apart = x.dim() > 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return apart and not any(i % n for i in (x.shape[-1], *x.stride()[:-1]))


class Parcel(NamedTuple):
    """What one rank sends to another one: tensors by number, or slices of them."""

    rank: int
    which: int  # the same for all ranks that get the same
    tensors: tuple[int, ...]
    places: tuple[range, ...] | None  # of the slices
    first: int  # the number of its first batch, among those that its rank shares


class Kind(NamedTuple):
    """All of an exchange but addresses. Tensor number i is taken to lie at (i + 1) * STRIDE."""

    shared: bool
    persistent: bool
    out: tuple[Parcel, ...]
    into: tuple[Parcel, ...]
    local: tuple[Parcel, ...]  # what this rank sends to itself, and where it receives that
    tensors: tuple[tuple[Any, ...], ...]  # dtype, shape, stride, and by how much an address is above a multiple of 16

    def runs(self, parcel: Parcel) -> list[Run]:
        runs: list[Run] = []
        for i in parcel.tensors:
            dtype, shape, stride, above = self.tensors[i]
            whole = torch.empty_strided(shape, stride, dtype=dtype, device="meta")  # at address 0
            slices = [whole] if parcel.places is None else Slices([whole], parcel.places)
            runs += [((i + 1) * STRIDE + above + at, size, i) for at, size, _ in joined(slices)]
        return runs


def described(
    shared: bool, persistent: bool, here: int, out: ByRank, into: ByRank, firsts: Mapping[int, int]
) -> tuple[Kind, list[int]]:
    """The kind of an exchange of rank `here`, and where its tensors lie, as multiples of 16."""
    tensors: dict[int, tuple[int, Tensor]] = {}  # by identity, in order
    objects: dict[int, int] = {}

    def parcel(rank: int, each: Sequence[Tensor], first: int) -> Parcel:
        some, places = (each.tensors, each.places) if isinstance(each, Slices) else (each, None)
        numbers = [tensors.setdefault(id(x), (len(tensors), x))[0] for x in some]
        return Parcel(rank, objects.setdefault(id(each), len(objects)), tuple(numbers), places, first)

    leaving = tuple([parcel(rank, each, 0) for rank, each in out.items() if rank != here])
    arriving = tuple([parcel(rank, each, firsts[rank]) for rank, each in into.items() if rank != here])
    local = tuple([parcel(here, each[here], 0) for each in (out, into) if here in each])
    found = [(x, x.data_ptr()) for _, x in tensors.values()]
    kinds = tuple([(x.dtype, x.shape, x.stride(), address % 16) for x, address in found])
    return Kind(shared, persistent, leaving, arriving, local, kinds), [address // 16 * 16 for _, address in found]


def are_scattered(each: Sequence[Tensor]) -> bool:
    """Whether one of these tensors has so many runs that it is packed first."""
    whole = each.tensors if isinstance(each, Slices) and all([r.step == 1 for r in each.places]) else ()
    if whole and all([x.is_contiguous() and x.shape[0] <= MAX_RUNS for x in whole]):
        return False  # without a look at every slice
    return any([count_runs(x) > MAX_RUNS for x in each])


def weight(groups: Iterable[Sequence[Piece]]) -> int:
    return sum([piece.rows * piece.size for group in groups for piece in group])


def count_runs(x: Tensor) -> int:
    return 1 if x.is_contiguous() else len(x) * count_runs(x[0])


def batches(runs: Iterable[Run]) -> Iterator[list[Piece]]:
    """Runs, cut and grouped into batches of at most a slot, each in as few pieces as possible."""
    group: list[Run] = []
    room = SLOT
    for address, size, allocation in runs:
        while size >= room:
            yield stacked([*group, (address, room, allocation)])
            address, size, group, room = address + room, size - room, [], SLOT
        if size:
            group.append((address, size, allocation))
            room -= size
    if group:
        yield stacked(group)


def stacked(runs: Iterable[Run]) -> list[Piece]:
    """Pieces of runs, in order: runs of the same size at the same distance in one allocation become one piece."""
    pieces: list[Piece] = []
    before = -1
    for address, size, allocation in runs:
        first, width, rows, pitch = pieces[-1] if pieces else Piece(0, 0)
        step = address - first - (rows - 1) * pitch
        if allocation == before and size == width and size <= step <= LARGEST_PITCH and (rows == 1 or step == pitch):
            pieces[-1] = Piece(first, size, rows + 1, step)
        else:
            pieces.append(Piece(address, size))
        before = allocation
    return pieces


def joined(tensors: Iterable[Tensor]) -> list[Run]:
    """The runs of tensors in order, joined where one starts at the end of another.

    Runs of two allocations are not joined, even if they are adjacent: a copy may not cross from one into another.
    """
    runs: list[Run] = []
    for x in tensors:
        allocation = x.untyped_storage().data_ptr()
        for address, size in runs_of(x):
            start, length, before = runs[-1] if runs else (-1, 0, -1)
            if address == start + length and allocation == before:
                runs[-1] = start, length + size, allocation
            else:
                runs.append((address, size, allocation))
    return runs


def runs_of(x: Tensor) -> list[tuple[int, int]]:
    """The (address, bytes) of the contiguous runs of a tensor, in order."""
    if x.is_contiguous():
        return [(x.data_ptr(), x.nbytes)] if x.nbytes else []
    return [run for each in x for run in runs_of(each)]
