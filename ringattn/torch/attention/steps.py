"""The steps of one rank: those of its schedule, with the local intervals of its queries on the device.

They are made once for a plan, a spec and its documents, and cached: all layers of a model use the same ones.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.bands import Runs
from ringattn.kernels.families import over_families
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.partial import Partial
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.rows import Rows, row_delta
from ringattn.layout import FEW, Layout, Shard, count_below, part_of
from ringattn.mask import Mask, schedule_of
from ringattn.schedule import Hop, Ranges, Round, Schedule

# The tensors of one group of heads, of a whole ring shard.
Entered = Sequence[Any]  # q, k, v, and the partial that the queries start from
Seen = Sequence[Any]  # q, k, v, out, lse and the gradients of the latter two, of lse perhaps None
Grads = Sequence[Any]  # dq, dk, dv, and delta where it is requested


class Places(NamedTuple):
    """Where the ranges of a block that are read lie among what a stop brings."""

    at: Ranges
    after: tuple[int, ...]  # how many tokens of other ranges the block's holder shows to others before these


class Stop(NamedTuple):
    """One visit of a rank's run, with its intervals and transfers."""

    where: Intervals | None  # of the queries among the keys that are here; None if there is no work
    shard: Shard  # the positions of the keys that are here
    brought: dict[int, Places]  # by source rank: where what is read of its block lies among the keys here
    readers: dict[int, Ranges]  # what other ranks read, at the same step, of the block that this rank holds

    @property
    def length(self) -> int:
        return sum(map(len, self.shard))


class Leg(NamedTuple):
    """One round of a rank's run, with its stops and transfers."""

    stops: tuple[Stop, ...]
    hop: Hop | None  # of the held block, to its next holder
    home: Hop | None  # of finished gradients, to their owners


Run = tuple[Leg, ...]


class Score(NamedTuple):
    """A kernel bound to all arguments of a call except the tensors and the intervals."""

    kernel: TorchKernel
    attend: Callable[..., Partial]
    backward: Callable[..., Any]  # (tensors, where, rows, want, into) -> dq, dk, dv


@lru_cache(maxsize=8)
def run_of(mask: Mask, rank: int, device: torch.device | None, together: int = 1) -> Run:
    """The run of one ring rank. Each visit has up to `together` blocks."""
    plan, schedule = mask.plan, schedule_of(mask)
    seen = bounds_on(mask, plan.tokens.shard(rank), device)

    def where(shard: Shard) -> Intervals | None:
        return local(seen, shard, device)

    hosts = plan.hosts
    size = plan.ring // hosts

    def holder(block: int) -> int:
        return rank // size * size + block % size

    return tuple(
        Leg(stops(schedule, one, plan.keys.tokens, rank, where, holder), one.hop, one.home)
        for one in schedule.rounds(rank, hosts, together)
    )


def stops(
    schedule: Schedule,
    held: Round,
    layout: Layout,
    rank: int,
    where: Callable[[Shard], Intervals | None],
    holder: Callable[[int], int] = int,
) -> tuple[Stop, ...]:
    """Each visit with the places of what it brings, sorted by position; `holder` gives the rank that has a block."""
    home, *others = held.visits
    shard = layout.shard(held.held) if home.sources else ()
    found = [Stop(where(shard) if shard else None, shard, {}, {})]
    for visit in others:
        read = [(part_of(layout.shard(s), slice(r.start, r.stop)), s) for s in visit.sources
                for r in schedule.ranges(rank, s)]  # fmt: skip
        read.sort(key=lambda pair: pair[0][0].start)
        shard = tuple(r for positions, _ in read for r in positions)
        at: dict[int, Ranges] = dict.fromkeys(visit.sources, ())
        for (_, source), place in zip(read, places([positions for positions, _ in read]), strict=True):
            at[source] += (place,)
        brought = {
            holder(s): Places(at[s], schedule.before(rank, s, readers))
            for s, readers in zip(visit.sources, visit.company, strict=True)
        }
        readers = {r: schedule.ranges(r, held.held) for r in visit.readers}
        found.append(Stop(where(shard) if shard else None, shard, brought, readers))
    return tuple(found)


def places(parts: Sequence[Shard]) -> Ranges:
    """Where the tokens of each part lie among all of them: one after the other, or stripes dealt out in turn."""
    if parts and parts[0][0].step > 1:
        shard = tuple(r for part in parts for r in part)
        first, second = (count_below(shard, np.array([r.start + i * r.step for r in shard])).tolist() for i in (0, 1))
        return tuple(range(a, a + len(r) * (b - a), b - a) for a, b, r in zip(first, second, shard, strict=True))
    ends = [0, *accumulate(sum(map(len, part)) for part in parts)]
    return tuple(map(range, ends, ends[1:]))


