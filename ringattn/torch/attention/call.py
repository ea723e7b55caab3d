"""A bound call of attention: its recipe (`ringattn.plans.recipe`), with what that needs on the device.

`bind` looks a call up by its plan, spec, documents, shapes and dtypes, never by the numbers in tensors. It checks a
call of a new kind, compares it between ranks, and caches it. Running it (`function.py`) looks nothing up.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.check.arguments import of_arguments, of_arrays
from ringattn.kernels import BY_NAME, lacking
from ringattn.kernels.intervals import Intervals
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape
from ringattn.plans.graphs import why_not
from ringattn.plans.mask import Mask
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import Pass, Recipe
from ringattn.steps.rank import Step
from ringattn.torch import agree, check
from ringattn.torch.attention.graphs import Graphs
from ringattn.torch.attention.steps import Score, arch_of, score_with, sight_of
from ringattn.torch.handles import whole_on_one
from ringattn.torch.sharding import real_queries, real_tokens, shard_order_of, swapped_of

CAUSAL = AttentionSpec()  # the default


class Bound(NamedTuple):
    """A pass of the recipe with its kernel bound."""

    steps: tuple[Step, ...]
    kernel: Score
    where: Intervals | None  # those of its only step, if nothing travels and it has work


class Call:
    """A recipe, and what it needs on the device."""

    def __init__(self, recipe: Recipe, device: torch.device, lse: bool):
        mask, plan = recipe.mask, recipe.plan
        self.recipe, self.plan, self.docs = recipe, plan, mask.docs
        self.shape, self.groups, self.gathers = recipe.shape, recipe.groups, recipe.gathers
        self.low = recipe.low_precision  # gradients travel in the dtype of the inputs
        self.gradients, self.keeps, self.shares = recipe.gradients, recipe.keeps, recipe.shares
        self.ring, self.ulysses = plan.ring_axis, plan.ulysses_axis
        self.keeps_heads = self.ulysses.size == 1 and self.groups == 1  # whether no heads are exchanged
        self.exchanges_dlse = lse and self.ulysses.size > 1  # all ranks alike, also one whose lse has no gradient
        self.order = swapped_of(plan, device)  # of what Ulysses ranks hold, where they exchange
        gathered = self.gathers and not plan.keys.tokens.in_order
        self.key_order = shard_order_of(plan.keys, device) if gathered else None
        same = mask.key_docs is None and plan.keys is plan
        real_keys = real_tokens(plan.keys, mask.docs if same else mask.key_docs, device)
        self.real = real_tokens(plan, mask.docs, device) if mask.seeing is None else real_queries(mask, device)
        self.reals = self.real, real_keys, real_keys  # which tokens of q, k and v are real
        self.padded = self.real is not None or real_keys is not None  # whether this rank must clear padding
        self.words: agree.Words = {}  # what the ranks compare
        self.compared = agree.watched(plan)  # whether they compare it in every call
        self.graphs = None if lse or why_not(plan, recipe.shape, mask.spec, mask.docs) else Graphs()

    @cached_property
    def forward(self) -> Bound:
        return self.ready(self.recipe.forward)

    @cached_property
    def backward(self) -> Bound:
        return self.ready(self.recipe.backward)

    def ready(self, pass_: Pass) -> Bound:
        spec, single = self.recipe.mask.spec, pass_.single
        families = any(step.where is not None and step.where.also for step in pass_.steps)
        kernel = score_with(pass_.kernel, spec.scale_for(self.shape.head_dim), spec.softcap, families)
        return Bound(pass_.steps, kernel, single.where if single else None)


def deterministic(plan: Plan) -> bool:
    return plan.deterministic or torch.are_deterministic_algorithms_enabled()


def has_of(q: Tensor, keep: bool) -> str | None:
    """What decides whether this rank keeps keys that arrive, which all ranks must do alike."""
    return f"{keep} {arch_of(q.device)} {lacking(BY_NAME['fa4'])}" if q.is_cuda else None


def recipe_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, gradients: bool, keep: bool) -> Recipe:
    """The recipe of this rank for such tensors."""
    (B, _, H, D), plan, device = q.shape, mask.plan, q.device
    rank = plan.ring_axis.rank
    return Recipe(
        mask, Shape(plan.seq_len, plan.keys.seq_len, H, k.shape[2], D, v.shape[3], q.itemsize, B),
        device.type, str(q.dtype).removeprefix("torch."), arch_of(device) if q.is_cuda else None, rank,
        deterministic(plan), gradients,
        keep and plan.axes.alike, sight_of(mask, rank, device),
    )  # fmt: skip


def bind(
    q: Any, k: Any, v: Any, plan: Any, spec: Any, docs: Any, key_docs: Any, sinks: Any, gradients: bool,
    return_lse: Any, keep: bool = True,
) -> Call:  # fmt: skip
    """The call for these arguments. If they are wrong on one rank, all ranks raise the same error.

    A call of a new kind is checked, compared with the other ranks, and cached. Where exchanging words is cheap, the
    ranks compare every call. `keep`: forward may keep keys that arrive.
    """
    call = None
    try:
        spec = CAUSAL if spec is None else spec
        plan = whole_on_one(q, k) if plan is None else plan
        key = agree.key_of((q, k, v, sinks), plan, spec, docs, key_docs, gradients, keep, return_lse)
        call = plan.axes.calls.get(key)
    except (AttributeError, TypeError, IndexError):
        pass  # not tensors, or not a plan: the checks report it
    if call is not None:
        if call.compared:
            agree.agree(plan, call.words)
        return call
    problem = (
        of_arguments(plan=plan, spec=spec, docs=docs, key_docs=key_docs, return_lse=return_lse)
        or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
        or check.problem(q, k, v, plan, spec, docs, key_docs, sinks)
    )
    if problem:
        agree.refuse(problem, plan)
    kept = f"{gradients}{', of the lse too' * (gradients and return_lse and plan.ulysses > 1)}"  # which is exchanged
    bits, tensors = deterministic(plan), {"q": q, "k": k, "v": v, "sinks": sinks}
    words = agree.describe(plan, spec, tensors, docs, key_docs, call="attention", gradients=kept, deterministic=bits)
    agree.agree(plan, words, has=has_of(q, keep))
    recipe = recipe_of(q, k, v, Mask(plan, spec, docs, key_docs), gradients, keep)
    refused = recipe.refused()
    if plan.kernel != "auto":  # one rank alone may lack a package, or have an older GPU
        agree.agree(plan, {"call": "attention", "kernel": str(refused or "serves")})
    if refused:
        raise refused
    call = Call(recipe, q.device, return_lse)
    call.words = words
    agree.remember(plan.calls, key, call)
    return call


def bound(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, spec: AttentionSpec, docs: Docs | None, key_docs: Docs | None,
    sinks: Tensor | None, return_lse: bool, keep: bool,
) -> Call:  # fmt: skip
    """The call of a backward pass: the one that forward bound, made again if it is no longer cached."""
    call = plan.calls.get(agree.key_of((q, k, v, sinks), plan, spec, docs, key_docs, True, keep, return_lse))
    return call or Call(recipe_of(q, k, v, Mask(plan, spec, docs, key_docs), True, keep), q.device, return_lse)
