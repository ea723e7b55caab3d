"""What the steps of a recipe need on a device: the intervals of a rank's queries, and the kernel.

Intervals are made once for a plan, a spec and its documents, and cached: all layers of a model use the same ones.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.kernels.families import over_families
from ringattn.kernels.intervals import Intervals, rectangles_of, some, stack
from ringattn.kernels.partial import Partial, empty
from ringattn.kernels.protocol import Disjoint, TorchKernel
from ringattn.kernels.rows import EVERY, NO_SUMS, OF_KEYS, OF_QUERIES, Rows
from ringattn.kernels.total import Total
from ringattn.layouts.layout import RANGES_SUMMED, Shard, count_below
from ringattn.masks.bands import Runs
from ringattn.plans.mask import Mask
from ringattn.plans.recipe import Visible
from ringattn.steps.rank import Queries, Step

Grads = Sequence[Any]  # of one group of heads: dq, dk, dv, and delta where it is requested


class Score(NamedTuple):
    """A kernel bound to all arguments of a call except the tensors and the intervals."""

    kernel: TorchKernel
    attend: Callable[..., Partial]
    backward: Callable[..., Any]  # (tensors, where, rows, want, into) -> dq, dk, dv
    disjoint: Disjoint | None  # of a kernel that has it


class Result:
    """The partial of all queries so far, with which each step merges."""

    def __init__(self, score: Score, q: Tensor, value_dim: int, steps: Sequence[Step], start: Partial | None):
        self.score, self.q, self.value_dim, self.part = score, q, value_dim, start
        self.last = next((step for step in reversed(steps) if step.where is not None), None)

    def add(self, step: Step, k: Tensor, v: Tensor) -> None:
        if step.where is None:
            return
        rounded = step is self.last or (self.part is None and self.score.kernel.rounds(step.where))
        dtype = self.q.dtype if rounded else None
        self.part = self.score.attend(self.q, k, v, step.where, carry=self.part, out_dtype=dtype)

    def whole(self) -> Partial:
        return self.part or empty(self.q, self.value_dim)


class DisjointResult:
    """The same of steps of which no query has keys in two: each writes the rows of its queries."""

    def __init__(self, score: Score, q: Tensor, value_dim: int, steps: Sequence[Step], start: Partial | None):
        assert score.disjoint  # the recipe asked
        self.kernel, self.q, self.start = score.disjoint, q, start
        self.wheres = [step.where for step in steps if step.where]
        self.part = self.kernel.allocate(q, value_dim)

    def add(self, step: Step, k: Tensor, v: Tensor) -> None:
        if step.where:
            self.kernel.write(self.q, k, v, step.where, self.part)

    def whole(self) -> Partial:
        return self.kernel.finish(self.part, self.wheres, self.start)


class Gradients:
    """The gradients of queries add up here, step by step; those of keys are returned, each step's first."""

    def __init__(self, score: Score, q: Tensor, rows: Rows, steps: Sequence[Step]):
        self.score, self.q, self.rows, self.dq = score, q, rows, Total(q)
        self.separable = score.kernel.separable
        self.inputs: Any = None  # of the current step
        self.grad: Tensor | None = None

    def of_keys(self, step: Step, k: Tensor, v: Tensor) -> Sequence[Any]:
        if step.where is None:
            return NO_SUMS[1:]
        tensors, rows = (self.q, k, v), self.rows
        if step.heads is not None:
            queries, heads = step.heads
            tensors, rows = (self.q[:, :, queries], k[:, :, heads], v[:, :, heads]), rows.heads(queries)
        self.inputs = tensors, step.where, rows
        want = OF_KEYS if self.separable else EVERY
        self.grad, *grads = self.score.backward(*self.inputs, want, (self.dq.running, None, None))
        return grads

    def of_queries(self, step: Step) -> None:
        if step.where is None:
            return
        if self.separable:
            self.grad = self.score.backward(*self.inputs, OF_QUERIES, (self.dq.running, None, None))[0]
        self.dq.add(self.grad, heads=slice(None) if step.heads is None else step.heads[0])
        self.dq.fold()
        self.inputs = self.grad = None

    def whole(self) -> Total:
        return self.dq


