"""What a plan takes on a machine: seconds forward and backward, bytes over both kinds of links, memory.

A `Course` is what the ranks of a ring do, step by step: the work of each step, and what must arrive before it, within a
host and between hosts. A step starts when its keys are there and the one before it is
done. Both kinds of links carry transfers one after the other, at the same time as the work:

    seconds = max over steps i of (arrival of i + work of i and of all later steps)

Plain numpy: milliseconds for a thousand ranks, the same on every rank. Of a large ring some ranks are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd, log
from typing import Any, NamedTuple

import numpy as np

from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank, replicas
from ringattn.plans.course import Course, Ring, course
from ringattn.plans.footprint import bound, peak
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import see_mostly_own

MEASURED = 2**20  # queries x heads of the calls whose rates are measured
BACKWARD = 2.5  # times the flops of forward
KEYS = 602, 4096  # a query: of the mask by which rates with few keys are measured, and of windows that lose nothing


class Spent(NamedTuple):
    """Seconds of one pass over a layer's attention."""

    seconds: float
    work: float  # of the mean rank
    within: float  # seconds in which links within hosts carry something
    between: float
    within_bytes: float  # a rank receives
    between_bytes: float

    @property
    def exposed(self) -> float:
        rest = self.seconds - self.work
        return rest if rest > 1e-9 * self.seconds else 0.0  # less is rounding


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


def arrivals(steps: Course, machine: Machine, token_bytes: Any, plan: Plan) -> np.ndarray:
    """[reader, step]: when the keys of a step are there, if a token has so many bytes.

    Transfers follow each other on a link, which the GPUs of a host that send may share. A block that hops on waits for
    the slowest hop before it.
    """
    some, times, everyone = steps.received > 0, list[Any](), len(steps.readers) == plan.ring
    for link, rows, tokens in zip((machine.inside, machine.between), steps.kinds, steps.tokens, strict=True):
        sending: Any = min(machine.gpus, plan.ring * plan.ulysses)
        if link.sharing > 1 and everyone:
            sending = np.ones(steps.shape)
            np.maximum.at(sending, (steps.place(rows), rows.needed_at), steps.sending(rows))
        times.append(link.transfer(tokens * token_bytes, sending))
    near_time, far_time = times
    late = np.where(steps.tokens[1] > 0, machine.between.latency, machine.inside.latency) * some
    onward = (near_time + far_time + late)[:, steps.hops].max(0)
    near_time[:, steps.hops], far_time[:, steps.hops], late[:, steps.hops] = 0, onward, 0
    return (np.maximum(np.cumsum(near_time, 1), np.cumsum(far_time, 1)) + late) * some


def finished(steps: Course, arrival: np.ndarray, work: np.ndarray) -> float:
    """When the last rank is done."""
    if len(steps.first) == steps.steps.count:  # one waits for the other
        work, arrival = work.max(0, keepdims=True), arrival.max(0, keepdims=True)
    later = np.cumsum(work[:, ::-1], axis=1)[:, ::-1]
    return float((arrival + later).max())


def across(ring: int, local: int, machine: Machine) -> float:
    """How many blocks a GPU receives from other hosts to gather all, with `local` of the ring's ranks on each.

    Collectives of NCCL pass blocks on round a ring of all ranks, over the links of all GPUs. Over gloo each rank sends
    its own to every other one.
    """
    if local == ring:
        return 0.0
    return float(ring - local) if machine.device == "cpu" else (ring - 1) / local


