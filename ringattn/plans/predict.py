"""What a plan takes on a machine: seconds forward and backward, bytes over both kinds of links, memory.

`Steps` are what the ranks of a ring do, step by step: the work of each step, and what must arrive before it, within a
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

from ringattn.masks.bands import work_of
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Shape, heads_of_group, kv_heads_of_a_rank, of_heads
from ringattn.plans.course import Ring, Steps, course
from ringattn.plans.footprint import bound, peak
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import see_mostly_local

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


class Pass(NamedTuple):
    """What one pass takes a rank: seconds of pairs of a query and a key, and bytes that travel."""

    pair: float  # seconds
    launch: float  # seconds of a step
    token: float  # bytes of the keys and values of a token
    returned: float  # bytes of the gradients that go back for each token that was read
    summed: float  # bytes of the sums that go on with each token that is held
    heads: tuple[float, float]  # bytes of Ulysses' exchanges, within hosts and between them

    def seconds(self, pairs: Any) -> Any:
        """Those of steps with so many pairs, if the rank computes alone."""
        return pairs * self.pair + self.launch * (pairs > 0)


def pass_of(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates, back: bool
) -> Pass:  # fmt: skip
    """That of a plan, forward or backward, with a kernel of these rates."""
    ulysses, queries, keys = plan.ulysses, plan.tokens, plan.keys.tokens
    rows = shape.batch * queries.shard_len * shape.heads / ulysses
    slower = (1 + machine.half[back] / rows) / (1 + machine.half[back] / MEASURED)
    seen = work_of(spec, queries.length, keys.length, docs).below(queries.length) / plan.ring / queries.shard_len
    flops = shape.flops_a_pair * (BACKWARD if back else 1.0) / ulysses
    token = shape.kv_bytes(1, kv_heads_of_a_rank(shape.kv_heads, ulysses))
    # gradients travel in float32, or as the inputs; their sums in float32
    grads, sums = 1.0 if rates.low_precision or shape.itemsize > 2 else 2.0, max(1.0, 4 / shape.itemsize)
    local = gcd(ulysses, machine.gpus)
    heads = sum(of_heads(shape, ulysses, (plan.local_len, plan.keys.local_len))) / ulysses
    return Pass(
        slower * flops / rates.of(back, spec, seen), machine.launch[back], token, token * grads * back,
        token * sums * back, (heads * (local - 1), heads * (ulysses - local)),
    )  # fmt: skip


def gathered_bytes(plan: Plan, machine: Machine, token: float) -> tuple[float, float]:
    """What a GPU receives to gather all blocks, whose tokens have so many bytes: within its host and from others.

    Collectives of NCCL pass blocks on round a ring of all ranks, over the links of all GPUs. Over gloo each rank sends
    its own to every other one.
    """
    local = max(1, min(machine.gpus // plan.ulysses, plan.ring))
    far = (plan.ring - local) if machine.device == "cpu" else (plan.ring - 1) / local * (local < plan.ring)
    block = plan.keys.tokens.shard_len * token
    return (plan.ring - 1) * block, far * block


def arrivals(steps: Steps, machine: Machine, token_bytes: np.ndarray, plan: Plan) -> np.ndarray:
    """[reader, step]: when the keys of a step are there, if a token has so many bytes.

    Transfers follow each other on a link, which the GPUs of a host that send may share. A block that hops on waits for
    the slowest hop before it.
    """
    some, times, everyone = steps.received > 0, list[Any](), len(steps.readers) == plan.ring
    for link, rows, tokens in zip((machine.inside, machine.between), steps.kinds, steps.tokens, strict=True):
        most = min(machine.gpus, plan.ring * plan.ulysses)
        times.append(
            link.transfer(tokens * token_bytes, steps.sending(rows) if link.sharing > 1 and everyone else most)
        )
    near, far = times
    late = np.where(steps.tokens[1] > 0, machine.between.latency, machine.inside.latency) * some
    onward = (near + far + late)[:, steps.moves_on].max(0)
    near[:, steps.moves_on], far[:, steps.moves_on], late[:, steps.moves_on] = 0, onward, 0
    return (np.maximum(np.cumsum(near, 1), np.cumsum(far, 1)) + late) * some


def finished(steps: Steps, arrival: np.ndarray, work: np.ndarray) -> float:
    """When the last rank is done."""
    if len(steps.first) == steps.count:  # one waits for the other
        work, arrival = work.max(0, keepdims=True), arrival.max(0, keepdims=True)
    later = np.cumsum(work[:, ::-1], axis=1)[:, ::-1]
    return float((arrival + later).max())


def one_pass(plan: Plan, shape: Shape, steps: Steps, machine: Machine, each: Pass, back: bool) -> Spent:
    ranks = plan.ring * plan.ulysses
    sending = min(machine.gpus, ranks)
    gathers = plan.strategy == "gather" and plan.ring > 1  # all keys are there in one step
    pairs = steps.pairs.sum(1, keepdims=True) if gathers else steps.pairs
    work = each.seconds(pairs) * machine.crowd(ranks)
    (near, far), within, between = each.heads, 0.0, 0.0
    if gathers:
        keys = gathered_bytes(plan, machine, each.token + each.returned)
        near, far, seconds = near + keys[0], far + keys[1], float(work.max())
    else:
        token = np.where(steps.moves_on, each.token + each.summed, each.token + each.returned)
        seconds = finished(steps, arrivals(steps, machine, token, plan), work)
        within, between = ((tokens * token).sum(1).max() for tokens in steps.tokens)
    if swap := machine.inside.transfer(near, sending) + machine.between.transfer(far, sending):
        late = 2 * (machine.between.latency if far else machine.inside.latency)
        groups = plan.groups_for(shape)
        queries, keys_too = of_heads(shape, plan.ulysses, (plan.local_len, plan.keys.local_len))
        shared = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses) < groups  # keys travel with the first group
        ends = 1 - (1 - 1 / groups) * (queries / (queries + keys_too) if shared else 1)
        seconds = max(seconds + (swap + late) * ends, swap + late + seconds / groups)
        seconds += (groups - 1) * int((pairs > 0).sum(1).max()) * machine.launch[back] + machine.exchange[back]
    within, between = within + near, between + far
    times = machine.inside.transfer(within, sending), machine.between.transfer(between, sending)
    return Spent(float(seconds), float(work.sum(1).mean()), *map(float, (*times, within, between)))


def blocks_at_once(plan: Plan, shape: Shape, machine: Machine, back: bool = False) -> int:
    """How many blocks a step brings, as in `Recipe`: fewer in backward, unless gradients have the dtype of keys."""
    groups = plan.groups_for(shape) if plan.ulysses > 1 else 1
    _, kv_heads = heads_of_group(shape.heads, shape.kv_heads, plan.ulysses, groups)
    times = 4 if back and plan.transport.grads != "input" else 1
    block = times * shape.kv_bytes(plan.keys.tokens.shard_len, kv_heads)
    return min(plan.transport.together or machine.blocks_at_once(block), plan.ring // plan.hosts)


def predict(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates
) -> Cost:  # fmt: skip
    """What the plan takes on the machine, with a kernel of these rates."""
    ring = Ring(plan.tokens, plan.keys.tokens, spec, docs, plan.hosts, machine.gpus)
    both = [
        (course(ring, blocks_at_once(plan, shape, machine, back)), machine,
         pass_of(plan, shape, spec, docs, machine, rates, back), back)
        for back in (False, True)
    ]  # fmt: skip
    forward, backward = (one_pass(plan, shape, *each) for each in both)
    steps, work = both[1][0], both[1][0].pairs.sum(1)
    mostly_local = see_mostly_local(spec, docs, shape.batch, plan.tokens.shard_len)
    count = partial(peak, plan, shape, steps, rates.kernel, rates.low_precision, mostly_local)
    return Cost(forward, backward, count, bound(plan, shape, steps), float(work.max() / max(work.mean(), 1.0)))