class DisjointGradients:
    """The same of steps of which no query has keys in two: each writes the rows of its queries."""

    def __init__(self, score: Score, q: Tensor, rows: Rows, steps: Sequence[Step]):
        assert score.disjoint  # the recipe asked
        self.kernel, self.q, self.rows, self.dq = score.disjoint, q, rows, q.new_empty(q.shape)
        self.wheres = [step.where for step in steps if step.where]

    def of_keys(self, step: Step, k: Tensor, v: Tensor) -> Sequence[Any]:
        if step.where is None:
            return NO_SUMS[1:]
        return self.kernel.backward((self.q, k, v), step.where, self.rows, self.dq)

    def of_queries(self, step: Step) -> None:
        """They are written with those of keys."""

    def whole(self) -> Total:
        self.kernel.clear(self.dq, self.wheres)
        dq = Total(self.q)
        dq.add(self.dq)
        return dq


class OnDevice(Visible):
    """The keys that the queries of one ring rank see: intervals on the device."""

    def __init__(self, mask: Mask, rank: int, device: torch.device):
        super().__init__(mask, rank)
        self.device = device

    @cached_property
    def seen(self) -> list[tuple[Any, Any]]:
        return bounds_on(self.mask, self.mask.plan.tokens.shard(self.rank), self.device)

    def among(self, keys: Shard, queries: Queries | None) -> Intervals:
        return local(self.of(queries), keys, self.device, rectangles=queries is None)


sight_of = lru_cache(maxsize=8)(OnDevice)  # all calls with a mask use the same one


def bounds_on(mask: Mask, shard: Shard, device: torch.device) -> list[tuple[Any, Any]]:
    """Of each family, the keys [begin, end) that a shard's queries see.

    They are numpy arrays, from which rectangles can be found, unless a batch's rows differ: those are made on a GPU
    there, from the few numbers of their runs.
    """
    made = (lambda runs: spread_on(runs, device)) if device.type != "cpu" else Runs.bounds
    return [runs.bounds() if len(runs.counts) == 1 else made(runs) for runs in mask.runs(shard)]


def spread_on(runs: Runs, device: torch.device) -> tuple[Tensor, Tensor]:
    """`runs.bounds()` on the device, by torch."""
    positions, counts, *others = (torch.from_numpy(x).to(device, non_blocking=True) for x in runs)
    rows, size = len(counts), len(positions)
    at = torch.repeat_interleave(counts.ravel(), output_size=rows * size)
    begin, end, lean, rise = (x.ravel()[at].view(rows, size) for x in others)
    return begin + lean * positions, end + rise * positions


def local(seen: list[tuple[Any, Any]], shard: Shard, device: torch.device, rectangles: bool = True) -> Intervals:
    """Intervals of positions as those of a shard's local indices; of families those that see something."""
    families = some([(below(shard, b), below(shard, e)) for b, e in seen])
    return stack([on_device(sides, device, rectangles) for sides in families])


def below(shard: Shard, position: Any) -> Any:
    """`count_below`, of many ranges on a device by a look-up too."""
    if isinstance(position, np.ndarray) or len(shard) <= RANGES_SUMMED:
        return count_below(shard, position)
    edges = torch.tensor([(r.start, r.stop) for r in shard], device=position.device).T
    before = torch.nn.functional.pad((edges[1] - edges[0]).cumsum(0), (1, 0))
    i = torch.searchsorted(edges[0].contiguous(), position, right=True)  # ranges that begin at it or before it
    return before[i] - (edges[1][i - 1] - position).clip(min=0) * (i > 0)


def on_device(seen: tuple[Any, ...], device: torch.device, rectangles: bool = True) -> Intervals:
    """Intervals on the device, with their rectangles if these are wanted and few."""
    if isinstance(seen[0], Tensor):
        return Intervals(seen[0].int(), seen[1].int(), made={})
    host = seen[0].astype(np.int32), seen[1].astype(np.int32)
    few = rectangles_of(*host) if rectangles else None
    begin, end = torch.from_numpy(host[0]), torch.from_numpy(host[1])
    return Intervals(begin.to(device, non_blocking=True), end.to(device, non_blocking=True), few, host, made={})


@lru_cache(maxsize=1024)
def score_with(entry: kernels.Kernel, scale: float, softcap: float | None, families: bool = True) -> Score:
    """The kernel of a call; with `families` its steps may see several families of intervals."""
    kernel: TorchKernel = over_families(entry.load()) if families else entry.load()
    how: dict[str, Any] = {"scale": scale, "softcap": softcap}
    disjoint = kernel.disjoint
    if disjoint:
        disjoint = disjoint._replace(write=partial(disjoint.write, **how), backward=partial(disjoint.backward, **how))
    return Score(kernel, partial(kernel.attend, **how), partial(kernel.backward, **how), disjoint)


arch_of = lru_cache(torch.cuda.get_device_capability)  # cached, since every call needs it
