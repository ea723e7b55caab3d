"""Gather: all keys at once, one kernel call; in backward the keys' gradients are summed and scattered home.

Simple and quick for short sequences, at the price of O(T) memory for the keys.
"""

import numpy as np
import torch
from torch import Tensor

from ringattn.comms.axis import Axis
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial
from ringattn.layout import Layout
from ringattn.torch.steps import Score


def gather_forward(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, layout: Layout, where: Intervals, score: Score, start: Partial | None
) -> Partial:
    """Attention of this rank's queries over all keys, brought into their global order."""
    return score.attend(q, *gathered(k, v, axis, layout), where, carry=start, out_dtype=q.dtype)


def gather_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    layout: Layout,
    where: Intervals,
    score: Score,
    rows: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float32; `rows` are this rank's dout, lse and delta."""
    dq, dk, dv = score.attend_backward(q, *gathered(k, v, axis, layout), where, *rows)
    home = [axis.reduce_scatter(reordered(x, layout, layout.order()), 1) for x in (dk, dv)]
    dk, dv = (pending.wait() for pending in home)
    return dq, dk, dv


def gathered(k: Tensor, v: Tensor, axis: Axis, layout: Layout) -> tuple[Tensor, Tensor]:
    pending = [axis.all_gather(x, 1) for x in (k, v)]
    k, v = (reordered(p.wait(), layout, np.argsort(layout.order())) for p in pending)
    return k, v


def reordered(x: Tensor, layout: Layout, order: np.ndarray) -> Tensor:
    return x if layout.name == "contiguous" else x.index_select(1, torch.from_numpy(order).to(x.device))
