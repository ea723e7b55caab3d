"""Where tensors lie: runs of bytes, joined where they touch, cut and grouped into batches that fill a slot."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringattn.comms.axis import Parts

SLOT = 16 * 2**20  # bytes
APART = 2**48  # bytes: more than a tensor has
MANY = 8  # pieces: a tensor of more is packed first, which takes the host less time than as many copies

Piece = tuple[int, int]  # address, bytes


def pieces_of(x: Tensor) -> list[Piece]:
    """The runs of memory that a tensor is, in order."""
    if x.is_contiguous():
        return [(x.data_ptr(), x.nbytes)] if x.nbytes else []
    return [piece for part in x for piece in pieces_of(part)]


def weight(groups: Iterable[Sequence[Piece]]) -> int:
    return sum(size for group in groups for _, size in group)


def is_few(x: Tensor) -> bool:
    """Whether a tensor lies in so few pieces that they are moved as they are; others are packed first."""
    return x.is_contiguous() or count_pieces(x) <= MANY


def count_pieces(x: Tensor) -> int:
    return 1 if x.is_contiguous() else len(x) * count_pieces(x[0])


def located(parts: Parts) -> list[list[Piece]] | None:
    """The pieces of ranges in batches; None where some are too many. Cut once for tensors of the same shape."""
    layout = layout_of(tuple([(x.dtype, x.shape, x.stride()) for x in parts.tensors]), parts.places, SLOT)
    if layout is None:
        return None
    starts = [x.data_ptr() for x in parts.tensors]
    return [[(starts[i] + at, size) for i, at, size in batch] for batch in layout]


@lru_cache(maxsize=1024)
def layout_of(kinds: tuple[Any, ...], places: tuple[range, ...], slot: int) -> list[list[tuple[int, int, int]]] | None:
    """The batches of ranges of tensors like these as (tensor, bytes from its start, bytes)."""
    found: list[Piece] = []
    for i, (dtype, shape, stride) in enumerate(kinds):
        parts = Parts([torch.empty_strided(shape, stride, dtype=dtype, device="meta")], places)
        if not all(map(is_few, parts)):
            return None
        found += [(i * APART + at, size) for at, size in joined(parts)]  # a meta tensor begins at 0
    return [[(*divmod(at, APART), size) for at, size in batch] for batch in batches(found)]


def batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces, cut and grouped so that each group fills at most a slot."""
    group: list[Piece] = []
    room = SLOT
    for address, size in pieces:
        while size >= room:
            yield [*group, (address, room)]
            address, size, group, room = address + room, size - room, [], SLOT
        if size:
            group.append((address, size))
            room -= size
    if group:
        yield group


def joined(tensors: Sequence[Tensor]) -> list[Piece]:
    """The pieces of some tensors; one that goes on where the last one ended makes one with it.

    But for those of two allocations: a copy may not run from one into another, even where they lie side by side.
    """
    found: list[Piece] = []
    end, last = -1, None
    for x in tensors:
        for address, size in pieces_of(x):
            if address == end and allocation(x) == allocation(last):
                found[-1] = found[-1][0], found[-1][1] + size
            else:
                found.append((address, size))
            end, last = address + size, x
    return found


def allocation(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())
