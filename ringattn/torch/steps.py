"""What one rank runs: its schedule's steps, each with the local intervals of its queries, on the device.

Made once for a plan, a spec and its documents, and kept: every layer of a model asks for the same ones.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.kernels import reference
from ringattn.kernels.intervals import Intervals, tiles_of
from ringattn.layout import Layout, Shard, to_local
from ringattn.mask import Mask, schedule_of
from ringattn.schedule import Hop, Schedule, Step, Visit
from ringattn.spec import AttentionSpec

Run = tuple[tuple[Step, Intervals], ...]

# The tensors of one group of heads, of a whole ring shard.
Entered = Sequence[Any]  # q, k, v, and what the queries have seen already
Seen = Sequence[Any]  # q, k, v, out, lse and the gradients of the latter two, of lse perhaps None
Grads = Sequence[Tensor]  # dq, dk, dv, delta


class Stop(NamedTuple):
    """One step of a rank's run on the direct route."""

    where: Intervals | None  # of the queries among the keys that are here; None without work
    shard: Shard  # the positions of the keys (or queries) that are here
    brought: dict[int, tuple[range, ...]]  # from whom, and where among them each of a block's ranges lies
    readers: tuple[int, ...]  # who has this rank's block at the same step
    own: tuple[range, ...]  # the ranges of this rank's own block, as it sends them

    @property
    def length(self) -> int:
        return sum(map(len, self.shard))


class Level(NamedTuple):
    """One round of a rank's run over several hosts."""

    run: tuple[Stop, ...]
    hop: Hop | None  # of the block that it holds, to the next host
    home: Hop | None  # of that block's gradient, straight to its owner; None in the first round, where that is itself


class Score(NamedTuple):
    """A kernel's functions with everything of the spec that is not an interval already said."""

    attend: Callable[..., Any]
    attend_backward: Callable[..., Any]
    halves: Callable[..., Any]  # attend_backward as two functions: one gives (dk, dv), the other dq
    parted: bool  # whether each of them does its own half only; then it adds up in what it is given
    tiles: bool  # whether it runs tile by tile, finds what has the inputs' dtype, and takes out for delta
    narrow: bool  # whether gradients travel in the inputs' dtype, as such a kernel of all ranks finds them
    prepare: Callable[..., Any]  # (q, dout, lse, delta) -> the rows that every step of a backward takes
    row_delta: Callable[..., Any]


@lru_cache(maxsize=8)
def relay_run(mask: Mask, rank: int, device: torch.device) -> Run:
    """The steps of one ring rank on the relay route, with their intervals."""
    begin, end = mask.bounds(mask.plan.tokens.positions(rank))
    keys = mask.plan.keys.tokens
    return tuple(
        (step, on_device(*to_local(keys.shard(step.source), begin, end), device))
        for step in schedule_of(mask).steps(rank)
    )


@lru_cache(maxsize=8)
def direct_run(mask: Mask, rank: int, device: torch.device, together: int = 1) -> tuple[Stop, ...]:
    """The stops of one ring rank, each with up to `together` blocks of keys, in the order of their positions."""
    keys = mask.plan.keys.tokens
    begin, end = mask.bounds(mask.plan.tokens.positions(rank))

    def where(shard: Shard) -> Intervals:
        return on_device(*to_local(shard, begin, end), device)

    return stops(schedule_of(mask).visits(rank, together), keys, rank, where)


