"""The recipe of a call in JAX, where all ranks of a ring run one program, in step. Plain Python; print it.

Whole blocks travel, from rank to rank, in rotations: all ranks send to the rank so many places on, but for those whose
block nobody needs any more. The program has a step for every distance at which some rank sees something.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from ringattn.kernels import Kernel, Problem
from ringattn.kernels.attention import pallas
from ringattn.plans.mask import Mask, table_of
from ringattn.plans.recipe import Recipe


class Rotation(NamedTuple):
    """All ranks send so many places on; zeros arrive from ranks that are not senders."""

    shift: int
    senders: tuple[int, ...]


class Flight(NamedTuple):
    """What travels during one step: the keys of the next step, and the gradients of the previous one."""

    keys: Rotation | None
    grads: Rotation | None


@dataclass(frozen=True)
class Route:
    """The distances at which some rank sees something, and the keys' rotations between them."""

    distances: tuple[int, ...]
    hops: tuple[Rotation, ...]
    ring: int

    @property
    def forward(self) -> list[tuple[Flight, list[int]]]:
        """The steps as runs of equal flights: (flight, distances)."""
        return runs(self.distances, [Flight(hop, None) for hop in (*self.hops, None)])

    @property
    def backward(self) -> list[tuple[Flight, list[int]]]:
        """The steps after the first. A gradient sets out one step after its keys, and all ranks take part."""
        grads = [Rotation(hop.shift, tuple(range(self.ring))) for hop in self.hops[1:]]
        hops = [Flight(k, g) for k, g in zip((*self.hops[1:], None), (None, *grads), strict=True) if self.hops]
        return runs(self.distances[1:], hops)

    @property
    def home(self) -> Rotation | None:
        """The last rotation of the gradients."""
        return Rotation(-self.distances[-1], tuple(range(self.ring))) if self.hops else None


def runs(distances: tuple[int, ...], flights: list[Flight]) -> list[tuple[Flight, list[int]]]:
    """Consecutive steps with the same flights, together: they become one loop."""
    grouped = groupby(zip(flights, distances, strict=True), key=lambda pair: pair[0])
    return [(flight, [d for _, d in pairs]) for flight, pairs in grouped]


@lru_cache(maxsize=64)
def route_of(mask: Mask) -> Route:
    """The route without distances at which no rank sees anything, and without hops that no rank needs."""
    ring = mask.plan.ring
    table = table_of(mask, hosts=ring)
    distances = table.distances.tolist()
    shifts, shift_of = [b - a for a, b in pairwise(distances)], np.diff(table.distances)[table.hops.needed_at - 1]
    senders = {shift: tuple(np.unique(table.hops.source[shift_of == shift]).tolist()) for shift in shifts}
    return Route(tuple(distances), tuple(Rotation(shift, senders[shift]) for shift in shifts), ring)


@dataclass(frozen=True)
class SharedRecipe(Recipe):
    """The recipe of all ranks. Equal ones are equal programs."""

    table = pallas.TABLE

    static: bool = True  # whether documents are part of the program, not arguments
    rectangles: bool = False  # whether the steps of all ranks are a few sets of rectangles

    @property
    def rows(self) -> int | None:
        """Unknown: a program may be exported for any batch."""
        return None

    @cached_property
    def chosen(self) -> tuple[Kernel, Problem]:
        """The kernel of both passes, and the problem that it serves."""
        return self.selected(self.rectangles), self.problem(self.rectangles)

    def problem(self, rectangles: bool) -> Problem:
        return replace(super().problem(rectangles), static=self.static)

    def lines(self) -> Iterator[str]:
        kernel, route = self.chosen[0], route_of(self.mask)
        travels = self.gathers or bool(route.hops)
        yield from self.head("each rank r of the ring, in one program")
        yield f"forward: kernel {kernel.name}{f'; keys and values travel in {self.dtype}' * travels}"
        yield from ["  step 1: all keys, which come at once"] if self.gathers else self.step_lines(route.forward)
        if not self.gradients:
            return
        yield f"backward: kernel {kernel.name}{f'; the same, and sums of their gradients in {self.wide}' * travels}"
        if self.gathers:
            yield "  step 1: all keys, which come at once; then their gradients are added up and scattered home"
        elif not travels:
            yield from self.step_lines(route.forward)
        else:
            halves = kernel.load().separable
            yield f"  first: {'dq of keys of rank r' if halves else 'no work'}{self.beside(keys=route.hops[0])}"
            yield from self.step_lines(route.backward)
            yield f"  last: {'dk and dv of ' * halves}keys of rank r{self.beside(gradients=route.home)}"

    def step_lines(self, course: Sequence[tuple[Flight, list[int]]]) -> Iterator[str]:
        """The steps, those of a loop in one line."""
        first = 1
        for flight, distances in course:
            last = first + len(distances) - 1
            what = f"step {first}" if first == last else f"steps {first} to {last}"
            ranks = in_words([-distance for distance in distances], rank_at)
            yield f"  {what}: keys of {ranks}{self.beside(keys=flight.keys, gradients=flight.grads)}"
            first = last + 1

    def beside(self, **hops: Rotation | None) -> str:
        """What travels beside a step."""
        texts = []
        for what, hop in hops.items():
            if hop is not None:
                some = f" from {in_words(hop.senders, str)}" * (len(hop.senders) < self.plan.ring)
                texts.append(f"{what} go to rank {rank_at(hop.shift)}{some}")
        return f"; meanwhile {' and '.join(texts)}" * bool(texts)


def rank_at(offset: int) -> str:
    """A rank, seen from rank r."""
    return "r" if offset == 0 else f"r {'+' if offset > 0 else '-'} {abs(offset)}"


def in_words(ranks: Sequence[int], name: Callable[[int], str]) -> str:
    names = [name(rank) for rank in ranks]
    if len(ranks) > 2 and abs(ranks[-1] - ranks[0]) == len(ranks) - 1:
        return f"ranks {names[0]} to {names[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"
