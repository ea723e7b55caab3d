"""A bound call of attention: all that is decided before anything moves or computes.

`bind` looks a call up by its plan, spec, documents, shapes and dtypes, never by the numbers in tensors. It checks a
call of a new kind, compares it between ranks, and caches it. Running it (`function.py`) looks nothing up.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn.check import of_arguments, of_arrays, warn_of_exchanged
from ringattn.choosing import kind_of
from ringattn.cost import Shape, kv_heads_of_a_rank
from ringattn.kernels import Kernel, select
from ringattn.kernels.intervals import Intervals
from ringattn.mask import Mask
from ringattn.planning import Plan
from ringattn.spec import AttentionSpec, Docs
from ringattn.torch import agree, check
from ringattn.torch.attention.steps import Run, Score, global_intervals, problem_of, run_of, score_with
from ringattn.torch.bind import CAUSAL, key_of, remember
from ringattn.torch.handles import whole_on_one
from ringattn.torch.sharding import real_tokens, swapped_of


class Pass(NamedTuple):
    """The run of one rank, forward or backward, and the kernel that serves all of its steps."""

    run: Run
    kernel: Score
    only: Intervals | None  # those of a run of one step in which nothing travels, if there is work in it


class Call:
    """One kind of call. `shape` is that of the whole sequence and all heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, gradients: bool, lse: bool):
        (B, _, H, D), plan, device = q.shape, mask.plan, q.device
        self.shape = shape = Shape(plan.seq_len, plan.keys.seq_len, H, k.shape[2], D, v.shape[3], q.itemsize, B)
        self.problem = problem_of(q, k, v, mask.spec.softcap, rectangles=True)
        self.mask, self.plan, self.dtype, self.device = mask, plan, q.dtype, device
        self.docs = mask.docs
        self.gradients = gradients
        self.ring, self.ulysses = plan.ring_axis, plan.ulysses_axis
        self.groups = plan.groups_for(shape) if plan.swaps else 1
        self.alone = self.ulysses.size == 1 and self.groups == 1  # whether no heads are exchanged
        self.exchanges_dlse = lse and self.ulysses.size > 1  # all ranks alike, also one whose lse has no gradient
        self.order = swapped_of(plan.tokens, self.ring.rank, device)  # of what Ulysses ranks hold, where they exchange
        self.gathers = plan.strategy == "gather"
        same = mask.key_docs is None and plan.keys is plan
        self.real = real_tokens(plan, mask.docs, device)
        real_keys = real_tokens(plan.keys, mask.docs if same else mask.key_docs, device)
        self.reals = self.real, real_keys, real_keys  # which tokens of q, k and v are real
        self.padded = self.real is not None or real_keys is not None  # whether this rank must clear padding
        self.deterministic = plan.deterministic or torch.are_deterministic_algorithms_enabled()
        self.narrow = plan.transport.grads == "input"  # whether gradients travel in the dtype of the inputs
        self.words: agree.Words | None = None  # what the ranks compare in every call; None if they do not

    @property
    def heads(self) -> tuple[int, int]:
        """The query and the key heads of one group on one rank."""
        size, shape = self.ulysses.size, self.shape
        return shape.heads // size // self.groups, kv_heads_of_a_rank(shape.kv_heads, size) // self.groups

    @cached_property
    def forward(self) -> Pass:
        """The forward pass of this rank."""
        run = self.run_forward(self.ring.rank, self.device)
        return Pass(run, self.score(self.kernel(self.rectangles(run))), only(run))

    @cached_property
    def backward(self) -> Pass:
        """The backward pass of this rank."""
        run = self.run_backward(self.ring.rank, self.device)
        return Pass(run, self.score(self.kernel(self.rectangles(run), backward=True)), only(run))

    @cached_property
    def everywhere(self) -> Intervals:
        """For a gather: the intervals among all keys."""
        return global_intervals(self.mask, self.ring.rank, self.device)

    def kernel_everywhere(self, backward: bool = False) -> Score:
        """For a gather: the kernel that serves them."""
        return self.score(self.kernel(self.may_rely(self.everywhere.are_rectangles), backward))

    def run_forward(self, rank: int, device: torch.device | None) -> Run:
        return run_of(self.mask, rank, device, self.plan.blocks_at_once(self.block_bytes))

    def run_backward(self, rank: int, device: torch.device | None) -> Run:
        """The steps of backward. If float32 gradients travel, a step brings fewer blocks."""
        together = self.plan.blocks_at_once(self.block_bytes * (1 if self.narrow else 4))
        return run_of(self.mask, rank, device, together)

    @cached_property
    def mask_kind(self) -> str:
        """The kind of mask, by which the fastest kernel is chosen where steps are not few rectangles."""
        *lengths, docs, key_docs = self.mask.arguments
        alone = self.ring.size == 1 and key_docs is None and (docs is None or len(docs.starts) == 1)
        return kind_of(self.mask.spec, (lengths[0], lengths[1]), docs, key_docs, alone)

    def rectangles(self, run: Run) -> bool:
        """Whether the kernel of this run may rely on few rectangles."""
        return self.may_rely(are_rectangles(run))

    def may_rely(self, rectangles: bool) -> bool:
        """Whether the kernel may rely on few rectangles. On GPUs "auto" does not with documents: other kernels are
        faster there.
        """
        packed = self.docs is not None or self.mask.key_docs is not None
        return rectangles and not (packed and self.plan.kernel == "auto" and self.device.type == "cuda")

    def refused(self) -> NotImplementedError | None:
        """Why no kernel serves every step of every rank: the same error on all ranks, before anything is sent.

        Some kernels run rectangles only, and whether a rank's steps are few rectangles depends on the rank. Every rank
        can make the steps of all ranks, and does so only if the choice of the kernel depends on them.
        """
        why = self.reason(rectangles=False)
        if why is None:
            return None
        if alike := self.reason(rectangles=True):
            return alike
        wrong = ", ".join(str(rank) for rank in range(self.plan.ring) if not self.serves_rank(rank))
        return NotImplementedError(f"{why} (the steps of ring rank {wrong} are not few rectangles)") if wrong else None

    def reason(self, rectangles: bool) -> NotImplementedError | None:
        try:
            self.kernel(rectangles)
        except NotImplementedError as error:
            return error
        return None

    def serves_rank(self, rank: int) -> bool:
        """Whether a kernel of few rectangles serves every step of a ring rank."""
        if self.gathers:
            return global_intervals(self.mask, rank, None).are_rectangles
        runs = [self.run_forward(rank, None), *([self.run_backward(rank, None)] if self.gradients else [])]
        return all(map(are_rectangles, runs))

    @property
    def block_bytes(self) -> int:
        """The bytes of the keys and values of one group that a rank of the ring holds."""
        return self.shape.kv_bytes(self.plan.keys.tokens.shard_len, self.heads[1])

    def kernel(self, rectangles: bool, backward: bool = False) -> Kernel:
        """The kernel for this call; `rectangles`: every step is few rectangles."""
        heads, kv_heads = self.heads
        problem = replace(
            self.problem, heads=heads, kv_heads=kv_heads, rectangles=rectangles, mask=self.mask_kind, queries=None,
            rows=self.shape.batch * self.plan.tokens.shard_len * heads, deterministic=self.deterministic,
        )  # fmt: skip
        return select(problem, self.plan.kernel, backward=backward)

    def score(self, kernel: Kernel) -> Score:
        spec = self.mask.spec
        return score_with(kernel, spec.scale_for(self.shape.head_dim), spec.softcap)


