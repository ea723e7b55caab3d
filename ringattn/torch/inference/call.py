"""Bound calls on a cache: all that is decided before anything moves or computes, as in ringattn.torch.attention.call.

A cache keeps the calls that were made on it, by all of their arguments except the numbers in tensors. A call of a new
kind is checked and compared between ranks. After that, only what depends on the cache's lengths is checked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringattn import kernels
from ringattn.check.arguments import of_arguments, of_arrays, of_sizes, of_unknown
from ringattn.check.cache import drafts, of_chunk, of_decoded, of_filled, of_parents
from ringattn.comms.axis import Axis
from ringattn.kernels.arrays import accumulator
from ringattn.kernels.intervals import Intervals
from ringattn.kernels.partial import Partial, empty
from ringattn.masks.numeric import of_choice
from ringattn.masks.spec import AttentionSpec, raise_if, whole
from ringattn.plans.plan import Plan
from ringattn.serving import WAYS, exchange_over, exchange_way, keys_at_once
from ringattn.torch import agree, check
from ringattn.torch.attention.steps import Score, arch_of, score_with
from ringattn.torch.dispatch import refuse_transforms
from ringattn.torch.inference.cache import KVCache
from ringattn.torch.inference.chunk import Chunk, KeyRange, ranges_of


class Visit(NamedTuple):
    """Keys and values, [B, ..., G, D or V], in the order of positions, and the queries' intervals, if not empty."""

    kept: Sequence[Tensor]
    where: Intervals | None


def visits_of(ranges: Iterable[KeyRange], k: Tensor, v: Tensor) -> list[Visit]:
    """Ranges of keys that one group of ranks holds."""
    return [Visit((k[:, each.keys], v[:, each.keys]), *each.seen) for each in ranges]


class Kernels:
    """The kernels of a call for some number of queries; the second one is loaded when a step needs it.

    A named kernel that supports rectangles only runs the steps that are rectangles, which depends on the rank and on
    the lengths of rows. The best other kernel runs the rest.
    """

    def __init__(self, problem: kernels.Problem, impl: str, spec: AttentionSpec):
        self.problem, self.impl = problem, impl
        self.score = spec.scale_for(problem.head_dim), spec.softcap
        chosen = kernels.select(problem, impl)
        self.needs_rectangles = chosen.rectangles
        self.chosen = score_with(chosen, *self.score, families=False)  # a visit is of one family

    @cached_property
    def others(self) -> Score:
        impl = "auto" if self.needs_rectangles else self.impl
        return score_with(kernels.select(replace(self.problem, rectangles=False), impl), *self.score, families=False)

    def attend(self, q: Tensor, visits: Iterable[Visit], partial: Partial | None) -> Partial | None:
        """Attention of the queries over the keys of each visit, merged into `partial`; None if they saw none."""
        for kept, where in visits:
            if where is not None:
                k, v = (x.flatten(1, -3) for x in kept)
                score = self.chosen if self.needs_rectangles and where.are_rectangles else self.others
                partial = score.attend(q, k, v, where, carry=partial)
        return partial


