"""What a plan takes on a machine: seconds forward and backward, bytes over both kinds of links, memory.

A step of a ring starts when its keys are there and the one before it is done. Both kinds of links carry transfers one
after the other, at the same time as the work. The host launches all of this ahead; of short shards it takes longer:

    seconds = max(those of the host, start + max over steps i of (arrival of i + work of i and of all later steps))
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd, log
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape, kv_heads_of_a_rank, of_heads
from ringattn.plans.course import Ring, Steps, course
from ringattn.plans.footprint import bound, peak
from ringattn.plans.graphs import why_not
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import see_mostly_local

MEASURED = 2**20  # queries x heads of the calls whose rates are measured
BACKWARD = 2.5  # times the flops of forward
KEYS = 602, 4096  # a query: of the mask by which rates with few keys are measured, and of windows that lose nothing


class Spent(NamedTuple):
    """What one pass over a layer's attention takes."""

    seconds: float
    work: float  # seconds of the mean rank
    within_bytes: float  # that a rank receives
    between_bytes: float
    host: float  # seconds in which the host launches all
    exposed: float  # seconds of transfers that neither the work nor the host hides


@dataclass(frozen=True)
class Cost:
    """What a plan takes for attention of one layer."""

    forward: Spent
    backward: Spent
    count: Callable[[], float]  # of `memory`: of many candidates few are asked for it
    bound: float  # `memory` is no more
    imbalance: float  # work of the busiest rank over the mean

    @cached_property
    def memory(self) -> float:
        """Bytes of a rank at the peak of backward."""
        return self.count()

    def fits(self, nbytes: float) -> bool:
        return self.bound <= nbytes or self.memory <= nbytes

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed(self) -> float:
        return self.forward.exposed + self.backward.exposed

    @property
    def host(self) -> float:
        """Seconds of the host in the passes that take no longer."""
        return sum(each.host for each in (self.forward, self.backward) if each.seconds <= each.host)

    @property
    def received(self) -> tuple[float, float]:
        """Bytes of a rank, between hosts and within them."""
        f, b = self.forward, self.backward
        return f.between_bytes + b.between_bytes, f.within_bytes + b.within_bytes


class Rates(NamedTuple):
    """Flops a second of the kernel that runs, forward and backward, whether its gradients are 16-bit, and its name."""

    forward: float
    backward: float
    low_precision: bool = False
    kernel: str = ""
    by_keys: tuple[tuple[float, float], tuple[float, float]] | None = None  # with few and with many keys a query

    def of(self, back: bool, spec: AttentionSpec, keys: float) -> float:
        """That of queries which see so many keys; with a window between the rates of few and of many."""
        if self.by_keys is None or spec.window is None:
            return (self.forward, self.backward)[back]
        few, many = (each[back] for each in self.by_keys)
        share = log(max(keys, 1) / KEYS[0]) / log(KEYS[1] / KEYS[0])
        return few + min(1.0, max(0.0, share)) * (many - few)


class Pass:
    """What one pass of a plan takes a rank, with a kernel of these rates: seconds of work, and bytes that travel."""

    def __init__(
        self, plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates,
        back: bool,
    ):  # fmt: skip
        ulysses, queries, keys = plan.ulysses, plan.tokens, plan.keys.tokens
        rows = shape.batch * queries.shard_len * shape.heads / ulysses
        slower = (1 + machine.half[back] / rows) / (1 + machine.half[back] / MEASURED)
        seen = work_of(spec, queries.length, keys.length, docs).below(queries.length) / plan.ring / queries.shard_len
        flops = shape.flops_a_pair * (BACKWARD if back else 1.0) / ulysses
        self.replays = why_not(plan, shape, spec, docs) is None
        self.pair = slower * flops / rates.of(back, spec, seen)
        self.launch = machine.launch[back]
        # bytes of a token: its keys and values, the gradients of them that return, and their sums that move on
        self.token = shape.bytes_of(1, kv_heads_of_a_rank(shape.kv_heads, ulysses))
        self.returned = self.token * back * (1.0 if rates.low_precision or shape.itemsize > 2 else 2.0)
        self.summed = self.token * back * max(1.0, 4 / shape.itemsize)
        local = gcd(ulysses, machine.gpus)
        heads = sum(of_heads(shape, ulysses, (plan.local_len, plan.keys.local_len))) / ulysses
        self.heads = heads * (local - 1), heads * (ulysses - local)  # bytes of exchanges, within hosts and between
        self.groups = plan.groups_for(shape) if plan.swaps else 1
        self.gathers = plan.strategy == "gather" and plan.ring > 1  # all keys are there in one step
        self.start = (machine.replay if self.replays else machine.start)[back]
        exchange = 0.0 if self.replays else machine.exchange
        self.first = self.start + exchange * plan.swaps  # when the first kernel runs: an exchange precedes it
        self.exchanges = exchange * (2 * (ulysses > 1) + (1 + back) * self.gathers)  # heads enter and leave
        eager = plan.framework == "torch" and plan.ring * ulysses > 1 and not self.replays  # else one launch for all
        self.step = eager * (machine.step[back] + machine.library * rates.low_precision)

    def seconds(self, pairs: Any) -> Any:
        """Those of steps with so many pairs, if the rank computes alone."""
        return pairs * self.pair + self.launch * (pairs > 0)

    def host(self, steps: int) -> float:
        """Seconds in which the host launches so many steps, for each group of heads."""
        return self.start + self.groups * (self.exchanges + steps * self.step)