def only(run: Run) -> Intervals | None:
    """The intervals of a run of one step in which nothing travels, if there is work in it."""
    leg, *more = run
    stop, *others = leg.stops
    travels = more or others or leg.hop or leg.home or stop.brought or stop.readers
    return None if travels else stop.where


def are_rectangles(run: Run) -> bool:
    """Whether every step of a run is few rectangles."""
    return all(stop.where.are_rectangles for leg in run for stop in leg.stops if stop.where)


def bind(
    q: Any, k: Any, v: Any, plan: Any, spec: Any, docs: Any, key_docs: Any, sinks: Any, gradients: bool,
    return_lse: Any,
) -> Call:  # fmt: skip
    """The call for these arguments. If they are wrong on one rank, all ranks raise the same error.

    Where exchanging words is cheap, the ranks compare every call.
    """
    found = plan
    try:
        spec = CAUSAL if spec is None else spec
        found = whole_on_one(q, k) if plan is None else plan
        key = key_of(q, k, v, found, spec, docs, key_docs, sinks, gradients, return_lse)
        call = found.calls.get(key)
        if call is not None and (forward_ad._current_level < 0 or not check.have_tangents(q, k, v, sinks)):
            if call.words is not None:
                agree.agree(found, call.words)
            return call
    except (AttributeError, TypeError, IndexError):
        key = None  # not tensors, or not a plan: the checks report it
    return make(q, k, v, found, spec, docs, key_docs, sinks, gradients, return_lse, key)


def make(
    q: Any, k: Any, v: Any, plan: Any, spec: Any, docs: Any, key_docs: Any, sinks: Any, gradients: bool,
    return_lse: Any, key: Any,
) -> Call:  # fmt: skip
    """Check a call of a new kind, compare it with the other ranks, and cache it."""
    problem = of_arguments(plan=plan, spec=spec, docs=docs, key_docs=key_docs, return_lse=return_lse)
    problem = problem or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    if problem:
        agree.refuse(problem, plan)
    problem = check.problem(q, k, v, plan, spec, docs, key_docs, sinks)
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    kept = f"{gradients}{', of the lse too' * (gradients and return_lse and plan.ulysses > 1)}"  # which is exchanged
    bits = plan.deterministic or torch.are_deterministic_algorithms_enabled()
    words = agree.describe(plan, spec, tensors, docs, key_docs, call="attention", gradients=kept, deterministic=bits)
    agree.agree(plan, words, problem)
    warn_of_exchanged(q, stacklevel=6)  # of the line that calls ringattn.attention
    call = Call(q, k, v, Mask(plan, spec, docs, key_docs), gradients, return_lse)
    refused = call.refused()
    if plan.kernel != "auto":  # one rank alone may lack a package, or have an older GPU
        agree.agree(plan, {"call": "attention", "kernel": str(refused or "serves")})
    if refused:
        raise refused
    if agree.watched(plan):
        call.words = words
    if not check.have_tangents(q, k, v, sinks):
        remember(plan.calls, key, call)
    return call


def bound(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None,
    sinks: Tensor | None, return_lse: bool,
) -> Call:  # fmt: skip
    """The call of a backward pass: the one that forward bound, made again if it is no longer cached."""
    call = plan.calls.get(key_of(q, k, v, plan, spec, docs, key_docs, sinks, True, return_lse))
    return call or Call(q, k, v, Mask(plan, spec, docs, key_docs), True, return_lse)
