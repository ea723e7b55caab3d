"""The memory of tensors as runs of bytes, joined where they touch, and cut into batches that fill a slot.

Sender and receiver cut the same bytes at the same places. Within a batch each side makes as few copies as its memory
allows: runs of the same size at the same distance are the rows of one piece.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.comms.axis import ByRank, Slices

SLOT = 16 * 2**20  # bytes
LARGEST_PITCH = 2**31 - 1  # bytes: the driver's limit for the distance between rows of one copy
MAX_PIECES = 8  # a tensor of more pieces is packed first, which takes the host less time than so many copies
MIN_ROW = 1024  # bytes: copies of shorter rows take longer than packing them

STRIDE = 2**56  # bytes from tensor to tensor where tensors have numbers, not addresses: more than any address


class Piece(NamedTuple):
    """What one copy moves: rows of memory, which are contiguous in a slot."""

    address: int
    size: int  # bytes of a row
    rows: int = 1
    pitch: int = 0  # bytes from the start of a row to that of the next

    def split(self, n: int) -> tuple[list["Piece"], list["Piece"]]:
        """The first n bytes, and the rest."""
        at, size, rows, pitch = self
        whole, part = divmod(min(n, rows * size), size)
        cut, after = at + whole * pitch, whole + (part > 0)
        head = [Piece(at, size, whole, pitch)] * (whole > 0) + [Piece(cut, part)] * (part > 0)
        rest = [Piece(at + after * pitch, size, rows - after, pitch)] * (rows > after)
        return head, [Piece(cut + part, size - part)] * (part > 0) + rest


Run = tuple[Piece, int]  # and the number of the allocation in which it lies


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
    persistent: bool | None
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
            start = (i + 1) * STRIDE + above
            runs += [(piece._replace(address=start + piece.address), i) for piece, _ in joined(slices)]
        return runs


def described(
    shared: bool, persistent: bool | None, here: int, out: ByRank, into: ByRank, firsts: Mapping[int, int]
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
    """Whether one of these tensors is in so many pieces that it is packed first."""
    whole = each.tensors if isinstance(each, Slices) and all([r.step == 1 for r in each.places]) else ()
    if whole and all([x.is_contiguous() and x.shape[0] <= MAX_PIECES for x in whole]):
        return False  # without a look at every slice
    return any([count_pieces(x) > MAX_PIECES for x in each])


def weight(groups: Iterable[Sequence[Piece]]) -> int:
    return sum([piece.rows * piece.size for group in groups for piece in group])


def count_pieces(x: Tensor) -> int:
    """Short rows count one by one."""
    if x.is_contiguous() or (are_rows(x) and x[0].nbytes >= MIN_ROW):
        return 1
    return len(x) * count_pieces(x[0])


def are_rows(x: Tensor) -> bool:
    """Whether a tensor that is not contiguous is runs which a copy can take as rows."""
    return x[0].is_contiguous() and x[0].nbytes <= x.stride(0) * x.itemsize <= LARGEST_PITCH


def batches(runs: Iterable[Run]) -> Iterator[list[Piece]]:
    """Runs, cut and grouped into batches of at most a slot, each in as few pieces as possible."""
    group: list[Run] = []
    room, left = SLOT, list(runs)[::-1]
    while left:
        piece, allocation = left.pop()
        head, rest = piece.split(room)
        group += [(each, allocation) for each in head]
        left += [(each, allocation) for each in reversed(rest)]
        room -= weight([head])
        if not room:
            yield stacked(group)
            group, room = [], SLOT
    if group:
        yield stacked(group)


def stacked(runs: Iterable[Run]) -> list[Piece]:
    """Pieces of runs, in order: runs of the same size at the same distance in one allocation become one piece."""
    pieces: list[Piece] = []
    before = -1
    for piece, allocation in runs:
        first, width, rows, pitch = pieces[-1] if pieces else Piece(0, 0)
        step, size = piece.address - first - (rows - 1) * pitch, piece.size
        near = allocation == before and piece.rows == 1 and size == width and size <= step <= LARGEST_PITCH
        if near and (rows == 1 or step == pitch):
            pieces[-1] = Piece(first, size, rows + 1, step)
        else:
            pieces.append(piece)
        before = allocation
    return pieces


def joined(tensors: Iterable[Tensor]) -> list[Run]:
    """The pieces of tensors in order, joined where one run starts at the end of another.

    Runs of two allocations are not joined, even if they are adjacent: a copy may not cross from one into another.
    """
    runs: list[Run] = []
    for x in tensors:
        allocation = x.untyped_storage().data_ptr()
        for piece in pieces_of(x):
            last, before = runs[-1] if runs else (Piece(-1, 0), -1)
            if piece.address == last.address + last.size and piece.rows == last.rows == 1 and allocation == before:
                runs[-1] = Piece(last.address, last.size + piece.size), allocation
            else:
                runs.append((piece, allocation))
    return runs


def pieces_of(x: Tensor) -> list[Piece]:
    """The memory of a tensor, in order."""
    if x.is_contiguous():
        return [Piece(x.data_ptr(), x.nbytes)] if x.nbytes else []
    if are_rows(x):
        return [Piece(x.data_ptr(), x[0].nbytes, len(x), x.stride(0) * x.itemsize)]
    return [piece for each in x for piece in pieces_of(each)]
