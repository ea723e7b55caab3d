"""A bound call of linear attention: all that is decided before states move, as in ringattn.torch.attention.call."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.check.arguments import of_arguments, of_arrays, of_returned
from ringattn.check.linear import Given, Settings, by_document, of_asked, of_linear, of_numbers, returned_states
from ringattn.kernels import linear
from ringattn.kernels.linear.maps import Inputs, ShapeAndDtype
from ringattn.kernels.protocol import LinearKernel
from ringattn.masks.spec import Docs
from ringattn.plans.plan import Plan
from ringattn.plans.segments import BEFORE, choose, segments, uneven
from ringattn.torch import agree
from ringattn.torch.attention.ulysses import Real, cleared
from ringattn.torch.check import of_dense, of_device, of_tensors
from ringattn.torch.handles import whole_on_one
from ringattn.torch.linear.documents import Documents
from ringattn.torch.linear.states import Chains, Passage
from ringattn.torch.sharding import cached, own_positions, real_tokens

MAX_KEPT_SHARE = 0.7  # states of up to this share of the bytes of q, k, v and the gates are kept for backward


class LinearCall:
    """One kind of call."""

    def __init__(self, x: Given, plan: Plan, asked: Settings, gradients: bool):
        self.plan, self.docs = plan, (docs := asked.docs)
        self.scale = x.q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
        self.gradients = gradients
        self.alone = plan.ring * plan.ulysses == 1
        self.parts = 1 if uneven(plan) else segments(plan)
        self.batch, _, H, V = x.v.shape
        self.real = real_tokens(plan, docs, x.q.device)
        self.returned = returned_states(x, asked)
        self.documents: Documents | None = None  # if states are one a document
        self.begin = None
        if uneven(plan) or (docs is not None and (self.returned == "documents" or by_document(x, docs))):
            packed = docs or Docs.from_lengths([plan.seq_len])
            self.documents = Documents(plan, packed, self.batch, x.q.device)
        else:
            self.begin = begins(plan, docs, self.batch, x.q.device)
        self.kernel = selected(x, asked.kernel)
        K, size = x.q.shape[3], 8 if x.q.dtype == torch.float64 else 4
        states = self.documents.count if self.documents and self.returned != "rows" else self.batch
        self.state_shape = (states, H, K, V)
        self.passages: Sequence[Passage | Chains] = ()  # of states from rank to rank, forward and backward
        if self.documents and uneven(plan) and not self.alone:
            starts = self.documents.starts
            self.passages = [Chains(plan, starts, x.q.device, backward) for backward in (False, True)]
        elif not self.alone:
            way = choose(plan, asked.scan, self.batch * H * K * size, V, 1 if x.beta is None else K)
            self.passages = [Passage(plan, way, backward) for backward in (False, True)]
        self.kept = None if self.documents or not gradients else kept_states(self.kernel, self.rows_of(x[:5]))
        self.words: agree.Words = {}  # what the ranks compare
        self.compared = agree.watched(plan)  # whether they compare it in every call
        self.looks = False  # whether the gates of every call are looked at

    def inputs(self, x: Given) -> Inputs:
        """The tokens of this rank's segments, for the kernel; padding is zeroed."""
        return self.rows_of([None if t is None else cleared(t, self.real) for t in x[:5]])

    def rows_of(self, tensors: Sequence[Tensor | None]) -> Inputs:
        """This rank's segments as rows of the batch, [B * P, T / P, ...]; its documents, if they have states each."""
        cut = self.documents.folded if self.documents else partial(rows, parts=self.parts)
        q, k, v, g, beta = (None if t is None else cut(t) for t in tensors)
        assert q is not None and k is not None and v is not None
        return Inputs(q, k, v, g, beta, self.begin, self.scale)

    def whole(self, x: Tensor) -> Tensor:
        """The tokens of this rank, from rows for its segments."""
        return x if self.parts == 1 else x.unflatten(0, (self.batch, self.parts)).flatten(1, 2)


def bind(x: Given, plan: Any, asked: Settings, gradients: bool) -> LinearCall:
    """The call for these arguments. If they are wrong on one rank, all ranks raise the same error.

    Where `check` is requested, or left out on a CPU, the gates of every call are looked at.
    """
    call = None
    try:
        plan = whole_on_one(x.q, x.q) if plan is None else plan
        key = agree.key_of(x, "linear_attention", plan, asked, gradients)
        call = plan.axes.calls.get(key)
    except (AttributeError, TypeError, IndexError):
        pass  # not tensors, or not a plan: the checks report it
    if call is not None:
        if call.looks or call.compared:
            agree.agree(plan, call.words, of_numbers(x, partial(first, call.real)) if call.looks else None)
        return call
    if wrong := problem(x, plan, asked):
        agree.refuse(wrong, plan)
    looks = x.q.device.type == "cpu" if asked.check is None else asked.check
    wrong = of_numbers(x, partial(first, real_tokens(plan, asked.docs, x.q.device))) if looks else None
    how = f"{asked.scale} {asked.kernel} {asked.scan} {returned_states(x, asked)}"  # compiled or not
    words = agree.describe(plan, None, x._asdict(), asked.docs, call="linear_attention", gradients=gradients, asked=how)
    agree.agree(plan, words, wrong)
    call = LinearCall(x, plan, asked, gradients)
    call.words, call.looks = words, looks
    agree.remember(plan.calls, key, call)
    return call


