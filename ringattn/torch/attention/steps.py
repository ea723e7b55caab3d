"""The steps of one rank: those of its schedule, with the local intervals of its queries on the device.

They are made once for a plan, a spec and its documents, and cached: all layers of a model use the same ones.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.kernels.intervals import Intervals, rectangles_of
from ringattn.kernels.partial import Partial
from ringattn.kernels.protocol import TorchKernel
from ringattn.kernels.rows import Rows, row_delta
from ringattn.layout import Layout, Shard, count_below
from ringattn.mask import Mask, schedule_of
from ringattn.schedule import Hop, Visit
from ringattn.spec import Spans

# The tensors of one group of heads, of a whole ring shard.
Entered = Sequence[Any]  # q, k, v, and the partial that the queries start from
Seen = Sequence[Any]  # q, k, v, out, lse and the gradients of the latter two, of lse perhaps None
Grads = Sequence[Any]  # dq, dk, dv, and delta where it is requested


class Stop(NamedTuple):
    """One visit of a rank's run, with its intervals and transfers."""

    where: Intervals | None  # of the queries among the keys that are here; None if there is no work
    shard: Shard  # the positions of the keys (or queries) that are here
    brought: dict[int, tuple[range, ...]]  # by source rank: where each range of its block lies among the keys here
    readers: tuple[int, ...]  # who reads the block that this rank holds, at the same step
    own: tuple[range, ...]  # the ranges of that block, in the order in which they are read

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
def run_of(mask: Mask, rank: int, device: torch.device | None, together: int = 1, queries: bool = False) -> Run:
    """The run of one ring rank. Each visit has up to `together` blocks of keys, or with `queries` of queries, which
    then travel while keys stay.
    """
    plan, schedule = mask.plan, schedule_of(mask)
    if queries:
        keys = plan.keys.tokens.shard(rank)
        schedule, layout = schedule.turned, plan.tokens
    else:
        found = mask.spans(plan.tokens.shard(rank))
        layout = plan.keys.tokens

    def where(shard: Shard) -> Intervals:
        if queries:
            return on_device(mask.spans(shard).through(partial(count_below, keys)), device)
        return on_device(found.through(partial(count_below, shard)), device)

    hosts = plan.hosts
    size = plan.ring // hosts

    def holder(block: int) -> int:
        return rank // size * size + block % size

    return tuple(
        Leg(stops(one.visits, layout, rank, where, holder), one.hop, one.home)
        for one in schedule.rounds(rank, hosts, together)
    )


def stops(
    visits: Iterable[Visit],
    layout: Layout,
    rank: int,
    where: Callable[[Shard], Intervals | None],
    holder: Callable[[int], int] = int,
) -> tuple[Stop, ...]:
    """Each visit with the places of the blocks it brings, sorted by range; `holder` gives the rank that has a block."""
    found = []
    for i, visit in enumerate(visits):
        ranges = sorted(((r, s) for s in visit.sources for r in layout.shard(s)), key=lambda pair: pair[0].start)
        shard = tuple(r for r, _ in ranges)
        brought: dict[int, tuple[range, ...]] = {holder(s): () for s in visit.sources if i}
        if layout.cut is not None:  # one block a visit, of which each document has a range: it travels whole
            whole = (range(layout.shard_len),)
            brought = {source: whole for source in brought}
            found.append(Stop(where(shard) if shard else None, shard, brought, visit.readers, whole))
            continue
        places = stripes(shard) if layout.name == "striped" else cuts(shard)
        for (_, source), place in zip(ranges, places, strict=True):
            if i:
                brought[holder(source)] += (place,)
        found.append(Stop(where(shard) if shard else None, shard, brought, visit.readers, cuts(layout.shard(rank))))
    return tuple(found)


def cuts(shard: Shard) -> tuple[range, ...]:
    """Where each range of a shard lies among its tokens."""
    ends = np.cumsum([len(r) for r in shard]).tolist()
    return tuple(range(end - len(r), end) for r, end in zip(shard, ends, strict=True))


def stripes(shard: Shard) -> tuple[range, ...]:
    """Where the tokens of each range lie in the shard, if the ranges are stripes."""
    return tuple(range(i, sum(map(len, shard)), len(shard)) for i in range(len(shard)))


@lru_cache(maxsize=8)
def global_intervals(mask: Mask, rank: int, device: torch.device | None) -> Intervals:
    """The intervals of one ring rank's queries among all keys in their global order."""
    return on_device(mask.spans(mask.plan.tokens.shard(rank)), device)


def on_device(found: Spans, device: torch.device | None) -> Intervals:
    """Intervals on the device; without a device they stay on the host, like those of another rank.

    If rows differ they are not rectangles, and a GPU computes them from the few numbers of their spans.
    """
    alike = len(found.counts) == 1
    if not alike and device is not None and device.type != "cpu":
        return Intervals(*spread_on(found, device), made={})
    host = found.spread()
    rectangles = rectangles_of(*host) if alike else None
    if device is None:
        return Intervals(*host, rectangles, host)
    b, e = (torch.from_numpy(x).to(device, non_blocking=True) for x in host)
    return Intervals(b, e, rectangles, host, made={})


def spread_on(found: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Spans.spread` by torch."""
    rows, size = len(found.counts), int(found.counts[0].sum())

    def there(x: np.ndarray, dtype: Any = np.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype)).to(device, non_blocking=True)

    at = torch.repeat_interleave(there(found.counts.ravel(), np.int64), output_size=rows * size)
    begin = there(found.begin.ravel())[at].view(rows, size)
    low, high = (None if x is None else there(x) for x in (found.low, found.high))
    if found.end is not None:
        end = there(found.end.ravel())[at].view(rows, size)
        end = end if high is None else torch.maximum(torch.minimum(end, high), begin)
    else:
        assert high is not None, "spans without an end have a highest one"
        end = high.expand(rows, size).contiguous()
    return begin if low is None else torch.minimum(torch.maximum(begin, low), end), end


@lru_cache(maxsize=1024)
def score_with(entry: kernels.Kernel, scale: float, softcap: float | None) -> Score:
    kernel: TorchKernel = entry.load()
    given: dict[str, Any] = {"scale": scale, "softcap": softcap}
    return Score(kernel, partial(kernel.attend, **given), partial(kernel.backward, **given))


def rows_of(
    score: Score, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, with_delta: bool, travels: bool = False
) -> tuple[Rows, Tensor | None]:
    """The rows of a backward pass as the kernel takes them, and delta if `with_delta`.

    A kernel that computes delta gets `out`, unless the lse has a gradient too, which is a term of delta, or the rows
    travel: delta is much smaller than out.
    """
    by_out = dlse is None and not travels
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