def gathered_bytes(plan: Plan, machine: Machine, each: Pass) -> tuple[float, float]:
    """What a GPU receives to gather all blocks, and their gradients: within its host and from others.

    Collectives of NCCL pass blocks on round a ring of all ranks, over the links of all GPUs. Over gloo each rank sends
    its own to every other one.
    """
    local = max(1, min(machine.gpus // plan.ulysses, plan.ring))
    far = (plan.ring - local) if machine.device == "cpu" else (plan.ring - 1) / local * (local < plan.ring)
    block = plan.keys.tokens.shard_len * (each.token + each.returned)
    return (plan.ring - 1) * block, far * block


def arrivals(steps: Steps, machine: Machine, token_bytes: np.ndarray, plan: Plan) -> np.ndarray:
    """[reader, step]: when the keys of a step are there, if a token has so many bytes.

    Transfers follow each other on a link, which the GPUs of a host may share. A block that hops on waits for the
    slowest hop before it.
    """
    senders, some = min(machine.gpus, plan.ring * plan.ulysses), steps.received > 0
    near, far = (
        link.seconds(tokens * token_bytes, senders=senders)
        for link, tokens in zip((machine.inside, machine.between), steps.tokens, strict=True)
    )
    late = np.where(steps.tokens[1] > 0, machine.between.seconds(0, 1), machine.inside.seconds(0, 1)) * some
    onward = (near + far + late)[:, steps.moves_on].max(0)
    near[:, steps.moves_on], far[:, steps.moves_on], late[:, steps.moves_on] = 0, onward, 0
    return (np.maximum(np.cumsum(near, 1), np.cumsum(far, 1)) + late) * some


def one_pass(plan: Plan, shape: Shape, steps: Steps, machine: Machine, each: Pass) -> Spent:
    ranks = plan.ring * plan.ulysses
    pairs = steps.pairs.sum(1, keepdims=True) if each.gathers else steps.pairs
    work = each.seconds(pairs) * machine.crowd(ranks)
    (near, far), keys = each.heads, [0.0, 0.0]
    if each.gathers:
        near, far = (a + b for a, b in zip((near, far), gathered_bytes(plan, machine, each), strict=True))
        seconds = float(work.max())
    else:
        token = np.where(steps.moves_on, each.token + each.summed, each.token + each.returned)
        arrival, alone = arrivals(steps, machine, token, plan), work
        if len(steps.first) == steps.count:  # one waits for the other
            arrival, alone = arrival.max(0, keepdims=True), work.max(0, keepdims=True)
        seconds = float((arrival + np.cumsum(alone[:, ::-1], axis=1)[:, ::-1]).max())
        keys = [float((tokens * token).sum(1).max()) for tokens in steps.tokens]
    if near or far:
        swap, late = machine.swap(near, far, ranks), 2 * (machine.between if far else machine.inside).seconds(0, 1)
        groups = each.groups
        queries, keys_too = of_heads(shape, plan.ulysses, (plan.local_len, plan.keys.local_len))
        shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < groups  # keys travel with the first group
        ends = 1 - (1 - 1 / groups) * (queries / (queries + keys_too) if shared else 1)
        seconds = max(seconds + (swap + late) * ends, swap + late + seconds / groups)
        seconds += (groups - 1) * int((pairs > 0).sum(1).max()) * each.launch
    mean, host = float(work.sum(1).mean()), each.host(pairs.shape[1])
    whole = float(max(each.first + seconds, host))
    exposed = max(0.0, whole - max(each.start + mean, host))
    return Spent(whole, mean, keys[0] + near, keys[1] + far, host, exposed)


def predict(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates
) -> Cost:  # fmt: skip
    """What the plan takes on the machine, with a kernel of these rates."""
    ring = Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts, machine.gpus)
    both = []
    for back in (False, True):
        steps, each = course(ring, plan.together(shape, back)), Pass(plan, shape, spec, docs, machine, rates, back)
        both.append(one_pass(plan, shape, steps, machine, each))
    work = steps.pairs.sum(1)
    mostly_local = see_mostly_local(spec, docs, shape.batch, plan.tokens.shard_len)
    count = partial(peak, plan, shape, steps, rates.kernel, rates.low_precision, mostly_local, each.replays)
    return Cost(both[0], both[1], count, bound(plan, shape, steps), float(work.max() / max(work.mean(), 1.0)))