def bound(x: Given, plan: Plan, asked: Settings) -> LinearCall:
    """The call of a compiled backward pass."""
    key = agree.key_of(x, "linear_attention", plan, asked)
    call = plan.calls.get(key)
    if call is None:
        call = LinearCall(x, plan, asked, gradients=True)
        agree.remember(plan.calls, key, call)
    return call


def problem(x: Given, plan: Plan | None, asked: Settings) -> str | None:
    """The first problem with the types, shapes, dtypes and devices of a call."""
    others = x._asdict()
    q, k, v = (others.pop(name) for name in "qkv")
    wrong = of_arguments(plan=plan, docs=asked.docs, check=asked.check) or of_returned(asked.return_state, asked.docs)
    if wrong := wrong or of_arrays({"q": q, "k": k, "v": v}, others, plan):
        return wrong
    plan = whole_on_one(q, q) if plan is None else plan
    wrong = (
        of_linear(x, plan, asked.docs, plan.local_len)
        or of_tensors(q, k, v, linear=True)
        or of_device(q, plan)
        or of_dense(**others)
        or of_asked(x, plan, asked, [kernel.name for kernel in linear.TABLE])
    )
    for name, t in others.items():
        if wrong is None and t is not None and t.device != q.device:
            wrong = f"{name} is on {t.device}, q on {q.device}; put both on one device"
    return wrong


def first(real: Real, bad: Tensor) -> tuple[int, ...] | None:
    """The first real token's place where this is true, for which the device is waited for; None if there is none."""
    if real is not None:
        bad &= real.reshape(*real.shape, *[1] * (bad.dim() - 2))
    return tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else None


def selected(x: Given, kernel: str) -> LinearKernel:
    """The kernel. It is chosen by concrete sizes, even while a compiler traces with symbolic ones."""
    problem = linear.LinearProblem(
        device=x.q.device.type,
        dtype=str(x.q.dtype).removeprefix("torch."),
        head_dim=int(x.q.shape[-1]),
        value_dim=int(x.v.shape[-1]),
        heads=int(x.v.shape[2]),
        kv_heads=int(x.k.shape[2]),
        beta=x.beta is not None,
        arch=torch.cuda.get_device_capability(x.q.device) if x.q.is_cuda else None,
    )
    return linear.select(problem, kernel)


def rows(x: Tensor, parts: int) -> Tensor:
    """The segments of each row, as rows."""
    return x if parts == 1 else x.unflatten(1, (parts, -1)).flatten(0, 1)


def kept_states(kernel: LinearKernel, x: Inputs) -> ShapeAndDtype | None:
    """The states before all chunks, if they are small compared to the inputs, which backward keeps anyway."""
    sizes, dtype = kernel.states_shape(x.k, x.v)
    inputs = sum(prod(t.shape) * t.itemsize for t in x[:5] if t is not None)
    return (sizes, dtype) if prod(sizes) * dtype.itemsize <= MAX_KEPT_SHARE * inputs else None


@cached
def begins(plan: Plan, docs: Docs | None, batch: int, device: torch.device) -> Tensor | None:
    """The start of each token's document relative to its segment's first token, [1 or B * P, T / P]; None: earlier.

    Padding continues the last document; a row's first document, even an empty one, continues from the initial state.
    """
    if docs is None:
        return None
    at = own_positions(plan)
    rows = [(row, np.searchsorted(row, np.minimum(at, row[-1] - 1), "right") - 1) for row in docs.starts]
    starts = np.stack([np.where(i <= 0, BEFORE, row[i]) for row, i in rows])  # -1 if a row has no tokens
    P = segments(plan)
    starts, at = starts.reshape(len(starts), P, -1), at.reshape(P, -1)
    local = np.where(starts == BEFORE, BEFORE, starts - at[:, :1])
    if P > 1 and len(local) < batch:
        local = local.repeat(batch, 0)
    return torch.from_numpy(local.reshape(-1, at.shape[1]).astype(np.int32)).to(device)