class CacheCall:
    """What prefill and decode have in common. The keys and values of a cache have the heads and dims of the call's."""

    docs = None  # a cache holds one sequence a row

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, spec: AttentionSpec):
        self.plan, self.spec = plan, spec
        self.impl = cache.plan.kernel
        self.value_dim = v.shape[-1]
        self.rows = q.shape[0] * q.shape[2]  # for each query
        self.problem = kernels.Problem(
            device=q.device.type, dtype=str(q.dtype).removeprefix("torch."), head_dim=q.shape[-1],
            value_dim=v.shape[-1], heads=q.shape[2], kv_heads=k.shape[2], softcap=spec.softcap is not None,
            rectangles=True, arch=arch_of(q.device) if q.is_cuda else None,
            queries=q.shape[1], rows=self.rows * q.shape[1],
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        self.made: dict[int, Kernels] = {}
        self.kernels(q.shape[1])  # raises if no kernel supports the call
        self.words: agree.Words = {}  # what the ranks compare
        self.compared = agree.watched(plan)  # whether they compare it in every call

    def kernels(self, queries: int) -> Kernels:
        """The kernels for this many queries: with several ranks, those of some ranks attend together."""
        if queries not in self.made:
            problem = replace(self.problem, queries=queries, rows=self.rows * queries)
            self.made[queries] = Kernels(problem, self.impl, self.spec)
        return self.made[queries]

    def attend(self, q: Tensor, cache: KVCache, chunk: Chunk, keys: int | None = None) -> Partial:
        """Attention of a chunk's queries over the keys that this rank holds, at most `keys` of them at once."""
        kernels, partial = self.kernels(q.shape[1]), None
        plans = ranges_of(chunk, ((cache.rank,),), keys, q.device, kernels.needs_rectangles)
        for ranges, (k, v) in zip(plans, cache.memory(), strict=True):
            partial = kernels.attend(q, visits_of(ranges, k, v), partial)
        return partial or empty(q, cache.v.shape[-1])

    def check(self, cache: KVCache, problem: str | None) -> None:
        """Raise the problem: on all ranks where they compare every call."""
        if self.compared:
            agree.agree(self.plan, self.words | words_of(cache), problem)
        raise_if(problem)


class Prefill(CacheCall):
    """A chunk of a prompt. `keys`: the most keys of a rank that are sent at once."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, spec: AttentionSpec, keys: Any):
        super().__init__(q, k, v, plan, cache, spec)
        self.most = whole(keys)
        self.keys = self.most or keys_at_once(plan.local_len)


class Decode(CacheCall):
    """A few tokens that every rank has."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, spec: AttentionSpec, tree: bool):
        super().__init__(q, k, v, cache.plan, cache, spec)
        chosen = kernels.select(replace(self.problem, rectangles=False), self.impl)
        plain = spec.chunk is None and not isinstance(spec.window, tuple) and not spec.first and not tree
        self.quick = chosen.first and cache.prefix is None and plain  # whether the host plans nothing for a call
        self.scale = spec.scale_for(q.shape[-1])
        axes = [axis for axis in (self.plan.ulysses_axis, self.plan.ring_axis) if axis.size > 1]
        self.exchange = [leg(axis, self.plan, q, v) for axis in axes]


def leg(axis: Axis, plan: Plan, q: Tensor, v: Tensor) -> tuple[Axis, bool]:
    """How partials of such queries travel along an axis: over which transport, and whether all ranks receive all.

    Else each rank merges a share of the rows, and sends it to all.
    """
    columns = v.shape[-1] + 2  # out, and at most its maximum and sum
    nbytes, size = prod(q.shape[:3]) * columns * accumulator(q).itemsize, axis.size
    link = plan.link if axis is plan.ring_axis else plan.machine.inside
    return axis.over(exchange_over(nbytes, size, plan.machine)), exchange_way(nbytes, size, link) == "gather"


def bind_prefill(
    q: Any, k: Any, v: Any, plan: Plan, cache: KVCache, spec: Any, sinks: Any, move: Any, keys: Any,
) -> Prefill:  # fmt: skip
    """The call for these arguments. Raises the same error on all ranks, before the cache is changed, if they are wrong.

    Where exchanging words is cheap, the ranks compare every call.
    """
    number = plan.axes.number  # plans of two meshes may be equal
    key, call = look_up(cache, (q, k, v, sinks), plan, spec, number, move, keys)
    if call is not None:
        call.check(cache, cache.overflow(plan.seq_len))
        return call
    problem = (
        of_given(q, k, v, spec, sinks, plan)
        or of_choice("move", move, ("auto", *WAYS))
        or of_sizes("keys", keys=keys)
        or of_chunk(q, k, v, plan, cache, spec, plan.local_len)
    )
    kind, how = partial(Prefill, q, k, v, plan, cache, spec, keys), f"move={move}, keys={whole(keys)}"
    return make(problem, kind, key, cache, plan, spec, (q, k, v, sinks), how)


def bind_decode(
    q: Any, k: Any, v: Any, cache: KVCache, spec: Any, sinks: Any, parents: Any, unknown: dict[str, Any],
    capturing: bool,
) -> Decode:  # fmt: skip
    """As `bind_prefill`. While a CUDA graph is captured, the call must be bound already."""
    tree, plan = parents is not None, cache.plan
    key, call = look_up(cache, (q, k, v, sinks), spec, tree)
    if capturing:
        raise_if(of_capture(cache, call))
        return call
    if call is not None and not unknown:
        problem = of_parents(parents, k.shape[1]) or of_filled(cache.lengths) or cache.overflow(k.shape[1])
        call.check(cache, problem)
        return call
    problem = (
        of_given(q, k, v, spec, sinks, plan)
        or of_unknown("decode", unknown)
        or of_parents(parents, k.shape[1])
        or of_decoded(q, k, v, cache, spec, cache.lengths)
    )
    how = "decode" if problem or not tree else f"decode, parents={drafts(parents)}"
    return make(problem, partial(Decode, q, k, v, cache, spec, tree), key, cache, plan, spec, (q, k, v, sinks), how)


def look_up(cache: KVCache, tensors: Sequence[Any], *how: Any) -> tuple[Any, Any]:
    """The key of a call, and the call if it is bound. No key if arguments are wrong: the checks report them."""
    if forward_ad._current_level >= 0:
        refuse_transforms()
    try:
        key = agree.key_of(tensors, *how)
        return key, cache.calls.get(key)
    except (AttributeError, TypeError):
        return None, None


def of_given(q: Any, k: Any, v: Any, spec: Any, sinks: Any, plan: Plan) -> str | None:
    problem = of_arguments(spec=spec) or of_arrays({"q": q, "k": k, "v": v}, {"sinks": sinks}, plan)
    return problem or check.of_tensors(q, k, v) or check.of_sinks_for(q, sinks)


def of_capture(cache: KVCache, call: Any) -> str | None:
    """Why a call cannot be captured in a CUDA graph; `call` is None if none of its kind ran before."""
    if cache.window is not None:
        return "a cache with a window moves its keys as it fills: decode on it cannot be captured"
    if call is None:
        return "call decode once like this before it is captured, to compile it and to compare it between ranks"
    if not call.quick:
        return "only the decode kernel, on a cache that is no fork, can be captured: others plan on the host"
    return None


def make(
    problem: str | None, kind: Callable[[], Any], key: Any, cache: KVCache, plan: Plan, spec: AttentionSpec,
    tensors: Sequence[Any], how: str,
) -> Any:  # fmt: skip
    """Compare a call of a new kind with the other ranks, and cache it. Raises the same error on all ranks."""
    if problem:
        agree.refuse(problem, plan)
    named = dict(zip(("q", "k", "v", "sinks"), tensors, strict=True))
    words = agree.describe(plan, spec, named, None, call="on a cache", how=how)
    agree.agree(plan, words | words_of(cache) if agree.watched(plan) else words)
    call = kind()
    call.words = words
    agree.remember(cache.calls, key, call)  # drops the oldest on all ranks alike
    return call


def words_of(cache: KVCache) -> agree.Words:
    """What ranks compare of a cache where words are cheap: its lengths too."""
    return {"cache": f"{cache}, window {cache.window}, {cache.stripes}"}