@lru_cache(maxsize=8)
def levels_run(mask: Mask, rank: int, device: torch.device, together: int = 1) -> tuple[Level, ...]:
    """The rounds of one ring rank whose ring lies on several hosts."""
    schedule, hosts, keys = schedule_of(mask), mask.plan.hosts, mask.plan.keys.tokens
    size = schedule.ring // hosts
    begin, end = mask.bounds(mask.plan.tokens.positions(rank))

    def where(shard: Shard) -> Intervals:
        return on_device(*to_local(shard, begin, end), device)

    def holder(block: int) -> int:
        return rank // size * size + block % size

    def seen(block: int, host: int) -> bool:
        return bool(schedule.needed[host * size : (host + 1) * size, block].any())

    found = []
    for o, one in enumerate(schedule.rounds(rank, hosts, together)):
        home = Hop(-o * size, seen(one.held, rank // size), seen(rank, (rank // size + o) % hosts)) if o else None
        found.append(Level(stops(one.visits, keys, rank, where, holder), one.hop, home))
    return tuple(found)


@lru_cache(maxsize=8)
def queries_run(mask: Mask, rank: int, device: torch.device, together: int = 1) -> tuple[Stop, ...]:
    """The stops of one ring rank whose keys stay, each with up to `together` blocks of queries."""
    keys = mask.plan.keys.tokens.shard(rank)

    def where(shard: Shard) -> Intervals:
        return on_device(*to_local(keys, *mask.bounds(sorted_positions(shard))), device)

    turned = Schedule(schedule_of(mask).needed.T)
    return stops(turned.visits(rank, together), mask.plan.tokens, rank, where)


def stops(
    visits: Iterable[Visit],
    layout: Layout,
    rank: int,
    where: Callable[[Shard], Intervals | None],
    holder: Callable[[int], int] = int,
) -> tuple[Stop, ...]:
    """Each visit with the places of what it brings, whose ranges are put in order; `holder` has a block now."""
    found = []
    for i, visit in enumerate(visits):
        ranges = sorted(((r, s) for s in visit.sources for r in layout.shard(s)), key=lambda pair: pair[0].start)
        shard = tuple(r for r, _ in ranges)
        brought: dict[int, tuple[range, ...]] = {holder(s): () for s in visit.sources if i}
        places = stripes(shard) if layout.name == "striped" else cuts(shard)
        for (_, source), place in zip(ranges, places, strict=True):
            if i:
                brought[holder(source)] += (place,)
        found.append(Stop(where(shard) if shard else None, shard, brought, visit.readers, cuts(layout.shard(rank))))
    return tuple(found)


def sorted_positions(shard: Shard) -> np.ndarray:
    """The positions of a shard, of which ranges may take turns."""
    return np.sort(np.concatenate([np.arange(r.start, r.stop, r.step) for r in shard]))


def cuts(shard: Shard) -> tuple[range, ...]:
    """Where each range of a shard lies among its tokens."""
    ends = np.cumsum([len(r) for r in shard]).tolist()
    return tuple(range(end - len(r), end) for r, end in zip(shard, ends, strict=True))


def stripes(shard: Shard) -> tuple[range, ...]:
    """Where the tokens of each range lie among those of all, when ranges take turns."""
    return tuple(range(i, sum(map(len, shard)), len(shard)) for i in range(len(shard)))


@lru_cache(maxsize=8)
def global_intervals(mask: Mask, rank: int, device: torch.device) -> Intervals:
    """The intervals of one ring rank's queries among all keys, for keys that were gathered into their global order."""
    return on_device(*mask.bounds(mask.plan.tokens.positions(rank)), device)


def on_device(begin: np.ndarray, end: np.ndarray, device: torch.device) -> Intervals:
    host = begin.astype(np.int32), end.astype(np.int32)
    b, e = (torch.from_numpy(x).to(device, non_blocking=True) for x in host)
    return Intervals(b, e, tiles_of(*host), host)


def score_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    impl: str,
    intervals: Iterable[Intervals | None],
    few: bool = False,
) -> Score:
    """The kernel that serves all these intervals, its scale and softcap filled in. `few`: it may be decoding."""
    tiles = all(where.tiles is not None for where in intervals if where)
    return kept_score(problem_of(q, k, v, spec, tiles, few), impl, spec.scale_for(q.shape[-1]), spec.softcap)


@lru_cache(maxsize=1024)
def kept_score(problem: kernels.Problem, impl: str, scale: float, softcap: float | None) -> Score:
    kernel = kernels.select(problem, impl)
    module = kernel.load()
    given = {"scale": scale, "softcap": softcap}
    row_delta = getattr(module, "row_delta", reference.row_delta)
    whole = partial(module.attend_backward, **given)
    parted = hasattr(module, "halves")
    found = partial(getattr(module, "totals", module.attend_backward), **given)
    halves = partial(module.halves, **given) if parted else partial(both_at_once, found)
    prepare = getattr(module, "prepare", as_they_are)
    attend = partial(module.attend, **given)
    return Score(attend, whole, halves, parted, kernel.tiles, kernels.is_narrow(impl), prepare, row_delta)


def carried_in(q: Tensor, score: Score, where: Intervals, carry: Any, ends: bool) -> torch.dtype | None:
    """The dtype for the out of a step: q's where the attention ends, and where the kernel had rounded to it anyway."""
    alone = carry is None and score.tiles and len(where.tiles or ()) == 1
    return q.dtype if ends or alone else None


def as_they_are(q: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    return rows


def delta_of(score: Score, out: Tensor, dout: Tensor, dlse: Tensor | None, asked: bool) -> Tensor:
    """delta; for a kernel that makes it from `out` again just that, if nobody `asked` for the numbers."""
    return out if score.tiles and dlse is None and not asked else score.row_delta(out, dout, dlse)


def both_at_once(
    gradients: Callable[..., Any], *args: Any, dq: Any = None, dk: Any = None, dv: Any = None
) -> tuple[Callable[[], tuple[Any, Any]], Callable[[], Any]]:
    """`halves` of a kernel that cannot part them. It adds to nothing: who asked does."""
    found: list[Any] = []

    def run() -> list[Any]:
        if not found:
            found.extend(gradients(*args))
        return found

    return lambda: (run()[1], run()[2]), lambda: run()[0]


def problem_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, tiles: bool, few: bool) -> kernels.Problem:
    return kernels.Problem(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        softcap=spec.softcap is not None,
        tiles=tiles,
        arch=arch_of(q.device) if q.is_cuda else None,
        queries=q.shape[1] if few else None,
    )


arch_of = lru_cache(torch.cuda.get_device_capability)  # asked for in every call