def one_pass(
    plan: Plan, shape: Shape, steps: Course, machine: Machine, rate: float, flops: float, token_bytes: Any, back: bool
) -> Spent:
    """`flops` a pair; a token of keys takes `token_bytes`, of each step perhaps its own, both ways together."""
    gpus, ring, ulysses = machine.gpus, plan.ring, plan.ulysses
    sending = min(gpus, ring * ulysses)
    rows = shape.batch * plan.tokens.shard_len * shape.heads / ulysses
    slower = (1 + machine.half[back] / rows) / (1 + machine.half[back] / MEASURED)
    gathers = plan.strategy == "gather" and ring > 1  # all keys are there in one step
    pairs = steps.pairs.sum(1, keepdims=True) if gathers else steps.pairs
    work = pairs * (slower * flops / ulysses / rate) + machine.launch[back] * (pairs > 0)
    work = work * machine.crowd(ring * ulysses)
    swap_near, swap_far, within, between, total = 0.0, 0.0, 0.0, 0.0, 0.0
    if gathers:
        local = max(1, min(gpus // ulysses, ring))
        block = plan.keys.tokens.shard_len * token_bytes
        swap_near, swap_far = (ring - 1) * block, across(ring, local, machine) * block
        seconds = float(work.sum(1).max())
    else:
        near, far = (tokens * token_bytes for tokens in steps.tokens)
        seconds = finished(steps, arrivals(steps, machine, token_bytes, plan), work)
        within, between = float(near.sum(1).max()), float(far.sum(1).max())
    if ulysses > 1:
        here = gcd(ulysses, gpus)
        total = shape.q_bytes(plan.local_len)
        total += shape.kv_bytes(plan.keys.local_len, shape.kv_heads * replicas(shape.kv_heads, ulysses))
        swap_near += total * (here - 1) / ulysses
        swap_far += total * (ulysses - here) / ulysses
    swap = machine.inside.transfer(swap_near, sending) + machine.between.transfer(swap_far, sending)
    if swap:
        late = 2 * (machine.between.latency if swap_far else machine.inside.latency)
        groups = plan.groups_for(shape)
        once = kv_heads_of_a_rank(shape.kv_heads, ulysses) < groups  # keys, with the first group
        ends = 1 - (1 - 1 / groups) * (shape.q_bytes(plan.local_len) / total if once else 1)
        seconds = max(seconds + (swap + late) * ends, swap + late + seconds / groups)
        seconds += (groups - 1) * int((pairs > 0).sum(1).max()) * machine.launch[back] + machine.exchange[back]
    within, between = within + swap_near, between + swap_far
    times = machine.inside.transfer(within, sending), machine.between.transfer(between, sending)
    return Spent(float(seconds), float(work.sum(1).mean()), *map(float, (*times, within, between)))


def blocks_at_once(plan: Plan, shape: Shape, machine: Machine, back: bool = False) -> int:
    """How many blocks a step brings, as in `Recipe`: fewer in backward, unless gradients are as narrow as keys."""
    groups = plan.groups_for(shape) if plan.ulysses > 1 else 1
    _, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, groups)
    times = 4 if back and plan.transport.grads != "input" else 1
    block = times * shape.kv_bytes(plan.keys.tokens.shard_len, kv_heads)
    return min(plan.transport.together or machine.blocks_at_once(block), plan.ring // plan.hosts)


def predict(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates
) -> Cost:  # fmt: skip
    """What the plan takes on the machine, with a kernel of these rates."""
    kv_heads = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses)
    out = shape.kv_bytes(1, kv_heads)
    grads = 1.0 if rates.low_precision or shape.itemsize > 2 else 2.0  # gradients travel in float32, or as the inputs
    ring = Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts)
    steps, back = (course(ring, machine.gpus, blocks_at_once(plan, shape, machine, b)) for b in (False, True))
    whole = steps.pairs.sum(1)
    rate = [rates.of(backward, spec, whole.mean() / plan.tokens.shard_len) for backward in (False, True)]
    forward = one_pass(plan, shape, steps, machine, rate[0], shape.flops_a_pair, out, False)
    flops = BACKWARD * shape.flops_a_pair
    both: Any = out * (1 + grads)
    if plan.strategy == "ring":  # sums of a block go with it from holder to holder, in float32
        both = np.where(back.hops, out * (1 + max(1.0, 4 / shape.itemsize)), both)
    backward = one_pass(plan, shape, back, machine, rate[1], flops, both, True)
    imbalance = float(whole.max() / max(whole.mean(), 1.0))
    mostly_own = see_mostly_own(spec, docs, shape.batch, plan.tokens.shard_len)
    count = partial(peak, plan, shape, back, grads, rates.kernel, rates.low_precision, mostly_own)
    return Cost(forward, backward, count, bound(plan, shape, back), imbalance)
