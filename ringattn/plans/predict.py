"""What a plan takes on a machine: seconds forward and backward, bytes over both kinds of links, memory.

A `Course` is what the ranks of a ring do, step by step, from the true pairs and ranges: the work of each step, and what
must arrive before it, within a host and between hosts. A step starts when its keys are there and the one before it is
done. Both kinds of links carry transfers one after the other, at the same time as the work:

    seconds = max over steps i of (arrival of i + work of i and of all later steps)

Plain numpy: milliseconds for a thousand ranks, the same on every rank. Of a large ring some ranks are computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import gcd, log
from typing import Any, NamedTuple

import numpy as np

from ringattn.layouts.layout import Layout
from ringattn.masks.bands import all_bands
from ringattn.masks.spec import AttentionSpec, Docs
from ringattn.plans.cost import Course, Shape, kv_heads_of_a_rank, queries_seeing, replicas, seen_pairs, shards
from ringattn.plans.footprint import bound, peak
from ringattn.plans.machine import Machine
from ringattn.plans.plan import Plan
from ringattn.plans.recipe import see_mostly_own
from ringattn.steps.reads import Reads, seen
from ringattn.steps.table import travelling as travelled

EXACT, SOME = 64, 12  # rings up to EXACT ranks are computed whole, of larger ones SOME ranks
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


class Rates(NamedTuple):
    """Flops a second of the kernel that runs, forward and backward, whether its gradients are 16-bit, and its name."""

    forward: float
    backward: float
    narrow: bool = False
    kernel: str = ""
    by_keys: tuple[tuple[float, float], tuple[float, float]] | None = None  # with few and with many keys a query

    def of(self, back: bool, spec: AttentionSpec, keys: float) -> float:
        """That of queries which see so many keys; with a window between the rates of few and of many."""
        if self.by_keys is None or spec.window is None:
            return (self.forward, self.backward)[back]
        few, many = (each[back] for each in self.by_keys)
        share = log(max(keys, 1) / KEYS[0]) / log(KEYS[1] / KEYS[0])
        return few + min(1.0, max(0.0, share)) * (many - few)


class Spread(NamedTuple):
    """What a course follows from: where queries and keys are, how they meet, and on hosts of how many GPUs."""

    queries: Layout
    keys: Layout
    hosts: int  # that the route assumes
    gpus: int
    spec: AttentionSpec
    docs: Docs | None


@lru_cache(maxsize=256)
def shown(
    queries: Layout, keys: Layout, spec: AttentionSpec, docs: Docs | None
) -> tuple[np.ndarray, np.ndarray, Reads | None]:
    """The ranks that are computed; [rank, block]: the pairs that each sees; the schedule, if the ring is computed."""
    ring = queries.ring
    ranks = np.unique(np.linspace(0, ring - 1, SOME).astype(int)) if ring > EXACT else np.arange(ring)
    pairs = seen_pairs(queries, keys, spec, docs, ranks)
    if ring > EXACT:
        return ranks, pairs, None
    bands = all_bands(spec, queries.length, keys.length, docs)
    return ranks, pairs, seen(bands, shards(queries), shards(keys))


class Blocks(NamedTuple):
    """[rank, block]: what ranks compute and receive, block by block in the order in which they come."""

    ranks: np.ndarray
    source: np.ndarray  # whose block it is
    pairs: np.ndarray
    near: np.ndarray
    far: np.ndarray
    sender: np.ndarray
    passed: np.ndarray
    shown: np.ndarray | None  # tokens of the held block that a rank's reader reads; None: as many as the rank reads
    rounds: int  # how often a block is passed on between hosts, and the own one
    distances: list[int]  # that blocks come from while one is held
    read: np.ndarray  # [distance, rank], on the rank's own host


def behind(x: np.ndarray, distance: Any, n: int) -> np.ndarray:
    """(x - distance) % n of numbers below n, which is slower."""
    at = x - distance
    return at + n * (at < 0)


def travelling(reads: Reads, hosts: int) -> np.ndarray:
    """[distance, block]: how many tokens hosts at this distance or later ones see."""
    ring = reads.ring
    if hosts == 1:
        return np.zeros((1, ring), int)
    block, begin, end, hops = travelled(
        reads.block, reads.begin, reads.end, (reads.reader // (ring // hosts) - reads.block // (ring // hosts)) % hosts,
        reads.length,
    )  # fmt: skip
    counts = np.bincount(hops * ring + block, end - begin, hosts * ring).reshape(hosts, ring)
    return counts[::-1].cumsum(0)[::-1].astype(int)


def growing(distances: Sequence[int], read: np.ndarray, block: int, together: int) -> Iterator[list[int]]:
    """The distances of each step, that of own blocks of `block` tokens left out; `read` [distance, rank] tokens come.

    To no rank more tokens come in a step than `together` blocks have, and more than three times as many as were there
    before it, so that compute can hide the transfer; of one distance all come.
    """
    now: list[int] = []
    coming = 0 * read[0]
    done = coming + block
    for d in distances:
        if now and (coming + read[d] > np.minimum(together * block, 3 * done)).any():
            yield now
            now, done, coming = [], done + coming, 0 * coming
        now.append(d)
        coming = coming + read[d]
    if now:
        yield now


@lru_cache(maxsize=64)
def blocks(spread: Spread) -> Blocks:
    ring, ulysses, hosts, gpus = spread.queries.ring, spread.queries.ulysses, spread.hosts, spread.gpus
    size = ring // hosts
    ranks, pairs, schedule = shown(spread.queries, spread.keys, spread.spec, spread.docs)
    if schedule is None:  # blocks travel whole
        length = spread.keys.shard_len
        tokens, onward = np.where(pairs > 0, length, 0), np.broadcast_to(length, (hosts, ring))
    else:
        tokens, onward = schedule.tokens, travelling(schedule, hosts)
    r, at = ranks[:, None], np.arange(len(ranks))[:, None]
    host, place = np.divmod(r, size)
    o, d = (x.ravel() for x in np.mgrid[:hosts, :size])  # distances between hosts, and within one
    met = (tokens[at, behind(host, o, hosts) * size + behind(place, d, size)] > 0).any(0).reshape(hosts, size)
    rounds = [0, *(np.flatnonzero(met[1:].any(1)) + 1).tolist()]
    distances = (np.flatnonzero(met[:, 1:].any(0)) + 1).tolist()
    o, d = np.repeat(rounds, 1 + len(distances)), np.tile([0, *distances], len(rounds))
    passed = (d == 0) & (o > 0)
    gap = passed * np.repeat(np.diff(rounds, prepend=0), 1 + len(distances))  # hosts from the holder before
    owner, there = behind(host, o, hosts), behind(place, d, size)
    source = owner * size + there
    sender = np.where(d == 0, behind(r, gap * size, ring), host * size + there)
    arrive = np.where(passed, onward[o, source], tokens[at, source]) * (sender != r)
    at_home = np.arange(ring) * ulysses // gpus  # the host of a ring rank
    remote = at_home[r] != at_home[sender]
    given = None
    if schedule is not None and len(ranks) == ring:  # those behind this rank read what it holds
        given = tokens[host * size + (place + d) % size, owner * size + place] * (d > 0)
    read = tokens[at, host * size + behind(place, np.arange(size), size)].T
    cells = pairs[at, source], arrive * ~remote, arrive * remote
    return Blocks(ranks, source, *cells, sender, passed, given, len(rounds), distances, read)


@lru_cache(maxsize=64)
def course(spread: Spread, together: int) -> Course:
    """The steps of the ranks, each with up to so many blocks."""
    x = blocks(spread)
    visits = [[0], *growing(x.distances, x.read, spread.keys.shard_len, together)]
    first = np.cumsum([0, *map(len, visits[:-1])])
    starts = (np.arange(x.rounds)[:, None] * (1 + len(x.distances)) + first).ravel()

    def of_steps(cells: np.ndarray, how: np.ufunc = np.add) -> np.ndarray:
        return cells if len(starts) == len(x.passed) else how.reduceat(cells, starts, axis=1)

    near, far = of_steps(x.near), of_steps(x.far)

    def held() -> tuple[np.ndarray, np.ndarray]:
        seeing = queries_seeing(spread.queries, spread.keys, spread.spec, spread.docs, x.ranks)
        low, high = (each[np.arange(len(x.ranks))[:, None], x.source] for each in seeing)
        queries = of_steps(high, np.maximum) - of_steps(low, np.minimum)
        return np.maximum(queries, 0), near + far if x.shown is None else of_steps(x.shown)

    return Course(x.ranks, of_steps(x.pairs), near, far, x.sender[:, starts], x.passed[starts], held)


def senders(steps: Course, tokens: np.ndarray, ulysses: int, gpus: int) -> np.ndarray:
    """[rank, step]: how many GPUs of the host from which its keys come send at that step."""
    host = steps.sender * ulysses // gpus
    count = np.zeros((int(host.max()) + 1, tokens.shape[1]), int)
    cell = host, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    np.add.at(count, cell, ulysses * (tokens > 0))
    return count[cell]


def arrivals(steps: Course, machine: Machine, token_bytes: Any, plan: Plan) -> np.ndarray:
    """[rank, step]: when the keys of a step are there, if a token has so many bytes.

    Transfers from owners follow each other on a link, which the GPUs of a host that send may share. A block that is
    passed on waits for the slowest hop before it.
    """
    some, gpus, times = steps.near + steps.far > 0, machine.gpus, []
    for link, tokens in ((machine.inside, steps.near), (machine.between, steps.far)):
        sending: Any = min(gpus, plan.ring * plan.ulysses)
        if link.sharing > 1 and len(steps.ranks) == plan.ring:
            sending = senders(steps, tokens, plan.ulysses, gpus)
        times.append(link.transfer(tokens * token_bytes, sending))
    near_time, far_time = times
    late = np.where(steps.far > 0, machine.between.latency, machine.inside.latency) * some
    onward = (near_time + far_time + late)[:, steps.passed].max(0)
    near_time[:, steps.passed], far_time[:, steps.passed], late[:, steps.passed] = 0, onward, 0
    return (np.maximum(np.cumsum(near_time, 1), np.cumsum(far_time, 1)) + late) * some


def finished(steps: Course, arrival: np.ndarray, work: np.ndarray) -> float:
    """When the last rank is done."""
    if steps.passed[1:].all():  # one waits for the other
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
    work = steps.pairs * (slower * flops / ulysses / rate) + machine.launch[back] * (steps.pairs > 0)
    work = work * machine.crowd(ring * ulysses)
    swap_near, swap_far, within, between, total = 0.0, 0.0, 0.0, 0.0, 0.0
    if plan.strategy == "gather" and ring > 1:
        local = max(1, min(gpus // ulysses, ring))
        block = plan.keys.tokens.shard_len * token_bytes
        swap_near, swap_far = (ring - 1) * block, across(ring, local, machine) * block
        seconds = float(work.sum(1).max())
    else:
        near, far = steps.near * token_bytes, steps.far * token_bytes
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
        seconds += (groups - 1) * len(steps.passed) * machine.launch[back] + machine.exchange[back]
    within, between = within + swap_near, between + swap_far
    times = machine.inside.transfer(within, sending), machine.between.transfer(between, sending)
    return Spent(float(seconds), float(work.sum(1).mean()), *map(float, (*times, within, between)))


def predict(
    plan: Plan, shape: Shape, spec: AttentionSpec, docs: Docs | None, machine: Machine, rates: Rates
) -> Cost:  # fmt: skip
    """What the plan takes on the machine, with a kernel of these rates."""
    kv_heads = kv_heads_of_a_rank(shape.kv_heads, plan.ulysses)
    out = shape.kv_bytes(1, kv_heads)
    grads = 1.0 if rates.narrow or shape.itemsize > 2 else 2.0  # gradients travel in float32, or as the inputs
    block = out * plan.keys.tokens.shard_len
    room = plan.transport.together or machine.blocks_at_once(block)
    less = plan.transport.together or machine.blocks_at_once(block * (1 if grads == 1 else 4))  # as ring steps do
    spread = Spread(plan.tokens, plan.keys.tokens, plan.hosts, machine.gpus, spec, docs)
    steps = course(spread, min(room, plan.ring))
    back = steps if min(less, plan.ring) == min(room, plan.ring) else course(spread, less)
    whole = steps.pairs.sum(1)
    rate = [rates.of(backward, spec, whole.mean() / plan.tokens.shard_len) for backward in (False, True)]
    forward = one_pass(plan, shape, steps, machine, rate[0], shape.flops_a_pair, out, False)
    flops = BACKWARD * shape.flops_a_pair
    both: Any = out * (1 + grads)
    if plan.strategy == "ring":  # sums of a block that is passed on go with it, in float32
        both = np.where(back.passed, out * (1 + max(1.0, 4 / shape.itemsize)), both)
    backward = one_pass(plan, shape, back, machine, rate[1], flops, both, True)
    imbalance = float(whole.max() / max(whole.mean(), 1.0))
    mostly_own = see_mostly_own(spec, docs, shape.batch, plan.tokens.shard_len)
    count = partial(peak, plan, shape, back, grads, rates.kernel, rates.narrow, mostly_own)
    return Cost(forward, backward, count, bound(plan, shape, back), imbalance)
