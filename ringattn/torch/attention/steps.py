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
from ringattn.bands import Runs
from ringattn.kernels.families import over_families
from ringattn.kernels.intervals import Intervals, rectangles_of, some, stack
from ringattn.kernels.partial import Partial
from ringattn.kernels.protocol import Once, TorchKernel
from ringattn.layout import FEW, Shard, count_below
from ringattn.mask import Mask
from ringattn.recipe import Sight
from ringattn.schedule import Only

# The tensors of one group of heads, of a whole ring shard.
Entered = Sequence[Any]  # q, k, v, and the partial that the queries start from
Seen = Sequence[Any]  # q, k, v, out, lse and the gradients of the latter two, of lse perhaps None
Grads = Sequence[Any]  # dq, dk, dv, and delta where it is requested


class Score(NamedTuple):
    """A kernel bound to all arguments of a call except the tensors and the intervals."""

    kernel: TorchKernel
    attend: Callable[..., Partial]
    backward: Callable[..., Any]  # (tensors, where, rows, want, into) -> dq, dk, dv
    once: Once | None  # of a kernel that has it


class OnDevice(Sight):
    """The keys that the queries of one ring rank see: intervals on the device."""

    def __init__(self, mask: Mask, rank: int, device: torch.device):
        super().__init__(mask, rank)
        self.device = device

    @cached_property
    def seen(self) -> list[tuple[Any, Any]]:
        return bounds_on(self.mask, self.mask.plan.tokens.shard(self.rank), self.device)

    def among(self, keys: Shard, only: Only | None) -> Intervals:
        return local(self.of(only), keys, self.device, rectangles=only is None)


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
    if isinstance(position, np.ndarray) or len(shard) <= FEW:
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
    few = rectangles_of(*host) if rectangles and len(host[0]) == 1 else None
    b, e = (torch.from_numpy(x).to(device, non_blocking=True) for x in host)
    return Intervals(b, e, few, host, made={})


@lru_cache(maxsize=1024)
def score_with(entry: kernels.Kernel, scale: float, softcap: float | None, families: bool = True) -> Score:
    """The kernel of a call; with `families` its steps may see several families of intervals."""
    kernel: TorchKernel = over_families(entry.load()) if families else entry.load()
    given: dict[str, Any] = {"scale": scale, "softcap": softcap}
    once = kernel.once
    if once:
        once = once._replace(write=partial(once.write, **given), backward=partial(once.backward, **given))
    return Score(kernel, partial(kernel.attend, **given), partial(kernel.backward, **given), once)


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
