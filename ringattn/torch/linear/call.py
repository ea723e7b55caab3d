"""A bound call of linear attention: all that is decided before states move, as in ringattn.torch.attention.call."""

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn import kernels
from ringattn.check import of_choice, of_linear, of_scale, of_state
from ringattn.kernels import linear
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.protocol import LinearKernel
from ringattn.planning import Plan
from ringattn.segments import BEFORE, WAYS, choose, segments
from ringattn.spec import Docs
from ringattn.torch import agree
from ringattn.torch.attention.call import remember
from ringattn.torch.attention.ulysses import Real, cleared
from ringattn.torch.check import have_tangents, of_dense, of_tangents, of_tensors
from ringattn.torch.linear import states
from ringattn.torch.sharding import local_positions, real_tokens

SHARE = 0.5  # states of up to this share of the bytes of q, k, v and the gates are kept for backward


class Call:
    """One kind of call."""

    def __init__(
        self, q: Tensor, v: Tensor, plan: Plan, docs: Docs | None, scale: float | None, kernel: str, scan: str,
        gradients: bool, return_state: bool,
    ):  # fmt: skip
        self.plan, self.docs = plan, docs
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.gradients, self.return_state = gradients, return_state
        self.alone = plan.ring * plan.ulysses == 1
        self.parts = segments(plan)
        self.batch = q.shape[0]
        self.real = real_tokens(plan, docs, q.device)
        self.place = plan.ring_axis.rank, plan.ulysses_axis.rank
        self.begin = begins(plan, docs, *self.place, q.shape[0], q.device)
        self.kernel = selected(q, v, kernel)
        size = 8 if q.dtype == torch.float64 else 4
        self.way = choose(plan, scan, q.shape[0] * q.shape[2] * q.shape[3] * v.shape[3] * size, q.shape[3])
        self.words: agree.Words = {}  # what the ranks compare
        self.compared = agree.watched(plan)  # whether they compare it in every call

    def exchange(self, own: linear.State, start: Tensor | None, **how: bool) -> states.Here | states.Exchange:
        """The transfer of the state before each segment."""
        return states.Here(own, start) if self.alone else states.Exchange(self.plan, own, start, self.way, **how)

    def folded(self, *tensors: Tensor | None) -> list[Any]:
        """This rank's segments as rows of the batch, [B * P, T / P, ...], padding zeroed."""
        return [None if x is None else rows(cleared(x, self.real), self.parts) for x in tensors]

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `folded`."""
        return x.unflatten(0, (self.batch, self.parts)).flatten(1, 2)


def bind(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, plan: Plan, initial_state: Tensor | None,
    docs: Docs | None, scale: float | None, kernel: str, scan: str, gradients: bool, look: bool, return_state: bool,
) -> Call:  # fmt: skip
    """The call for these arguments. Raises the same error on all ranks if they, or with `look` a gate, are wrong."""
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": initial_state}
    kinds = tuple(None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors.values())
    key = ("linear_attention", plan, docs, scale, kernel, scan, gradients, return_state, kinds)
    tangents = have_tangents(*tensors.values())
    call = None if tangents else plan.calls.get(key)
    if call is None:
        found = problem(q, k, v, log_decay, plan, initial_state, docs, scale, kernel, scan)
        found = found or (look and of_gates(log_decay, plan, docs)) or None
        asked = f"{scale} {kernel} {scan} {return_state}"
        words = agree.describe(plan, None, tensors, docs, call="linear_attention", gradients=gradients, asked=asked)
        agree.agree(plan, words, found)
        call = Call(q, v, plan, docs, scale, kernel, scan, gradients, return_state)
        call.words = words
        if not tangents:
            remember(plan.calls, key, call)
    elif look or call.compared:
        agree.agree(plan, call.words, of_gates(log_decay, plan, docs) if look else None)
    return call


def problem(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, plan: Plan, initial_state: Tensor | None,
    docs: Docs | None, scale: float | None, kernel: str, scan: str,
) -> str | None:  # fmt: skip
    """The first problem with the shapes, dtypes and devices of a call."""
    found = (
        of_linear(q, k, v, log_decay, plan, docs)
        or of_tensors(q, k, v)
        or of_tangents(log_decay=log_decay, initial_state=initial_state)
        or of_dense(log_decay=log_decay, initial_state=initial_state)
        or of_scale(scale, q.shape[-1])
        or of_choice("kernel", kernel, ("auto", *(one.name for one in linear.TABLE)))
        or of_choice("scan", scan, ("auto", *WAYS))
    )
    if found is None and initial_state is not None:
        found = of_state("initial_state", initial_state, q, v, accumulator(q))
    for name, x in (("log_decay", log_decay), ("initial_state", initial_state)):
        if found is None and x is not None:
            if not x.is_floating_point():
                found = f"{name} is {x.dtype}; expected floats"
            elif x.device != q.device:
                found = f"{name} is on {x.device}, q on {q.device}; put both on one device"
    return found


def of_gates(log_decay: Tensor | None, plan: Plan, docs: Docs | None) -> str | None:
    """The first gate that is not a finite number of at most 0. Reads all gates, so it waits for the device."""
    if log_decay is None:
        return None
    real: Real = real_tokens(plan, docs, log_decay.device)
    bad = ~((log_decay <= 0) & (log_decay > float("-inf")))
    if real is not None:
        bad &= real.reshape(*real.shape, *[1] * (bad.dim() - 2))
    if not bool(bad.any()):
        return None
    at = tuple(bad.nonzero()[0].tolist())
    return (
        f"log_decay{list(at)} = {float(log_decay[at].detach()):g}: a log decay is finite and at most 0, as logsigmoid "
        "gives it; growth overflows; for document borders use docs="
    )


def selected(q: Tensor, v: Tensor, kernel: str) -> LinearKernel:
    """The kernel. It is chosen by concrete sizes, even while a compiler traces with symbolic ones."""
    problem = kernels.Problem(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=int(q.shape[-1]),
        value_dim=int(v.shape[-1]),
        heads=int(q.shape[2]),
        kv_heads=int(q.shape[2]),
        arch=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
    )
    found: LinearKernel = linear.select(problem, kernel).load()
    return found


def rows(x: Tensor, parts: int) -> Tensor:
    """The segments of each row, as rows."""
    return x.unflatten(1, (parts, -1)).flatten(0, 1)


def empty_states(kernel: LinearKernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> Tensor | None:
    """Memory for the states before all chunks, if it is small compared to the inputs, which backward keeps anyway."""
    sizes, dtype = kernel.states_shape(k, v)
    inputs = sum(prod(x.shape) * x.itemsize for x in (q, k, v, g) if x is not None)
    return q.new_empty(sizes, dtype=dtype) if prod(sizes) * dtype.itemsize <= SHARE * inputs else None


@lru_cache(maxsize=32)
def begins(
    plan: Plan, docs: Docs | None, ring_rank: int, ulysses_rank: int, batch: int, device: torch.device
) -> Tensor | None:
    """The start of each token's document relative to its segment's first token, [1 or B * P, T / P]; None: earlier.

    Padding continues the last document; the first document continues from the initial state.
    """
    if docs is None:
        return None
    at = local_positions(plan, ring_rank, ulysses_rank)
    own = [np.minimum(at, max(row[-1] - 1, 0)) for row in docs.starts]
    starts = np.stack([r[np.searchsorted(r, p, "right") - 1] for r, p in zip(docs.starts, own, strict=True)])
    P = segments(plan)
    starts, at = starts.reshape(len(starts), P, -1), at.reshape(P, -1)
    local = np.where(starts == 0, BEFORE, starts - at[:, :1])
    if P > 1 and len(local) < batch:
        local = local.repeat(batch, 0)
    return torch.from_numpy(local.reshape(-1, at.shape[1]).astype(np.int32)).to(device)
