"""What one rank runs: its schedule's steps, each with the local intervals of its queries, on the device.

Made once for a plan, a spec and its documents, and kept: every layer of a model asks for the same ones.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.kernels import reference
from ringattn.kernels.intervals import Intervals, tiles_of
from ringattn.layout import to_local
from ringattn.planning import Plan
from ringattn.schedule import Schedule, Step, needed
from ringattn.spec import AttentionSpec, Docs, bounds

Run = tuple[tuple[Step, Intervals], ...]


class Score(NamedTuple):
    """A kernel's functions with everything of the spec that is not an interval already said."""

    attend: Callable[..., Any]
    attend_backward: Callable[..., Any]
    row_delta: Callable[..., Any]


@dataclass(frozen=True)
class Mask:
    """All that decides who sees whom."""

    plan: Plan
    spec: AttentionSpec
    docs: Docs | None = None
    key_docs: Docs | None = None

    def bounds(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        plan = self.plan
        return bounds(self.spec, positions, plan.seq_len, plan.keys.seq_len, self.docs, self.key_docs)


@lru_cache(maxsize=32)
def schedule_of(mask: Mask) -> Schedule:
    """Who needs whose keys, the same on every rank."""
    tokens, keys = mask.plan.tokens, mask.plan.keys.tokens
    begin, end = mask.bounds(np.arange(tokens.padded_length))
    everyone = range(tokens.ring)
    return Schedule(needed(begin, end, [tokens.shard(r) for r in everyone], [keys.shard(r) for r in everyone]))


@lru_cache(maxsize=32)
def ring_run(mask: Mask, rank: int, device: torch.device) -> Run:
    """The steps of one ring rank with their intervals."""
    begin, end = mask.bounds(mask.plan.tokens.positions(rank))
    keys = mask.plan.keys.tokens
    return tuple(
        (step, on_device(*to_local(keys.shard(step.source), begin, end), device))
        for step in schedule_of(mask).steps(rank)
    )


@lru_cache(maxsize=32)
def global_intervals(mask: Mask, rank: int, device: torch.device) -> Intervals:
    """The intervals of one ring rank's queries among all keys, for keys that were gathered into their global order."""
    return on_device(*mask.bounds(mask.plan.tokens.positions(rank)), device)


def on_device(begin: np.ndarray, end: np.ndarray, device: torch.device) -> Intervals:
    host = begin.astype(np.int32), end.astype(np.int32)
    b, e = (torch.from_numpy(x).to(device, non_blocking=True) for x in host)
    return Intervals(b, e, tiles_of(*host), host)


def score_of(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, impl: str, intervals: Iterable[Intervals], few: bool = False
) -> Score:
    """The kernel that serves all these intervals, its scale and softcap filled in. `few`: it may be decoding."""
    tiles = all(where.tiles is not None for where in intervals)
    module = kernels.select(problem_of(q, k, v, spec, tiles, few), impl).load()
    given = {"scale": spec.scale_for(q.shape[-1]), "softcap": spec.softcap}
    row_delta = getattr(module, "row_delta", reference.row_delta)
    return Score(partial(module.attend, **given), partial(module.attend_backward, **given), row_delta)


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
        arch=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        queries=q.shape[1] if few else None,
    )