@lru_cache(maxsize=8)
def global_intervals(mask: Mask, rank: int, device: torch.device | None) -> Intervals:
    """The intervals of one ring rank's queries among all keys in their global order."""
    seen = bounds_on(mask, mask.plan.tokens.shard(rank), device)
    return together(seen, device) or on_device(seen[0], device)


def bounds_on(mask: Mask, shard: Shard, device: torch.device | None) -> list[tuple[Any, Any]]:
    """Of each family, the keys [begin, end) that a shard's queries see.

    They are numpy arrays, from which rectangles can be found, unless a batch's rows differ: those are made on a GPU
    there, from the few numbers of their runs.
    """
    on_host = device is None or device.type == "cpu"
    return [runs.bounds() if on_host or len(runs.counts) == 1 else spread_on(runs, device) for runs in mask.runs(shard)]


def spread_on(runs: Runs, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """`runs.bounds()` on the device, by torch."""
    positions, counts, *others = (torch.from_numpy(x).to(device, non_blocking=True) for x in runs)
    rows, size = len(counts), len(positions)
    at = torch.repeat_interleave(counts.ravel(), output_size=rows * size)
    begin, end, lean, rise = (x.ravel()[at].view(rows, size) for x in others)
    return begin + lean * positions, end + rise * positions


def local(seen: list[tuple[Any, Any]], shard: Shard, device: torch.device | None) -> Intervals | None:
    """Intervals of positions as those of a shard's local indices."""
    return together([tuple(below(shard, side) for side in sides) for sides in seen], device)


def together(seen: Sequence[tuple[Any, ...]], device: torch.device | None) -> Intervals | None:
    """The families that see something, on the device; None if none does. What is on the device is not looked at."""
    some = [sides for sides in seen if isinstance(sides[0], Tensor) or (sides[0] < sides[1]).any()]
    found = [on_device(sides, device) for sides in some]
    return found[0]._replace(also=tuple(found[1:])) if found else None


def below(shard: Shard, position: Any) -> Any:
    """`count_below`, of many ranges on a device by a look-up too."""
    if isinstance(position, np.ndarray) or len(shard) <= FEW:
        return count_below(shard, position)
    edges = torch.tensor([(r.start, r.stop) for r in shard], device=position.device).T
    before = torch.nn.functional.pad((edges[1] - edges[0]).cumsum(0), (1, 0))
    i = torch.searchsorted(edges[0].contiguous(), position, right=True)  # ranges that begin at it or before it
    return before[i] - (edges[1][i - 1] - position).clip(min=0) * (i > 0)


def on_device(seen: tuple[Any, ...], device: torch.device | None) -> Intervals:
    """Intervals on the device; without a device they stay on the host, like those of another rank."""
    if isinstance(seen[0], Tensor):
        return Intervals(seen[0].int(), seen[1].int(), made={})
    host = seen[0].astype(np.int32), seen[1].astype(np.int32)
    rectangles = rectangles_of(*host) if len(host[0]) == 1 else None
    if device is None:
        return Intervals(*host, rectangles, host)
    b, e = (torch.from_numpy(x).to(device, non_blocking=True) for x in host)
    return Intervals(b, e, rectangles, host, made={})


@lru_cache(maxsize=1024)
def score_with(entry: kernels.Kernel, scale: float, softcap: float | None) -> Score:
    kernel: TorchKernel = over_families(entry.load())
    given: dict[str, Any] = {"scale": scale, "softcap": softcap}
    return Score(kernel, partial(kernel.attend, **given), partial(kernel.backward, **given))


def rows_of(
    score: Score, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, with_delta: bool
) -> tuple[Rows, Tensor | None]:
    """The rows of a backward pass as the kernel takes them, and delta if `with_delta`.

    A kernel that computes delta gets `out`, unless the lse has a gradient too, which is a term of delta.
    """
    by_out = dlse is None
    delta = None if by_out and not with_delta else row_delta(out, dout, dlse)
    return score.kernel.prepare(dout, lse, delta, out if by_out else None), delta


def problem_of(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, rectangles: bool) -> kernels.Problem:
    """The problem of a call on one device."""
    return kernels.Problem(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        softcap=softcap is not None,
        rectangles=rectangles,
        arch=arch_of(q.device) if q.is_cuda else None,
        queries=q.shape[1],
        rows=q.shape[0] * q.shape[1] * q.shape[2],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


arch_of = lru_cache(torch.cuda.get_device_capability)  # cached, since every call needs it
