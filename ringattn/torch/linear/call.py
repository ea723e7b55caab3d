"""A bound call of linear attention: all that is decided before states move, as in ringattn.torch.attention.call."""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.check.arguments import of_choice
from ringattn.check.linear import by_document, of_linear, of_scale, of_state, returned_states, wrong_number
from ringattn.kernels import linear
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.linear.maps import Inputs, Scan
from ringattn.kernels.protocol import LinearKernel
from ringattn.planning import Plan
from ringattn.segments import BEFORE, WAYS, choose, segments, uneven
from ringattn.spec import Docs
from ringattn.torch import agree
from ringattn.torch.attention.ulysses import Real, cleared
from ringattn.torch.bind import remember
from ringattn.torch.check import have_tangents, of_dense, of_tangents, of_tensors
from ringattn.torch.linear import states
from ringattn.torch.linear.documents import Documents, documents_of
from ringattn.torch.sharding import local_positions, real_tokens

SHARE = 0.7  # states of up to this share of the bytes of q, k, v and the gates are kept for backward


class Given(NamedTuple):
    """The tensors of a call, as its user passes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    initial_state: Tensor | None = None


class LinearCall:
    """One kind of call."""

    def __init__(
        self, x: Given, plan: Plan, docs: Docs | None, scale: float | None, kernel: str, scan: str, gradients: bool,
        return_state: bool | str,
    ):  # fmt: skip
        self.plan, self.docs = plan, docs
        self.scale = x.q.shape[-1] ** -0.5 if scale is None else scale
        self.gradients = gradients
        self.alone = plan.ring * plan.ulysses == 1
        self.parts = 1 if uneven(plan) else segments(plan)
        self.batch, _, H, V = x.v.shape
        self.real = real_tokens(plan, docs, x.q.device)
        self.place = plan.ring_axis.rank, plan.ulysses_axis.rank
        self.returned = returned_states(return_state, x.initial_state, docs, self.batch)
        self.documents: Documents | None = None  # if states are one a document
        self.begin = None
        each = self.returned == "documents" or by_document(x.initial_state, docs, self.batch)
        if uneven(plan) or (docs is not None and each):
            packed = docs or Docs.from_lengths([plan.seq_len])
            self.documents = documents_of(plan, packed, *self.place, self.batch, x.q.device)
        else:
            self.begin = begins(plan, docs, *self.place, self.batch, x.q.device)
        self.kernel = selected(x, kernel)
        K, size = x.q.shape[3], 8 if x.q.dtype == torch.float64 else 4
        states = self.documents.count if self.documents and self.returned != "rows" else self.batch
        self.state_shape = (states, H, K, V)
        self.way = choose(plan, scan, self.batch * H * K * size, V, 1 if x.beta is None else K)
        self.words: agree.Words = {}  # what the ranks compare
        self.compared = agree.watched(plan)  # whether they compare it in every call

    def exchange(self, scan: Scan, start: Tensor | None, **how: bool) -> states.Exchange | None:
        """The transfer of the state before each segment; on one device nothing travels."""
        return None if scan.map is None or self.alone else states.Exchange(self.plan, scan.map, start, self.way, **how)

    def inputs(self, x: Given) -> Inputs:
        """The tokens of this rank's segments, for the kernel."""
        q, k, v, g, beta = self.folded(*x[:5])
        return Inputs(q, k, v, g, beta, self.begin, self.scale)

    def folded(self, *tensors: Tensor | None) -> list[Any]:
        """This rank's segments as rows of the batch, [B * P, T / P, ...], padding zeroed."""
        return [None if x is None else rows(cleared(x, self.real), self.parts) for x in tensors]

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `folded`."""
        return x if self.parts == 1 else x.unflatten(0, (self.batch, self.parts)).flatten(1, 2)


def bind(
    x: Given, plan: Plan, docs: Docs | None, scale: float | None, kernel: str, scan: str, gradients: bool, look: bool,
    return_state: bool | str,
) -> LinearCall:  # fmt: skip
    """The call for these arguments. Raises the same error on all ranks if they, or with `look` a gate, are wrong."""
    kinds = tuple(None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in x)
    key = ("linear_attention", plan, docs, scale, kernel, scan, gradients, return_state, kinds)
    tangents = have_tangents(*x)
    call = None if tangents else plan.calls.get(key)
    if call is None:
        wrong = problem(x, plan, docs, scale, kernel, scan)
        wrong = wrong or (look and of_numbers(x, plan, docs)) or None
        returned = wrong or returned_states(return_state, x.initial_state, docs, x.v.shape[0])
        asked, tensors = f"{scale} {kernel} {scan} {returned}", x._asdict()  # alike in a compiled call and an eager one
        words = agree.describe(plan, None, tensors, docs, call="linear_attention", gradients=gradients, asked=asked)
        agree.agree(plan, words, wrong)
        call = LinearCall(x, plan, docs, scale, kernel, scan, gradients, return_state)
        call.words = words
        if not tangents:
            remember(plan.calls, key, call)
    elif look or call.compared:
        agree.agree(plan, call.words, of_numbers(x, plan, docs) if look else None)
    return call


def problem(x: Given, plan: Plan, docs: Docs | None, scale: float | None, kernel: str, scan: str) -> str | None:
    """The first problem with the shapes, dtypes and devices of a call."""
    others = x._asdict()
    q, k, v = (others.pop(name) for name in "qkv")
    wrong = (
        of_linear(q, k, v, x.log_decay, x.beta, plan, docs)
        or of_tensors(q, k, v, linear=True)
        or of_tangents(**others)
        or of_dense(**others)
        or of_scale(scale, q.shape[-1])
        or of_choice("kernel", kernel, ("auto", *(kernel_.name for kernel_ in linear.TABLE)))
        or of_choice("scan", scan, ("auto", *WAYS))
    )
    if wrong is None and scan != "auto" and uneven(plan):
        wrong = f"scan={scan!r}: in layout={plan.layout!r} maps go straight to the ranks that need them; leave scan out"
    if wrong is None and x.initial_state is not None:
        wrong = of_state("initial_state", x.initial_state, q, v, accumulator(q), docs)
    for name, t in others.items():
        if wrong is None and t is not None:
            if not t.is_floating_point():
                wrong = f"{name} is {t.dtype}; expected floats"
            elif t.device != q.device:
                wrong = f"{name} is on {t.device}, q on {q.device}; put both on one device"
    return wrong


def of_numbers(x: Given, plan: Plan, docs: Docs | None) -> str | None:
    """The first gate above 0, or beta outside of [0, 2]. Reads all of them, so it waits for the device."""
    real: Real = real_tokens(plan, docs, x.q.device)
    for name, t in (("log_decay", x.log_decay), ("beta", x.beta)):
        if t is None:
            continue
        bad = ~(t <= 0) if name == "log_decay" else ~((t >= 0) & (t <= 2))
        if real is not None:
            bad &= real.reshape(*real.shape, *[1] * (bad.dim() - 2))
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            return wrong_number(name, at, float(t[at].detach()))
    return None


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
    loaded: LinearKernel = linear.select(problem, kernel).load()
    return loaded


def rows(x: Tensor, parts: int) -> Tensor:
    """The segments of each row, as rows."""
    return x if parts == 1 else x.unflatten(1, (parts, -1)).flatten(0, 1)


def empty_states(kernel: LinearKernel, x: Inputs) -> Tensor | None:
    """Memory for the states before all chunks, if it is small compared to the inputs, which backward keeps anyway."""
    sizes, dtype = kernel.states_shape(x.k, x.v)
    inputs = sum(prod(t.shape) * t.itemsize for t in x[:5] if t is not None)
    return x.q.new_empty(sizes, dtype=dtype) if prod(sizes) * dtype.itemsize <= SHARE * inputs else None


@lru_cache(maxsize=32)
def begins(
    plan: Plan, docs: Docs | None, ring_rank: int, ulysses_rank: int, batch: int, device: torch.device
) -> Tensor | None:
    """The start of each token's document relative to its segment's first token, [1 or B * P, T / P]; None: earlier.

    Padding continues the last document; a row's first document, even an empty one, continues from the initial state.
    """
    if docs is None:
        return None
    at = local_positions(plan, ring_rank, ulysses_rank)
    rows = [(row, np.searchsorted(row, np.minimum(at, row[-1] - 1), "right") - 1) for row in docs.starts]
    starts = np.stack([np.where(i <= 0, BEFORE, row[i]) for row, i in rows])  # -1 if a row has no tokens
    P = segments(plan)
    starts, at = starts.reshape(len(starts), P, -1), at.reshape(P, -1)
    local = np.where(starts == BEFORE, BEFORE, starts - at[:, :1])
    if P > 1 and len(local) < batch:
        local = local.repeat(batch, 0)
    return torch.from_numpy(local.reshape(-1, at.shape[1]).astype(np.int32)).to(device)
